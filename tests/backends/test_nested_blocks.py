"""Blocks as libraries write them: lists in lists that are never called, stages, and blocks whose parts are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.helpers.lomo_runs import assert_close, start, streamed
from tests.helpers.lsp_runs import CPU, current_weights, lsp_json
from tests.helpers.mezo_reference import PlainMeZO
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


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


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


class ViT(Toy):
    """As vit-pytorch has it."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), feed_forward()]) for _ in range(3))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
        return x


class XTransformer(Toy):
    """As x-transformers has it: norms with empty places, a block, and what adds the residual."""

    def make(self) -> None:
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), None]), block, nn.Identity()])
            for _ in range(2)
            for block in (Attention(), feed_forward())
        )

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for (norm, _), block, residual in self.layers:
            x = residual(x + block(norm(x)))
        return x


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Swin(Toy):
    """Stages that are called, with lists in them."""

    def make(self) -> None:
        self.stages = nn.ModuleList(Stage() for _ in range(3))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class InsideOut(Swin):
    """The same stages, passed over: their blocks are called, of the last the weights alone are used."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages[:-1]:
            for block in stage.blocks:
                x = x + block(x)
        for block in self.stages[-1].blocks:
            x = x + torch.tanh(functional.linear(x, block.mix.weight, block.mix.bias))
        return x


class Funnel(nn.Module):
    """Transformers' own, whose `blocks` are lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = hf.FunnelConfig(
            vocab_size=16,
            d_model=8,
            n_head=2,
            d_head=4,
            d_inner=8,
            block_sizes=[2, 2],
            num_decoder_layers=1,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            num_labels=2,
        )
        self.model = hf.FunnelForSequenceClassification(config)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=x, labels=y).loss
        return loss


STRUCTURES: list[tuple[type[nn.Module], int]] = [(ViT, 6), (XTransformer, 8), (Swin, 3), (Funnel, 4)]
"""With the number of blocks that stream."""


def batches(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    if isinstance(model, Funnel):
        ids = [torch.randint(1, 16, (2, 8), generator=made) for _ in range(NUM_STEPS)]
        return [{"x": x, "y": x[:, 0] % 2} for x in ids]
    return [{key: torch.randn(4, WIDTH, generator=made) for key in "xy"} for _ in range(NUM_STEPS)]


def trained(kind: type[nn.Module], config: dict[str, Any], *, num_streamed: int = 0) -> dict[str, torch.Tensor]:
    model = kind().train()
    engine = start(config, model)
    block_store = getattr(engine.backend, "block_store", None) or getattr(engine.backend, "_block_store", None)
    if getattr(engine.backend, "_streamed", None) is not None:
        block_store = engine.backend._streamed.block_store
    if num_streamed:
        assert sum(unit.streamed for unit in block_store.placement.blocks) == num_streamed
    for batch in batches(model):
        engine.backward(engine(**batch))
        engine.step()
    found = current_weights(engine)
    engine.destroy()
    return found


def plain(kind: type[nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    model = kind().train()
    made = optimizer(model.parameters())
    for batch in batches(model):
        model(**batch).backward()
        made.step()
        made.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def by_adamw(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    return plain(kind, lambda params: torch.optim.AdamW(params, **ADAM))


@pytest.mark.parametrize(("kind", "num_blocks"), STRUCTURES)
def test_lsp_is_adamw(kind: type[nn.Module], num_blocks: int) -> None:
    expected = by_adamw(kind)
    own = {**ADAM, "projector": "none"}
    with log_lines() as lines:
        assert_close(trained(kind, lsp_json(params=own)), expected, atol=1e-5)
    assert not any("used outside the forward" in line for line in lines)
    place = {**CPU, "offload_param": {"device": "cpu"}}
    found = trained(kind, lsp_json(params=own, zero_optimization=place), num_streamed=num_blocks)
    assert_close(found, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "num_blocks"), STRUCTURES)
def test_lomo_is_sgd(kind: type[nn.Module], num_blocks: int) -> None:
    expected = plain(kind, lambda params: torch.optim.SGD(params, lr=0.1))
    assert_close(trained(kind, streamed(), num_streamed=num_blocks), expected)


@pytest.mark.parametrize(("kind", "num_blocks"), STRUCTURES)
def test_zo_is_mezo(kind: type[nn.Module], num_blocks: int) -> None:
    model = kind()
    reference = PlainMeZO(model, lr=1e-2)
    for batch in batches(model):
        reference.step([batch])
    own = {"lr": 1e-2}
    assert_close(trained(kind, zo_json(offload=False, params=own)), reference.weights, atol=2e-5)
    assert_close(trained(kind, zo_json(params=own), num_streamed=num_blocks), reference.weights, atol=2e-5)


# Blocks with a forward that is not called


def test_lsp_applies_updates_before_a_forward_that_passes_over_blocks() -> None:
    with log_lines() as lines:
        found = trained(InsideOut, lsp_json(params={**ADAM, "projector": "none"}))
    assert_close(found, by_adamw(InsideOut), atol=1e-5)
    assert sum("stages.0, stages.1, stages.2: weights are used outside the forward" in line for line in lines) == 1


def test_a_part_of_the_model_that_is_run_by_itself_has_the_last_update() -> None:
    engine = start(lsp_json(params={**ADAM, "projector": "none"}), InsideOut().train())
    for batch in batches(engine.module):
        engine.backward(engine(**batch))
        engine.step()
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        found = engine.module.stages[0].blocks[0](x)
        engine.module.state_dict()  # brings every weight up to date
        torch.testing.assert_close(found, engine.module.stages[0].blocks[0](x))
    engine.destroy()


@pytest.mark.parametrize("backend", ["lsp", "lomo", "zo"])
def test_streamed_blocks_that_are_passed_over_are_refused_in_the_first_forward(backend: str) -> None:
    place = {**CPU, "offload_param": {"device": "cpu"}}
    configs = {"lsp": lsp_json(zero_optimization=place), "lomo": streamed(), "zo": zo_json()}
    engine = start(configs[backend], InsideOut().train())
    with pytest.raises(ValueError, match=r"parameter stages\.0\.blocks\.0\.mix\.\w+ was used outside .*stream\.blocks"):
        engine(**batches(engine.module)[0])
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


@pytest.mark.parametrize("backend", ["lsp", "lomo", "zo"])
def test_a_streamed_block_inside_another_is_refused(backend: str) -> None:
    place = {**CPU, "offload_param": {"device": "cpu"}}
    configs = {"lsp": lsp_json(zero_optimization=place), "lomo": streamed(), "zo": zo_json()}
    engine = start(configs[backend], InEachOther().train())
    with pytest.raises(ValueError, match=r"block blocks\.3 inside block blocks\.0: name the list .*stream\.blocks"):
        engine(**batches(engine.module)[0])
    engine.destroy()


def test_resident_blocks_may_run_inside_one_another() -> None:
    config = streamed(stream={"resident_blocks": 4})
    expected = plain(InEachOther, lambda params: torch.optim.SGD(params, lr=0.1))
    assert_close(trained(InEachOther, config), expected)


class Changing(Swin):
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
    first, second, _ = batches(engine.module)
    engine.backward(engine(**first))
    engine.step()
    loss = engine(**second)
    with pytest.raises(ValueError, match=r"stages\.0.* used before that: call the block.*optimizer\.params\.schedule"):
        engine.backward(loss)
    engine.destroy()
