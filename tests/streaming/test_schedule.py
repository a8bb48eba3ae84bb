"""Schedules are lists: read, checked and priced without a device."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from ds_zo.streaming import schedule
from ds_zo.streaming.schedule import NO_SLOT, NUM_CHUNKS, Action, Kind, Timeline, price
from tests.helpers.schedule_check import validate


def sweep(order: Sequence[int], *, streamed: Collection[int] = range(99), **options: Any) -> list[Action]:
    return schedule.sweep(order, streamed=streamed, **options)


def read(text: str) -> list[Action]:
    found = re.findall(r"(\d+)([HLGgCD])(\d*)(?:\+(\d+))?", text)
    return [
        Action(int(block), Kind(kind), int(slot or NO_SLOT), int(low or NO_SLOT)) for block, kind, slot, low in found
    ]


def written(actions: Sequence[Action]) -> str:
    return " ".join(map(str, actions))


@pytest.mark.parametrize(
    ("order", "options", "expected"),
    [
        ([0, 1, 2], {"num_slots": 2, "downloads": {0, 1, 2}}, "0H0 1H1 0C0 0D0 2H0 1C1 1D1 2C0 2D0"),
        ([0, 1, 2], {"num_slots": 3, "downloads": {0, 1, 2}}, "0H0 1H1 2H2 0C0 0D0 1C1 1D1 2C2 2D2"),
        ([0, 1, 2], {"num_slots": 1, "downloads": {0, 1, 2}}, "0H0 0C0 0D0 1H0 1C0 1D0 2H0 2C0 2D0"),
        ([0, 1, 2], {"num_slots": 2}, "0H0 1H1 0C0 2H0 1C1 2C0"),
        ([2, 1, 0], {"num_slots": 2, "downloads": {1}}, "2H0 1H1 2C0 0H0 1C1 1D1 0C0"),
        ([0, 1, 2], {"num_slots": 2, "then": [0, 1]}, "0H0 1H1 0C0 2H0 1C1 0H1 2C0 1H0"),
        ([0, 1, 2], {"num_slots": 2, "loaded": {0: 1, 1: 0}}, "0C1 2H1 1C0 2C1"),
        ([0, 1, 2], {"num_slots": 2, "loaded": {2: 0}}, "0H0 1H1 0C0 2H0 1C1 2C0"),
        ([0, 0, 1], {"num_slots": 1}, "0H0 0C0 0H0 0C0 1H0 1C0"),
        ([0, 1, 0, 1], {"num_slots": 2}, "0H0 1H1 0C0 0H0 1C1 1H1 0C0 1C1"),
        ([0, 0, 1], {"num_slots": 2, "downloads": {0}}, "0H0 0C0 0H1 1H0 0C1 0D1 1C0"),
        ([5], {"num_slots": 4}, "5H0 5C0"),
        ([], {"num_slots": 2}, ""),
        ([0, 1, 2, 3], {"streamed": {1, 3}, "num_slots": 1, "then": [0, 1]}, "1H0 0C 1C0 3H0 2C 3C0 1H0"),
    ],
)
def test_a_sweep_reads_as_expected(order: list[int], options: dict[str, Any], expected: str) -> None:
    assert written(sweep(order, **options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lows": [1, 3]}, "1H0 1L0 0C 1C0+0 1D0+0 3L0 3H0 2C 3C0+0 3D0+0 1H0"),
        ({"lows": [0, 2], "downloads": {0, 2}}, "1H0 0L0 0C+0 0D+0 2L0 1C0 3H0 2C+0 2D+0 3C0 1H0"),
        ({"lows": [1, 2], "downloads": {1}}, "1H0 1L0 0C 1C0+0 1D0+0 2L0 3H0 2C 3C0 1H0"),
        ({"lows": [1, 1], "downloads": {1}}, "1H0 1L0 0C 1C0+0 1D0+0 1L0 3H0 2C 3C0 1H0"),
        ({"lows": [1, 3], "low_slots": [0, 1]}, "1H0 1L0 3L1 0C 1C0+0 1D0+0 3H0 2C 3C0+1 3D0+1 1H0"),
        ({"lows": [1, 3], "low_slots": [], "loaded_lows": {1: 0}}, "1H0 0C 1C0+0 1D0+0 3L0 3H0 2C 3C0+0 3D0+0 1H0"),
    ],
)
def test_low_planes_come_in_the_order_of_the_folds(options: dict[str, Any], expected: str) -> None:
    """Blocks 0 and 2 are on the device, with low planes on the host."""
    options = {"downloads": {1, 3}, "low_slots": [0], **options}
    assert written(sweep([0, 1, 2, 3], streamed={1, 3}, num_slots=1, then=[0, 1], **options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "0G0 1G1 0C0 2G0 1C1 0G1 2C0 1G0"),
        ({"loaded": {0: 0, 1: 1}}, "0C0 2G0 1C1 0G1 2C0 1G0"),
        ({"downloads": {1}, "lows": [1]}, "0G0 1G1 1g0 0C0 2G0 1C1+0 1D1+0 0G1 2C0 1G0"),
        (
            {"downloads": {0}, "lows": [0], "loaded": {0: 0}},
            "0g0 1G1 0C0+0 0D0+0 2G0 1C1 0G1 2C0 1G0",
        ),
    ],
)
def test_a_collective_pass_gathers_each_block_once(options: dict[str, Any], expected: str) -> None:
    options = {"gathers": True, "low_slots": [0, 1], **options}
    assert written(sweep([0, 1, 2], num_slots=2, then=[0, 1], **options)) == expected


def runs_to_its_end(actions: Sequence[Action], *, loaded: dict[int, int]) -> bool:
    """Three engines, each taking its own actions in order, with waits worked out from what an action touches: a compute
    needs its block in its slot, a download its compute, an upload a slot that nobody has still to read."""
    queues = {kind: deque((i, a) for i, a in enumerate(actions) if a.kind is kind) for kind in Kind}
    done: set[int] = set()
    holds = {slot: block for block, slot in loaded.items()}
    while any(queues.values()):
        for kind, queue in queues.items():
            if not queue:
                continue
            i, action = queue[0]
            before = [j for j in range(i) if actions[j].slot == action.slot]
            if kind is Kind.UPLOAD:
                ready = all(j in done for j in before)
            else:
                ready = holds.get(action.slot) == action.block and all(
                    j in done for j in before if actions[j].kind is Kind.UPLOAD or kind is Kind.DOWNLOAD
                )
            if ready:
                queue.popleft()
                done.add(i)
                if kind is Kind.UPLOAD:
                    holds[action.slot] = action.block
                break
        else:
            return False
    return True


def test_every_sweep_is_valid_and_runs_to_its_end() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        num_blocks, num_slots = rng.randint(1, 7), rng.randint(1, 5)
        order = rng.choices(range(num_blocks), k=rng.randint(0, 9))  # with gaps and repeats
        then = rng.choices(range(num_blocks), k=rng.randint(0, num_slots))
        downloads = {block for block in range(num_blocks) if rng.random() < 0.5}
        slots = rng.sample(range(num_slots), rng.randint(0, min(num_slots, num_blocks)))
        loaded = dict(zip(rng.sample(range(num_blocks), len(slots)), slots, strict=True))
        actions = sweep(order, num_slots=num_slots, downloads=downloads, loaded=loaded, then=then)
        validate(actions, num_slots=num_slots, loaded=loaded)
        assert [a.block for a in actions if a.kind is Kind.COMPUTE] == order
        assert {a.block for a in actions if a.kind is Kind.DOWNLOAD} == downloads & set(order)
        assert runs_to_its_end(actions, loaded=loaded), written(actions)
        timeline = price(actions, seconds=dict.fromkeys(Kind, 1.0))
        assert len(timeline.spans) == len(actions)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0C0", "holds None"),
        ("0H0 1C0", "holds 0"),
        ("0H0 0C1", "holds None"),
        ("0H0 1H0 0C0", "before it was computed"),
        ("0H0 0D0 0C0", "downloaded before"),
        ("0H0 0C0 1H0 0D0", "holds 1"),
        ("0H2", "2 slots"),
    ],
)
def test_a_broken_schedule_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        validate(read(text), num_slots=2)


def test_a_sweep_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        sweep([0], num_slots=0)


def spans_of(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {f"{action.kind.value}{action.block}": (start, end) for action, start, end in timeline.spans}


def test_three_slots_keep_the_papers_dependencies_and_no_others() -> None:
    """Algorithm 1: C(i) after U(i) and C(i-1); U(i+1), C(i) and O(i-1) side by side."""
    num_blocks = 8
    actions = sweep(range(num_blocks), num_slots=3, downloads=range(num_blocks))
    spans = spans_of(price(actions, seconds=dict.fromkeys(Kind, 1.0)))
    for i in range(num_blocks):
        assert spans[f"C{i}"][0] == max(spans[f"H{i}"][1], spans[f"C{i - 1}"][1] if i else 0.0)
        assert spans[f"D{i}"][0] == spans[f"C{i}"][1]
    for i in range(2, num_blocks - 1):
        assert spans[f"H{i + 1}"] == spans[f"C{i}"] == spans[f"D{i - 1}"]
    assert spans[f"D{num_blocks - 1}"][1] == num_blocks + 2


def test_an_upload_follows_the_download_out_of_its_slot_by_a_chunk() -> None:
    num_blocks = 8
    actions = sweep(range(num_blocks), num_slots=2, downloads=range(num_blocks))
    two = price(actions, seconds=dict.fromkeys(Kind, 1.0))
    spans = spans_of(two)
    for i in range(1, num_blocks - 1):
        assert spans[f"H{i + 1}"][0] == spans[f"D{i - 1}"][0] + 1 / NUM_CHUNKS
        assert spans[f"H{i + 1}"][1] >= spans[f"D{i - 1}"][1] + 1 / NUM_CHUNKS
    three = price(sweep(range(num_blocks), num_slots=3, downloads=range(num_blocks)), seconds=dict.fromkeys(Kind, 1.0))
    assert three.total_s < two.total_s < three.total_s + num_blocks / NUM_CHUNKS


def test_two_slots_cost_nothing_where_nothing_is_sent_back() -> None:
    seconds = {Kind.UPLOAD: 1.0, Kind.COMPUTE: 0.9, Kind.DOWNLOAD: 1.0}
    totals = [price(sweep(range(9), num_slots=slots), seconds=seconds).total_s for slots in (1, 2, 3)]
    assert totals[0] == pytest.approx(9 * 1.9)
    assert totals[1] == totals[2] == pytest.approx(9 * 1.0 + 0.9)


def test_one_slot_prices_the_schedule_without_overlap() -> None:
    timeline = price(sweep(range(5), num_slots=1, downloads=range(5)), seconds=dict.fromkeys(Kind, 1.0))
    assert timeline.total_s == 15.0
    assert timeline.busy_s == dict.fromkeys(Kind, 0.0) | dict.fromkeys((Kind.UPLOAD, Kind.COMPUTE, Kind.DOWNLOAD), 5.0)


def test_prices_may_differ_by_block() -> None:
    actions = sweep([0, 1], num_slots=2)
    seconds_of = {(0, Kind.UPLOAD): 1.0, (0, Kind.COMPUTE): 5.0, (1, Kind.UPLOAD): 2.0, (1, Kind.COMPUTE): 1.0}
    spans = spans_of(price(actions, seconds_of=seconds_of))
    assert spans == {"H0": (0.0, 1.0), "H1": (1.0, 3.0), "C0": (1.0, 6.0), "C1": (6.0, 7.0)}
