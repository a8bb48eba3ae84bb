"""The bytes that a ZO step moves between host and device."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from ds_zo.backends.zo import store
from ds_zo.streaming.slot import Slot
from tests.helpers.equivalence_runs import one_step, zo_config, zo_engine
from tests.helpers.weights import parameters_of
from tests.helpers.zoo import CASES

pytestmark = pytest.mark.usefixtures("single_process")


def moved(num_steps: int, *, warm_up: int = 2, **options: Any) -> tuple[float, float, float]:
    """Bytes up and down per step, and the bytes of all streamed blocks. The very first step runs its passes twice."""
    case = CASES["wandering"]
    with zo_engine(case.make(), zo_config(**options)) as engine:
        for seed in range(warm_up):
            one_step(engine, case.batch(seed))
        runtime = engine.backend.store.blocks.runtime
        up, down = runtime.transport.bytes_up, runtime.transport.bytes_down
        for seed in range(num_steps):
            one_step(engine, case.batch(seed))
        up, down = runtime.transport.bytes_up - up, runtime.transport.bytes_down - down
        whole = sum(unit.nbytes for unit in engine.backend.store.blocks.placement.blocks if unit.streamed)
        assert whole > 0 and parameters_of(engine)
        return up / num_steps, down / num_steps, whole


@pytest.mark.parametrize("num_directions", [1, 3])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_blocks_go_up_once_a_step_and_back_once_an_interval(interval: int, num_directions: int) -> None:
    up, down, whole = moved(8, stream={"writeback_interval": interval}, num_directions=num_directions)
    assert up == whole
    assert down == whole / interval


def test_resident_blocks_do_not_move() -> None:
    up, down, whole = moved(4, stream={"writeback_interval": 1, "resident_blocks": 1})
    assert up == down == whole


def test_accumulation_uploads_once_a_micro_batch_and_writes_back_once_a_step() -> None:
    up, down, whole = moved(8, accumulation=2, stream={"writeback_interval": 1})
    assert up == whole
    assert down == whole / 2


def test_low_planes_move_on_folds_only() -> None:
    """bf16 with `master: split`: the low planes are as large as the weights themselves, and move once per interval."""
    up, down, whole = moved(8, dtype="bf16", stream={"writeback_interval": 4})
    assert up == whole + whole / 4
    assert down == 2 * whole / 4


@pytest.mark.parametrize("num_resident", [0, 1])
@pytest.mark.parametrize("interval", [2, 8])
def test_an_evaluation_uploads_weights_and_low_planes_once(
    interval: int, num_resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Low planes of resident blocks too: each unit has pending updates. At interval 8 there is one low slot. Where
    there is memory for copies, later forwards upload nothing."""
    is_full = interval == 8
    monkeypatch.setattr(store, "free_nbytes", lambda *_, **__: 0 if is_full else 1 << 40)
    case = CASES["wandering"]
    stream = {"writeback_interval": interval, "resident_blocks": num_resident}
    with zo_engine(case.make(), zo_config(dtype="bf16", stream=stream)) as engine:
        for seed in range(3):
            one_step(engine, case.batch(seed))
        runtime = engine.backend.store.blocks.runtime
        found = []
        forward = partial(engine.module, **case.batch(0))
        for evaluate in (forward, forward, engine.module.state_dict):
            before = runtime.transport.bytes_up
            with torch.no_grad():
                evaluate()
            found.append(runtime.transport.bytes_up - before)
        whole = sum(unit.nbytes for unit in runtime.units if unit.streamed)
        lows = sum(unit.low_nbytes for unit in runtime.units if unit.low_streamed)
        assert found[1] == (whole + lows if is_full else 0), "the first one finds blocks of the last step in slots"
        assert found[2] == whole + lows


def test_a_new_interval_leaves_no_buffers_of_the_old_one() -> None:
    """The buffers must not wait for garbage collection either: a low plane of OPT-175B's blocks is 3.6 GB."""
    case = CASES["wandering"]

    def held(store: Any) -> int:
        buffers = [thing.buffer for thing in gc.get_objects() if isinstance(thing, Slot)]
        return sum(buffer.numel() for buffer in buffers if buffer.device == store.blocks.device)

    with zo_engine(case.make(), zo_config(dtype="bf16", stream={"writeback_interval": 4})) as engine:
        one_step(engine, case.batch(0))
        store = engine.backend.store
        gc.collect()
        before = held(store)
        gc.disable()
        try:
            store.set_interval(store.interval)
            assert 0 < held(store) == before
        finally:
            gc.enable()
