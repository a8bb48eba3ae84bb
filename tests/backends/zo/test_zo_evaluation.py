"""Every reader of the weights between steps sees the weights of the current step, and training is not affected.

Weights are compared with an engine that folds every update at once, and with float32 masters. Outputs are compared with
a plain model that is loaded with those weights.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    FunctionalTie,
    Toy,
    engine_for,
    one_step,
    same_snapshot,
    snapshot,
    toy_batches,
    train,
    zo_json,
)

pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}
PLACES: dict[str, dict[str, Any]] = {
    "streamed": {"interval": 4},
    "some resident": {"interval": 4, "resident_blocks": 1},
    "resident": {"interval": 4, "offload": False},
}
BATCHES = [tiny_batch("llama", seed=i, batch_size=2, length=8) for i in range(6)]
"""Enough for a write-back and for updates that are pending after it."""


def eval_batch() -> dict[str, torch.Tensor]:
    return tiny_batch("llama", seed=99, batch_size=2, length=8)


def current(engine: Any) -> nn.Module:
    """A plain model without ds_zo's hooks, with the weights of the engine's step: the float32 weights rounded to
    nearest."""
    dtype = next(engine.module.parameters()).dtype
    model = hf.AutoModelForCausalLM.from_config(engine.module.config).to(dtype).eval()
    with torch.no_grad():
        masters = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
        for name, p in model.named_parameters():
            p.copy_(masters[name])
    return model


def logits_of(model: Any, **extra: Any) -> torch.Tensor:
    return model(**eval_batch(), **extra).logits


def by_engine(engine: Any) -> torch.Tensor:
    engine.eval()
    try:
        return logits_of(engine)
    finally:
        engine.train()


def by_raw_module(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(engine.module)


def in_inference_mode(engine: Any) -> torch.Tensor:
    with torch.inference_mode():
        return logits_of(engine.module)


def in_eval_with_grad(engine: Any) -> torch.Tensor:
    engine.module.eval()
    try:
        found = logits_of(engine.module)
        assert torch.is_grad_enabled()
        return found
    finally:
        engine.module.train()


def in_training_mode_by_engine(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        return logits_of(engine)


READERS = [by_engine, by_raw_module, in_inference_mode, in_eval_with_grad, in_training_mode_by_engine]


@pytest.mark.parametrize(("place", "dtype"), [("streamed", {}), ("some resident", BF16), ("resident", BF16)])
def test_every_way_to_evaluate_sees_the_current_step(place: str, dtype: dict[str, Any]) -> None:
    """Evaluates after every step, with every number of updates pending that the interval allows. Training with and
    without evaluations is the same bit for bit. One case has an interval of 4; two pending updates show all that the
    others can show."""
    interval = 4 if place == "streamed" and not dtype else 3
    batches = BATCHES[: interval + 2]
    json = zo_json(**{**PLACES[place], "interval": interval}, **dtype)
    undisturbed = engine_for(tiny_model("llama"), json)
    expected = train(undisturbed, batches)
    engine = engine_for(tiny_model("llama"), json)
    pending = set()

    def evaluate(step: int) -> None:
        folded = [u.version for u in engine.backend.store.blocks.placement.units]
        pending.update(step + 1 - version for version in folded)
        with torch.no_grad():
            reference = logits_of(current(engine))
        generators = snapshot()
        for read in READERS:
            found = read(engine)
            assert torch.equal(found, reference), read.__name__
            assert torch.is_grad_enabled()
        assert same_snapshot(snapshot(), generators)
        assert folded == [u.version for u in engine.backend.store.blocks.placement.units], "reading folded something"

    evaluate(-1)
    assert train(engine, batches, after=evaluate) == expected
    assert pending >= set(range(interval))
    assert_equal(weights(engine.module), weights(undisturbed.module))


@pytest.mark.parametrize("place", PLACES)
def test_weights_by_name_are_those_of_the_step(place: str) -> None:
    """In float32, bit for bit the weights of an engine that writes every update back at once."""
    engine = engine_for(tiny_model("llama"), zo_json(**PLACES[place]))
    at_once = engine_for(tiny_model("llama"), zo_json(interval=1))
    for batch in BATCHES:
        assert one_step(engine, batch) == one_step(at_once, batch)
        assert_equal(weights(engine.module), weights(at_once.module))
        layer = engine.module.model.layers[1]
        part = {f"model.layers.1.{name}": v for name, v in layer.state_dict().items()}
        whole = at_once.module.state_dict()
        assert part
        assert all(torch.equal(v, whole[name]) for name, v in part.items())
        single = engine.module.model.layers[2].mlp.up_proj.state_dict()["weight"]
        assert torch.equal(single, whole["model.layers.2.mlp.up_proj.weight"])
        assert_equal(weights(engine.module), {k: v.clone() for k, v in engine.module_state_dict().items()})


@pytest.mark.parametrize("master", ["split", "wire"])
@pytest.mark.parametrize("place", PLACES)
def test_bf16_weights_by_name_are_the_float32_ones_rounded(place: str, master: str) -> None:
    engine = engine_for(tiny_model("llama"), zo_json(**PLACES[place], **BF16, master=master))
    for batch in BATCHES[:3]:
        one_step(engine, batch)
        masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        for name, value in engine.module.state_dict().items():
            assert value.dtype is torch.bfloat16
            assert torch.equal(value, masters[name].bfloat16()), name


def test_generate_with_its_cache() -> None:
    """Updates are pending at the second step: the interval is 4."""
    json = zo_json(**PLACES["streamed"], **BF16)
    expected = train(engine_for(tiny_model("llama"), json), BATCHES[:2])
    engine = engine_for(tiny_model("llama"), json)
    prompt = eval_batch()["input_ids"][:, :4]
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def generate(step: int) -> None:
        engine.module.eval()
        ours = engine.module.generate(prompt, use_cache=True, **how)
        engine.module.train()
        theirs = current(engine).generate(prompt, use_cache=True, **how)
        assert ours.past_key_values is not None
        assert torch.equal(ours.sequences, theirs.sequences)
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            assert torch.equal(a, b)

    assert train(engine, BATCHES[:2], after=generate) == expected


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tied", [True, False])
def test_save_pretrained(place: str, tied: bool, tmp_path: Path) -> None:
    """Every pair of place, tie and dtype, not every triple: saving reads the weights as `state_dict` does."""
    dtype = BF16 if tied == (place == "some resident") else {}
    json = zo_json(**PLACES[place], **dtype)
    engine = engine_for(tiny_model("llama", tie_word_embeddings=tied), json)
    undisturbed = engine_for(tiny_model("llama", tie_word_embeddings=tied), json)
    expected = train(undisturbed, BATCHES[:2])

    def save(step: int) -> None:
        engine.module.save_pretrained(tmp_path / str(step), max_shard_size="5KB" if step % 2 else "5GB")
        assert (len(list((tmp_path / str(step)).glob("*.safetensors"))) > 1) == bool(step % 2)
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / str(step), dtype="auto")
        assert_equal(weights(loaded), weights(engine.module))
        assert_equal(weights(loaded), weights(current(engine)))

    assert train(engine, BATCHES[:2], after=save) == expected


def test_a_state_dict_is_a_copy_of_its_moment() -> None:
    """A state dict that is kept (the best so far, say) does not change while training goes on."""
    engine = engine_for(tiny_model("llama"), zo_json(interval=3))
    train(engine, BATCHES[:2])
    kept = engine.module.state_dict()
    copies = {name: value.clone() for name, value in kept.items()}
    train(engine, BATCHES[2:5])
    assert_equal(kept, copies)


def test_evaluation_between_the_micro_batches_of_a_step() -> None:
    json = zo_json(interval=3, gradient_accumulation_steps=2)
    engines = [engine_for(tiny_model("llama"), json) for _ in range(2)]
    for i, batch in enumerate(BATCHES):
        for engine, evaluates in zip(engines, (True, False), strict=True):
            loss = engine(**batch).loss
            engine.backward(loss)
            if evaluates:
                assert torch.equal(by_raw_module(engine), logits_of(current(engine)))
            engine.step()
        assert engines[0].global_steps == (i + 1) // 2
    assert_equal(weights(engines[0].module), weights(engines[1].module))


def test_evaluation_between_forward_and_backward() -> None:
    engines = [engine_for(tiny_model("llama"), zo_json(interval=3)) for _ in range(2)]
    for batch in BATCHES[:4]:
        losses = [engine(**batch).loss for engine in engines]
        by_raw_module(engines[0])
        engines[0].module.state_dict()
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
    assert_equal(weights(engines[0].module), weights(engines[1].module))


def test_part_of_a_model_may_be_run_alone() -> None:
    """A weight that is used outside its module is pass-long. Its module also gives the right result when called by
    itself."""
    engine = engine_for(FunctionalTie(), zo_json(interval=3))
    plain = FunctionalTie().eval()
    ids = toy_batches(1)[0]["ids"]
    for batch in toy_batches(3):
        one_step(engine, batch)
        plain.load_state_dict(copy.deepcopy(engine.module.state_dict()))
        with torch.no_grad():
            x = plain.embed(ids)
            assert torch.equal(engine.module.embed(ids), x)
            assert torch.equal(engine.module.middle(x), plain.middle(x))
            assert torch.equal(engine.module.blocks[1](x), plain.blocks[1](x))
            assert torch.equal(engine.module(ids), plain(ids))


class Breaks(Toy):
    """Raises `error` where its last block ends, in an evaluation."""

    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.grad_modes: list[bool] = []
        self.blocks[2].linear.register_forward_hook(lambda *_: self.end())

    def end(self) -> None:
        self.grad_modes.append(torch.is_grad_enabled())
        if self.error is not None:
            raise self.error

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x * self.scale)


@pytest.mark.parametrize("error", [None, ValueError("the user's own"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("part", ["", "blocks.2"])
def test_an_evaluation_leaves_the_callers_grad_mode(part: str, error: BaseException | None) -> None:
    """Modules that the engine materialises run without gradients. Code after them runs in the caller's mode."""
    engine = engine_for(Breaks(), zo_json(interval=3))
    batches = toy_batches(3)
    one_step(engine, batches[0])
    engine.module.grad_modes.clear()
    engine.module.error = error
    given = batches[1] if not part else {"x": torch.ones(1, 16)}
    with pytest.raises(type(error)) if error is not None else nullcontext():
        engine.module.get_submodule(part)(**given)
    assert engine.module.grad_modes == [False]
    assert torch.is_grad_enabled()
    engine.module.error = None
    one_step(engine, batches[2])


def test_evaluation_in_autocast_follows_the_weights() -> None:
    """One autocast context covers many steps: its cache of casts must not outlive a step."""
    engine = engine_for(Toy(), zo_json(interval=3))
    ids = toy_batches(1)[0]["ids"]
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in toy_batches(3):
            one_step(engine, batch)
            with torch.no_grad():
                seen.append(engine.module(ids).item())
                plain = Toy()
                plain.load_state_dict(engine.module.state_dict())
                assert plain(ids).item() == seen[-1]
    assert len(set(seen)) == 3


def test_a_model_that_was_never_put_in_train_mode_trains() -> None:
    """As under DeepSpeed's own engine: transformers' `from_pretrained` returns models in eval mode."""
    model = tiny_model("llama").eval()
    engine = engine_for(model)
    batch = tiny_batch("llama")
    engine.backward(engine(**batch).loss)
    engine.step()
    assert engine.get_global_grad_norm() > 0
    engine.train()
    one_step(engine, batch)
    engine.eval()
    assert not engine(**batch).loss.requires_grad, "eval mode counts once the script has trained in train mode"
