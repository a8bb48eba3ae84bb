"""Changes that would lose a gradient or an input: parameters that a script replaces, unfreezes or makes complex, and
blocks that change their input in place. All are refused by name.

A failure names the seed of its case.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.adapter_runs import adapter_json
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed
from tests.helpers.lsp_runs import lsp_json, streamed_lsp
from tests.helpers.zo_runs import zo_json
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

SEEDS = pytest.mark.parametrize("seed", seeds(15))
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "LSP": lsp_json,
    "LSP, streamed": streamed_lsp,
    "LOMO": config_for,
    "LOMO, streamed": streamed,
    "ZO": zo_json,
}


@SEEDS
def test_a_replaced_parameter_is_refused_at_the_next_forward(seed: int) -> None:
    rng = random.Random(seed)
    kind = list(CONFIGS)[seed % len(CONFIGS)]
    engine = start(CONFIGS[kind](), lively("llama"))
    name, p = rng.choice([(n, p) for n, p in engine.module.named_parameters() if p.ndim == 2])
    at = rng.choice([0, 1, 3])
    print(f"seed {seed}: {kind}, {name} before step {at}")
    for i, batch in enumerate(batches("llama", at + 1)):
        if i == at:
            owner, _, own = name.rpartition(".")
            setattr(engine.module.get_submodule(owner), own, nn.Parameter(torch.randn(p.shape)))
            with pytest.raises(ValueError, match=rf"{name.replace('.', '[.]')}.*before deepspeed\.initialize"):
                engine(**batch)
        else:
            engine.backward(engine(**batch).loss)
            engine.step()
    engine.destroy()


@pytest.mark.parametrize("kind", ["LSP", "LSP, streamed", "LOMO, streamed"])
def test_a_complex_parameter_is_refused_by_its_dtype(kind: str) -> None:
    model = lively("llama")
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    engine = start(CONFIGS[kind](), model)
    with pytest.raises(ValueError, match=r"floating-point dtype, got phase of torch\.complex64"):
        engine(**next(batches("llama", 1)))
    engine.destroy()


def test_lsp_refuses_a_parameter_that_is_unfrozen_later() -> None:
    model = lively("llama")
    model.model.norm.weight.requires_grad_(False)
    engine = start(lsp_json(), model)
    model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"norm\.weight, which became trainable later"):
        engine(**next(batches("llama", 1)))
    engine.destroy()


def _fill_slice(x: torch.Tensor) -> None:
    x[..., 0] = 0.0


IN_PLACE: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x.add_(1.0),
    lambda x: x.transpose(0, 1).mul_(0.5),
    torch.relu_,
    _fill_slice,
    lambda x: x.detach().mul_(2.0),
]


class Changing(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(x)
        return x + self.trained(torch.tanh(self.frozen(x)))


class Net(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], Any], *, at: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Changing(change if i == at else lambda x: None) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@SEEDS
def test_a_block_that_changes_its_input_in_place_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    number, at = seed % len(IN_PLACE), rng.randrange(3)
    print(f"seed {seed}: change {number} in block {at}")
    model = Net(IN_PLACE[number], at=at)
    if rng.random() < 0.3:
        engine = start_adapter(model, adapter_json(offload_activations=rng.random() < 0.5))
    else:
        engine = start(rng.choice([streamed(), streamed_lsp()]), model)
    with pytest.raises(ValueError, match=rf"block layers\.{at} changes its input in place"):
        engine(torch.randn(2, 4, 8))
    engine.destroy()
