"""Blocks that save only their inputs and are recomputed in the backward pass, for LOMO and LSP with streaming."""
