"""The runtime brings the right bytes to a slot whatever order blocks are visited in, and counts what it moves."""

from __future__ import annotations

import random
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.units import Unit
from tests.helpers.made_units import make_runtime, make_units


def units_of(num_units: int, *, streamed: Container[int] = range(9)) -> list[Unit]:
    """Of different sizes."""
    return make_units([300 + 100 * i for i in range(num_units)], streamed=streamed)[0]


def assert_holds(slot: Slot, unit: Unit) -> None:
    assert slot.unit is unit and slot.version == unit.version
    assert torch.equal(slot.buffer[: unit.nbytes], unit.store_buffer)


def visit(runtime: Runtime, unit: Unit, *, update: bool = False, download: bool = False) -> None:
    slot = runtime.acquire(unit)
    assert slot is not None
    assert_holds(slot, unit)
    if update:
        slot.buffer[: unit.nbytes] += 1
        slot.updated(slot.version + 1)
    if download:
        runtime.written(unit, slot)
    runtime.release(unit, slot)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4, 9])
def test_every_pass_uploads_every_block_once(num_slots: int) -> None:
    units = units_of(6)
    runtime = make_runtime(units, num_slots=num_slots)
    whole = sum(u.nbytes for u in units)
    moved = []
    for number in range(4):
        before = runtime.transport.bytes_up, runtime.transport.bytes_down
        runtime.start(units, downloads=units)
        for unit in units:
            visit(runtime, unit, update=True, download=True)
        runtime.finish()
        moved.append((runtime.transport.bytes_up - before[0], runtime.transport.bytes_down - before[1]))
        for i, unit in enumerate(units):
            assert unit.version == number + 1 and bool((unit.store_buffer == i + number + 1).all())
    ahead = sum(u.nbytes for u in units[:num_slots]) if num_slots < len(units) else 0
    assert moved[0] == (whole + ahead, whole), "the first pass brings up what the second starts with"
    assert all(up <= whole and down == whole for up, down in moved[1:])
    if ahead:
        assert all(up == whole for up, _ in moved[1:])


def test_only_what_is_asked_for_is_sent_back() -> None:
    units = units_of(5)
    runtime = make_runtime(units)
    changed = [units[1], units[4]]
    runtime.start(units, downloads=changed)
    for unit in units:
        visit(runtime, unit, update=True, download=unit in changed)
    runtime.finish()
    assert runtime.transport.bytes_down == units[1].nbytes + units[4].nbytes
    assert [u.version for u in units] == [0, 1, 0, 0, 1]
    assert [int(u.store_buffer[0]) for u in units] == [0, 2, 2, 3, 5]


def test_resident_blocks_never_move() -> None:
    units = units_of(4, streamed=(1, 3))
    runtime = make_runtime(units)
    for _ in range(3):
        runtime.start(units, downloads=units)
        for unit in units:
            if unit.streamed:
                visit(runtime, unit, download=True)
        runtime.finish()
    streamed = units[1].nbytes + units[3].nbytes
    assert runtime.transport.bytes_down == 3 * streamed and runtime.transport.bytes_up <= 4 * streamed


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_skipped_repeated_and_reordered_blocks_are_right(num_slots: int) -> None:
    """Random visits against any plan, some updating their slot, some sent back, some outside a pass."""
    rng = random.Random(num_slots)
    units = units_of(5)
    runtime = make_runtime(units, num_slots=num_slots)
    value = {id(u): int(u.store_buffer[0]) for u in units}
    for _ in range(200):
        announced = rng.random() < 0.8
        downloads = [u for u in units if rng.random() < 0.5] if announced else []
        if announced:
            runtime.start(rng.choice([units, units[::-1], units[1:4]]), downloads=downloads)
        for unit in rng.choices(units, k=rng.randint(0, 8)):
            sent_back = unit in downloads
            slot = runtime.acquire(unit)
            assert slot is not None
            assert_holds(slot, unit)
            assert int(slot.buffer[0]) == value[id(unit)] == int(slot.buffer[unit.nbytes - 1])
            if sent_back or rng.random() < 0.5:
                slot.buffer[: unit.nbytes] = new = rng.randint(0, 255)
                slot.updated(slot.version + 1)
                if sent_back:
                    value[id(unit)] = new
                    downloads.remove(unit)
            if sent_back:
                runtime.written(unit, slot)
            runtime.release(unit, slot)
        if announced or rng.random() < 0.5:
            runtime.finish()
    assert [int(u.store_buffer[0]) for u in units] == [value[id(u)] for u in units]


def test_changed_stores_are_brought_up_again() -> None:
    """Also after a change in place that broke off: what it has changed stays."""
    units = units_of(3)
    runtime = make_runtime(units, num_slots=3)
    runtime.start(units)
    for unit in units:
        visit(runtime, unit)
    runtime.finish()
    units[0].store_buffer.fill_(77)
    runtime.invalidate_slots()
    runtime.start(units)
    visit(runtime, units[0])
    with pytest.raises(KeyError), runtime.updating(units[0]) as stored:
        stored[:64].fill_(7)
        raise KeyError
    visit(runtime, units[0])


def test_a_pass_that_breaks_off_leaves_a_runtime_that_works() -> None:
    units = units_of(4)
    runtime = make_runtime(units)
    runtime.start(units, downloads=units)
    runtime.acquire(units[0])
    runtime.finish()
    runtime.start(units, downloads=units)
    for unit in units:
        visit(runtime, unit, update=True, download=True)
    runtime.finish()
    assert [int(u.store_buffer[0]) for u in units] == [1, 2, 3, 4]


@pytest.mark.parametrize("in_pass", [True, False])
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("num_whole", range(6))
def test_an_upload_that_breaks_off_is_made_again(num_whole: int, num_slots: int, in_pass: bool) -> None:
    """Ctrl-C, in the middle of the copies that bring a block."""

    class BreaksOff(TorchDispatchMode):
        num_left = num_whole

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[1].data_ptr() in begins:
                self.num_left -= 1
                if self.num_left == -1:
                    func(args[0][:64], args[1][:64])
                    raise KeyboardInterrupt
            return func(*args, **(kwargs or {}))

    units = units_of(6)
    runtime = make_runtime(units, num_slots=num_slots, num_low_slots=0)
    begins = [unit.store_buffer.data_ptr() for unit in units]
    for slot in runtime.slots:
        slot.buffer.fill_(255)
    copies = BreaksOff()
    for number in range(3):
        try:
            with copies:
                if in_pass:
                    runtime.start(units, downloads=units)
                for unit in units:
                    visit(runtime, unit, update=in_pass, download=in_pass)
        except KeyboardInterrupt:
            assert number == 0
        if in_pass:
            runtime.finish()
    assert copies.num_left < 0
