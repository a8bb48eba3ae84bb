"""The record that a run leaves: rows of JSON, the machine it ran on, and a summary of its training."""
