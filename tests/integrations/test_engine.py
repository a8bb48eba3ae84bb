"""What DeepSpeed's own unit tests ask of an engine, asked of ours: schedulers, boundaries, tags, ways to initialize."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import logger

from tests.helpers.tiny_models import tiny_model
from tests.helpers.zo_rank_cases import Failing
from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    LEARNING_RATE,
    Run,
    Weights,
    assert_moved,
    assert_same,
    batches,
    config_for,
    fresh_libraries,  # noqa: F401
    on_device,
    section_for,
    start,
    train,
    weights_of,
)

pytestmark = pytest.mark.parametrize("backend", ENGINE_BACKENDS)

SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 6},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
    "LinearLR": {"start_factor": 0.1, "total_iters": 4},
    "StepLR": {"step_size": 2, "gamma": 0.5},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_json_scheduler_gives_the_rates_it_gives_any_optimizer(backend: str, name: str) -> None:
    """All of them under one backend, one of DeepSpeed's and one of torch's under the others: engines share the code."""
    if backend != "zo" and name not in ("WarmupLR", "StepLR"):
        pytest.skip("schedules are the engine's, whatever the backend")
    params = dict(SCHEDULERS[name])
    engine = start(config_for(backend, scheduler={"type": name, "params": params}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LEARNING_RATE[backend], momentum=0.9)
    home = torch.optim.lr_scheduler if hasattr(torch.optim.lr_scheduler, name) else deepspeed.runtime.lr_schedules
    if name == "OneCycle":
        params["cycle_momentum"] = False  # as DeepSpeed does where an optimizer has no momentum
    scheduler = getattr(home, name)(optimizer, **params)
    ours, theirs = [], []
    for batch in batches(5):
        ours.append(engine.get_lr()[0])
        theirs.append(optimizer.param_groups[0]["lr"])
        train(engine, [batch])
        optimizer.step()
        scheduler.step()
    assert ours == pytest.approx(theirs)
    assert len(set(ours)) > 1


def test_the_boundary_falls_where_the_json_says_and_moves_weights_only_there(backend: str) -> None:
    engine = start(config_for(backend, accumulation=3))
    boundaries, steps, moved, before = [], [], [], weights_of(engine)
    for batch in batches(6):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        train(engine, [batch])
        steps.append(engine.global_steps)
        after = weights_of(engine)
        moved.append(any(not torch.equal(before[name], after[name]) for name in before))
        before = after
    assert boundaries == [False, False, True] * 2
    assert steps == [0, 0, 1, 1, 1, 2]
    if backend == "zo":
        assert moved == boundaries


def test_zero_grad_inside_a_window_drops_what_came_before_and_says_so(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed's stages 0 and 1 do; its stage 2 keeps it, so that scripts may call it before each micro-batch."""
    said: list[str] = []
    monkeypatch.setattr(logger, "warning_once", said.append)
    runs = []
    for share in (1.0, 0.0):
        engine = start(config_for(backend, accumulation=2))
        for batch, share_of_loss in zip(batches(4), (1.0, 1.0, share, 1.0), strict=True):
            engine.backward(engine(**on_device(engine, batch)).loss * share_of_loss)
            if share_of_loss == share and engine.micro_steps == 2:
                assert not said
                engine.optimizer.zero_grad()
            engine.step()
            if engine.micro_steps % 2 == 0:
                engine.zero_grad()  # Trainer's
        runs.append(weights_of(engine))
        assert len(said) == ("lomo" not in backend), said
        said.clear()
    if backend == "zo":  # LOMO has made the update, and LSP's projectors are fitted to the gradient that is dropped
        assert_same(*runs)


def test_no_sync_over_a_window_is_the_window(backend: str) -> None:
    """Tracking of accumulation is off inside, so the caller divides."""
    plain = start(config_for(backend, accumulation=2))
    train(plain, batches(2))
    engine = start(config_for(backend, accumulation=2))
    first, second = (on_device(engine, batch) for batch in batches(2))
    with engine.no_sync():
        engine.backward(engine(**first).loss)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(**second).loss)
    engine.step()
    assert_same(weights_of(plain), weights_of(engine))


def test_checkpoint_tags_latest_and_client_state(backend: str, tmp_path: Path) -> None:
    engine = start(config_for(backend))
    saved = {}
    for batch in batches(3):
        train(engine, [batch])
        tag = f"after-{engine.global_steps}"
        engine.save_checkpoint(str(tmp_path), tag=tag, client_state={"seen": [engine.global_steps], "note": "mine"})
        saved[tag] = weights_of(engine)
    assert (tmp_path / "latest").read_text() == "after-3"

    other = start(config_for(backend), tiny_model("llama", seed=1))
    _, client = other.load_checkpoint(str(tmp_path))
    assert_same(weights_of(other), saved["after-3"])
    assert (client["seen"], client["note"], other.global_steps) == ([3], "mine", 3)
    _, client = other.load_checkpoint(str(tmp_path), tag="after-1")
    assert_same(weights_of(other), saved["after-1"])
    assert (client["seen"], other.global_steps, other.global_samples) == ([1], 1, 4)
    train(other, batches(2)[1:])
    assert_same(weights_of(other), saved["after-2"])  # going back goes on as the first time
    engine.save_checkpoint(str(tmp_path), tag="aside", save_latest=False)
    assert (tmp_path / "latest").read_text() == "after-3"
    assert other.load_checkpoint(str(tmp_path / "nothing")) == (None, None)


def test_the_ways_to_initialize_give_one_run(backend: str, tmp_path: Path) -> None:
    config = config_for(backend)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = tiny_model("llama")
    groups = [{"params": list(model.parameters())}]
    named = tiny_model("llama")
    ways: dict[str, dict[str, Any]] = {
        "dict": {"model": tiny_model("llama"), "config": config},
        "file": {"model": tiny_model("llama"), "config": str(file)},
        "config_params": {"model": tiny_model("llama"), "config_params": config},
        "args": {"model": tiny_model("llama"), "args": argparse.Namespace(deepspeed_config=str(file), local_rank=0)},
        "groups": {"model": model, "model_parameters": groups, "config": config},
        "parameters": {"model": named, "model_parameters": named.parameters(), "config": config},
    }
    runs = {}
    for way, given in ways.items():
        engine, optimizer, data, scheduler = deepspeed.initialize(**given)
        assert optimizer is engine.optimizer and data is None and scheduler is None
        runs[way] = Run(train(engine, batches(2)), weights_of(engine))
    for run in runs.values():
        assert run.losses == runs["dict"].losses
        assert_same(run.weights, runs["dict"].weights)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_load_fn_gets_all_weights_and_drops_no_state(backend: str, stream: bool, tmp_path: Path) -> None:
    config, tied = config_for(backend, stream=stream), {"tie_word_embeddings": True}
    engine = start(config, tiny_model("llama", **tied))
    train(engine, batches(3))
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.module.save_pretrained(tmp_path / "folder")
    calls = []

    def load(src: Weights, dst: torch.nn.Module) -> None:
        calls.append(sorted(src))
        dst.load_state_dict(src, strict="saved" in str(folder))  # save_pretrained leaves tied weights out

    for folder in (tmp_path / "saved", tmp_path / "folder"):
        other = start(config, tiny_model("llama", seed=1, **tied))
        other.load_checkpoint(str(folder), load_optimizer_states=False, custom_load_fn=load)
        assert_same(weights_of(other), weights_of(engine))
        train(other, batches(1))
        assert_moved(weights_of(other), weights_of(engine))
    assert len(calls) == 2 and calls[0] == sorted(engine.module_state_dict())
    with pytest.raises(ValueError, match="pass load_optimizer_states=False"):
        other.load_checkpoint(str(tmp_path / "saved"), custom_load_fn=load)


@pytest.mark.parametrize("stream", [False, True])
def test_a_later_engine_of_a_module_takes_it_over(backend: str, stream: bool) -> None:
    """As a second Trainer for a model does while the first is still there: from the current weights, with hooks of its
    own only."""
    config = config_for(backend, stream=stream)
    first = start(config)
    train(first, batches(2))
    alone = tiny_model("llama")
    alone.load_state_dict(weights_of(first))
    expected, second = start(config, alone), start(config, first.module)
    losses = [train(engine, batches(2)) for engine in (expected, second)]
    assert losses[0] == losses[1]
    assert_same(weights_of(expected), weights_of(second))
    with pytest.raises(RuntimeError, match="a later engine of its module"):
        train(first, batches(1))


def test_optimizer_and_scheduler_may_be_callables(backend: str) -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE[backend], weight_decay=0.0)

    def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)

    model = tiny_model("llama")
    engine = start(
        section_for(backend),
        model,
        optimizer=make_optimizer,
        model_parameters=list(model.parameters()),
        lr_scheduler=make_scheduler,
    )
    scheduler = {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 2}}
    reference = start(config_for(backend, scheduler=scheduler))
    assert train(engine, batches(3)) == train(reference, batches(3))
    assert engine.get_lr() == reference.get_lr() == [pytest.approx(LEARNING_RATE[backend])]
    assert_same(weights_of(engine), weights_of(reference))


def test_training_data_comes_back_as_a_loader(backend: str) -> None:
    data = [{name: value[0] for name, value in batch.items()} for batch in batches(8)]
    engine, _, loader, _ = deepspeed.initialize(
        model=tiny_model("llama"), config=config_for(backend), training_data=data
    )
    before = weights_of(engine)
    train(engine, list(loader))
    assert engine.global_steps == 2
    assert_moved(before, weights_of(engine))


def events(folder: Path, name: str) -> list[tuple[float, float]]:
    """The number of samples, and the value."""
    [file] = folder.rglob(f"*{name}.csv")
    return [(float(samples), float(value)) for samples, value in list(csv.reader(file.open()))[1:]]


def values(folder: Path, name: str) -> list[float]:
    return [value for _, value in events(folder, name)]


def test_monitor_events_carry_loss_lr_throughput_and_memory(backend: str, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = config_for(backend, accumulation=2, csv_monitor=monitor)
    if importlib.util.find_spec("tensorboard") is not None:
        config["tensorboard"] = {**monitor, "output_path": str(tmp_path / "tensorboard")}
    engine = start(config)
    losses = train(engine, batches(4))
    assert values(tmp_path, "train_loss") == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert events(tmp_path, "lr") == [(8, LEARNING_RATE[backend]), (16, LEARNING_RATE[backend])]
    assert all(rate > 0 for rate in values(tmp_path, "samples_per_s"))
    assert all(0.01 < memory < 1000 for memory in values(tmp_path, "peak_host_gb"))
    assert len(values(tmp_path, "peak_device_gb")) == 2
    assert "tensorboard" not in config or list(tmp_path.rglob("events.out*"))


@pytest.mark.parametrize("lost", ["raised", "raised, zero_grad", "dropped"])
def test_the_loss_of_a_lost_backward_reaches_no_monitor(backend: str, lost: str, tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = start(config_for(backend, csv_monitor=monitor))
    if lost == "dropped" and not engine.backend.accumulates:
        pytest.skip("a backward that has updated the weights cannot be dropped")
    data = batches(3)
    losses = train(engine, data[:1])
    loss = engine(**data[1]).loss
    with pytest.raises(RuntimeError, match="no memory") if "raised" in lost else nullcontext():
        engine.backward(Failing.apply(loss) if "raised" in lost else loss)
    if lost != "raised":
        engine.zero_grad()
    losses += train(engine, data[2:])
    assert values(tmp_path, "train_loss") == pytest.approx(losses)
