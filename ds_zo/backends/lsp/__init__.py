"""LSP: gradients are projected to a small subspace, and Adam runs there on the CPU."""
