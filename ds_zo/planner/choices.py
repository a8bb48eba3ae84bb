"""Constants and rules that a backend and its estimate share."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_zo.ops import MXFP4, NF4
from ds_zo.streaming.budget import fits
from ds_zo.streaming.placement import FrozenWire

LOSS_CHUNK_NUMEL = 2**22
"""Logits that the loss of ZO and LOMO converts to float32 at a time: 16 MB, and 16 MB for their log-softmax."""

WIRE: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "bf12": torch.uint8,
    "nf4": NF4.dtype,
    "mxfp4": MXFP4.dtype,
}
"""The torch dtype of ZO's stored blocks for each `wire_dtype` and `frozen_dtype`; None: the dtype of the model."""


def frozen_wire(frozen_dtype: str) -> FrozenWire:
    """The storage of frozen matrices in a plan, which reads no files. With mxfp4 it takes the weights of experts, which
    have three dimensions, for those that the files hold so."""
    if frozen_dtype == "mxfp4":
        return lambda p: MXFP4.dtype if p.dim() == 3 else None
    return WIRE[frozen_dtype]


MOST_RECORDED_FLOPS = 0.5e12
"""FLOPs of a block's forward below which launching its kernels from Python takes longer than they take on an H200. ZO
replays such a block as a CUDA graph, where both perturbed copies are made at once."""

FOLD_DRAWS = 0.4
"""Cost of a fold in addition to its replay, in noise draws a weight: random bits for rounding, and the store."""

INTERVALS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The candidates for the number of steps between two folds of a block."""
_EQUALLY_FAST = 1.002
"""Intervals whose step time is within this factor of the shortest count as equally fast. Of these the longest is taken,
because it rounds least often."""


def best_interval(
    step_s: Callable[[int], float],
    *,
    device_nbytes: Callable[[int], int] = lambda interval: 0,
    budget_nbytes: int | None = None,
) -> int:
    """The value of ZO's `writeback_interval` where the user has set none. `step_s` returns the seconds of a step for an
    interval, `device_nbytes` the peak of its device memory. An interval that does not fit the budget is not taken,
    unless no interval needs less."""
    nbytes = {interval: device_nbytes(interval) for interval in INTERVALS}
    least = min(nbytes.values())
    seconds = {k: step_s(k) for k in INTERVALS if nbytes[k] == least or fits(nbytes[k], budget_nbytes=budget_nbytes)}
    limit = _EQUALLY_FAST * min(seconds.values())
    return max(interval for interval in seconds if seconds[interval] <= limit)


def lags(interval: int) -> range:
    """Numbers of pending updates that a block replays, in the steps from one of its folds to the next. Folds of blocks
    are staggered, so that in each step about as many blocks have each of these numbers."""
    return range(1, interval + 1)
