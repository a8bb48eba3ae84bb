"""Models of random structure: nested lists, dicts and sequentials, shared entries, modules that are called whole, by
their children or not at all. A seed makes the same model again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, ROWS = 6, 4
_CALLABLE = ("plain", "table", "whole", "sequential")
_CONTAINERS = ("list", "dict", "bare")
NUM_TURNS = 3


class Clock:
    """Which step it is: what models skip depends on that."""

    turn = 0


class Node:
    """How the model runs one of its modules."""

    def __init__(self, module: nn.Module, rng: random.Random, clock: Clock, children: list[Node]) -> None:
        self.module, self.clock, self.children = module, clock, children
        self.is_called = isinstance(module, (Plain, Table, Whole, nn.Sequential)) and rng.random() < 0.6
        """Whole, as modules are meant to be."""
        self.order = list(range(len(children)))
        if rng.random() < 0.3:
            rng.shuffle(self.order)
        if children and rng.random() < 0.2:
            self.order.append(rng.randrange(len(children)))
        self.skipped_at = rng.randrange(NUM_TURNS) if rng.random() < 0.15 else None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        if self.skipped_at == self.clock.turn:
            return x
        if self.is_called:
            called: torch.Tensor = self.module(x)
            return called
        if isinstance(self.module, (Plain, Table)):
            return self.module.compute(x)
        return self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.module, Bare):
            x = x + 0.2 * torch.tanh(functional.linear(x, self.module.mix) * self.module.scale)
        for i in self.order:
            x = self.children[i].run(x)
        return x


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.5 * torch.tanh(functional.linear(x, self.weight, self.bias))


class Table(nn.Embedding):
    """Autograd saves nothing of its weights, so it does not notice that they change."""

    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.3 * functional.embedding(torch.arange(len(x), device=x.device) % ROWS, self.weight)


class Whole(nn.Module):
    """A block with a forward, which may be passed over all the same."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.node: list[Node] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.node[0].inside(x)


class Bare(nn.Module):
    """A container without a forward that has parameters of its own."""

    def __init__(self, children: dict[str, nn.Module]) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        for name, child in children.items():
            self.add_module(name, child)


class Generated(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.clock = Clock()
        self._made: list[Node] = []
        self._budget = 14
        self.stem = nn.Linear(WIDTH, WIDTH)
        self._roots = [self._node(rng, depth=3, kinds=_CONTAINERS) for _ in range(rng.choice((1, 1, 2)))]
        for i, root in enumerate(self._roots):
            self.add_module(f"stack{i}", root.module)
        self.head = nn.Linear(WIDTH, WIDTH)

    @property
    def leaves_out_at_first(self) -> bool:
        """Whether its first forward leaves a module out."""
        return any(node.skipped_at == 0 for node in self._made)

    def _node(self, rng: random.Random, *, depth: int, kinds: tuple[str, ...]) -> Node:
        kind = rng.choice(kinds)
        shareable = [node for node in self._made if isinstance(node.module, (Plain, Table, Whole))]
        if kind in _CALLABLE and shareable and rng.random() < 0.12:
            return rng.choice(shareable)
        self._budget -= 1
        if kind in ("plain", "table"):
            return self._keep(Node(Plain() if kind == "plain" else Table(), rng, self.clock, []))
        below: tuple[str, ...] = ("plain", "table", "plain")
        if depth > 1 and self._budget > 0:
            below = (*below, "whole", "whole", *(() if kind == "sequential" else (*_CONTAINERS, "sequential")))
        if kind in _CONTAINERS and depth > 1 and rng.random() < 0.5:  # entries of one kind, as lists of blocks have
            below = (rng.choice(below),)
        children = [
            self._node(rng, depth=depth - 1, kinds=below) for _ in range(rng.choice((1, 2, 2, 3)) if depth < 3 else 3)
        ]
        if kind == "sequential":
            sequential = Node(nn.Sequential(*(child.module for child in children)), rng, self.clock, children)
            for child in children:  # whoever calls it calls its entries
                child.is_called, child.skipped_at = True, None
            sequential.order = list(range(len(children)))
            return self._keep(sequential)
        if kind == "dict":
            return self._keep(Node(nn.ModuleDict(_named(children)), rng, self.clock, children))
        if kind == "bare":
            return self._keep(Node(Bare(_named(children)), rng, self.clock, children))
        entries: list[Any] = [child.module for child in children]
        if rng.random() < 0.1:
            entries.append(None)
        if kind == "list":
            return self._keep(Node(nn.ModuleList(entries), rng, self.clock, children))
        whole = Whole(nn.ModuleList(entries))
        node = Node(whole, rng, self.clock, children)
        whole.node.append(node)
        return self._keep(node)

    def _keep(self, node: Node) -> Node:
        self._made.append(node)
        return node

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for root in self._roots:
            x = root.run(x)
        return functional.mse_loss(self.head(x), y)


def _named(children: list[Node]) -> dict[str, nn.Module]:
    return {f"entry{i}": child.module for i, child in enumerate(children)}


def batches(seed: int, num_batches: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        yield {key: torch.randn(ROWS, WIDTH, generator=generator) for key in ("x", "y")}
