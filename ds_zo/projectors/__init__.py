"""Sparse projectors of the LSP backend: drawing, products, fitting. Nothing here knows where gradients come from."""

from __future__ import annotations

from ds_zo.projectors.fit import FitReport, carry_moments, choose_dims, fit
from ds_zo.projectors.products import apply_, compress, relative_bias
from ds_zo.projectors.sparse import SparseProjector

__all__ = [
    "FitReport",
    "SparseProjector",
    "apply_",
    "carry_moments",
    "choose_dims",
    "compress",
    "fit",
    "relative_bias",
]
