"""What an engine does by a fixed rule, and its plan must know: told once, for both."""

from __future__ import annotations

LOSS_CHUNK_NUMEL = 2**22
"""Logits that the loss of ZO and LOMO upcasts at a time: 16 MB, and as much for their logarithms."""
