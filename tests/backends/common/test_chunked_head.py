"""Head and loss in chunks of tokens: the loss and the gradients of the whole, without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from ds_zo.backends.common import chunked_head
from ds_zo.backends.common.chunked_loss import CausalLosses
from tests.helpers import lomo_runs
from tests.helpers.adapter_runs import adapter_json
from tests.helpers.heads import CHUNK, MODELS, LiveLogits, WatchingForCausalLM, a_batch, reads, with_lora_head
from tests.helpers.lomo_runs import lively
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model
from tests.helpers.weights import assert_equal
from tests.integrations.library_runs import arguments, logged, trainer_for


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", CHUNK * VOCAB)


def in_chunks(model: nn.Module, batch: Any) -> AbstractContextManager[None]:
    return CausalLosses(model).in_chunks(batch)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 1
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(7)])
@pytest.mark.parametrize("name", MODELS)
def test_chunks_have_loss_and_gradients_of_the_whole(name: str, num_items: Any) -> None:
    model, batch = MODELS[name]().train(), a_batch()
    with LiveLogits() as plain:
        expected = model(**batch, num_items_in_batch=num_items)
        (3 * expected.loss).backward()
    whole = gradients(model)
    with LiveLogits() as chunks, in_chunks(model, batch):
        outputs = model(**batch, num_items_in_batch=num_items)
        (3 * outputs.loss).backward(retain_graph=True)
    first = gradients(model)
    (3 * outputs.loss).backward()
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0)
    assert_near(first, whole)
    assert_equal(gradients(model), first)
    assert chunks.peak <= 6 * CHUNK * VOCAB * 4 < 32 * VOCAB * 4 < plain.peak


@pytest.mark.parametrize("name", MODELS)
def test_logits_that_are_read_are_those_of_the_whole(name: str, log: pytest.LogCaptureFixture) -> None:
    """And so are gradients of a loss that is made from them."""
    model, batch = MODELS[name]().train(), a_batch()
    expected = model(**batch)
    (expected.loss + expected.logits.square().mean() + Doubled.apply(expected.logits).mean()).backward()
    whole = gradients(model)
    with in_chunks(model, batch):
        outputs = model(**batch)
    assert outputs.logits.shape == expected.logits.shape and outputs.logits.dtype == expected.logits.dtype
    assert outputs.logits.requires_grad
    assert not reads(log.messages)
    (outputs.loss + outputs.logits.square().mean() + Doubled.apply(outputs.logits).mean()).backward()
    assert len(reads(log.messages)) == 1
    assert torch.equal(outputs.logits, expected.logits)
    assert outputs.logits.detach().numpy().tolist() == expected.logits.tolist() == outputs.logits.data.tolist()
    assert_near(gradients(model), whole)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def test_a_model_that_writes_to_its_logits_has_the_loss_of_the_whole() -> None:
    model, batch = WatchingForCausalLM(mask=True), a_batch()
    expected = model(**batch)
    expected.loss.backward()
    whole = gradients(model)
    with in_chunks(model, batch):
        outputs = model(**batch)
    outputs.loss.backward()
    assert torch.equal(outputs.logits, expected.logits)
    assert_near(gradients(model), whole)


@pytest.mark.parametrize("autocast", [False, True])
def test_one_chunk_has_the_bits_of_the_whole(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", 32 * VOCAB)
    model, batch = MODELS["untied"](), a_batch()
    found = []
    for context in (nullcontext(), in_chunks(model, batch)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), context:
            loss = model(**batch).loss
        loss.backward()
        found.append(gradients(model))
    assert "lm_head.weight" in found[0]
    assert_equal(found[1], found[0])


def test_few_tokens_of_a_large_trained_head_are_not_computed_in_chunks() -> None:
    """The sum of a trained head's gradients takes more than the logits of four tokens."""
    model, batch = MODELS["untied"](), tiny_batch("llama", batch_size=1, length=CHUNK + 1)
    with LiveLogits() as logits, in_chunks(model, batch):
        model(**batch).loss.backward()
    assert logits.peak >= 2 * (CHUNK + 1) * VOCAB * 4


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_16_bit_weights_are_summed_in_float32(autocast: bool) -> None:
    """Under autocast, chunks compute in its dtype in both passes."""
    model, batch = MODELS["untied"](), a_batch()
    model.to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = model(**batch).loss
        with in_chunks(model, batch):
            found = model(**batch).loss
    expected.backward()
    whole = gradients(model)
    found.backward()
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-5)
    apart = (gradients(model)["lm_head.weight"] - whole["lm_head.weight"]).abs().max()
    assert apart <= 2**-8 * whole["lm_head.weight"].abs().max()


def test_hooks_of_the_head_see_logits_once() -> None:
    model, batch = MODELS["untied"](), a_batch()
    expected = model(**batch).logits
    seen = []
    handle = model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits + 0))  # type: ignore[union-attr,operator]
    with in_chunks(model, batch):
        model(**batch).loss.backward()
    handle.remove()
    assert len(seen) == 1 and torch.equal(seen[0], expected)


def test_dropout_of_a_head_is_that_of_the_whole() -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)
    model, batch = peft.get_peft_model(tiny_model("llama"), config).train(), a_batch()
    torch.manual_seed(1)
    model(**batch).loss.backward()
    whole = gradients(model)
    torch.manual_seed(1)
    with in_chunks(model, batch):
        loss = model(**batch).loss
    loss.backward()
    assert_equal(gradients(model), whole)


ENGINES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "LOMO": (lambda: lively("llama"), lomo_runs.config_for),
    "LOMO, tied": (lambda: lively("opt", tie_word_embeddings=True), lomo_runs.config_for),
    "LOMO, two passes": (lambda: lively("llama"), lambda: lomo_runs.config_for(clipping=0.5)),
    "LOMO, streamed": (lambda: lively("llama"), lambda: lomo_runs.streamed(clipping=0.5)),
    "AdaLOMO": (lambda: lively("llama"), lambda: lomo_runs.config_for("AdaLOMO", lr=1e-3)),
    "LSP": (lambda: lively("llama"), lsp_json),
    "Adapter": (with_lora_head, lambda: adapter_json(own=False)),
}


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", ENGINES)
def test_engines_train_by_chunks_as_by_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, json = ENGINES[name]
    results = []
    for num_tokens in (32, CHUNK):
        monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", num_tokens * VOCAB)
        engine = lomo_runs.start(json(), make())
        with LiveLogits() as logits:
            losses = lomo_runs.train(engine, (a_batch(seed) for seed in range(3)))
        assert (logits.peak < 32 * VOCAB * 4) == (num_tokens == CHUNK)
        results.append((losses, lomo_runs.weights_of(engine.module)))
        engine.destroy()
    (losses, weights), (found_losses, found) = results
    assert found_losses == pytest.approx(losses, rel=1e-4)
    for key, value in weights.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("name", ["LOMO", "LSP", "Adapter"])
def test_logits_are_refused_after_an_update_of_the_head(name: str) -> None:
    make, json = ENGINES[name]
    engine = lomo_runs.start(json(), make())
    outputs = engine(**a_batch())
    read = engine(**a_batch())
    values = read.logits.detach().clone()
    engine.backward(outputs.loss)
    engine.step()
    engine(**a_batch())
    with pytest.raises(RuntimeError, match=r"outputs\.logits.*before engine\.backward"):
        outputs.logits.argmax(-1)
    assert torch.equal(read.logits, values)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer_trains_by_chunks_as_by_the_whole(
    smoothing: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer passes `num_items_in_batch`. With label smoothing it computes the loss from the logits."""
    losses = []
    rows = [{key: value[0] for key, value in a_batch(seed).items()} for seed in range(6)]
    for num_tokens in (32, CHUNK):
        monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", num_tokens * VOCAB)
        args = arguments(
            tmp_path / str(num_tokens),
            lomo_runs.config_for(clipping=1.0, zero_optimization={"stage": 0}, gradient_accumulation_steps=1),
            max_steps=3,
            label_smoothing_factor=smoothing,
            per_device_train_batch_size=2,
        )
        trainer = trainer_for(args, 1, lively("llama"), train_dataset=rows, data_collator=None)
        with LiveLogits() as logits:
            trainer.train()
        assert (logits.peak < 32 * VOCAB * 4) == (num_tokens == CHUNK and not smoothing)
        losses.append(logged(trainer, "loss"))
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)
