"""Low planes are on the device when a fold asks for them, whether their block streams or stays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.streaming.units import Unit
from tests.helpers.made_units import make_runtime, make_units
from tests.helpers.timed_streams import TimedStreams

NUMEL = 1024
BLOCK_S, COMPUTE_S, EDGE_S = 3.0, 2.0, 6.0
"""A block's upload, which takes as long as its low plane's; its computing, and that of everything around blocks."""


def made(num_units: int, *, streamed: Sequence[int]) -> tuple[list[Unit], list[torch.Tensor]]:
    """Units of one size, and their low planes."""
    return make_units([NUMEL] * num_units, streamed=streamed, wire=torch.bfloat16)


def folding(units: Sequence[Unit], step: int, interval: int) -> list[Unit]:
    return [unit for unit in units if (step + unit.index) % interval == 0]


class Copying(TorchDispatchMode):
    """Inside, copies take time on the line that makes them."""

    def __init__(self, streams: TimedStreams, *, nbytes: int) -> None:
        """`nbytes`: those of a block."""
        super().__init__()
        self._streams, self._nbytes = streams, nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._streams.copying.now_s += BLOCK_S * args[0].numel() / self._nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_low_slots", "interval"), [(1, 4), (2, 3), (2, 2)])
@pytest.mark.parametrize("streamed", [(0, 3, 6, 9), (2, 5, 8, 11), (7,), (0, 11)], ids=str)
def test_folds_wait_for_no_low_plane(streamed: tuple[int, ...], num_low_slots: int, interval: int) -> None:
    """The link has time for all copies, so steps take as long as their computing."""
    units, _ = made(12, streamed=streamed)
    streams = TimedStreams()
    computing = streams.computing
    runtime = make_runtime(units, streams=streams, num_low_slots=num_low_slots)
    seconds = []
    with Copying(streams, nbytes=units[0].nbytes):
        for step in range(4 * interval):
            begin = computing.now_s
            now, then = folding(units, step, interval), folding(units, step + 1, interval)
            runtime.start(units, downloads=now, lows=[*now, *then])
            for unit in units:
                slot = runtime.acquire(unit)
                if unit in now:
                    runtime.acquire_low(unit)
                    runtime.written(unit, slot)
                computing.now_s += COMPUTE_S
                if slot is not None:
                    runtime.release(unit, slot)
            computing.now_s += EDGE_S
            runtime.finish()
            seconds.append(computing.now_s - begin)
    assert runtime.transport.bytes_down == 4 * sum(u.nbytes * u.streamed + u.low_nbytes for u in units)
    assert seconds[1:] == [12 * COMPUTE_S + EDGE_S] * (len(seconds) - 1)


@pytest.mark.parametrize("num_low_slots", [1, 2])
def test_the_low_planes_of_the_next_folds_are_on_their_way(num_low_slots: int) -> None:
    """Those of the pass after this one too, and none comes twice."""
    units, lows = made(8, streamed=(1, 6))
    runtime = make_runtime(units, num_low_slots=num_low_slots)
    folded: list[int] = []

    def ahead() -> set[int]:
        return {slot.unit.index for slot in runtime.low_slots if slot.unit and slot.is_current and not slot.in_use}

    for step in range(6):
        now, then = folding(units, step, 3), folding(units, step + 1, 3)
        due = [u.index for u in (*now, *then)]
        runtime.start(units, downloads=now, lows=[*now, *then])
        for unit in units:
            slot = runtime.acquire(unit)
            if unit in now:
                assert ahead() == set(due[:num_low_slots]), "before their visits"
                low = runtime.acquire_low(unit)
                assert low is not None and low[: unit.low_nbytes].tolist() == lows[unit.index].tolist()
                runtime.written(unit, slot)
                folded.append(due.pop(0))
                assert ahead() == set(due[:num_low_slots]), "as soon as there is room"
            if slot is not None:
                runtime.release(unit, slot)
        runtime.finish()
        low_planes = units[0].low_nbytes * (len(folded) + num_low_slots)
        assert runtime.transport.bytes_up == low_planes + 2 * units[0].nbytes, (
            "the two blocks that stream stay in their slots"
        )


@pytest.mark.parametrize("num_low_slots", [1, 2, 3])
def test_whatever_is_visited_folds_its_own_low_plane(num_low_slots: int) -> None:
    """Folds that no pass announced or none came for, visits that break off, evaluations in between, homes that are
    rewritten: the bytes are right, and no slot is lost."""
    rng = random.Random(num_low_slots)
    units, planes = made(6, streamed=(0, 2, 3))
    runtime = make_runtime(units, num_low_slots=num_low_slots)
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
            slot = runtime.acquire(unit)
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
            runtime.release(unit, slot)
            interrupted.discard(unit.index)
        if in_pass:
            runtime.finish()
            interrupted.clear()
        if rng.random() < 0.05:
            for unit in units:
                value[unit.index] = rng.randint(0, 255)
                planes[unit.index].fill_(value[unit.index])
            runtime.invalidate_slots()
        in_use = [slot for slot in runtime.low_slots if slot.in_use]
        assert {slot.unit.index for slot in in_use if slot.unit is not None} <= interrupted
    assert num_folds > 100
    runtime.start(units, lows=units)
    assert all(slot.is_current for slot in runtime.low_slots)
    assert [set(plane.tolist()) for plane in planes] == [{v} for v in value]
