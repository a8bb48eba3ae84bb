"""The runtime brings the right bytes to a slot whatever order blocks are visited in, and counts what it moves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.runtime import Runtime, Slot
from ds_zo.streaming.units import Part, PlacedParameter, Unit

CPU = torch.device("cpu")


def make_units(num_units: int, *, wire: torch.dtype = torch.float32, resident: tuple[int, ...] = ()) -> list[Unit]:
    """Of different sizes. Every element of unit i is i, and its low plane is full of i."""
    store = HostStore(CPU, pin=False)
    units = []
    for i in range(num_units):
        placed = PlacedParameter(f"p{i}", nn.Parameter(torch.zeros(300 + 100 * i, dtype=wire)), 0, 0, True)
        part = Part([placed], wire, wire, split=wire.itemsize < 4, frozen=False)
        unit = Unit(f"u{i}", nn.Module(), [part], index=i, is_block=True)
        low = store.take(unit.low_nbytes) if unit.low_nbytes else None
        unit.assign_buffers(store.take(unit.nbytes), low, streamed=i not in resident, low_streamed=True)
        unit.store_buffer.fill_(i)
        if low is not None:
            low.fill_(i)
        units.append(unit)
    return units


def make_runtime(units: list[Unit], *, num_slots: int = 2, num_low_slots: int = 1, **options: bool) -> Runtime:
    return Runtime(units, CPU, num_slots=num_slots, num_low_slots=num_low_slots, **options)


def assert_holds(slot: Slot, unit: Unit) -> None:
    assert slot.unit is unit and slot.version == unit.version
    assert torch.equal(slot.buffer[: unit.nbytes], unit.store_buffer)


def visit(runtime: Runtime, unit: Unit, *, update: bool = False, download: bool = False) -> None:
    slot = runtime.acquire(unit)
    assert_holds(slot, unit)
    if update:
        slot.buffer[: unit.nbytes] += 1
        slot.updated(slot.version + 1)
    runtime.release(unit, slot, download=download)


@pytest.mark.parametrize("reuse_buffers", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_slots", [2, 3, 4, 9])
def test_every_pass_uploads_every_block_once(num_slots: int, overlap: bool, reuse_buffers: bool) -> None:
    units = make_units(6)
    runtime = make_runtime(units, num_slots=num_slots, overlap=overlap, reuse_buffers=reuse_buffers)
    whole = sum(u.nbytes for u in units)
    moved = []
    for number in range(4):
        before = runtime.bytes_up, runtime.bytes_down
        runtime.start(units, downloads=units)
        for unit in units:
            visit(runtime, unit, update=True, download=True)
        runtime.finish()
        moved.append((runtime.bytes_up - before[0], runtime.bytes_down - before[1]))
        for i, unit in enumerate(units):
            assert unit.version == number + 1 and bool((unit.store_buffer == i + number + 1).all())
    ahead = sum(u.nbytes for u in units[:num_slots]) if overlap and num_slots < len(units) else 0
    assert moved[0] == (whole + ahead, whole), "the first pass brings up what the second starts with"
    assert all(up <= whole and down == whole for up, down in moved[1:])
    if ahead:
        assert all(up == whole for up, _ in moved[1:])


def test_only_what_is_asked_for_is_sent_back() -> None:
    units = make_units(5)
    runtime = make_runtime(units)
    changed = [units[1], units[4]]
    runtime.start(units, downloads=changed)
    for unit in units:
        visit(runtime, unit, update=True, download=unit in changed)
    runtime.finish()
    assert runtime.bytes_down == units[1].nbytes + units[4].nbytes
    assert [u.version for u in units] == [0, 1, 0, 0, 1]
    assert [int(u.store_buffer[0]) for u in units] == [0, 2, 2, 3, 5]


def test_resident_blocks_never_move() -> None:
    units = make_units(4, resident=(0, 2))
    runtime = make_runtime(units)
    for _ in range(3):
        runtime.start(units, downloads=units)
        for unit in units:
            if unit.streamed:
                visit(runtime, unit, download=True)
        runtime.finish()
    streamed = units[1].nbytes + units[3].nbytes
    assert runtime.bytes_down == 3 * streamed and runtime.bytes_up <= 4 * streamed


def test_a_reversed_pass_is_planned_like_any_other() -> None:
    """What a backward pass needs."""
    units = make_units(5)
    runtime = make_runtime(units, num_slots=3)
    for order in (units, units[::-1], units, units[::-1]):
        runtime.start(order, downloads=units)
        for unit in order:
            visit(runtime, unit, update=True, download=True)
        runtime.finish()
    assert [int(u.store_buffer[0]) for u in units] == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
def test_skipped_repeated_and_reordered_blocks_are_right(num_slots: int) -> None:
    """Random visits against any plan, some updating their slot, some sent back, some outside a pass."""
    rng = random.Random(num_slots)
    units = make_units(5)
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
            assert_holds(slot, unit)
            assert int(slot.buffer[0]) == value[id(unit)] == int(slot.buffer[unit.nbytes - 1])
            if sent_back or rng.random() < 0.5:
                slot.buffer[: unit.nbytes] = new = rng.randint(0, 255)
                slot.updated(slot.version + 1)
                if sent_back:
                    value[id(unit)] = new
                    downloads.remove(unit)
            runtime.release(unit, slot, download=sent_back)
        if announced or rng.random() < 0.5:
            runtime.finish()
    assert [int(u.store_buffer[0]) for u in units] == [value[id(u)] for u in units]


def test_a_slot_that_was_changed_and_not_sent_back_counts_for_nothing() -> None:
    units = make_units(2)
    runtime = make_runtime(units, num_slots=2)
    for _ in range(3):
        runtime.start(units)
        for unit in units:
            visit(runtime, unit, update=True)  # asserts that the next pass finds the home's bytes again
        runtime.finish()
    assert runtime.bytes_down == 0


def test_rewritten_homes_are_brought_up_again_once_forgotten() -> None:
    units = make_units(3)
    runtime = make_runtime(units, num_slots=3)
    runtime.start(units)
    for unit in units:
        visit(runtime, unit)
    runtime.finish()
    units[0].store_buffer.fill_(77)
    runtime.invalidate_slots()
    runtime.start(units)
    visit(runtime, units[0])


def test_a_pass_that_breaks_off_leaves_a_runtime_that_works() -> None:
    units = make_units(4)
    runtime = make_runtime(units)
    runtime.start(units, downloads=units)
    runtime.acquire(units[0])
    runtime.finish()
    runtime.start(units, downloads=units)
    for unit in units:
        visit(runtime, unit, update=True, download=True)
    runtime.finish()
    assert [int(u.store_buffer[0]) for u in units] == [1, 2, 3, 4]


@pytest.mark.parametrize("num_low_slots", [1, 2])
def test_low_planes_come_with_their_block_only_where_wanted(num_low_slots: int) -> None:
    units = make_units(5, wire=torch.bfloat16, resident=(2,))
    runtime = make_runtime(units, num_low_slots=num_low_slots)
    folding = {id(units[1]), id(units[2]), id(units[4])}
    runtime.start(
        units,
        downloads=[u for u in units if id(u) in folding],
        lows=[u for u in units if id(u) in folding],
    )
    for i, unit in enumerate(units):
        slot = runtime.acquire(unit) if unit.streamed else None
        if id(unit) in folding:
            low = runtime.acquire_low(unit)
            assert low is not None and bool((low[: unit.low_nbytes] == i).all())
            low[: unit.low_nbytes] += 10
        runtime.release(unit, slot, download=id(unit) in folding)
    runtime.finish()
    found = [int(u.low_buffer[0]) for u in units if u.low_buffer is not None]
    assert found == [0, 11, 12, 3, 14]
    streamed = sum(u.nbytes for u in units if u.streamed)
    lows = sum(u.low_nbytes for u in units if id(u) in folding)
    assert runtime.bytes_down == units[1].nbytes + units[4].nbytes + lows
    assert runtime.bytes_up == streamed + lows + units[0].nbytes + units[1].nbytes


@pytest.mark.parametrize("in_pass", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_whole", range(6))
def test_an_upload_that_breaks_off_is_made_again(num_whole: int, overlap: bool, in_pass: bool) -> None:
    """Ctrl-C, in the middle of the copies that bring a block."""

    class BreaksOff(Runtime):
        num_left = num_whole

        def _copy_up(self, slot: Slot, home: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
            if self.num_left == 0:
                slot.buffer[:64].copy_(home[:64])
                self.num_left = -1
                raise KeyboardInterrupt
            self.num_left -= 1
            super()._copy_up(slot, home, stream)

    units = make_units(6)
    runtime = BreaksOff(units, CPU, num_slots=3, num_low_slots=0, overlap=overlap)
    for slot in runtime.slots:
        slot.buffer.fill_(255)
    for number in range(3):
        try:
            if in_pass:
                runtime.start(units, downloads=units)
            for unit in units:
                visit(runtime, unit, update=in_pass, download=in_pass)
        except KeyboardInterrupt:
            assert number == 0
        if in_pass:
            runtime.finish()
    assert runtime.num_left < 0
