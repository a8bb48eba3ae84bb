"""Blocks replayed as CUDA graphs give the same results as blocks launched kernel by kernel."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

from ds_zo.backends.zo.cuda_graphs import MAX_INPUT_KINDS
from tests.helpers.equivalence_runs import masters_of, one_step, zo_config, zo_engine
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import Weights, assert_equal
from tests.helpers.zoo import CASES, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process")]


def run(
    make: Any, batch: Any, *, graphs: bool, dtype: str | None = None, num_steps: int = 8, **params: Any
) -> tuple[Weights, int]:
    config = zo_config(lr=1e-4, offload=False, dtype=dtype, section={"cuda_graphs": graphs}, **params)
    with zo_engine(make(), config) as engine:
        for step in range(num_steps):
            one_step(engine, batch(step % 3))
        recorder = engine.backend._graphs
        num_recorded = 0 if recorder is None else sum(r is not None for r in recorder._recordings.values())
        return masters_of(engine), num_recorded


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "qwen2"])
def test_graphs_change_nothing(name: str, dtype: str | None) -> None:
    case = CASES[name]
    expected, none = run(case.make, case.batch, graphs=False, dtype=dtype)
    found, num_recorded = run(case.make, case.batch, graphs=True, dtype=dtype)
    assert none == 0
    assert num_recorded > 0
    assert_equal(found, expected)


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_graphs_of_members_change_nothing(name: str, antithetic: bool) -> None:
    case = CASES[name]
    size = len(case.batch(0)["input_ids"])
    trained = partial(run, case.make, case.batch, noise="rank1", num_members=2 * size, antithetic=antithetic)
    (expected, none), (found, num_recorded) = trained(graphs=False), trained(graphs=True)
    assert none == 0
    assert num_recorded > 0
    assert_equal(found, expected)


@pytest.mark.parametrize("params", [{}, {"noise": "rank1", "num_members": 2}])
def test_direct_launches_change_nothing(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: direct launches]."""
    from ds_zo.ops import triton_launch

    case = CASES["llama"]
    found, _ = run(case.make, case.batch, graphs=False, dtype="bf16", **params)
    assert triton_launch._is_direct and triton_launch._compiled, "Triton refused a direct launch"
    monkeypatch.setattr(triton_launch, "_is_direct", False)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    expected, _ = run(case.make, case.batch, graphs=False, dtype="bf16", **params)
    assert_equal(found, expected)


def test_recordings_of_members_follow_their_factors() -> None:
    """Factors get other addresses when another matrix is trained."""
    case = CASES["llama"]
    found = []
    for graphs in (False, True):
        config = zo_config(lr=1e-4, offload=False, section={"cuda_graphs": graphs}, noise="rank1", num_members=2)
        with zo_engine(case.make(), config) as engine:
            frozen = next(p for name, p in engine.module.named_parameters() if "layers.0" in name and "q_proj" in name)
            for step in range(15):
                frozen.requires_grad_(step // 5 != 1)
                one_step(engine, case.batch(0))
            found.append(masters_of(engine))
            if graphs:
                assert any(engine.backend._graphs._recordings.values())
    assert_equal(*found)


def test_many_blocks_of_members_are_recorded() -> None:
    """In the first forward, factors get their addresses block by block."""
    make = partial(tiny_model, "llama", num_hidden_layers=MAX_INPUT_KINDS + 1)
    _, num_recorded = run(make, lambda seed: tiny_batch("llama", seed=seed), graphs=True, noise="rank1", num_members=2)
    assert num_recorded > 0


def test_blocks_are_recorded_again_after_every_recording_was_dropped() -> None:
    """Working copies get new addresses when the interval is chosen. The allocator frees the memory of the
    recordings."""
    case = CASES["opt"]
    expected, _ = run(case.make, case.batch, graphs=False)
    with zo_engine(case.make(), zo_config(lr=1e-4, offload=False)) as engine:
        recordings = engine.backend._graphs._recordings
        for step in range(8):
            if step in (3, 6):
                assert any(recordings.values())
                engine.backend.store.set_interval(engine.backend.store.interval)
            one_step(engine, case.batch(step % 3))
        assert any(recordings.values())
        assert_equal(masters_of(engine), expected)


class Sighted(nn.Module):
    """A block whose forward reads a number back to the host, which no recording can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1.0 if float(x.sum()) > 0 else 0.5)


class Made(nn.Module):
    """A block that makes a tensor of Python numbers, which a dispatch mode does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * torch.tensor([0.5] * 16, device=x.device)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Writes(nn.Module):
    """A block that changes its input in place: a replay would change a copy of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.5)) + x


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()  # blocks may write to it
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack_batch(seed: int) -> dict[str, Any]:
    return {"x": torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.parametrize("block", [Sighted, Made, Noisy, Writes])
def test_what_cannot_be_replayed_runs_as_usual(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    expected, _ = run(lambda: seeded(lambda: Stack(block)), stack_batch, graphs=False)
    torch.manual_seed(0)
    found, num_recorded = run(lambda: seeded(lambda: Stack(block)), stack_batch, graphs=True)
    assert num_recorded == 0
    assert_equal(found, expected)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_inputs_of_many_lengths_are_not_all_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_zo.backends.zo.cuda_graphs.MAX_INPUT_KINDS", 1)

    def batch(seed: int) -> dict[str, Any]:
        return {"x": torch.randn(2, 4 + seed, 16, generator=torch.Generator().manual_seed(seed))}

    expected, _ = run(lambda: seeded(lambda: Stack(Plain)), batch, graphs=False)
    found, num_recorded = run(lambda: seeded(lambda: Stack(Plain)), batch, graphs=True)
    assert num_recorded == 3 * 2, "three blocks, two passes, one of three lengths"
    assert_equal(found, expected)


def test_a_module_inside_a_block_that_changes_its_mode_is_not_replayed_in_the_other() -> None:
    def trained(graphs: bool) -> tuple[Weights, bool]:
        torch.manual_seed(0)
        config = zo_config(lr=1e-4, offload=False, section={"cuda_graphs": graphs})
        with zo_engine(seeded(lambda: Stack(Noisy)), config) as engine:
            for step in range(9):
                for block in engine.module.blocks:
                    block.dropout.train(step // 3 == 1)  # blocks without dropout are recorded
                one_step(engine, stack_batch(step))
            recorded = graphs and any(engine.backend._graphs._recordings.values())
            return masters_of(engine), recorded

    (expected, _), (found, is_recorded) = trained(False), trained(True)
    assert is_recorded
    assert_equal(found, expected)


def test_a_forward_of_a_blocks_own_is_there_again_afterwards() -> None:
    model = seeded(lambda: Stack(Plain))
    block = model.blocks[0]
    own = block.forward = partial(Plain.forward, block)
    with zo_engine(model, zo_config(lr=1e-4, offload=False)) as engine:
        one_step(engine, stack_batch(0))
        assert block.forward is not own
    assert block.forward is own
    assert "forward" not in vars(model.blocks[1])


class Growing(nn.Module):
    """A block with a table as long as the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > self.table.shape[0]:
            self.table = torch.arange(length, device=x.device, dtype=x.dtype) / length
        return self.linear(x).relu() + self.table[:length, None]


def test_a_table_that_grows_is_not_read_where_the_shorter_one_was() -> None:
    def batch(seed: int) -> dict[str, Any]:
        length = (4, 4, 96)[seed]
        return {"x": torch.randn(2, length, 16, generator=torch.Generator().manual_seed(seed))}

    expected, _ = run(lambda: seeded(lambda: Stack(Growing)), batch, graphs=False, num_steps=12)
    found, num_recorded = run(lambda: seeded(lambda: Stack(Growing)), batch, graphs=True, num_steps=12)
    assert num_recorded == 3 * 2 * 2, "three blocks, two passes, both lengths"
    assert_equal(found, expected)


def test_hooks_inside_blocks_are_called_though_there_are_recordings() -> None:
    seen: list[int] = []
    with zo_engine(seeded(lambda: Stack(Plain)), zo_config(lr=1e-4, offload=False)) as engine:
        for step in range(4):
            one_step(engine, stack_batch(step))
        assert any(engine.backend._graphs._recordings.values())
        handle = engine.module.blocks[1].linear.register_forward_hook(lambda *_: seen.append(1))
        one_step(engine, stack_batch(4))
        assert len(seen) == 2, "two passes"
        handle.remove()
        one_step(engine, stack_batch(5))
        assert len(seen) == 2


class Interrupted(Plain):
    """A block in whose first recording Ctrl-C arrives."""

    was_interrupted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing() and not Interrupted.was_interrupted:
            Interrupted.was_interrupted = True
            raise KeyboardInterrupt
        return super().forward(x)


def test_training_goes_on_after_ctrl_c_inside_a_recording() -> None:
    expected, _ = run(lambda: seeded(lambda: Stack(Plain)), stack_batch, graphs=False)
    Interrupted.was_interrupted = False
    with zo_engine(seeded(lambda: Stack(Interrupted)), zo_config(lr=1e-4, offload=False)) as engine:
        for step in range(8):
            try:
                one_step(engine, stack_batch(step % 3))
            except KeyboardInterrupt:
                one_step(engine, stack_batch(step % 3))
        assert Interrupted.was_interrupted
        assert any(engine.backend._graphs._recordings.values())
        assert_equal(masters_of(engine), expected)
