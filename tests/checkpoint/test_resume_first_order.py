"""A resumed run of LOMO, AdaLOMO or LSP is the run that was not interrupted, bit for bit, wherever it was saved."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.preemption import Preemption
from tests.helpers.first_order_runs import (
    JSONS,
    Epochs,
    assert_same_run,
    check_held_snapshot,
    check_resumed_runs,
    engine_of,
    everything,
    play,
)
from tests.helpers.lomo_runs import start
from tests.helpers.lsp_runs import lsp_json, small

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("name", JSONS)
def test_resume_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    check_resumed_runs(name, tmp_path)


@pytest.mark.parametrize("name", JSONS)
def test_what_is_held_stays_while_training_goes_on(name: str) -> None:
    check_held_snapshot(name)


@pytest.mark.parametrize("name", ["LOMO, bf16, streamed", "LSP, on the device"])
def test_frozen_parameters_may_be_left_out(name: str, tmp_path: Path) -> None:
    first = engine_of(name)
    first.module.model.layers[0].requires_grad_(False)
    play(first, Epochs(), 2)
    first.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    resumed = engine_of(name)
    resumed.module.model.layers[0].requires_grad_(False)
    resumed.load_checkpoint(str(tmp_path))
    assert_same_run(everything(resumed), everything(first))


@pytest.mark.parametrize("name", ["LOMO, bf16, streamed", "LSP, on the device"])
def test_sigterm_saves_and_the_run_goes_on_later(name: str, tmp_path: Path) -> None:
    engine, epochs = engine_of(name), Epochs()
    losses: list[float] = []
    with Preemption() as preemption:
        for number in range(9):
            losses += play(engine, epochs, 1)
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.requested():
                engine.save_checkpoint(str(tmp_path), client_state=vars(epochs))
                break
    assert len(losses) == 4
    resumed = engine_of(name, seed=1)
    _, client = resumed.load_checkpoint(str(tmp_path))
    losses += play(resumed, Epochs(client["order"], client["at"], client["num_seen"]), 3)
    assert losses == play(engine_of(name), Epochs(), 7)


def test_another_subspace_is_refused_before_anything_changes(tmp_path: Path) -> None:
    engine = start(lsp_json(), small())
    play(engine, Epochs(), 1)
    engine.save_checkpoint(str(tmp_path))
    other = start(lsp_json(params={"subspace_dim": 5}), small(seed=3))
    before = everything(other)
    with pytest.raises(CheckpointError, match="subspace_dim"):
        other.load_checkpoint(str(tmp_path))
    assert_same_run(everything(other), before)
    state = other.backend.state_dict()
    del state["layout"]  # as version 1 wrote it
    with pytest.raises(CheckpointError, match="layout 3, the checkpoint's in 1"):
        other.backend.check_state(state)
