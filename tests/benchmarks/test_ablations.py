"""A run without a feature of streamed ZO moves and computes what it is measured for, and trains the same weights."""

from __future__ import annotations

import re
import shlex

import pytest

from benchmarks import speed
from benchmarks.training_speed import measure
from ds_zo.config import ConfigError, resolve
from ds_zo.config.section import StreamConfig
from tests.helpers.equivalence_runs import zo_config, zo_engine
from tests.helpers.zo_runs import train
from tests.helpers.zoo import CASES

pytestmark = pytest.mark.usefixtures("single_process")


def test_an_update_sweep_of_its_own_uploads_twice() -> None:
    params = {"shape": "opt-tiny", "layers": 4, "length": 8, "warmup": 2, "steps": 2, "device": "cpu", "method": "zo"}
    stream = {"master": "wire", "resident_blocks": 0, "writeback_interval": 1}
    fused, unfused = (measure(**params, stream=stream, without=without) for without in ((), ["fuse_update"]))
    assert unfused["up_gb_a_step"] == 2 * fused["up_gb_a_step"] > 0
    assert unfused["down_gb_a_step"] == fused["down_gb_a_step"] > 0


def test_every_upload_goes_to_new_memory() -> None:
    case = CASES["opt"]
    for without, are_new in (((), False), (["reuse_buffers"], True)):
        with zo_engine(case.make(), zo_config(), without=without) as engine:
            slots = engine.backend.store.blocks.runtime.slots
            train(engine, [case.batch(0)])
            before = [slot.buffer for slot in slots]
            train(engine, [case.batch(1)])
            assert {slot.buffer is not old for slot, old in zip(slots, before, strict=True)} == {are_new}


@pytest.mark.parametrize("key", StreamConfig.retired)
def test_the_command_of_a_refused_key_measures_its_effect(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(zo_config(stream={key: False}))
    command = re.search("`python -m benchmarks.speed (.*?)`", str(refused.value))
    assert command is not None
    suite, *args = shlex.split(command[1])
    speed.main([suite, *args, "--list"])
    *listed, _ = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert listed == [case.name for case in speed.cases_of(suite) if case.params.get("without") == [key]] != []


def test_without_overlap_blocks_take_turns_in_one_slot() -> None:
    with zo_engine(CASES["opt"].make(), zo_config(), without=["overlap"]) as engine:
        runtime = engine.backend.store.blocks.runtime
        assert len(runtime.slots) == 1 and runtime.streams.upload is runtime.streams.compute
