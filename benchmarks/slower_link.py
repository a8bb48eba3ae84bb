"""A slower link between host and device than the machine's own: PCIe as the LSP paper's workstations have it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any
from unittest.mock import patch

import torch

from ds_zo.bench.measure import link_gbps
from ds_zo.streaming.streams import DONE, Event, Stream, current_stream

_CALIBRATION_CYCLES = 200_000_000


@contextmanager
def slower_link(
    gbps: float | None, *, current: Callable[[], Stream] | None = None, sleep: Callable[[float], Any] | None = None
) -> Iterator[None]:
    """Lets every `Tensor.copy_` between host and device take at least as long as on a link of `gbps` GB/s. None: the
    link as it is.

    After a copy, its stream waits for the rest of that time. Kernels of other streams run beside it. Each direction has
    one queue, in the order of issue. A copy starts after its stream's earlier work and after the copy before it in the
    queue. A copy whose stream waits for a kernel holds up later ones, though a real link may let them pass.

    `current` returns the current stream, and `sleep` makes it wait for seconds. By default both are those of the
    current CUDA device, and `sleep` is calibrated on it."""
    if gbps is None:
        yield
        return
    stream_now = current or partial(current_stream, torch.device("cuda"))
    wait = sleep or partial(_sleep, _cycles_per_s())
    own_s = 1 / _own_gbps() if sleep is None else 0.0
    each_s = max(0.0, 1 / gbps - own_s) / 1e9
    plain = torch.Tensor.copy_
    ends: dict[str, Event] = {}
    """By the type of the target's device: the end of the last copy to it."""
    lock = RLock()  # several threads issue copies

    def copy_(to: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = to.device.type
        if target == source.device.type:
            return plain(to, source, *args, **kwargs)
        with lock:
            stream = stream_now()
            stream.wait(ends.get(target, DONE))
            copied = plain(to, source, *args, **kwargs)
            wait(each_s * to.nbytes)
            ends[target] = stream.recorded()
        return copied

    with patch.object(torch.Tensor, "copy_", copy_):
        yield


def _own_gbps() -> float:
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
