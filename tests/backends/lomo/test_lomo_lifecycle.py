"""What is alive when, and what may change under LOMO: frozen and thawed parameters, other backwards, other engines."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds_zo.config import ConfigError
from tests.helpers.lomo_runs import (
    batches,
    checkpointed,
    config_for,
    lively,
    start,
    streamed,
    train,
    train_plain,
    weights_of,
)
from tests.helpers.tiny_models import tiny_model
from tests.helpers.weights import assert_close, assert_equal
from tests.helpers.zo_rank_cases import Failing

STALE = r"forward after the last update.*add the losses up"
pytestmark = pytest.mark.usefixtures("single_process")


def most_live_gradients(module: nn.Module) -> list[int]:
    """A list to which each arriving gradient adds how many there are; hooked after the engine, so what it leaves."""
    counts: list[int] = []
    parameters = list(module.parameters())

    def count(_: torch.Tensor) -> None:
        counts.append(sum(p.grad is not None for p in parameters))

    for p in parameters:
        p.register_post_accumulate_grad_hook(count)
    return counts


@pytest.mark.parametrize(("make", "kind"), [(config_for, "LOMO"), (config_for, "AdaLOMO"), (streamed, "LOMO")])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_one_gradient_is_alive_at_a_time(make: Callable[..., dict[str, Any]], kind: str, clipping: float) -> None:
    model = lively("gpt2")
    before = most_live_gradients(model)
    engine = start(make(kind, clipping=clipping, lr=0.01), model)
    after = most_live_gradients(model)
    train(engine, batches("gpt2", 2))
    passes = 2 if clipping else 1
    assert len(before) == 2 * passes * len(list(model.parameters()))
    assert max(before) == 1 and max(after) == 0


def test_with_grouped_norms_one_layers_gradients_are() -> None:
    model = lively("llama")
    found: list[StorageWeakRef] = []
    counts: list[int] = []

    def count(p: torch.Tensor) -> None:
        found.append(StorageWeakRef(p.grad.untyped_storage()))
        counts.append(sum(not storage.expired() for storage in found))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    engine = start(config_for(clipping=0.1, params={"norm_scope": "group"}), model)
    train(engine, batches("llama", 1))
    assert max(counts) == len(list(model.model.layers[0].parameters()))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_frozen_parameters_stay_and_thawed_ones_train(clipping: float) -> None:
    def frozen(model: nn.Module, value: bool) -> nn.Module:
        model.model.layers[1].requires_grad_(not value)
        return model

    engine, reference = (
        start(config_for(clipping=clipping), frozen(lively("llama"), True)),
        frozen(lively("llama"), True),
    )
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for thawed in (False, True, False):
        frozen(engine.module, not thawed), frozen(reference, not thawed)
        before = weights_of(engine.module.model.layers[1])
        train(engine, batches("llama", 2))
        train_plain(reference, batches("llama", 2), sgd, max_norm=clipping or None)
        moved = any(not torch.equal(before[n], p) for n, p in engine.module.model.layers[1].named_parameters())
        assert moved == thawed
    for name, p in engine.module.named_parameters():
        torch.testing.assert_close(p, reference.get_parameter(name), rtol=0, atol=0 if clipping == 0 else 1e-6)


def test_parameters_outside_the_groups_stay_and_do_not_count() -> None:
    model, reference = lively("llama"), lively("llama")
    chosen = [p for p in model.parameters() if p.ndim < 2]
    engine = start(config_for(clipping=0.01), model, model_parameters=chosen)
    matrix = model.lm_head.weight.detach().clone()
    train(engine, batches("llama", 1))
    reference(**next(batches("llama", 1))).loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.ndim < 2]).norm()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    assert torch.equal(matrix, model.lm_head.weight) and model.lm_head.weight.grad is None
    others = [p for p in model.parameters() if p.ndim > 1][: len(chosen)]  # as many: layers that take turns
    engine.optimizer.param_groups[0]["params"] = others
    before = weights_of(model)
    train(engine, batches("llama", 1, first=1))
    moved = {id(p) for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {id(p) for p in others}


def test_a_bare_backward_is_an_update_where_one_pass_is_enough() -> None:
    engine, reference = start(config_for(), lively("opt")), lively("opt")
    for batch in batches("opt", 3):
        engine(**batch).loss.backward()
        engine.step()
    train_plain(reference, batches("opt", 3), torch.optim.SGD(reference.parameters(), lr=0.1))
    assert_equal(weights_of(engine.module), weights_of(reference))


def test_a_bare_backward_is_refused_where_two_are_needed() -> None:
    model = lively("opt")
    before = weights_of(model)
    engine = start(config_for(clipping=1.0), model)
    with pytest.raises(RuntimeError, match=r"engine\.backward\(loss\).*gradient_clipping"):
        engine(**next(batches("opt", 1))).loss.backward()
    assert_equal(before, weights_of(model))


@pytest.mark.parametrize("first", ["bare", "engine"])
def test_a_second_bare_backward_before_a_step_is_refused_as_the_engines_is(first: str) -> None:
    engine, reference = start(config_for(), lively("opt")), lively("opt")
    data = list(batches("opt", 3))
    loss = engine(**data[0]).loss
    loss.backward() if first == "bare" else engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"one backward.*engine\.step\(\).*accumulation"):
        engine(**data[1]).loss.backward()
    engine.step()
    engine(**data[2]).loss.backward()
    engine.optimizer.zero_grad()  # there is nothing to forget, and what follows adds nothing to it
    engine(**data[0]).loss.backward()
    engine.step()
    train_plain(reference, [data[0], data[2], data[0]], torch.optim.SGD(reference.parameters(), lr=0.1))
    assert_equal(weights_of(engine.module), weights_of(reference))
    sequential = start(config_for(params={"accumulation": "sequential"}), lively("opt"))
    for batch in (data[0], data[2], data[0]):
        sequential(**batch).loss.backward()
    sequential.step()
    assert_equal(weights_of(sequential.module), weights_of(reference))


@pytest.mark.parametrize("states", [True, False], ids=["all of it", "its weights"])
@pytest.mark.parametrize("bare", [True, False], ids=["bare", "the engine's"])
def test_a_checkpoint_that_is_loaded_instead_of_a_step_undoes_the_backward(
    bare: bool, states: bool, tmp_path: Path
) -> None:
    """As where a loss has gone wild: what was updated is gone with the weights."""
    found = []
    for goes_wild in (False, True):
        engine = start(config_for(), lively("gpt2"))
        first, wild, after = batches("gpt2", 3)
        train(engine, [first])
        engine.save_checkpoint(str(tmp_path))
        if goes_wild:
            loss = 100 * engine(**wild).loss
            loss.backward() if bare else engine.backward(loss)
        engine.load_checkpoint(str(tmp_path), load_optimizer_states=states)
        loss = engine(**after).loss
        loss.backward() if bare else engine.backward(loss)
        engine.step()
        found.append(weights_of(engine.module))
    assert_equal(*found)


@pytest.mark.parametrize("seed", range(8))
def test_losses_of_earlier_forwards_are_refused(seed: int) -> None:
    """Whether blocks are recomputed or not, and whichever weights are trained: those that autograd has saved, or those
    of recomputed blocks alone, where it would use the new weights without a word. A loss whose updates are all skipped
    changes nothing."""
    draw = random.Random(seed)
    kind = draw.choice(["resident", "checkpointed", "reentrant", "streamed"])
    bare = kind != "streamed" and draw.random() < 0.5
    clipping = 0.0 if bare else draw.choice([0.0, 1.0])
    trained = draw.choice(["", "layers"])
    make = streamed if kind == "streamed" else config_for
    found = []
    for is_refused in (True, False):
        model = checkpointed(lively("llama"), {"checkpointed": False, "reentrant": True}.get(kind))
        for name, p in model.named_parameters():
            p.requires_grad_(trained in name)
        engine = start(make(clipping=clipping, params={"accumulation": "sequential"}), model)

        run: Callable[[torch.Tensor], object] = torch.Tensor.backward if bare else engine.backward
        one, two, three = batches("llama", 3)
        skipped, first = engine(**two).loss * float("nan"), engine(**one).loss
        second = engine(**two).loss if is_refused else None
        run(skipped)
        run(first)
        if second is not None:
            before = weights_of(engine.module)
            with pytest.raises(RuntimeError, match=STALE):
                run(second)
            assert_equal(weights_of(engine.module), before)
        run(engine(**three).loss)
        engine.step()
        found.append(weights_of(engine.module))
    assert_close(*found)  # a graph that is alive has held gradients back, which changes the order of the norm's sum


def test_an_input_that_is_returned_may_be_used_by_several_forwards() -> None:
    """As the hidden states of an encoder outside the engine, which T5's decoder returns."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(hidden).square().mean(), "hidden": hidden}

    engine = start(config_for(), Returning())
    leaf = torch.randn(2, 4, requires_grad=True)
    hidden = leaf * 2
    for _ in range(2):
        engine.backward(engine(hidden)["loss"], retain_graph=True)
        engine.step()


def test_several_outputs_of_one_forward_have_one_direct_backward() -> None:
    """The last layers are updated before the backward reaches an earlier output."""
    engine, reference = start(config_for(), lively("llama")), lively("llama")
    for batch in batches("llama", 2):
        for model in (engine, reference):
            output = model(**batch, output_hidden_states=True)
            (output.loss + output.hidden_states[1].square().mean() + output.logits.mean()).backward()
        engine.step()
        with torch.no_grad():
            for p in reference.parameters():
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    assert_equal(weights_of(engine.module), weights_of(reference))


def test_a_backward_that_raises_leaves_the_next_one_whole() -> None:
    engine = start(config_for(clipping=1.0), lively("llama"))
    batch = next(batches("llama", 1))
    handle = engine.module.model.layers[1].register_forward_hook(lambda m, i, out: Failing.apply(out))
    with pytest.raises(RuntimeError, match="no memory"):
        train(engine, [batch])
    handle.remove()
    assert all(p.grad is None for p in engine.module.parameters())
    reference = start(config_for(clipping=1.0), lively("llama"))
    assert train(engine, [batch]) == train(reference, [batch])
    assert_equal(weights_of(engine.module), weights_of(reference.module))


@pytest.mark.parametrize("closed", [True, False])
def test_a_new_engine_takes_the_place_of_the_old(closed: bool) -> None:
    model, reference = lively("opt"), lively("opt")
    old = start(config_for(lr=100.0), model)
    if closed:
        old.destroy()
    engine = start(config_for(), model)
    train(engine, batches("opt", 2))
    train_plain(reference, batches("opt", 2), torch.optim.SGD(reference.parameters(), lr=0.1))
    assert_equal(weights_of(model), weights_of(reference))
    engine.destroy()
    del engine
    gc.collect()
    model(**next(batches("opt", 1))).loss.backward()  # the module is the user's again
    assert all(p.grad is not None for p in model.parameters())
    assert_equal(weights_of(model), weights_of(reference))


def test_weights_of_64_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight of torch\.float64.*convert"):
        start(config_for(), lively("llama").double())


@pytest.mark.parametrize(("lr", "warns"), [(1e-3, True), (5e-4, False)])
def test_value_clipping_warns_at_large_rates(lr: float, warns: bool, log: pytest.LogCaptureFixture) -> None:
    start(config_for(lr=lr, params={"clip_grad_value": 1.0}), tiny_model("opt"))
    assert ("prefer gradient_clipping" in log.text) == warns


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
def test_what_is_not_finite_is_counted_and_logged(kind: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """A resumed run counts the updates that were made."""
    config = config_for(kind, lr=0.01, bf16={"enabled": True})
    engine, reference = start(config, lively("llama")), start(config, lively("llama"))
    data = list(batches("llama", 3))
    train(engine, data[:2], scale=lambda step: float("inf") if step == 0 else 1.0)
    assert (engine.skipped_steps, engine.global_steps) == (1, 2)
    assert log.text.count("step skipped") == 1
    p = engine.module.model.layers[1].mlp.up_proj.weight
    before = p.detach().clone()
    handle = p.register_hook(lambda grad: grad * float("nan"))
    train(engine, data[:1])
    handle.remove()
    engine.save_checkpoint(str(tmp_path))
    assert torch.equal(p, before) and engine.skipped_steps == 1
    num_parameters = len(list(engine.module.parameters()))
    assert f"1 of {num_parameters} parameters kept their values" in log.text and "up_proj" in log.text
    train(reference, data[1:2])
    reference.load_checkpoint(str(tmp_path))
    assert reference.backend.state_dict()["step"] == 2
    train(engine, data[2:])
    train(reference, data[2:])
    assert_equal(weights_of(engine.module), weights_of(reference.module))


def test_a_compiled_model_trains_alike() -> None:
    """One layer, and two passes a step: compiling takes longer than anything else here."""
    engine, reference = (start(config_for(clipping=0.5), lively("llama", num_hidden_layers=1)) for _ in range(2))
    torch._dynamo.reset()  # code that an engine with one pass compiled cannot be run backward twice
    engine.module.compile(backend="aot_eager")
    assert train(engine, batches("llama", 2)) == pytest.approx(train(reference, batches("llama", 2)), rel=1e-5)
    for name, p in engine.module.named_parameters():
        torch.testing.assert_close(p, reference.module.get_parameter(name), rtol=0, atol=1e-6)
