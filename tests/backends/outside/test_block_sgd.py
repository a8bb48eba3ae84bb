"""The recipe "Add a backend" of CONTRIBUTING.md: a backend of under 150 lines trains, streamed or not, and resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zo.config import ConfigError, resolve
from tests.backends.outside import block_sgd
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, train, weights_of
from tests.helpers.ranks import job
from tests.helpers.stream_clocks import Races, buffers_of, clocked
from tests.helpers.weights import assert_close, assert_equal, parameters_of, weights

pytestmark = pytest.mark.usefixtures("single_process")
LR, DECAY, MOMENTUM = 0.05, 0.1, 0.9
PARAMS = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}
RESIDENT = config_for("BlockSGD", params=PARAMS)
STREAMED = streamed("BlockSGD", params=PARAMS)


@pytest.fixture(autouse=True)
def registered(own_backends: None) -> None:
    block_sgd.register()


def run(config: dict[str, Any], *, name: str = "llama", num_steps: int = 4) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the weights at the end."""
    engine = start(config, lively(name))
    losses = train(engine, batches(name, num_steps))
    found = parameters_of(engine)
    engine.destroy()
    return losses, found


def plain_run(num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that everybody knows, with decoupled weight decay."""
    model = lively("llama").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for batch in batches("llama", num_steps):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 - LR * DECAY)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(model)


def test_streamed_equals_resident_and_a_plain_loop() -> None:
    losses, found = run(STREAMED)
    resident_losses, resident = run(RESIDENT)
    plain_losses, plain = plain_run(4)
    assert losses == resident_losses == plain_losses and losses[-1] < losses[0]
    assert_equal(found, resident)
    assert_equal(found, plain)


def test_a_block_that_runs_twice_is_updated_once() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = torch.tanh(block(x))
            return x.square().mean()

    ends = []
    for config in (STREAMED, RESIDENT):
        engine = start(config, Twice())
        for seed in range(3):
            engine.backward(engine(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))))
            engine.step()
        ends.append(parameters_of(engine))
        engine.destroy()
    assert_close(*ends)


def traced(*, deaf: list[tuple[str, str]]) -> tuple[Races, list[str]]:
    """Two steps on streams of which some do not wait, and the copies of the last pass."""
    with clocked(deaf=deaf):
        engine = start(streamed("BlockSGD", params=PARAMS, stream={"resident_blocks": 0}), lively("llama"))
        runtime = engine.backend.blocks.store.runtime
        with Races(lambda: buffers_of(runtime)) as races:
            train(engine, batches("llama", 2))
        executed = [str(action) for action in runtime.executed]
        engine.destroy()
    return races, executed


def test_copies_and_updates_wait_for_each_other() -> None:
    races, executed = traced(deaf=[])
    assert races.num_writes > 50 and not races.found
    assert [action[:2] for action in executed if "D" in action] == ["2D", "1D", "0D"]
    for pair in (("upload", "download"), ("download", "compute"), ("compute", "upload")):
        assert traced(deaf=[pair])[0].found, pair


@pytest.mark.parametrize("config", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize("other", [STREAMED, RESIDENT], ids=["to-streamed", "to-resident"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    config: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    _, expected = run(config, num_steps=5)
    first = start(config, lively("llama"))
    train(first, batches("llama", 2))
    first.save_checkpoint(str(tmp_path))
    first.destroy()
    resumed = start(other, lively("llama", seed=1))
    resumed.load_checkpoint(str(tmp_path))
    train(resumed, batches("llama", 3, first=2))
    assert_equal(parameters_of(resumed), expected)
    assert resumed.global_steps == 5


def test_a_module_keeps_its_weights_when_the_engine_is_gone() -> None:
    model = lively("llama")
    engine = start(STREAMED, model)
    train(engine, batches("llama", 2))
    expected = parameters_of(engine)
    engine.destroy()
    assert_equal({name: weights(model)[name] for name in expected}, expected)


def on_rank(rank: int) -> dict[str, Any]:
    """In a rank: its weights after training on every second batch."""
    block_sgd.register()
    engine = start({**STREAMED, "optimizer": {"type": "BlockSGD", "params": {"lr": LR}}}, lively("llama"))
    train(engine, [batch for i, batch in enumerate(batches("llama", 6)) if i % 2 == rank])
    return {"weights": parameters_of(engine)}


@pytest.mark.slow
def test_two_ranks_average_their_gradients() -> None:
    first, second = job(on_rank, 2)
    assert_equal(first["weights"], second["weights"])
    model = lively("llama").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for i, batch in enumerate(batches("llama", 6)):
        (model(**batch).loss / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(first["weights"], weights_of(model))


# Used wrongly.


def test_accumulation_and_fp16_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 1, because a block is updated when"):
        resolve({**STREAMED, "gradient_accumulation_steps": 2})
    with pytest.raises(ConfigError, match="BlockSGD does not scale losses, which fp16 needs"):
        resolve({**STREAMED, "fp16": {"enabled": True}})


@pytest.fixture(params=[STREAMED, RESIDENT], ids=["streamed", "resident"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = start(request.param, lively("llama"))
    yield made
    made.destroy()


def test_a_step_without_a_backward_is_refused(engine: Any) -> None:
    with pytest.raises(RuntimeError, match=r"makes the update, got engine\.step without it"):
        engine.step()


def test_a_second_backward_of_one_forward_is_refused(engine: Any) -> None:
    [batch] = batches("llama", 1)
    loss = engine(**batch).loss
    engine.backward(loss, retain_graph=True)
    with pytest.raises(RuntimeError, match=r"call the engine again|modified by an inplace operation"):
        engine.backward(loss)


def test_a_direct_backward_of_streamed_blocks_is_refused() -> None:
    engine = start(STREAMED, lively("llama"))
    [batch] = batches("llama", 1)
    with pytest.raises(RuntimeError, match=r"call engine\.backward\(loss\)"):
        engine(**batch).loss.backward()
    engine.destroy()
