"""Blocks whose output depends on state that no context restores: refused by name, at once or some steps later. Blocks
that only round differently are not refused.

A failure names the seed of its case.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.backends.recompute.output_check import OutputCheck
from tests.helpers.adapter_runs import adapter_json
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.lomo_runs import start, streamed
from tests.helpers.lsp_runs import streamed_lsp
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

SEEDS = pytest.mark.parametrize("seed", seeds(20))
WIDTH, NUM_BLOCKS = 8, 3
REFUSED = r"must give its first output, got another one from block (\S+): keep its counters in buffers"
ON_CPU = torch.device("cpu")


class Stateful(nn.Module):
    """Counts its calls from `first` on, or draws from a generator, which only a closure hides."""

    def __init__(self, kind: str, *, first: int, seed: int) -> None:
        super().__init__()
        self.inside, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kind, self.first, self.num_calls = kind, first, 0
        generator = torch.Generator().manual_seed(seed)
        self.held: Any = {"list": [generator], "dict": {"g": generator}, "deque": deque([generator])}.get(kind)
        self.hidden: Callable[[], torch.Generator] = lambda: generator
        if kind == "buffer":
            self.register_buffer("counter", torch.zeros(()))
        if kind == "attribute":
            self.held = generator

    def factor(self, x: torch.Tensor) -> Any:
        self.num_calls += 1
        if self.kind == "none" or self.num_calls < self.first:
            return 1.0
        if self.kind == "counter":
            return 1.0 + 0.5 * (self.num_calls % 3)
        if self.kind == "buffer":
            self.counter.add_(1)
            return 1.0 + 0.5 * (self.counter % 3)
        held = self.hidden() if self.kind == "closure" else self.held
        generator = held if isinstance(held, torch.Generator) else held["g"] if self.kind == "dict" else held[0]
        # a number for each row: two draws of one number for all rows may be equal in bfloat16
        return torch.rand(x.shape[:-1], generator=generator).unsqueeze(-1).to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor(x) * self.trained(torch.tanh(self.inside(x)))


class Net(nn.Module):
    def __init__(self, kind: str, *, first: int, seed: int, at: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH)
        kinds = [kind if i == at else "none" for i in range(NUM_BLOCKS)]
        self.layers = nn.ModuleList(Stateful(k, first=first, seed=seed) for k in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def engine_of(rng: random.Random, model: nn.Module) -> Any:
    backend = rng.choice(["lomo", "lomo clipped", "lsp", "adapter"])
    dtype = rng.choice([torch.float32, torch.bfloat16])
    bf16 = {"bf16": {"enabled": dtype is torch.bfloat16}}
    model.to(dtype)
    stream: dict[str, Any] = {"offload_activations": rng.random() < 0.5}
    print(backend, dtype, stream)
    if backend.startswith("lomo"):
        return start(streamed(clipping=1.0 if "clipped" in backend else 0.0, lr=1e-3, stream=stream, **bf16), model)
    if backend == "lsp":
        return start(streamed_lsp(stream=stream, lr=1e-4, **bf16), model)
    for layer in model.layers:
        layer.inside.requires_grad_(False)
    return start_adapter(model, adapter_json(resident_blocks=0, **stream, **bf16))


def steps(engine: Any, seed: int, num: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(engine.module.parameters()).dtype
    for _ in range(num):
        engine.backward(engine(torch.randn(2, 5, WIDTH, generator=generator).to(dtype)))
        engine.step()


@SEEDS
def test_a_block_with_state_of_its_own_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    kind, at = rng.choice(["counter", "closure"]), rng.randrange(NUM_BLOCKS)
    first = rng.choice([1, 3, 9])
    """Nine: in the fifth step at the latest, which is after the first steps."""
    print(f"seed {seed}: {kind} from call {first} on, in block {at}")
    engine = engine_of(rng, Net(kind, first=first, seed=seed, at=at))
    with pytest.raises(ValueError, match=REFUSED.replace(r"(\S+)", rf"layers\.{at}")):
        steps(engine, seed, 3 if first < 9 else 18)
    engine.destroy()


@SEEDS
def test_state_that_is_restored_is_not_refused(seed: int) -> None:
    rng = random.Random(seed)
    kind = rng.choice(["none", "buffer", "attribute", "list", "dict", "deque"])
    print(f"seed {seed}: {kind}")
    engine = engine_of(rng, Net(kind, first=1, seed=seed, at=rng.randrange(NUM_BLOCKS)))
    steps(engine, seed, 18)
    engine.destroy()


def compare(first: torch.Tensor, again: torch.Tensor) -> None:
    check = OutputCheck(ON_CPU, forwards_per_step=1)
    check.begin_forward()
    check.compare("layers.0", nn.Module(), check.summarise([first]), [again])


@SEEDS
def test_rounding_is_no_difference_and_other_values_are(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16, torch.complex64])
    shape = rng.choice([(), (7,), (3, 70, 5), (2, 100, 33), (130, 1)])
    first = (torch.randn(shape) * 10 ** torch.randn(shape)).to(dtype)
    rounded = first * (1 + torch.finfo(dtype).eps * torch.randn(shape).sign()).to(first.dtype)
    compare(first, rounded)
    for value in (float("nan"), float("inf")):
        lost = rounded.flatten().index_fill(0, torch.tensor([0]), value).view(shape)
        compare(first, lost)
        compare(lost, first)
    if len(shape) > 1 and not dtype.is_complex:  # more than 64 rows: a router chose another expert for one token
        compare(first, first.flatten(0, -2).index_fill(0, torch.tensor([1]), 7.0).view(shape))
    others = {"scaled": first * 1.5, "shape": first.unsqueeze(0)}
    if first.numel() > 1:
        others["moved"] = first.flatten().roll(1).view(shape)
    for name, other in others.items():
        with pytest.raises(ValueError, match=REFUSED):
            compare(first, other)
            raise AssertionError(f"seed {seed}: {name} {dtype} {shape}")
