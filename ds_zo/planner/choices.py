"""What an engine does by a fixed rule, and its plan must know: told once, for both."""

from __future__ import annotations

from collections.abc import Callable

import torch

LOSS_CHUNK_NUMEL = 2**22
"""Logits that the loss of ZO and LOMO upcasts at a time: 16 MB, and as much for their logarithms."""

WIRE: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "bf12": torch.uint8,
}
"""What `wire_dtype` stores ZO's blocks as; None: as they are."""

MOST_RECORDED_FLOPS = 0.5e12
"""A block's forward of less work than this takes an H200 less time than launching its kernels takes Python: it is
replayed as a CUDA graph where copies are made in pairs."""

FOLD_DRAWS = 0.4
"""What a fold costs beyond a replay, in noise draws: its dither and the store."""

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Steps between a block's folds, among which is chosen."""
_ALIKE = 1.002
"""Intervals whose steps take this much longer at most count as equally fast: then the longest, which rounds least."""


def best_interval(step_s: Callable[[int], float]) -> int:
    """ZO's `writeback_interval` where the user left it out, from the seconds that a step takes with each."""
    seconds = {interval: step_s(interval) for interval in INTERVALS}
    limit = _ALIKE * min(seconds.values())
    return max(interval for interval in INTERVALS if seconds[interval] <= limit)


def lags(interval: int) -> range:
    """Updates that a block is behind when it is visited, in the steps from one of its folds to the next. In each step
    every lag is met about as often."""
    return range(1, interval + 1)
