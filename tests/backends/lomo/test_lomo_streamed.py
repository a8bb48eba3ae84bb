"""Streamed LOMO is resident LOMO bit for bit, whatever streams."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.lomo_runs import (
    batches,
    checkpointed,
    config_for,
    lively,
    lora_model,
    start,
    streamed,
    train,
    weights_of,
)
from tests.helpers.weights import assert_close, assert_equal
from tests.helpers.zoo import Layer, Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}


def assert_same_run(
    make: Callable[[], nn.Module], data: Callable[[], Any], *, kind: str = "LOMO", stream: Any = None, **more: Any
) -> Any:
    """Returns the streamed engine."""
    engines, losses = [], []
    for config in (config_for(kind, **more), streamed(kind, stream=stream, **more)):
        engines.append(start(config, make()))
        torch.manual_seed(7)
        losses.append(train(engines[-1], data()))
    before = weights_of(make())
    assert losses[0] == losses[1]
    resident, engine = engines
    assert_equal(weights_of(engine.module), weights_of(resident.module))
    assert any(not torch.equal(before[name], p) for name, p in engine.module.named_parameters())
    assert engine.get_global_grad_norm() == resident.get_global_grad_norm()
    assert engine.skipped_steps == resident.skipped_steps
    assert engine.backend.blocks.store.runtime.transport.bytes_up > 0 or (stream or {}).get("resident_blocks", 0) >= 3
    return engine


@pytest.mark.parametrize(
    ("name", "dtype", "clipping"),
    [
        ("opt", {}, 0.0),
        ("opt", BF16, 0.5),
        ("llama", {}, 0.5),
        ("llama", BF16, 0.0),
        ("gpt2", {}, 0.0),
        ("gpt2", BF16, 0.5),
    ],
)
def test_streamed_equals_resident(name: str, dtype: dict[str, Any], clipping: float) -> None:
    """Every pair of model, dtype and number of passes, not every triple."""
    assert_same_run(lambda: lively(name), lambda: batches(name, 3), clipping=clipping, **dtype)


@pytest.mark.parametrize(
    "stream",
    [{"resident_blocks": 1}, {"resident_blocks": 3}, {"device_slots": 3}],
    ids=str,
)
def test_where_blocks_are_changes_nothing(stream: dict[str, Any]) -> None:
    engine = assert_same_run(lambda: lively("llama"), lambda: batches("llama", 3), stream=stream, clipping=0.5)
    num_streamed = sum(unit.streamed for unit in engine.backend.blocks.store.placement.blocks)
    assert num_streamed == 3 - stream.get("resident_blocks", 0)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("LOMO", {"clipping": 0.1, "params": {"norm_scope": "group"}}),
        ("LOMO", {"params": {"clip_grad_value": 0.01, "weight_decay": 0.1}}),
        ("AdaLOMO", {"clipping": 0.5, "lr": 1e-2}),
        ("AdaLOMO", {"lr": 1e-2, **BF16}),
        ("LOMO", {"params": {"accumulation": "sequential"}, "gradient_accumulation_steps": 2}),
        ("LOMO", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "clipping": 0.5}),
    ],
    ids=["grouped norms", "values", "AdaLOMO", "AdaLOMO bf16", "sequential", "autocast"],
)
def test_every_update_is_the_same(kind: str, more: dict[str, Any]) -> None:
    assert_same_run(lambda: lively("llama"), lambda: batches("llama", 3), kind=kind, **more)


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_dropout_masks_are_the_same_in_every_sweep(clipping: float) -> None:
    # Without a cache, as streamed models train: one changes the layout of keys, and so the last bit of their products.
    dropout = {"resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3, "use_cache": False}
    assert_same_run(lambda: lively("gpt2", **dropout), lambda: batches("gpt2", 3), clipping=clipping)


def test_an_overflow_is_skipped_without_moving_a_block() -> None:
    def make() -> nn.Module:
        model = lively("llama")
        model.model.embed_tokens.weight.register_hook(lambda grad: grad * 0.5)  # takes a gradient, not None
        return model

    scale = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2}}
    engine = assert_same_run(make, lambda: batches("llama", 12), clipping=1.0, **scale)
    assert 0 < engine.skipped_steps < 12
    runtime = engine.backend.blocks.store.runtime
    assert runtime.transport.bytes_down == (12 - engine.skipped_steps) * sum(u.nbytes for u in runtime.units)


class Checkpointing(Wandering):
    """Its author checkpoints blocks, and inside blocks."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **options: bool) -> torch.Tensor:
        x = self.embed(input_ids).requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, **options)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Inside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointing_inside() -> nn.Module:
    model = Wandering()
    model.layers = nn.ModuleList(Inside(16) for _ in range(3))
    return model


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_checkpointing_of_the_users_own(clipping: float) -> None:
    for reentrant in (False, True):
        assert_same_run(
            lambda reentrant=reentrant: checkpointed(lively("opt"), reentrant),
            lambda: batches("opt", 2),
            clipping=clipping,
        )
        data = [plain_batch(seed, use_reentrant=reentrant) for seed in range(2)]
        assert_same_loop(Checkpointing, data, clipping=clipping)
    assert_same_loop(checkpointing_inside, [plain_batch(seed) for seed in range(2)], clipping=clipping)


def assert_same_loop(make: Callable[[], nn.Module], data: Any, *, compare: Any = assert_equal, **more: Any) -> Any:
    """For models that return the bare loss."""
    engines = [start(config, seeded(make)) for config in (config_for(**more), streamed(**more))]
    for engine in engines:
        for batch in data:
            engine.backward(engine(**batch))
            engine.step()
    compare(weights_of(engines[1].module), weights_of(engines[0].module))
    return engines[1]


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_block_that_runs_several_times_is_updated_once_by_the_sum(clipping: float) -> None:
    orders = [[0, 1, 0, 2, 0], [3, 2, 1, 0], [1, 1], [2, 0]]
    data = [plain_batch(seed, order=order) for seed, order in enumerate(orders)]
    for scope in ("global", "group"):
        assert_same_loop(Wandering, data, clipping=clipping, params={"norm_scope": scope})


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_a_loss_of_two_forwards_and_a_forward_without_a_backward(clipping: float) -> None:
    engines = [
        start(config, seeded(Wandering)) for config in (config_for(clipping=clipping), streamed(clipping=clipping))
    ]
    for engine in engines:
        for seed in range(2):
            unused = engine(**plain_batch(seed + 20))
            loss = engine(**plain_batch(seed)) + 2 * engine(**plain_batch(seed + 10, order=[1, 0]))
            engine.backward(loss)
            engine.step()
            assert unused.requires_grad
    compare = assert_close if clipping else assert_equal  # norms are added up in another order
    compare(weights_of(engines[1].module), weights_of(engines[0].module))


class Sharing(Wandering):
    """A weight is in two blocks, another in a block and outside, and so are two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[1].up.weight
        self.layers[3].down = self.layers[1].down
        self.final = nn.LayerNorm(16)
        self.final.weight = self.layers[0].norm.weight
        self.first = self.layers[2].norm

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(input_ids))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.final(x)).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("scope", ["global", "group"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_what_is_shared_between_blocks_and_with_what_is_around_them(clipping: float, scope: str) -> None:
    data = [plain_batch(seed) for seed in range(3)]
    compare = assert_close if clipping and scope == "global" else assert_equal  # norms are added in another order
    assert_same_loop(Sharing, data, compare=compare, clipping=clipping, params={"norm_scope": scope})


def test_models_that_were_never_put_in_train_mode_train() -> None:
    """They ask for key-value caches then, and blocks that get one keep nothing for a backward."""
    assert_same_run(lambda: lively("llama").eval(), lambda: batches("llama", 2), clipping=0.5)


@pytest.mark.parametrize("train_base", [False, True])
def test_adapters(train_base: bool) -> None:
    def make() -> nn.Module:
        model: nn.Module = lora_model(train_base=train_base)
        return model

    engine = assert_same_run(make, lambda: batches("llama", 3), clipping=0.5, params={"adapter": {"lr": 1e-2}}, lr=0.05)
    assert (
        engine.backend.blocks.store.runtime.transport.bytes_down > 0
    ) == train_base  # adapters of frozen blocks stay


def test_frozen_blocks_are_not_sent_back_and_thawed_ones_are() -> None:
    def make() -> nn.Module:
        model = lively("llama")
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[0].requires_grad_(False)
        model.model.layers[2].requires_grad_(False)
        return model

    engine = assert_same_run(make, lambda: batches("llama", 2))
    runtime = engine.backend.blocks.store.runtime
    assert runtime.transport.bytes_down == 2 * runtime.units[1].nbytes
    resident = start(config_for(), make())
    train(resident, batches("llama", 2))
    for one in (engine, resident):
        one.module.model.layers[2].requires_grad_(True)
        train(one, batches("llama", 2, first=2))
    assert_equal(weights_of(engine.module), weights_of(resident.module))
    assert runtime.transport.bytes_down == 4 * runtime.units[1].nbytes + 2 * runtime.units[2].nbytes


@pytest.mark.parametrize(("clipping", "uploads"), [(0.0, 6), (0.5, 12)])
def test_blocks_still_in_slots_are_not_uploaded_again(clipping: float, uploads: int) -> None:
    """Of five blocks two are in the slots when a sweep turns; between two reverse sweeps none is left."""
    model = lively("llama", num_hidden_layers=5)
    engine = start(streamed(clipping=clipping), model)
    train(engine, batches("llama", 1))
    runtime = engine.backend.blocks.store.runtime
    up, down = runtime.transport.bytes_up, runtime.transport.bytes_down
    train(engine, batches("llama", 1, first=1))
    block = runtime.units[0].nbytes
    assert (runtime.transport.bytes_down - down) // block == 5
    assert (runtime.transport.bytes_up - up) // block == uploads - (1 if clipping else 0)


def test_a_block_keeps_its_inputs_and_nothing_else() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    engine = start(streamed(), seeded(Wandering))
    inputs: list[int] = []
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].data_ptr()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = engine(**plain_batch(0))
    assert len(inputs) == 4 and set(inputs) <= {t.data_ptr() for t in kept}
    assert len(kept) <= 4 + 8  # those of the embedding, the head and the loss beside them
    assert not any(t.shape[-1:] == (32,) for t in kept), "an activation inside a block"
    engine.backward(loss)


def test_nothing_of_a_forward_outlives_its_block() -> None:
    """Not even what a graph saves of a node's own output, which would keep the node, and so itself, alive."""
    inside: list[weakref.ref[torch.Tensor]] = []
    model = seeded(Wandering)
    model.layers = nn.ModuleList(Exponential(inside) for _ in range(4))
    engine = start(streamed(), model)
    for step in range(2):
        loss = engine(**plain_batch(step))
        assert len(inside) == 4
        assert [ref() for ref in inside] == [None] * 4, "an activation of a block that has run"
        inside.clear()
        engine.backward(loss)
        engine.step()
        del loss
        assert [ref() for ref in inside] == [None] * 4
        inside.clear()


class Exponential(nn.Module):
    """Its backward needs the output of a step in its midst."""

    def __init__(self, seen: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self._seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.exp(-self.linear(x).square())
        self._seen.append(weakref.ref(result))
        return x + result
