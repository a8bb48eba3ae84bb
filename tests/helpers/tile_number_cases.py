"""Blocks whose activations are large beside their weights, and what ranks do with them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.helpers.lomo_runs import start, streamed
from tests.helpers.zoo import Sizes, seeded

BATCH = 8
WIDTH, INNER, LENGTH, DEPTH = 4, 128, 64, 3


class Wide(nn.Module):
    """`sizes`: the batch sizes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.sizes = Sizes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        return x + self.of(x)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(torch.tanh(self.up(x)).sin())
        return found


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs(num: int, *, batch: int = BATCH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, LENGTH, WIDTH, generator=generator) for _ in range(num)]


def steps(engine: Any, batches: list[torch.Tensor], *, seed: int | None = 3) -> list[float]:
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
    losses = []
    for x in batches:
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def budget(block: type[nn.Module], free: int) -> float:
    """`device_memory_gb` with so many bytes for activations."""
    engine = start(streamed(stream={"device_memory_gb": 1}), seeded(lambda: Net(block)))
    taken = 1_000_000_000 - engine.backend.blocks.store.unallocated_nbytes()
    engine.destroy()
    return float((taken + MARGIN_NBYTES + free) / 1e9)


def chosen_by_ranks(rank: int) -> dict[str, Any]:
    """The numbers of tiles of ranks whose first batches have other sizes."""
    engine = start(streamed(stream={"device_memory_gb": budget(Wide, 500_000)}), seeded(lambda: Net(Wide)))
    model = engine.module
    steps(engine, inputs(1, batch=BATCH if rank else 2))
    steps(engine, inputs(1))
    number = engine.backend.blocks.num_tiles
    found = {"number": number, "sizes": model.layers[0].sizes[-2 * number :]}
    engine.destroy()
    return found
