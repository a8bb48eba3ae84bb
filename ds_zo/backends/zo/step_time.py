"""Predicts a step's time, to choose how often blocks fold. The speeds of the link, of the kernels and of the blocks are
measured once, at the start.

A longer interval means fewer downloads, but one more noise draw per block for each step that the block lags behind. So
a long interval is best when the link is the bottleneck, and a short one when computing is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_zo.backends.zo.fold_interval import FOLD_DRAWS, best_interval, lags
from ds_zo.backends.zo.replay_log import ReplayLog
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.units import Unit

_COPY_SLOWDOWN = 0.01
"""Fraction of the computing time that is added to the copying time beside it. On an H200, with OPT-6.7B and 13B in
bf16, bf12 and fp8, it measured 0 to 3 ms of 160 to 320 ms."""
TIMED_NUM_UPDATES = (5, 1, 5)
"""Numbers of updates to replay in the timed forwards. The first forward is not counted: it brings the device to the
clock that it keeps under load. That clock is up to a tenth lower than at a first step."""
_REPEATS = 4


@dataclass(frozen=True)
class StepTimeModel:
    """Seconds and rates measured for one model on one machine."""

    up_nbytes_per_s: float
    down_nbytes_per_s: float
    both_nbytes_per_s: float
    """Sum of both directions while both are busy."""
    compute_s: float
    """Seconds of a step's computing with nothing to replay: without its waits for uploads, but while uploads run beside
    it."""
    draw_s: float
    """Seconds to replay one pending update in all blocks."""

    def link_s(self, interval: int, *, streamed_nbytes: int, low_nbytes: int, num_uploads: int = 1) -> float:
        """Seconds that a step's copies take. Uploads are slower while downloads run. `num_uploads`: how often a step
        uploads each block."""
        up = num_uploads * streamed_nbytes + low_nbytes / interval
        down = (streamed_nbytes + low_nbytes) / interval
        slower = max(0.0, 2 / self.both_nbytes_per_s - 1 / self.up_nbytes_per_s)
        return max(up / self.up_nbytes_per_s + min(up, down) * slower, down / self.down_nbytes_per_s)

    def busy_s(self, interval: int) -> float:
        """Seconds of a step's computing, averaged over the lags that blocks have."""
        return sum(self._busy_s(interval)) / interval

    def _busy_s(self, interval: int) -> list[float]:
        """For each lag, the seconds of a step's computing if every block had that lag."""
        return [self.compute_s + self.draw_s * (lag + FOLD_DRAWS * (lag == interval)) for lag in lags(interval)]

    def step_s(self, interval: int, **nbytes: int) -> float:
        """Expected seconds of a step. Computing and copying overlap, and share the device's memory bandwidth. Two slots
        balance them little: the link waits for blocks with a large lag, and the other blocks wait for the link."""
        link_s = self.link_s(interval, **nbytes) + _COPY_SLOWDOWN * self.busy_s(interval)
        return sum(max(link_s, busy_s) for busy_s in self._busy_s(interval)) / interval

    def best_interval(
        self,
        *,
        device_nbytes: Callable[[int], int] = lambda interval: 0,
        budget_nbytes: int | None = None,
        **nbytes: int,
    ) -> int:
        """The interval with the shortest expected step, of those that fit: see `fold_interval.best_interval`."""
        return best_interval(
            lambda interval: self.step_s(interval, **nbytes), device_nbytes=device_nbytes, budget_nbytes=budget_nbytes
        )

    def __str__(self) -> str:
        return (
            f"link {self.up_nbytes_per_s / 1e9:.1f} GB/s up, {self.down_nbytes_per_s / 1e9:.1f} down, "
            f"{self.both_nbytes_per_s / 1e9:.1f} both ways; computing {self.compute_s * 1e3:.1f} ms a step, "
            f"{self.draw_s * 1e3:.2f} ms more for each update to replay"
        )


def measure_link(runtime: Runtime, unit: Unit, other: Unit) -> tuple[float, float, float]:
    """Returns the rates (up, down, both) in bytes per second. Copies two units to slots and back, which leaves their
    store buffers unchanged. Must be called between passes, with at least two slots."""
    slots = runtime.slots[:2]
    device = runtime.device
    streams = [torch.cuda.Stream(device) for _ in slots]
    runtime.invalidate_slots()
    torch.cuda.current_stream(device).synchronize()
    slot_bytes = [slot.buffer[: u.nbytes] for slot, u in zip(slots, (unit, other), strict=True)]
    for buffer, u in zip(slot_bytes, (unit, other), strict=True):
        buffer.copy_(u.store_buffer)

    def rate(*copies: tuple[torch.Tensor, torch.Tensor]) -> float:
        torch.cuda.current_stream(device).synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for stream, (to, source) in zip(streams, copies, strict=False):
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                for _ in range(_REPEATS):
                    to.copy_(source, non_blocking=True)
            torch.cuda.current_stream(device).wait_stream(stream)
        end.record()
        end.synchronize()
        nbytes = sum(to.numel() for to, _ in copies)
        return _REPEATS * nbytes / (begin.elapsed_time(end) / 1e3)

    up, down = (slot_bytes[0], unit.store_buffer), (other.store_buffer, slot_bytes[1])
    rates = rate(up), rate(down), rate(up, down)
    runtime.invalidate_slots()
    return rates


def measure_draw(replay: Callable[[int], None], device: torch.device) -> float:
    """Returns the seconds that one more replayed update takes: launches `replay` with few and with many updates, while
    nothing else runs."""

    def seconds(num_updates: int) -> float:
        replay(num_updates)  # autotunes the kernel, and gives the device work before the clock starts
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(device))
        for _ in range(_REPEATS):
            replay(num_updates)
        end.record(torch.cuda.current_stream(device))
        return _seconds((begin, end)) / _REPEATS

    few, many = 1, 9
    return max(0.0, seconds(many) - seconds(few)) / (many - few)


class TimedForward:
    """A forward whose blocks replay updates that change nothing, timed on the compute stream. The time excludes waits
    for uploads of blocks. On a CPU the host's clock is used, for tests."""

    def __init__(self, num_updates: int, device: torch.device, *, log: ReplayLog) -> None:
        """`log`: the updates that blocks replay."""
        self.num_updates, self.log = num_updates, log
        self._device = device
        self._whole: _Span | None = None
        self._waits: list[_Span] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the whole forward."""
        begin = self._mark()
        yield
        self._whole = (begin, self._mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Times one wait for a block's upload, which `busy_s` subtracts."""
        begin = self._mark()
        yield
        self._waits.append((begin, self._mark()))

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def busy_s(self) -> float:
        """Seconds of the forward without its waits for uploads. Blocks the host until the forward has ended."""
        assert self._whole is not None
        return _seconds(self._whole) - sum(map(_seconds, self._waits))


_Span = tuple[torch.cuda.Event | float, torch.cuda.Event | float]


def _seconds(span: _Span) -> float:
    begin, end = span
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin


def compute_and_draw_s(timed_forwards: Sequence[TimedForward]) -> tuple[float, float]:
    """Returns the seconds of a step with nothing to replay, and the seconds to replay one update in all blocks. They
    follow from forwards that replay few and many updates."""
    few, many = sorted(timed_forwards[1:], key=lambda r: r.num_updates)
    draw_s = max(0.0, many.busy_s - few.busy_s) / (many.num_updates - few.num_updates)
    return few.busy_s - few.num_updates * draw_s, draw_s
