"""Writes and reads checkpoints that are whole or absent.

Weights are in safetensors and all other state is in JSON. A manifest with hashes is written after them, and `latest`
last.
"""

from __future__ import annotations

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.manifest import newest_complete

__all__ = ["CheckpointError", "newest_complete"]
