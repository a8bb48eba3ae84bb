"""LOMO and AdaLOMO: each parameter is updated as soon as the backward pass has computed its gradient."""
