"""Checkpoints on CUDA, where copies are on their way while the host goes on: every backend resumes bit for bit, and
what is written in the background is of the step that was saved.

Bit for bit needs deterministic algorithms and a fixed cuBLAS workspace, which must be chosen before CUDA starts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

from ds_zo.checkpoint import files
from ds_zo.checkpoint.reader import open_folder
from ds_zo.checkpoint.rebuild import replay
from ds_zo.checkpoint.trajectory import FILE, read_trajectory
from tests.helpers.checkpoint_runs import assert_same_bits, planes
from tests.helpers.equivalence_runs import one_step, zo_config, zo_engine
from tests.helpers.first_order_runs import JSONS, check_held_snapshot, check_resumed_runs
from tests.helpers.stream_delays import delayed
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process", "deterministic")]

WIDTH = 1024
"""A block is 17 MB in float32 and computes sixteen tokens: copies outlast everything else."""
LR = 1e-6
STORAGES: dict[str, dict[str, Any]] = {
    "fp32": {"stream": {"writeback_interval": 3}},
    "bf16 split, some resident": {"stream": {"writeback_interval": 3, "resident_blocks": 2}, "dtype": "bf16"},
    "bf16 wire": {"stream": {"writeback_interval": 2, "master": "wire"}, "dtype": "bf16"},
    "fp8 split": {"stream": {"writeback_interval": 3, "wire_dtype": "fp8"}, "dtype": "bf16"},
    "bf12 wire": {"stream": {"writeback_interval": 3, "wire_dtype": "bf12", "master": "wire"}, "dtype": "bf16"},
    "bf16 resident": {"offload": False, "dtype": "bf16"},
    "bf16, all automatic": {"stream": {"resident_blocks": None}, "dtype": "bf16"},
}


@pytest.fixture
def delays() -> Iterator[None]:
    """Downloads and computing are held up at random: a writer that does not wait reads old bytes, and a fold that does
    not mind the writer overwrites what it reads."""
    rng = random.Random(0)
    lengths = {"download": [0, 4_000_000, 20_000_000], "compute": [0, 0, 4_000_000]}
    with delayed(lambda what: torch.cuda._sleep(rng.choice(lengths.get(what, [0])))):
        yield


def model() -> nn.Module:
    return seeded(lambda: Wandering(num_blocks=5, width=WIDTH))


def config_of(storage: str, **checkpoint: Any) -> dict[str, Any]:
    return zo_config(**STORAGES[storage], lr=LR, section={"checkpoint": checkpoint})


def train(engine: Any, first: int, end: int) -> None:
    for seed in range(first, end):
        one_step(engine, plain_batch(seed))


def bits(engine: Any) -> dict[str, Any]:
    """On the host, wherever blocks live: residency is a matter of memory, not of bits."""
    torch.cuda.synchronize()
    found = planes(engine)
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


@pytest.mark.parametrize("storage", STORAGES)
def test_zo_resumes_and_is_not_disturbed_by_asynchronous_saves(storage: str, tmp_path: Path, delays: None) -> None:
    """Saved asynchronously after steps 3, 4 and 5, and synchronously at 4: the same files' hashes, the same run."""
    with zo_engine(model(), config_of(storage, asynchronous=True)) as saving:
        train(saving, 0, 3)
        saving.save_checkpoint(str(tmp_path))
        train(saving, 3, 4)
        saving.save_checkpoint(str(tmp_path))
        train(saving, 4, 5)
        saving.save_checkpoint(str(tmp_path))
        train(saving, 5, 9)
        saving.wait_for_checkpoint()
        expected, interval = bits(saving), saving.backend.store.interval
    with zo_engine(model(), config_of(storage)) as resumed:
        resumed.load_checkpoint(str(tmp_path), tag="global_step3")
        assert resumed.backend.store.interval == interval  # an automatic one is taken over, not measured again
        assert not resumed.backend.store.must_choose_interval
        train(resumed, 3, 4)
        resumed.save_checkpoint(str(tmp_path / "sync"))
        assert_same_weights_files(tmp_path / "global_step4", tmp_path / "sync" / "global_step4")
        train(resumed, 4, 9)
        assert_same_bits(bits(resumed), expected)
    with zo_engine(model(), config_of(storage)) as latest:
        latest.load_checkpoint(str(tmp_path))
        assert latest.global_steps == 5
        train(latest, 5, 9)
        assert_same_bits(bits(latest), expected)


def assert_same_weights_files(a: Path, b: Path) -> None:
    """Edge, blocks and low planes as they were written, the pending log and the versions beside them."""
    names = sorted(path.name for path in a.glob("weights-*"))
    assert names and names == sorted(path.name for path in b.glob("weights-*"))
    for name in names:
        one, other = (files.sha256_of(folder / name, progress=lambda num: None) for folder in (a, b))
        assert one == other, name
    state_a, state_b = (open_folder(folder).backend_state for folder in (a, b))
    assert torch.equal(state_a["rows"].view(torch.int32), state_b["rows"].view(torch.int32))
    assert {key: value for key, value in state_a.items() if key != "rows"} == {
        key: value for key, value in state_b.items() if key != "rows"
    }


def test_a_writer_that_gets_no_turn_reads_the_step_that_was_saved(delays: None) -> None:
    """Blocks fold several times while they wait; edges and resident blocks fold in place at once."""
    storage = "bf16 split, some resident"
    with zo_engine(model(), config_of(storage)) as engine, zo_engine(model(), config_of(storage)) as same:
        for one in (engine, same):
            train(one, 0, 4)
        snapshot = engine.backend.snapshot(hold=True)  # nothing has been waited for
        saved = bits(same)
        train(engine, 4, 11)
        train(same, 4, 11)
        late = {name: value.clone() for file in snapshot.weights_files for name, value in file.tensors().items()}
        snapshot.abandon()
        assert_same_bits(late, {name: saved[name] for name in late})
        assert len(late) == sum(isinstance(value, torch.Tensor) for value in saved.values()) - 1  # the log's rows
        assert torch.equal(snapshot.state()["rows"].view(torch.int32), saved["rows"].view(torch.int32))
        assert_same_bits(bits(engine), bits(same))


def test_a_trajectory_is_written_beside_the_device_and_continues_a_run(tmp_path: Path) -> None:
    """A thread takes each step's row when the device has made it; steps after the last save are made again from it."""
    storage = "bf16 split, some resident"
    with zo_engine(model(), config_of(storage, trajectory=True, asynchronous=True)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(str(tmp_path))
        train(engine, 3, 8)
        engine.wait_for_checkpoint()
        engine.backend.recorder.flush()
        assert read_trajectory(tmp_path / FILE).end_step == 8
        train(engine, 8, 10)
        expected = bits(engine)
    with zo_engine(model(), config_of(storage, trajectory=True)) as resumed:
        resumed.load_checkpoint(str(tmp_path))
        assert resumed.global_steps == 10
        assert_same_bits(bits(resumed), expected)
        resumed.save_checkpoint(str(tmp_path))
    path, out = tmp_path / FILE, tmp_path / "out"
    assert replay(tmp_path / "global_step3", path, step=10, out=out, device="cuda"), "the saved hash"


def test_an_automatic_choice_is_recorded_and_taken_over(tmp_path: Path) -> None:
    """The saving run chose its interval by measurement; one that is started elsewhere takes it from the checkpoint."""
    storage = "bf16, all automatic"
    with zo_engine(model(), config_of(storage)) as first:
        assert first.backend.store.must_choose_interval and first.backend.store.blocks.may_fill_device
        train(first, 0, 3)
        store = first.backend.store
        assert not store.must_choose_interval and not store.blocks.may_fill_device
        assert not any(unit.streamed for unit in store.blocks.placement.blocks)  # all fit on this device
        first.save_checkpoint(str(tmp_path))
        train(first, 3, 6)
        expected, interval = bits(first), store.interval
    tight = {**config_of(storage)}
    tight["ds_zo"] = {**tight["ds_zo"], "stream": {**tight["ds_zo"]["stream"], "resident_blocks": 0}}
    with zo_engine(model(), tight) as streamed:  # another residency, the same bits
        streamed.load_checkpoint(str(tmp_path))
        assert streamed.backend.store.interval == interval
        assert all(unit.streamed for unit in streamed.backend.store.blocks.placement.blocks)
        train(streamed, 3, 6)
        assert_same_bits(bits(streamed), expected)


@pytest.mark.parametrize("name", JSONS)
def test_first_order_runs_resume_bit_for_bit(name: str, tmp_path: Path) -> None:
    check_resumed_runs(name, tmp_path)


@pytest.mark.parametrize("name", JSONS)
def test_what_first_order_runs_hold_stays_while_training_goes_on(name: str) -> None:
    check_held_snapshot(name)
