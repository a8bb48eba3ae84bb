"""Blocks that keep only their inputs and are computed again in the backward pass: streamed LOMO and LSP."""
