"""Checkpoints that are whole or absent: planes of weights in safetensors, everything else in JSON, a manifest with
hashes, and `latest` last."""

from __future__ import annotations

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.manifest import newest_complete

__all__ = ["CheckpointError", "newest_complete"]
