"""Low planes are on the device when a fold asks for them, whether their block streams or stays."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.streaming.runtime import Runtime, Slot
from ds_zo.streaming.units import Unit
from tests.helpers.made_units import make_units

CPU = torch.device("cpu")
NUMEL = 1024
BLOCK_S, COMPUTE_S, EDGE_S = 3.0, 2.0, 6.0
"""A block's upload, which takes as long as its low plane's; its computing, and that of everything around blocks."""


def made(num_units: int, *, streamed: Sequence[int]) -> tuple[list[Unit], list[torch.Tensor]]:
    """Units of one size, and their low planes."""
    return make_units([NUMEL] * num_units, streamed=streamed, wire=torch.bfloat16)


def folding(units: Sequence[Unit], step: int, interval: int) -> list[Unit]:
    return [unit for unit in units if (step + unit.index) % interval == 0]


class Line:
    """A stream: when it has done what it was given."""

    def __init__(self) -> None:
        self.now_s = 0.0


class Moment:
    """An event."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self, line: Line) -> None:
        self.at_s = line.now_s


class TimedRuntime(Runtime):
    """The runtime as it is on CUDA, on a clock. The host issues a visit when the computing has got there."""

    def __init__(self, units: Sequence[Unit], *, num_low_slots: int) -> None:
        self.computing = Line()
        super().__init__(units, CPU, num_slots=2, num_low_slots=num_low_slots)
        self._own_up, self._own_up_low, self._own_down = Line(), Line(), Line()  # type: ignore[assignment]
        for slot in (*self.slots, *self.low_slots):
            slot.filled, slot.drained = Moment(), Moment()  # type: ignore[assignment]
            slot.saved = [Moment() for _ in slot.saved]  # type: ignore[misc]
        self.copying = self.computing

    @property
    def _compute(self) -> Any:
        return self.computing

    @contextmanager
    def _lines(self, line: Any) -> Iterator[None]:
        line.now_s = max(line.now_s, self.computing.now_s)
        before, self.copying = self.copying, line
        yield
        self.copying = before

    def _on(self, stream: Any) -> AbstractContextManager[object]:
        return self._lines(stream)

    @staticmethod
    def _wait(stream: Any, event: Any) -> None:
        if event is not None:
            stream.now_s = max(stream.now_s, event.at_s)

    @staticmethod
    def _record(event: Any, stream: Any) -> None:
        event.record(stream)


class Copying(TorchDispatchMode):
    """Inside, copies take time on the line that makes them."""

    def __init__(self, runtime: TimedRuntime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.runtime.copying.now_s += BLOCK_S * args[0].numel() / self.runtime.units[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_low_slots", "interval"), [(1, 4), (2, 3), (2, 2)])
@pytest.mark.parametrize("streamed", [(0, 3, 6, 9), (2, 5, 8, 11), (7,), (0, 11)], ids=str)
def test_folds_wait_for_no_low_plane(
    streamed: tuple[int, ...], num_low_slots: int, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link has time for all copies, so steps take as long as their computing."""
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    units, _ = made(12, streamed=streamed)
    runtime = TimedRuntime(units, num_low_slots=num_low_slots)
    seconds = []
    with Copying(runtime):
        for step in range(4 * interval):
            begin = runtime.computing.now_s
            now, then = folding(units, step, interval), folding(units, step + 1, interval)
            runtime.start(units, downloads=now, lows=[*now, *then])
            for unit in units:
                slot = runtime.acquire(unit) if unit.streamed else None
                if unit in now:
                    runtime.acquire_low(unit)
                    runtime.written(unit, slot)
                runtime.computing.now_s += COMPUTE_S
                if slot is not None:
                    runtime.release(unit, slot)
            runtime.computing.now_s += EDGE_S
            runtime.finish()
            seconds.append(runtime.computing.now_s - begin)
    assert runtime.bytes_down == 4 * sum(u.nbytes * u.streamed + u.low_nbytes for u in units)
    assert seconds[1:] == [12 * COMPUTE_S + EDGE_S] * (len(seconds) - 1)


@pytest.mark.parametrize("num_low_slots", [1, 2])
def test_the_low_planes_of_the_next_folds_are_on_their_way(num_low_slots: int) -> None:
    """Those of the pass after this one too, and none comes twice."""
    came: list[int] = []

    class Noting(Runtime):
        def _upload_low(self, unit: Unit) -> Slot:
            came.append(unit.index)
            return super()._upload_low(unit)

    units, lows = made(8, streamed=(1, 6))
    runtime = Noting(units, CPU, num_slots=2, num_low_slots=num_low_slots)
    folded: list[int] = []

    def ahead() -> list[int]:
        return [unit.index for unit in runtime._lows.ahead]

    for step in range(6):
        now, then = folding(units, step, 3), folding(units, step + 1, 3)
        due = [u.index for u in (*now, *then)]
        runtime.start(units, downloads=now, lows=[*now, *then])
        for unit in units:
            slot = runtime.acquire(unit) if unit.streamed else None
            if unit in now:
                assert ahead() == due[:num_low_slots], "before their visits"
                low = runtime.acquire_low(unit)
                assert low is not None and low[: unit.low_nbytes].tolist() == lows[unit.index].tolist()
                runtime.written(unit, slot)
                folded.append(due.pop(0))
                assert ahead() == due[:num_low_slots], "as soon as there is room"
            if slot is not None:
                runtime.release(unit, slot)
        runtime.finish()
        assert came == [*folded, *ahead()] and len(ahead()) == num_low_slots


@pytest.mark.parametrize("num_low_slots", [1, 2, 3])
def test_whatever_is_visited_folds_its_own_low_plane(num_low_slots: int) -> None:
    """Folds that no pass announced or none came for, visits that break off, evaluations in between, homes that are
    rewritten: the bytes are right, and no slot is lost."""
    rng = random.Random(num_low_slots)
    units, planes = made(6, streamed=(0, 2, 3))
    runtime = Runtime(units, CPU, num_slots=2, num_low_slots=num_low_slots)
    value = [u.index for u in units]
    num_folds = 0
    interrupted: set[int] = set()
    for _ in range(400):
        due = [u for u in units if rng.random() < 0.4]
        in_pass = rng.random() < 0.7
        if in_pass:
            guessed = [u for u in units if rng.random() < 0.3]
            runtime.start(units, downloads=due, lows=[*(u for u in due if rng.random() < 0.9), *guessed])
        for unit in rng.choice([units, units[::-1], rng.sample(units, 4)]):
            slot = runtime.acquire(unit) if unit.streamed else None
            folds = in_pass and unit in due
            if folds or rng.random() < 0.3:
                low = runtime.acquire_low(unit)
                assert low is not None and set(low[: unit.low_nbytes].tolist()) == {value[unit.index]}
                if folds:
                    low[: unit.low_nbytes] = new = rng.randint(0, 255)
                    if rng.random() < 0.1:
                        interrupted.add(unit.index)
                        break
                    if slot is None:
                        unit.folded(unit.version + 1)
                    else:
                        slot.updated(slot.version + 1)
                    runtime.written(unit, slot)
                    due.remove(unit)
                    value[unit.index] = new
                    num_folds += 1
                elif rng.random() < 0.2:
                    interrupted.add(unit.index)
                    break
            runtime.release(unit, slot, keep_low=rng.random() < 0.2)
            interrupted.discard(unit.index)
        if in_pass:
            runtime.finish()
            interrupted.clear()
        if rng.random() < 0.05:
            for unit in units:
                value[unit.index] = rng.randint(0, 255)
                planes[unit.index].fill_(value[unit.index])
            runtime.invalidate_slots()
        lows = runtime._lows
        in_use = [slot for slot in runtime.low_slots if slot.in_use]
        free = [slot for slot in runtime.low_slots if not (slot.in_use or slot.is_current)]
        assert len(free) + len(lows.ahead) + len(in_use) == num_low_slots
        assert sorted(map(id, lows._slots)) == sorted(map(id, runtime.low_slots))
        assert {slot.unit.index for slot in in_use if slot.unit is not None} <= interrupted
    assert num_folds > 100
    assert [set(plane.tolist()) for plane in planes] == [{v} for v in value]
