"""Of equal blocks one is traced, and every figure is that of a trace of the whole model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from ds_zo.planner import Model, Rates, plan
from ds_zo.planner import models as models_module
from ds_zo.planner.timeline import Trace
from ds_zo.planner.trace import trace_pass
from ds_zo.streaming.blocks import find_blocks
from tests.helpers.tiny_models import CONFIGS
from tests.planner.planned_models import planned

_SIZE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
UNLIKE: dict[str, Callable[..., hf.PretrainedConfig]] = {
    # Full attention and a window of four tokens in turn.
    "gemma2": lambda **kw: hf.Gemma2Config(**{**_SIZE, "sliding_window": 4, **kw}),
    # Dense and a mixture of experts in turn, but for three dense ones at the start.
    "qwen3-moe": lambda **kw: hf.Qwen3MoeConfig(
        **{**_SIZE, **_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1], **kw}
    ),
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: (blocks that run: a first, its neighbours and two at the end, or more where kinds take turns; overrides)
    "gpt2": (5, {"n_layer": 6}),
    "llama": (5, {"num_hidden_layers": 6}),
    "opt-350m": (5, {"num_hidden_layers": 6}),
    "bloom": (5, {"n_layer": 6}),
    "gemma2": (7, {"num_hidden_layers": 8}),
    "qwen3-moe": (9, {"num_hidden_layers": 10}),
}


def tiny(case: str) -> Model:
    return planned(case, dtype="bf16", **CASES[case][1])


def count_runs(module: nn.Module) -> list[int]:
    """Appends to the list each time that one of the blocks does anything."""
    runs: list[int] = []
    for i, block in enumerate(find_blocks(module).values()):
        inner = next(m for m in block.modules() if not list(m.children()) and list(m.parameters()))
        inner.register_forward_pre_hook(lambda *_, i=i: runs.append(i))  # type: ignore[misc]
    return runs


def whole_trace(*args: Any, **options: Any) -> Trace:
    """As `trace_pass`, where every block runs."""
    return trace_pass(*args, **options | {"whole": True})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in UNLIKE.items():
        monkeypatch.setitem(CONFIGS, name, config)


@pytest.mark.parametrize("case", CASES)
def test_a_trace_equals_that_of_the_whole_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Callable[[Model], Any]] = [
        Model.forward_trace,
        partial(Model.backward_trace, checkpointing=False),
        partial(Model.backward_trace, checkpointing=True, loss_in_chunks=True),
    ]
    model = tiny(case)
    runs = count_runs(model.module)
    traces = []
    for run in passes:
        runs.clear()
        traces.append(run(model))
        assert len(set(runs)) == CASES[case][0] < len(model.blocks) == len(traces[-1].block)
    with monkeypatch.context() as patch:
        patch.setattr(models_module, "trace_pass", whole_trace)
        whole = tiny(case)
        runs = count_runs(whole.module)
        assert [run(whole) for run in passes] == traces
        assert len(set(runs)) == len(whole.blocks)


class Computes:
    """Garbage in a circle whose end is an operation, as that of an engine that nobody destroyed."""

    def __init__(self) -> None:
        self.circle = self

    def __del__(self) -> None:
        torch.zeros(10_000, device="meta").add(1)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_that_computes_is_in_no_trace(seed: int) -> None:
    """It is made while the model runs, and collected some objects later, drawn by the seed."""
    model, other = tiny("gpt2"), tiny("gpt2")
    expected = model.backward_trace(checkpointing=True)
    next(other.module.children()).register_forward_pre_hook(lambda *_: Computes() and None)
    before = gc.get_threshold()
    gc.set_threshold(random.Random(seed).randint(1, 60))
    try:
        assert other.backward_trace(checkpointing=True) == expected
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


def test_a_plan_equals_that_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> Any:
        return plan(tiny("llama"), device_memory_gb=0.3, backends=["zo", "lomo", "adapter", "zero-3"]).to_json()

    found = shown()
    monkeypatch.setattr(models_module, "trace_pass", whole_trace)
    assert shown() == found


WIDTH, DEPTH = 16, 9


class Layer(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + torch.relu(self.linear(x))


class Stack(nn.Module):
    """Nothing of transformers': equal layers in a list, unless subclasses say otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer(i) for i in range(DEPTH))

    def layer(self, place: int) -> nn.Module:
        return Layer(place)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return type("Output", (), {"loss": x.sum()})


class WithoutList(Stack):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        for i in range(DEPTH):
            setattr(self, f"layer{i}", Layer(i))

    def forward(self, x: torch.Tensor) -> Any:
        for i in range(DEPTH):
            x = getattr(self, f"layer{i}")(x)
        return type("Output", (), {"loss": x.sum()})


class DeepLayer(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) if self.place < DEPTH // 2 else super().forward(super().forward(x))


class Deepening(Stack):
    """Layers look alike, but those past the middle do more."""

    def layer(self, place: int) -> nn.Module:
        return DeepLayer(place)


class Told(Stack):
    """Layers are handed what tells them apart."""

    def forward(self, x: torch.Tensor) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer(x, scale=1.0 / (i + 1))
        return type("Output", (), {"loss": x.sum()})


class Twice(Stack):
    """All layers run once more, in reverse."""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in [*self.layers, *reversed(self.layers)]:
            x = layer(x)
        return type("Output", (), {"loss": x.sum()})


class Collecting(Stack):
    """Outputs are all used at the end."""

    def forward(self, x: torch.Tensor) -> Any:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(seen[-1]))
        return type("Output", (), {"loss": torch.stack(seen).sum()})


class Shared(Stack):
    """One weight, in all layers."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear.weight = self.layers[0].linear.weight  # type: ignore[union-attr]


HOARD: list[torch.Tensor] = []


class Keeper(Layer):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        HOARD.append(x * 2)
        return super().forward(x)


class Hoarding(Stack):
    """Layers leave something behind, which is there until the end of the forward pass."""

    def layer(self, place: int) -> nn.Module:
        return Keeper(place)

    def forward(self, x: torch.Tensor) -> Any:
        output = super().forward(x)
        HOARD.clear()
        return output


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_run"),
    [
        (Stack, 5),
        (WithoutList, 0),
        (Told, DEPTH),
        (Deepening, DEPTH),
        (Twice, DEPTH),
        (Collecting, None),
        (Shared, DEPTH),
        (Hoarding, DEPTH),
    ],
)
def test_models_that_are_not_what_they_seem_are_traced_whole(
    kind: type[Stack], num_run: int | None, backward: bool
) -> None:
    found = []
    for whole in (False, True):
        with torch.device("meta"):
            module = kind()
        blocks = list(find_blocks(module).values())
        runs = count_runs(module)
        x = torch.empty(4, WIDTH, device="meta")
        found.append(trace_pass(module, {"x": x}, blocks=blocks, rates=Rates(), backward=backward, whole=whole))
        if num_run is not None and not whole:
            assert len(set(runs)) == num_run
    assert found[0] == found[1]
