"""Sparse projectors of the LSP backend: drawing, products, fitting. Nothing here knows where gradients come from."""

from __future__ import annotations

from ds_zo.projectors.batches import Application, Compression, Prepared, Shift, apply_all_, compress_all, shift_all_
from ds_zo.projectors.fit import FitReport, captured_share, carry_over, choose_dims, fit, flattened
from ds_zo.projectors.products import apply_, compress, relative_bias
from ds_zo.projectors.recording import GradientRecorder
from ds_zo.projectors.sparse import ProjectorRows, SparseProjector

__all__ = [
    "Application",
    "Compression",
    "FitReport",
    "GradientRecorder",
    "Prepared",
    "ProjectorRows",
    "Shift",
    "SparseProjector",
    "apply_",
    "apply_all_",
    "captured_share",
    "carry_over",
    "choose_dims",
    "compress",
    "compress_all",
    "fit",
    "flattened",
    "relative_bias",
    "shift_all_",
]
