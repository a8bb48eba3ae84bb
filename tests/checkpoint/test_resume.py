"""A resumed run is the run that was not interrupted, bit for bit, in every storage format and at every moment."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import BATCHES, JSONS, assert_same_bits, planes, start, with_checkpoint
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Toy, engine_for, log_lines, one_step, train, zo_json

pytestmark = pytest.mark.usefixtures("single_process")


@cache
def uninterrupted(name: str) -> tuple[list[float], dict[str, Any], dict[str, torch.Tensor]]:
    """Losses, and what it ends with."""
    whole = start(name)
    losses = train(whole, BATCHES[:9])
    return losses, planes(whole), weights(whole.module)


SYNCHRONOUS = ("fp32", "bf16 split some resident")
"""A save that is awaited writes the same files with the same code."""


@pytest.mark.parametrize(
    ("name", "asynchronous"), [*((name, True) for name in JSONS), *((name, False) for name in SYNCHRONOUS)]
)
def test_resume_equals_uninterrupted(name: str, asynchronous: bool, tmp_path: Path) -> None:
    """Also after several resumes, and with the saving run unharmed by its saves."""
    expected, last_planes, last_weights = uninterrupted(name)
    saving = start(name, asynchronous=asynchronous)
    losses = train(saving, BATCHES[:2])
    saving.save_checkpoint(str(tmp_path))
    at_two = planes(saving)
    losses += train(saving, BATCHES[2:5])
    saving.save_checkpoint(str(tmp_path))
    assert losses + train(saving, BATCHES[5:9]) == expected
    saving.wait_for_checkpoint()
    assert (tmp_path / "latest").read_text() == "global_step5"

    other = start(name)
    train(other, BATCHES[9:10])  # whatever it was before
    other.load_checkpoint(str(tmp_path), tag="global_step2")
    assert other.global_steps == 2
    assert_same_bits(planes(other), at_two)
    assert train(other, BATCHES[2:4]) == expected[2:4]
    other.save_checkpoint(str(tmp_path), tag="again", save_latest=False)
    third = start(name)
    third.load_checkpoint(str(tmp_path), tag="again")
    assert train(third, BATCHES[4:9]) == expected[4:]
    assert_same_bits(planes(third), last_planes)
    assert_equal(weights(third.module), last_weights)
    third.load_checkpoint(str(tmp_path))
    assert third.global_steps == 5
    assert train(third, BATCHES[5:9]) == expected[5:]
    assert_same_bits(planes(third), last_planes)


SCHEDULE = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 20, "warmup_max_lr": 1e-3}}


def with_dropout() -> torch.nn.Module:
    return tiny_model("opt", dropout=0.2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resume_inside_an_accumulation_window_with_a_schedule_and_dropout(asynchronous: bool, tmp_path: Path) -> None:
    json = zo_json(interval=3, scheduler=SCHEDULE, gradient_accumulation_steps=3, bf16={"enabled": True})
    json = with_checkpoint(json, asynchronous=asynchronous)
    batches = [tiny_batch("opt", seed=i, batch_size=2, length=6) for i in range(13)]
    torch.manual_seed(3)
    whole = engine_for(with_dropout(), json)
    expected = train(whole, batches)
    torch.manual_seed(3)
    saving = engine_for(with_dropout(), json)
    losses = train(saving, batches[:5])  # one step and two of three micro-batches
    saving.save_checkpoint(str(tmp_path), client_state={"num_seen": 5})
    saving.wait_for_checkpoint()
    torch.manual_seed(77)
    resumed = engine_for(with_dropout(), json)
    _, client_state = resumed.load_checkpoint(str(tmp_path))
    assert client_state["num_seen"] == 5
    assert (resumed.global_steps, resumed.micro_steps) == (1, 5)
    assert losses + train(resumed, batches[5:]) == expected
    assert resumed.get_lr() == whole.get_lr()
    assert_same_bits(planes(resumed), planes(whole))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Asynchronous saves after every step: homes are swapped under folds, and training has the same bits."""
    name = "bf16 split some resident"
    quiet, saving = start(name), start(name, asynchronous=True)
    expected = train(quiet, BATCHES)
    found = train(saving, BATCHES, after=lambda step: saving.save_checkpoint(str(tmp_path)) and None)
    assert found == expected
    saving.wait_for_checkpoint()
    assert_same_bits(planes(saving), planes(quiet))
    for step in (1, 7, 16):
        resumed = start(name)
        resumed.load_checkpoint(str(tmp_path), tag=f"global_step{step}")
        assert train(resumed, BATCHES[step:]) == expected[step:]


def test_a_unit_that_waits_to_be_written_keeps_its_bytes_while_it_folds() -> None:
    """With a writer that never gets a turn, training goes on; what is written late is of the step that was saved."""
    name = "bf16 split some resident"
    engine, same = start(name), start(name)
    train(engine, BATCHES[:4])
    train(same, BATCHES[:4])
    saved = planes(engine)
    snapshot = engine.backend.snapshot(hold=True, omit_frozen=False)
    host_nbytes = engine.backend.store.blocks.store.nbytes
    assert train(engine, BATCHES[4:10]) == train(same, BATCHES[4:10])
    store = engine.backend.store
    assert host_nbytes < store.blocks.store.nbytes <= 2 * host_nbytes
    late = {key: value.clone() for file in snapshot.weights_files for key, value in file.tensors().items()}
    assert_same_bits(late, {key: saved[key] for key in late})
    assert len(late) == sum(isinstance(v, torch.Tensor) for v in saved.values()) - 1  # the log's rows
    snapshot.abandon()
    most = store.blocks.store.nbytes
    for _ in range(2):  # buffers go round
        engine.backend.snapshot(hold=True, omit_frozen=False).abandon()
        train(engine, BATCHES[:6])
    assert store.blocks.store.nbytes == most


@pytest.mark.parametrize("saved", ["bf16 split", "fp8 split", "bf12 wire"])
def test_another_way_of_storing_takes_the_weights_and_says_so(saved: str, tmp_path: Path) -> None:
    first = start(saved)
    train(first, BATCHES[:4])
    first.save_checkpoint(str(tmp_path))
    other = start("bf16 over fp32")
    with log_lines() as lines:
        other.load_checkpoint(str(tmp_path))
    assert any("not bit for bit" in line for line in lines)
    assert_equal(weights(other.module), weights(first.module))
    assert other.backend.store.log.length == 4
    one_step(other, BATCHES[4])


@pytest.mark.parametrize("options", [{"load_optimizer_states": False}, {"load_module_only": True}])
@pytest.mark.parametrize("name", ["fp32", "bf16 split"])
def test_weights_alone(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    first = start(name)
    train(first, BATCHES[:4])
    first.save_checkpoint(str(tmp_path))
    other = start(name)
    train(other, BATCHES[:2])
    other.load_checkpoint(str(tmp_path), **options)
    assert_equal(weights(other.module), weights(first.module))
    assert other.backend.store.log.length == 2
    assert other.global_steps == (2 if "load_module_only" in options else 4)
    one_step(other, BATCHES[4])


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    def model() -> Toy:
        toy = Toy()
        toy.blocks[1].requires_grad_(False)
        toy.blocks[2].norm.requires_grad_(False)
        return toy

    first, whole = engine_for(model(), JSONS["bf16 split"]), engine_for(model(), JSONS["bf16 split"])
    train(first, BATCHES[:4])
    expected = train(whole, BATCHES[:8])
    first.save_checkpoint(str(tmp_path), tag="all")
    first.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    sizes = [sum(f.stat().st_size for f in (tmp_path / t).glob("w*")) for t in ("all", "global_step4")]
    assert sizes[1] < sizes[0]
    resumed = engine_for(model(), JSONS["bf16 split"])
    resumed.load_checkpoint(str(tmp_path))
    assert train(resumed, BATCHES[4:8]) == expected[4:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("fp32", {}), ("fp32", {"load_module_only": True}), ("fp32", {"load_optimizer_states": False})),
        ("fp32 some resident", {"load_module_only": True}),
        ("fp32 resident", {"load_optimizer_states": False}),
        ("two directions", {}),
    ],
    ids=str,
)
def test_weights_that_a_checkpoint_lacks_keep_their_pending_updates(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """They were frozen in the run that saved it, and are trained in the run that loads it."""
    half_frozen = Toy()
    half_frozen.embed.requires_grad_(False)
    half_frozen.blocks[1].requires_grad_(False)
    first = engine_for(half_frozen, JSONS[name])
    train(first, BATCHES[:2])
    first.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    engine = engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[:4])
    own = {n: value for n, value in weights(engine.module).items() if n.startswith(("embed", "blocks.1."))}
    engine.load_checkpoint(str(tmp_path), **options)
    assert_equal(weights(engine.module), weights(first.module) | own)


@pytest.mark.parametrize(
    ("params", "own_micro_batches", "saved_micro_batches"),
    [
        *(({}, 0, 5), ({}, 1, 4)),
        *(({"seed": 5}, 1, 5), ({"seed": 5}, 0, 4)),
        *(({"num_directions": 2}, 0, 5), ({"num_directions": 2}, 1, 4)),
        *(({"distribution": "rademacher"}, 1, 5), ({"distribution": "rademacher"}, 0, 4)),
    ],
    ids=str,
)
def test_projected_gradients_along_other_noise_are_dropped(
    params: dict[str, Any], own_micro_batches: int, saved_micro_batches: int, tmp_path: Path
) -> None:
    """Those of the checkpoint's open step if its noise is another one, and those of this run's open step always."""
    first = engine_for(Toy(), zo_json(gradient_accumulation_steps=2))
    train(first, BATCHES[:saved_micro_batches])
    first.save_checkpoint(str(tmp_path))
    saved = first.backend._projected
    engine = engine_for(Toy(), zo_json(gradient_accumulation_steps=2, params=params))
    train(engine, BATCHES[:own_micro_batches])
    with log_lines() as lines:
        engine.load_checkpoint(str(tmp_path))
    if params:
        assert not engine.backend._projected.any()
        assert any("are along other noise" in line for line in lines) is bool(saved.any())
    else:
        assert torch.equal(engine.backend._projected, saved)


def test_tied_weights_and_buffers(tmp_path: Path) -> None:
    class WithBuffer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model("opt")
            self.register_buffer("seen", torch.zeros(3))

        def forward(self, **batch: torch.Tensor) -> Any:
            return self.inner(**batch)

    batches = [tiny_batch("opt", seed=i, batch_size=2, length=6) for i in range(6)]
    first, whole = engine_for(WithBuffer(), JSONS["bf16 split"]), engine_for(WithBuffer(), JSONS["bf16 split"])
    expected = train(whole, batches)
    train(first, batches[:3])
    first.module.seen.fill_(7.0)
    first.save_checkpoint(str(tmp_path))
    resumed = engine_for(WithBuffer(), JSONS["bf16 split"])
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.module.seen.tolist() == [7.0] * 3
    assert train(resumed, batches[3:]) == expected[3:]
