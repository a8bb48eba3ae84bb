"""Sparse projectors of the LSP backend: drawing, products and fitting, independent of models and streaming."""

from __future__ import annotations

from ds_zo.projectors.batches import (
    Compression,
    MatrixUpdate,
    PreparedLaunches,
    VectorUpdate,
    apply_all_,
    compress_all,
    update_vectors_,
)
from ds_zo.projectors.fit import FitReport, captured_share, choose_dims, fit, flatten_spectrum
from ds_zo.projectors.products import apply_, compress, relative_bias
from ds_zo.projectors.recording import FitGraphRecorder
from ds_zo.projectors.sparse import ProjectorRows, SparseProjector

__all__ = [
    "Compression",
    "FitGraphRecorder",
    "FitReport",
    "MatrixUpdate",
    "PreparedLaunches",
    "ProjectorRows",
    "SparseProjector",
    "VectorUpdate",
    "apply_",
    "apply_all_",
    "captured_share",
    "choose_dims",
    "compress",
    "compress_all",
    "fit",
    "flatten_spectrum",
    "relative_bias",
    "update_vectors_",
]
