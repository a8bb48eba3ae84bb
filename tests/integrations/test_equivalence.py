"""One run, four ways to start it: DeepSpeed's loop, Accelerate's with a JSON optimizer or the script's own, Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DummyOptim
from transformers import Trainer

from ds_zo.config import BACKENDS
from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import (
    LEARNING_RATE,
    Run,
    accelerator_for,
    adam_apart,
    arguments,
    assert_moved,
    assert_same,
    batches,
    config_for,
    engine_of,
    fresh_libraries,  # noqa: F401
    loader,
    logged,
    loop,
    on_device,
    rows,
    section_for,
    start,
    train,
    weights_of,
)

NUM_BATCHES = 4

OWN_UPDATES = [backend for backend in BACKENDS if backend != "adapter"]
"""Backends whose update is not made by the optimizer that they are given. Adapter's runs are compared with plain loops
of the same optimizer in backends/adapter."""

pytestmark = pytest.mark.parametrize("backend", OWN_UPDATES)


def raw(config: dict[str, Any]) -> Run:
    engine = start(config)
    initial = weights_of(engine)
    run = Run(train(engine, batches(NUM_BATCHES)), weights_of(engine))
    assert_moved(initial, run.weights)
    return run


def assert_equal_runs(a: Run, b: Run, *, apart: float = 0.0) -> None:
    assert a.losses == pytest.approx(b.losses, rel=apart, abs=0.0)
    assert_same(a.weights, b.weights, atol=apart)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate_with_an_optimizer_in_the_json_is_the_raw_loop(backend: str, accumulation: int) -> None:
    config = config_for(backend, accumulation=accumulation)
    accelerator = accelerator_for(config)
    model = tiny_model("llama")
    model, optimizer, data = accelerator.prepare(model, DummyOptim(model.parameters()), loader(batches(NUM_BATCHES)))
    assert_equal_runs(Run(loop(accelerator, model, optimizer, data), weights_of(model)), raw(config))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate_with_the_scripts_own_adamw_is_the_raw_loop(backend: str, accumulation: int) -> None:
    if backend in ("lomo", "adalomo") and accumulation > 1:
        section = {"params": {"accumulation": "sequential"}}
    else:
        section = {}
    accelerator = accelerator_for(section_for(backend, accumulation=accumulation, ds_zo=section))
    model = tiny_model("llama")
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[backend], weight_decay=0.0)
    model, optimizer, data = accelerator.prepare(model, adamw, loader(batches(NUM_BATCHES)))
    run = Run(loop(accelerator, model, optimizer, data), weights_of(model))
    assert not adamw.state
    assert_equal_runs(run, raw(config_for(backend, accumulation=accumulation)))


class RecordingTrainer(Trainer):
    """Keeps what `compute_loss` was given and returned: the log has means, rounded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.num_items: list[int] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        self.losses.append(loss.item())
        self.num_items.append(int(num_items_in_batch))
        return loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_is_the_raw_loop(backend: str, accumulation: int, tmp_path: Path) -> None:
    """Trainer divides each loss by the tokens of the whole window and asks the engine not to divide again. The raw
    loop does the same here: dividing by micro-batch and window apart rounds otherwise, and ZO multiplies a loss's
    rounding by 1 / (2 zo_eps). Every pair of backend, accumulation and kind of optimizer, not every triple."""
    own_optimizer = (list(BACKENDS).index(backend) % 2 == 0) == (accumulation == 2)
    config = config_for(backend, accumulation=accumulation)
    if own_optimizer:
        section = {"params": {"accumulation": "sequential"}} if "lomo" in backend and accumulation > 1 else {}
        given = section_for(backend, accumulation=accumulation, ds_zo=section)
    else:
        given = config
    args = arguments(tmp_path, given, num_train_epochs=1, learning_rate=LEARNING_RATE[backend])
    trainer = RecordingTrainer(
        model=tiny_model("llama"),
        args=args,
        train_dataset=rows(NUM_BATCHES),
        data_collator=lambda examples: {name: torch.stack([e[name] for e in examples]) for name in examples[0]},
    )
    trainer.train()
    assert trainer.state.global_step == NUM_BATCHES // accumulation

    engine = start(config)
    losses = []
    for batch, num_items in zip(batches(NUM_BATCHES), trainer.num_items, strict=True):
        loss = engine(**on_device(engine, batch), num_items_in_batch=torch.tensor(num_items)).loss
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
        losses.append(loss.item())
    assert_equal_runs(Run(trainer.losses, weights_of(engine_of(trainer))), Run(losses, weights_of(engine)))
    plain = raw(config)  # knows nothing of tokens: a mean of means, of batches that have as many
    means = [sum(plain.losses[i : i + accumulation]) / accumulation for i in range(0, NUM_BATCHES, accumulation)]
    assert logged(trainer, "loss") == pytest.approx(means, rel=1e-4)


def test_params_of_the_section_reach_the_backend(backend: str) -> None:
    if backend != "zo":
        pytest.skip("the parameter that is compared is ZO's")
    runs = []
    for config in (
        section_for(backend, ds_zo={"params": {"zo_eps": 1e-2, "seed": 7}}),
        section_for(backend),
    ):
        model = tiny_model("llama")
        adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[backend], weight_decay=0.0)
        engine = start(config, model, optimizer=adamw)
        runs.append(Run(train(engine, batches(2)), weights_of(engine)))
    config = config_for(backend)
    config["optimizer"]["params"].update(zo_eps=1e-2, seed=7)
    engine = start(config)
    assert_equal_runs(runs[0], Run(train(engine, batches(2)), weights_of(engine)))
    assert_moved(runs[0].weights, runs[1].weights)


def test_no_blocks_streams_and_trains_as_with_blocks(backend: str) -> None:
    config = config_for(backend, stream=True)
    runs = []
    for blocks in ([], None):
        engine = start({**config, "ds_zo": {"stream": {"blocks": blocks}}})
        runs.append(Run(train(engine, batches(2)), weights_of(engine)))
    assert_equal_runs(*runs, apart=adam_apart(backend))  # without blocks vectors stay on the device
