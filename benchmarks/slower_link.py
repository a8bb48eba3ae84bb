"""A slower link between host and device than the machine's own: PCIe as the LSP paper's workstations have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

_CALIBRATION_CYCLES = 200_000_000


@contextmanager
def slower_link(gbps: float | None, *, sleep: Callable[[float], Any] | None = None) -> Iterator[None]:
    """Lets every `Tensor.copy_` between host and device take at least as long as a link of `gbps` GB/s would; None: the
    link as it is.

    After a copy, its stream waits for the rest of that time, so that copies in both directions and kernels of other
    streams still run beside it. Copies of two streams in one direction do not slow each other down, as they would on a
    real link. `sleep` makes the current stream wait for seconds; by default it is calibrated on the current device."""
    if gbps is None:
        yield
        return
    wait = sleep or partial(_sleep, _cycles_per_s())
    own_s = 1 / _own_gbps() if sleep is None else 0.0
    each_s = max(0.0, 1 / gbps - own_s) / 1e9
    plain = torch.Tensor.copy_

    def copy_(to: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copied: torch.Tensor = plain(to, source, *args, **kwargs)
        if to.device.type != source.device.type:
            wait(each_s * to.nbytes)
        return copied

    with patch.object(torch.Tensor, "copy_", copy_):
        yield


def _own_gbps() -> float:
    from ds_zo.bench.measure import link_gbps

    found = link_gbps(torch.device("cuda", torch.cuda.current_device()))
    return min(found["up"], found["down"])


def _cycles_per_s() -> float:
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        torch.cuda.synchronize()
    return _CALIBRATION_CYCLES / (time.perf_counter() - start)


def _sleep(cycles_per_s: float, seconds: float) -> None:
    torch.cuda._sleep(int(seconds * cycles_per_s))
