"""On CUDA, uploads, computing and downloads run beside one another: whatever touches the same bytes has to be ordered
by an event. Checked with clocks instead of streams, where a missing wait can't be hidden by timing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lomo_runs import start, streamed
from stream_clocks import COMPUTE, ClockedRuntime, Event, Races
from zo_runs import Toy, engine_for, one_step, toy_batches, zo_json

from ds_zo.engines import homes, lomo_homes

pytestmark = pytest.mark.usefixtures("single_process")

ZO: dict[str, dict[str, Any]] = {
    "a slot a block": {"interval": 1, "device_slots": 3},
    "a slot a block, folds in turn": {"interval": 3, "device_slots": 3},
    "one block streams": {"interval": 2, "resident_blocks": 2},
    "slots go round": {"interval": 2},
    "low planes": {"interval": 2, "bf16": {"enabled": True}},
    "several directions": {"interval": 2, "params": {"num_directions": 2}},
}


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: COMPUTE)
    for module in (homes, lomo_homes):
        monkeypatch.setattr(module, "Runtime", ClockedRuntime)


@pytest.mark.parametrize("case", ZO)
def test_zo_orders_what_touches_the_same_bytes(case: str) -> None:
    model = Toy().train()
    engine = engine_for(model, zo_json(**ZO[case]))
    with Races() as races:
        for step, batch in enumerate(toy_batches(5)):
            one_step(engine, batch)
            if step % 2:
                with torch.no_grad():
                    model(**batch)
                model.state_dict()
    assert races.num_writes and not races.found


@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["one pass", "two passes"])
@pytest.mark.parametrize("device_slots", [2, 3])
def test_lomo_orders_what_touches_the_same_bytes(device_slots: int, clipping: float) -> None:
    model = Toy().train()
    engine = start(streamed(stream={"device_slots": device_slots}, clipping=clipping), model)
    with Races() as races:
        for batch in toy_batches(3):
            one_step(engine, batch)
            with torch.no_grad():
                model(**batch)
            model.state_dict()
    assert races.num_writes and not races.found
