"""Scripts that run in the environment of a client."""
