"""Blocks that are passed over, whose parts are called, or that run inside one another: trained, or refused by name.

Models of random structure are in tests/random/test_block_structures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.lomo_runs import start, streamed
from tests.helpers.lsp_runs import lsp_json, streamed_lsp
from tests.helpers.weights import assert_close, parameters_of
from tests.helpers.zo_runs import log_lines, zo_json

pytestmark = pytest.mark.usefixtures("single_process")

WIDTH, NUM_STEPS = 8, 3
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.make()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.head(self.middle(self.stem(x))), y)

    def make(self) -> None:
        raise NotImplementedError

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Staged(Toy):
    """Stages that are called, with lists in them."""

    def make(self) -> None:
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class InsideOut(Staged):
    """The same stages, passed over: their blocks are called, of the last the weights alone are used."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages[:-1]:
            for block in stage.blocks:
                x = x + block(x)
        for block in self.stages[-1].blocks:
            x = x + torch.tanh(functional.linear(x, block.mix.weight, block.mix.bias))
        return x


def batches() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [{key: torch.randn(4, WIDTH, generator=made) for key in "xy"} for _ in range(NUM_STEPS)]


def trained(kind: type[nn.Module], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = start(config, kind().train())
    for batch in batches():
        engine.backward(engine(**batch))
        engine.step()
    found = parameters_of(engine)
    engine.destroy()
    return found


def plain(kind: type[nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    model = kind().train()
    made = optimizer(model.parameters())
    for batch in batches():
        model(**batch).backward()
        made.step()
        made.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_lsp_applies_updates_before_a_forward_that_passes_over_blocks() -> None:
    with log_lines() as lines:
        found = trained(InsideOut, lsp_json(params={**ADAM, "projector": "none"}))
    assert_close(found, plain(InsideOut, lambda params: torch.optim.AdamW(params, **ADAM)), atol=1e-5)
    assert sum("stages.0, stages.1, stages.2: weights are used outside the forward" in line for line in lines) == 1


def test_a_part_of_the_model_that_is_run_by_itself_has_the_last_update() -> None:
    engine = start(lsp_json(params={**ADAM, "projector": "none"}), InsideOut().train())
    for batch in batches():
        engine.backward(engine(**batch))
        engine.step()
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        found = engine.module.stages[0].blocks[0](x)
        engine.module.state_dict()  # brings every weight up to date
        torch.testing.assert_close(found, engine.module.stages[0].blocks[0](x))
    engine.destroy()


class InEachOther(Toy):
    """The first block runs the last one."""

    def make(self) -> None:
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        first, *others, last = self.blocks
        hook = first.mix.register_forward_hook(lambda m, given, found: found + last(found))
        try:
            for block in (first, *others):
                x = x + block(x)
        finally:
            hook.remove()
        return x


STREAMED = {
    "lsp": streamed_lsp(),
    "lomo": streamed(),
    "zo": zo_json(),
}


@pytest.mark.parametrize("backend", STREAMED)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (InsideOut, r"parameter stages\.0\.blocks\.0\.mix\.\w+ was used outside .*stream\.blocks"),
        (InEachOther, r"block blocks\.3 inside block blocks\.0: name the list .*stream\.blocks"),
    ],
)
def test_streamed_blocks_that_are_not_run_whole_and_in_turn_are_refused_in_the_first_forward(
    kind: type[nn.Module], said: str, backend: str
) -> None:
    engine = start(STREAMED[backend], kind().train())
    with pytest.raises(ValueError, match=said):
        engine(**batches()[0])
    engine.destroy()


def test_resident_blocks_may_run_inside_one_another() -> None:
    config = streamed(stream={"resident_blocks": 4})
    expected = plain(InEachOther, lambda params: torch.optim.SGD(params, lr=0.1))
    assert_close(trained(InEachOther, config), expected)


class Changing(Staged):
    """Calls a stage whole at first, and then what is inside it."""

    num_calls = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        for stage in self.stages:
            if self.num_calls > 1:
                for block in stage.blocks:
                    x = x + block(x)
            else:
                x = stage(x)
        return x


def test_lsp_names_a_block_that_is_passed_over_after_it_was_called() -> None:
    engine = start(lsp_json(), Changing().train())
    first, second, _ = batches()
    engine.backward(engine(**first))
    engine.step()
    loss = engine(**second)
    with pytest.raises(ValueError, match=r"stages\.0.* used before that: call the block.*optimizer\.params\.schedule"):
        engine.backward(loss)
    engine.destroy()
