"""The LSP backend: gradients are projected to a small subspace, in which Adam runs, usually on the CPU."""
