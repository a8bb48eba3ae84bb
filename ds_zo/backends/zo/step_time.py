"""How often to fold: from the speeds of the link, of the kernels and of the blocks, measured once at the start.

A long interval spares the link downloads and costs a noise draw more for each step that a block lags behind: long is
best when the link is the bottleneck, short when computing is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ds_zo.planner.choices import FOLD_DRAWS, best_interval, lags
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.units import Unit

_FRICTION = 0.01
"""Copying takes longer by this part of the computing beside it: on an H200 0 to 3 ms of 160 to 320, with OPT-6.7B and
13B in bf16, bf12 and fp8."""
REHEARSED = (5, 1, 5)
"""Updates to replay in the forwards that are timed. The first counts for nothing: it brings the device to the clock
that it keeps under load, which is up to a tenth lower than that of a first step."""
_REPEATS = 4


@dataclass(frozen=True)
class StepTimeModel:
    """Measured seconds and rates of one model on one machine."""

    up_nbytes_per_s: float
    down_nbytes_per_s: float
    both_nbytes_per_s: float
    """Up and down together, while both are busy."""
    compute_s: float
    """A step with nothing pending, on the compute stream, without its waits for blocks but beside their uploads."""
    draw_s: float
    """Replaying one pending update in all blocks."""

    def link_s(self, interval: int, *, streamed_nbytes: int, low_nbytes: int, num_visits: int = 1) -> float:
        """Uploads, slower while something comes down. `num_visits`: how often a step brings each block."""
        up = num_visits * streamed_nbytes + low_nbytes / interval
        down = (streamed_nbytes + low_nbytes) / interval
        slower = max(0.0, 2 / self.both_nbytes_per_s - 1 / self.up_nbytes_per_s)
        return max(up / self.up_nbytes_per_s + min(up, down) * slower, down / self.down_nbytes_per_s)

    def busy_s(self, interval: int) -> float:
        return sum(self._busy_s(interval)) / interval

    def _busy_s(self, interval: int) -> list[float]:
        """Were every block as far behind, for each lag."""
        return [self.compute_s + self.draw_s * (lag + FOLD_DRAWS * (lag == interval)) for lag in lags(interval)]

    def step_s(self, interval: int, **nbytes: int) -> float:
        """What a step is expected to take. Computing and copying overlap, and share the device's memory. Two slots even
        out little: the link waits for blocks that are far behind, and the others for the link."""
        link_s = self.link_s(interval, **nbytes) + _FRICTION * self.busy_s(interval)
        return sum(max(link_s, busy_s) for busy_s in self._busy_s(interval)) / interval

    def best_interval(self, **nbytes: int) -> int:
        return best_interval(lambda interval: self.step_s(interval, **nbytes))

    def __str__(self) -> str:
        return (
            f"link {self.up_nbytes_per_s / 1e9:.1f} GB/s up, {self.down_nbytes_per_s / 1e9:.1f} down, "
            f"{self.both_nbytes_per_s / 1e9:.1f} both ways; computing {self.compute_s * 1e3:.1f} ms a step, "
            f"{self.draw_s * 1e3:.2f} ms more for each update to replay"
        )


def measure_link(runtime: Runtime, unit: Unit, other: Unit) -> tuple[float, float, float]:
    """(up, down, both) in bytes a second, by copying two units to slots and back: their homes get what they hold.
    Only between passes, with at least two slots."""
    slots = runtime.slots[:2]
    device = runtime.device
    streams = [torch.cuda.Stream(device) for _ in slots]
    runtime.invalidate_slots()
    torch.cuda.current_stream(device).synchronize()
    there = [slot.buffer[: u.nbytes] for slot, u in zip(slots, (unit, other), strict=True)]
    for buffer, u in zip(there, (unit, other), strict=True):
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

    up, down = (there[0], unit.store_buffer), (other.store_buffer, there[1])
    rates = rate(up), rate(down), rate(up, down)
    runtime.invalidate_slots()
    return rates


def measure_draw(replay: Callable[[int], None], device: torch.device) -> float:
    """Seconds of one more update to replay, by launches of `replay` with few and with many and nothing beside them."""

    def seconds(num_updates: int) -> float:
        replay(num_updates)  # tuned, and on its way before the clock starts
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(device))
        for _ in range(_REPEATS):
            replay(num_updates)
        end.record(torch.cuda.current_stream(device))
        return _seconds((begin, end)) / _REPEATS

    few, many = 1, 9
    return max(0.0, seconds(many) - seconds(few)) / (many - few)


class TimedForward:
    """A forward whose blocks replay updates that change nothing, timed on the compute stream: all of it, less what it
    waits for blocks. (On a CPU the same by the host's clock, for tests.)"""

    def __init__(self, num_updates: int, device: torch.device) -> None:
        self.num_updates = num_updates
        self._device = device
        self._whole: _Span | None = None
        self._waits: list[_Span] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = self._mark()
        yield
        self._whole = (begin, self._mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
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
        """Waits for the forward to end."""
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


def compute_and_draw_s(rehearsals: Sequence[TimedForward]) -> tuple[float, float]:
    """(a step with nothing pending, replaying one update in all blocks), from forwards with few and with many."""
    few, many = sorted(rehearsals[1:], key=lambda r: r.num_updates)
    draw_s = max(0.0, many.busy_s - few.busy_s) / (many.num_updates - few.num_updates)
    return few.busy_s - few.num_updates * draw_s, draw_s
