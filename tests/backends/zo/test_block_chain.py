"""One graph for all blocks of both passes gives the same bits as blocks without graphs: on the CPU with graphs that run
their work again, and on CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from equivalence_runs import Weights, assert_same_weights, masters_of, on_device, one_step, zo_config, zo_engine
from fake_graphs import use_fake_graphs
from torch import nn
from zoo import CASES, seeded

from ds_zo.backends.zo import cuda_graphs
from ds_zo.backends.zo.block_chain import ChainBroken, PendingOutput

pytestmark = pytest.mark.usefixtures("single_process", "graphs")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cpu":
        use_fake_graphs(monkeypatch)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * scale


class Dropped(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x, scale), 0.5)


class Growing(Block):
    """Keeps a table as long as the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.table.shape[0]:
            self.table = torch.arange(length, device=x.device, dtype=x.dtype) / length
        return super().forward(x, scale) + self.table[:length, None]


class Stack(nn.Module):
    """Draws random numbers before and between its blocks, as LayerDrop does. `quirk` names what it does besides."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor, quirk: Any = None) -> Any:
        scale = nn.functional.dropout(torch.ones_like(x[0, 0]), 0.1)
        x, seen = self.embed(x), []
        for i, block in enumerate(self.blocks):
            if torch.rand([]) < 0.0 or (quirk is not None and quirk.now == "skips" and i == 1):
                continue
            x = block(x, scale)
            if quirk is not None and quirk.now == "reads":
                x = x * 2.0
            if quirk is not None and quirk.now == "writes":
                scale.mul_(0.5)
            seen.append(x)
        loss = x.float().square().mean()
        if quirk is not None and quirk.now == "fails":
            raise KeyboardInterrupt
        return (loss, *seen) if quirk is not None and quirk.now == "returns" else (loss,)


@dataclass
class Quirk:
    """What the model does in one step besides its usual work."""

    now: str | None


def batch(step: int, length: int = 4) -> dict[str, Any]:
    return {"x": torch.randn(2, length, 16, generator=torch.Generator().manual_seed(step))}


def random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


def set_random_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1:])


def train(engine: Any, batches: list[dict[str, Any]]) -> None:
    for each in batches:
        loss = engine(**on_device(engine, each))[0]
        engine.backward(loss)
        engine.step()


def trained(
    batches: list[dict[str, Any]],
    *,
    graphs: bool,
    make: Callable[[], nn.Module] = Stack,
    **config: Any,
) -> tuple[Weights, list[torch.Tensor], int, Any]:
    """Weights and random states after a step a batch, the number of recorded chains, and the chains."""
    torch.manual_seed(3)
    settings = zo_config(lr=1e-3, offload=False, section={"cuda_graphs": graphs}, **config)
    with zo_engine(seeded(make), settings) as engine:
        train(engine, batches)
        chains = engine.backend._graphs.chains if graphs else None
        num_recorded = len(list(chains.graphs)) if chains is not None else 0
        return masters_of(engine), random_states(), num_recorded, chains


def assert_same_run(batches: list[dict[str, Any]], **options: Any) -> tuple[int, Any]:
    """Trains with and without graphs. Returns the number of recorded chains, and the chains."""
    expected, expected_states, *_ = trained(batches, graphs=False, **options)
    found, states, num_recorded, chains = trained(batches, graphs=True, **options)
    assert_same_weights(found, expected)
    assert all(map(torch.equal, states, expected_states))
    return num_recorded, chains


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_one_graph_changes_nothing(dtype: str | None, accumulation: int) -> None:
    def cast(each: dict[str, Any]) -> dict[str, Any]:
        return {"x": each["x"].to(torch.bfloat16)} if dtype else each

    batches = [cast(batch(step)) for step in range(6 * accumulation)]
    num_recorded, chains = assert_same_run(batches, dtype=dtype, accumulation=accumulation)
    assert num_recorded == accumulation, "a graph with pending updates, and one without"
    assert chains.enabled


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_one_graph_of_a_transformers_model_changes_nothing(name: str) -> None:
    case = CASES[name]

    def run(*, graphs: bool) -> tuple[Weights, int]:
        torch.manual_seed(3)
        with zo_engine(case.make(), zo_config(offload=False, section={"cuda_graphs": graphs})) as engine:
            for step in range(5):
                one_step(engine, case.batch(step % 3))
            return masters_of(engine), len(list(engine.backend._graphs.chains.graphs)) if graphs else 1

    (expected, _), (found, num_recorded) = run(graphs=False), run(graphs=True)
    assert_same_weights(found, expected)
    assert num_recorded == 1


def test_each_length_has_a_graph_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_INPUT_KINDS", 2)
    lengths = [batch(step, length=4 + step % 3) for step in range(12)]
    num_recorded, _ = assert_same_run(lengths)
    assert num_recorded == 2


@pytest.mark.parametrize("quirk", ["skips", "reads", "writes", "returns"])
def test_a_forward_that_changes_runs_again_without_the_graph(quirk: str) -> None:
    quirks = [Quirk(None if step < 5 else quirk) for step in range(8)]
    num_recorded, chains = assert_same_run([{**batch(step), "quirk": each} for step, each in enumerate(quirks)])
    assert num_recorded == 0
    assert not chains.enabled


@pytest.mark.parametrize("block", [Dropped, Growing])
def test_blocks_that_one_graph_cannot_hold(block: type[nn.Module]) -> None:
    lengths = (4, 4, 4, 4, 9, 9, 12, 12)
    batches = [batch(step, length=length) for step, length in enumerate(lengths)]
    assert_same_run(batches, make=lambda: Stack(block))


def test_an_interval_of_folds_needs_no_chain() -> None:
    num_recorded, chains = assert_same_run([batch(step) for step in range(6)], stream={"writeback_interval": 2})
    assert num_recorded == 0
    assert chains.enabled


def test_hooks_on_blocks_see_their_outputs() -> None:
    seen: list[torch.Tensor] = []
    with zo_engine(seeded(Stack), zo_config(offload=False)) as engine:
        train(engine, [batch(step) for step in range(4)])
        handle = engine.module.blocks[1].register_forward_hook(lambda m, args, output: seen.append(output))
        train(engine, [batch(4)])
        handle.remove()
        train(engine, [batch(5)])
        assert len(seen) == 2, "two passes"
        assert not any(isinstance(output, PendingOutput) for output in seen)
        assert len(list(engine.backend._graphs.chains.graphs)) == 1


def test_training_goes_on_after_an_interrupted_step() -> None:
    expected, *_ = trained([batch(step) for step in range(6)], graphs=False)
    torch.manual_seed(3)
    with zo_engine(seeded(Stack), zo_config(lr=1e-3, offload=False)) as engine:
        for step in range(6):
            states = random_states()
            with pytest.raises(KeyboardInterrupt):
                engine(**on_device(engine, {**batch(step), "quirk": Quirk("fails")}))
            set_random_states(states)
            train(engine, [batch(step)])
        assert list(engine.backend._graphs.chains.graphs)
        assert_same_weights(masters_of(engine), expected)


def test_a_failed_recording_leaves_the_step_right(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = cuda_graphs.BlockGraphs._capture

    def failing(self: Any, work: Callable[[], None]) -> Any:
        capture(self, work)
        raise torch.OutOfMemoryError("no memory for a graph")

    monkeypatch.setattr(cuda_graphs.BlockGraphs, "_capture", failing)
    num_recorded, chains = assert_same_run([batch(step) for step in range(5)])
    assert num_recorded == 0
    assert not chains.enabled


def test_training_goes_on_after_ctrl_c_inside_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch(step) for step in range(5)]
    expected, *_ = trained(batches, graphs=False)
    capture = cuda_graphs.BlockGraphs._capture
    interruptions: list[None] = []

    def interrupted(self: Any, work: Callable[[], None]) -> Any:
        def half() -> None:
            work()
            if not interruptions:
                interruptions.append(None)
                raise KeyboardInterrupt

        return capture(self, half)

    monkeypatch.setattr(cuda_graphs.BlockGraphs, "_capture", interrupted)
    torch.manual_seed(3)
    with zo_engine(seeded(Stack), zo_config(lr=1e-3, offload=False)) as engine:
        for each in batches:
            states = random_states()
            try:
                train(engine, [each])
            except KeyboardInterrupt:
                set_random_states(states)
                train(engine, [each])
        assert interruptions
        assert list(engine.backend._graphs.chains.graphs)
        assert_same_weights(masters_of(engine), expected)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    batches = [batch(step) for step in range(8)]
    expected, *_ = trained(batches, graphs=False)
    torch.manual_seed(3)
    with zo_engine(seeded(Stack), zo_config(lr=1e-3, offload=False)) as engine:
        train(engine, batches[:4])
        engine.save_checkpoint(str(tmp_path))
    torch.manual_seed(3)
    with zo_engine(seeded(Stack), zo_config(lr=1e-3, offload=False)) as engine:
        engine.load_checkpoint(str(tmp_path))
        train(engine, batches[4:])
        assert list(engine.backend._graphs.chains.graphs)
        assert_same_weights(masters_of(engine), expected)


def test_a_pending_output_has_a_shape_and_no_values() -> None:
    output = PendingOutput.like(torch.Size((2, 3)), torch.float32, torch.device("cpu"))
    assert (output.shape, output.dtype, output.device.type, output.dim()) == ((2, 3), torch.float32, "cpu", 2)
    for use in (lambda: output + 1, lambda: output.sum(), lambda: output[0], lambda: torch.cat([output, output])):
        with pytest.raises(ChainBroken):
            use()
