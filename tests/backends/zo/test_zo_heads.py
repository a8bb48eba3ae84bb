"""ZO's losses by head and loss in chunks of tokens: those of whole logits, which no pass has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from deepspeed.utils import safe_set_full_fp32_param
from torch import nn

from ds_zo.backends.common import chunked_head, chunked_loss
from tests.helpers.heads import CHUNK, MODELS, WIDTH, LiveLogits, WatchingForCausalLM, a_batch, reads
from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, parts_have_bits_of_whole
from tests.helpers.zo_runs import engine_for, log_lines, train, zo_json

pytestmark = pytest.mark.usefixtures("single_process")
WHOLE = 32 * VOCAB * 4
"""Bytes of a batch's logits."""


@contextmanager
def chunks_of(num_tokens: int) -> Iterator[LiveLogits]:
    """Context in which heads and losses compute `num_tokens` at a time."""
    with pytest.MonkeyPatch.context() as patch, LiveLogits() as logits:
        patch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", num_tokens * VOCAB)
        patch.setattr(chunked_loss, "LOSS_CHUNK_NUMEL", CHUNK * VOCAB)
        yield logits


def trained(make: Callable[[], nn.Module], *, num_tokens: int, num_steps: int = 3, **json: Any) -> Any:
    """The losses and weights of a run, and the most bytes of logits that it had."""
    with chunks_of(num_tokens) as logits:
        engine = engine_for(make().train(), zo_json(**json))
        losses = train(engine, map(a_batch, range(num_steps)))
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.destroy()
    return losses, weights, logits.peak


@pytest.mark.parametrize(
    ("name", "interval"),
    [
        *(("untied", 1), ("untied", 3), ("tied", 3), ("lora", 1)),
        *(("opt", 3), ("soft-capped", 1), ("multiplied", 3), ("divided", 1)),
    ],
)
def test_chunks_have_losses_of_the_whole(name: str, interval: int) -> None:
    """Two heads' chunks take less than one whole, and streamed runs have the bits of resident ones."""
    losses, weights, whole = trained(MODELS[name], num_tokens=32, interval=interval)
    found, found_weights, chunks = trained(MODELS[name], num_tokens=CHUNK, interval=interval)
    assert found == pytest.approx(losses, rel=1e-6)
    for key, value in weights.items():
        torch.testing.assert_close(found_weights[key], value, rtol=1e-3, atol=1e-4, msg=key)
    assert chunks <= 6 * CHUNK * VOCAB * 4 < WHOLE <= whole
    resident, resident_weights, _ = trained(MODELS[name], num_tokens=CHUNK, interval=interval, offload=False)
    assert resident == found
    assert_equal(resident_weights, found_weights)


def test_losses_are_summed_in_the_order_of_whole_logits() -> None:
    """One chunk of the head holds several of the loss."""
    num_tokens = 2 * CHUNK + 1
    losses, weights, _ = trained(MODELS["untied"], num_tokens=32)
    found, found_weights, peak = trained(MODELS["untied"], num_tokens=num_tokens)
    assert found == pytest.approx(losses, rel=1e-6) and peak < WHOLE
    if parts_have_bits_of_whole(MODELS["untied"]().lm_head, torch.randn(32, WIDTH), sizes=[num_tokens]):
        assert found == losses
        assert_equal(found_weights, weights)


def test_directions_and_single_passes_have_losses_of_the_whole() -> None:
    for params in ({"num_directions": 2}, {"clip_projected_grad": 1.0}):
        losses, _, _ = trained(MODELS["tied"], num_tokens=32, params=params)
        found, _, peak = trained(MODELS["tied"], num_tokens=CHUNK, params=params)
        assert found == pytest.approx(losses, rel=1e-6) and peak < WHOLE


@pytest.mark.parametrize(
    ("name", "params"),
    [*((name, {}) for name in MODELS), *((name, {"num_directions": 2}) for name in ("tied", "lora"))],
)
def test_logits_that_are_read_are_those_of_the_last_pass(name: str, params: dict[str, Any]) -> None:
    found = []
    for num_tokens in (32, CHUNK):
        engine = engine_for(MODELS[name]().train(), zo_json(params=params))
        with chunks_of(num_tokens), log_lines(0) as lines:
            steps = []
            for seed in range(3):
                outputs = engine(**a_batch(seed))
                assert outputs.logits.shape == (2, 16, VOCAB)
                engine.backward(outputs.loss)
                steps += [outputs.logits.detach().clone(), outputs.loss.detach()]
                if seed == 0:  # later, near ties may go either way
                    steps.append(outputs.logits.argmax(-1))
                engine.step()
        assert len(reads(lines)) == (num_tokens == CHUNK and name != "modules_to_save")
        steps += [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        found.append(steps)
    for whole, chunks in zip(*found, strict=True):
        torch.testing.assert_close(chunks, whole, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)


def test_reading_logits_changes_nothing() -> None:
    results = []
    for is_read in (False, True):
        with chunks_of(CHUNK):
            engine = engine_for(MODELS["tied"](), zo_json(interval=2))
            losses = []
            for seed in range(4):
                outputs = engine(**a_batch(seed))
                if is_read:
                    outputs.logits.argmax(-1)
                losses.append(outputs.loss.item())
                engine.backward(outputs.loss)
                engine.step()
            results.append((losses, {name: x.clone() for name, x in engine.module.state_dict().items()}))
            engine.destroy()
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def test_logits_are_refused_after_a_step() -> None:
    with chunks_of(CHUNK):
        engine = engine_for(MODELS["untied"](), zo_json())
        outputs, read = engine(**a_batch()), engine(**a_batch())
        values = read.logits.detach().clone()
        engine.backward(outputs.loss)
        engine.step()
        with pytest.raises(RuntimeError, match=r"outputs\.logits.*until engine\.step"):
            outputs.logits.argmax(-1)
        assert torch.equal(read.logits, values)


def test_logits_are_refused_after_a_load() -> None:
    with chunks_of(CHUNK):
        for write in (
            lambda engine: engine.module.load_state_dict(engine.module.state_dict()),
            lambda engine: safe_set_full_fp32_param(engine.module.lm_head.weight, torch.zeros(VOCAB, WIDTH)),
        ):
            engine = engine_for(MODELS["untied"](), zo_json())
            outputs = engine(**a_batch())
            write(engine)
            with pytest.raises(RuntimeError, match=r"outputs\.logits.*until weights are loaded"):
                outputs.logits.argmax(-1)
            engine.destroy()


@pytest.mark.parametrize("change", [lambda x: x, lambda x: 2 * x.float(), lambda x: x.tanh()])
def test_losses_made_of_deferred_logits_are_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with chunks_of(CHUNK):
        engine = engine_for(MODELS["untied"](), zo_json())
        outputs = engine(**a_batch())
        with pytest.raises(ValueError, match="an output of the model besides its loss"):
            engine.backward(outputs.loss + change(outputs.logits).mean())


def test_kept_logits_and_losses_are_refused() -> None:
    """Logits of a hook, which would be deferred without it, and the loss of a batch that is one chunk."""
    kept: list[torch.Tensor] = []
    hooked = MODELS["untied"]()
    hooked.lm_head.register_forward_hook(lambda m, args, output: kept.append(output))
    keep = Keeping(MODELS["untied"]())
    for model, num_tokens, term in (
        (hooked, CHUNK, lambda: kept[-1].logsumexp(-1).square().mean()),
        (keep, 32, lambda: keep.kept),
    ):
        with chunks_of(num_tokens):
            engine = engine_for(model, zo_json())
            loss = engine(**a_batch()).loss + term()
            with pytest.raises(ValueError, match="activation that the forward left behind"):
                engine.backward(loss)
            engine.destroy()


class Keeping(nn.Module):
    """Keeps the loss of a model, and returns another one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        outputs = self.model(**batch)
        self.kept = outputs.loss
        outputs.loss = 2 * outputs.loss
        return outputs


def test_objectives_read_the_logits_of_their_pass() -> None:
    def entropy(outputs: Any, batch: Any) -> torch.Tensor:
        return torch.distributions.Categorical(logits=outputs.logits).entropy().mean()

    found = []
    for num_tokens in (32, CHUNK):
        with chunks_of(num_tokens):
            engine = engine_for(MODELS["untied"]().train(), zo_json())
            scores = [engine.zo_step(a_batch(seed), entropy).item() for seed in range(3)]
            found.append((scores, {name: x.clone() for name, x in engine.module.state_dict().items()}))
            engine.destroy()
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("mask", [False, True])
def test_modules_between_head_and_loss_may_take_its_memory(mask: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return WatchingForCausalLM(mask=mask)

    losses, _, _ = trained(make, num_tokens=32)
    found, _, peak = trained(make, num_tokens=CHUNK)
    assert found == pytest.approx(losses, rel=1e-6)
    assert (peak < WHOLE) is not mask


def test_evaluations_have_whole_logits() -> None:
    with chunks_of(CHUNK):
        engine = engine_for(MODELS["untied"](), zo_json())
        train(engine, [a_batch()])
        engine.eval()
        with log_lines(0) as lines, torch.no_grad():
            outputs = engine(**a_batch())
            expected = engine.module(input_ids=a_batch()["input_ids"])
        assert type(outputs.logits) is torch.Tensor and torch.equal(outputs.logits, expected.logits)
        assert not reads(lines)


def test_dropout_of_a_head_is_that_of_the_whole() -> None:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)

    def make() -> nn.Module:
        torch.manual_seed(1)
        return peft.get_peft_model(tiny_model("llama"), config)

    losses, weights, _ = trained(make, num_tokens=32)
    found, found_weights, _ = trained(make, num_tokens=CHUNK)
    assert found == losses
    assert_equal(found_weights, weights)


def test_few_tokens_have_whole_logits() -> None:
    """Chunks would take more than half of the memory."""
    with chunks_of(CHUNK):
        engine = engine_for(MODELS["untied"](), zo_json())
        outputs = engine(**tiny_batch("llama", batch_size=1, length=2 * CHUNK - 1))
        assert outputs.logits.grad_fn is not None and not isinstance(outputs.logits, chunked_head.DeferredLogits)
