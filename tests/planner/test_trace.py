"""Activations are counted by running the model on tensors without memory: the count is that of real ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch import nn
from torch.nn import functional

from ds_zo.backends.common.chunked_loss import CausalLosses, losses_in_chunks, models_with_causal_loss
from ds_zo.planner import Rates
from ds_zo.planner.timeline import PassPhase, Trace
from ds_zo.planner.trace import trace_pass
from ds_zo.streaming.blocks import find_blocks
from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model
from tests.planner.planned_models import planned

WIDTH, ROWS, DEPTH = 32, 8, 4
TENSOR = 4 * ROWS * WIDTH


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return type("Output", (), {"loss": x.sum()})


def trace_chain(*, backward: bool) -> Any:
    chain = Chain().to("meta")
    x = torch.empty(ROWS, WIDTH, device="meta")
    return trace_pass(chain, {"x": x}, blocks=list(chain.layers), rates=Rates(), backward=backward)


def test_a_chain_without_gradients_holds_an_input_and_an_output() -> None:
    trace = trace_chain(backward=False)
    assert trace.peak.total == 2 * TENSOR
    assert trace.paused_nbytes == TENSOR
    assert trace.forward.flops == DEPTH * 2 * ROWS * WIDTH * WIDTH


def test_a_backward_holds_every_input_and_gradients_only_if_kept() -> None:
    trace = trace_chain(backward=True)
    weight = 4 * WIDTH * WIDTH
    assert trace.peak.gradients == 0
    assert trace.peak_keeping.gradients >= (DEPTH - 1) * weight
    assert trace.peak_keeping.total - trace.peak.total >= (DEPTH - 2) * weight
    assert trace.backward.flops == (2 * DEPTH - 1) * 2 * ROWS * WIDTH * WIDTH  # the first input needs no gradient


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2", "bloom"])
def test_tensors_without_memory_count_like_real_ones(name: str, backward: bool) -> None:
    batch = tiny_batch(name, batch_size=2, length=8)
    batch.pop("attention_mask")
    found = []
    for device in ("cpu", "meta"):
        model = tiny_model(name).to(device)
        model.config.use_cache = False  # type: ignore[union-attr]
        found.append(
            trace_pass(
                model,
                {key: value.to(device) for key, value in batch.items()},
                blocks=list(find_blocks(model).values()),
                rates=Rates(),
                backward=backward,
            )
        )
    # BLOOM's softmax takes a temporary more on the CPU.
    assert found[0].peak.total == pytest.approx(found[1].peak.total, rel=0.06 if name == "bloom" else 0.001)
    assert found[0].forward.flops == found[1].forward.flops > 0


def test_checkpointing_keeps_one_input_a_block() -> None:
    peaks = [planned("llama", num_hidden_layers=depth, seq=32).backward_trace(checkpointing=True) for depth in (5, 6)]
    assert peaks[1].peak.total - peaks[0].peak.total == peaks[0].block_input_nbytes == 4 * 2 * 32 * 16
    whole = planned("llama", num_hidden_layers=6, seq=32).backward_trace(checkpointing=False)
    assert whole.peak.total > 1.5 * peaks[1].peak.total
    assert whole.backward.flops < peaks[1].backward.flops


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("num_rows", [10, 63])
def test_the_loss_on_paper_takes_what_the_chunked_loss_takes(
    num_rows: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 997  # so that logits are the largest there is
    monkeypatch.setattr("ds_zo.backends.common.chunked_loss.LOSS_CHUNK_NUMEL", num_rows * vocabulary)
    model = planned("opt", seq=32, dtype=dtype, vocab_size=vocabulary)
    on_paper = model.forward_trace(), model.backward_trace(checkpointing=False, loss_in_chunks=True)
    with losses_in_chunks(models_with_causal_loss(model.module)):
        real = [model._pass(backward=backward) for backward in (False, True)]
    for ours, theirs in zip(on_paper, real, strict=True):
        assert ours.peak.total == pytest.approx(theirs.peak.total, rel=0.01)


class CurrentWeights:
    def use_of(self, head: Any, *, chunk_nbytes: int) -> Any:
        return nullcontext


@pytest.mark.parametrize("backward", [False, True])
def test_the_head_on_paper_takes_what_the_chunked_head_takes(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 997

    def on_paper() -> Trace:
        made = planned("opt", seq=32, vocab_size=vocabulary)
        return made.backward_trace(checkpointing=False, loss_in_chunks=True) if backward else made.forward_trace()

    whole = on_paper()
    monkeypatch.setattr("ds_zo.backends.common.chunked_head.HEAD_CHUNK_NUMEL", 3 * vocabulary)
    monkeypatch.setattr("ds_zo.backends.common.chunked_loss.LOSS_CHUNK_NUMEL", 2 * vocabulary)
    model, batch = tiny_model("opt", vocab_size=vocabulary), tiny_batch("opt", batch_size=2, length=32)
    batch.pop("attention_mask")
    model.config.use_cache = False  # type: ignore[union-attr]
    blocks = list(find_blocks(model).values())
    with CausalLosses(model, pass_weights=None if backward else CurrentWeights()).in_chunks(batch):
        real = trace_pass(model, batch, blocks=blocks, rates=Rates(), vocab_size=vocabulary, backward=backward)
    assert on_paper().peak.total == pytest.approx(real.peak.total, rel=0.001)
    assert on_paper().peak.total < whole.peak.total / 2


def test_the_last_norm_on_paper_takes_what_the_chunked_norm_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def around(trace: Trace) -> int:
        return max(
            s.at_peak.total for s in trace.sections if s.at_peak and (s.block is None or s.phase is PassPhase.AROUND)
        )

    def on_paper() -> int:
        return around(planned("llama", batch=16, seq=32).backward_trace(checkpointing=False, loss_in_chunks=True))

    monkeypatch.setattr("ds_zo.backends.common.chunked_head.HEAD_CHUNK_NUMEL", 8 * VOCAB)
    monkeypatch.setattr("ds_zo.backends.common.chunked_loss.LOSS_CHUNK_NUMEL", 8 * VOCAB)
    whole = on_paper()
    monkeypatch.setattr("ds_zo.backends.common.chunked_norm.NORM_CHUNK_NUMEL", 128)
    model, batch = tiny_model("llama"), tiny_batch("llama", batch_size=16, length=32)
    batch.pop("attention_mask")
    model.config.use_cache = False  # type: ignore[union-attr]
    blocks = list(find_blocks(model).values())
    with CausalLosses(model).in_chunks(batch):
        real = trace_pass(model, batch, blocks=blocks, rates=Rates(), vocab_size=VOCAB, backward=True)
    assert on_paper() == pytest.approx(around(real), rel=0.01)
    assert on_paper() < 0.6 * whole


def test_a_process_that_has_used_zero3_plans_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's `zero.Init` replaces `functional.linear` for the rest of the process."""
    plain = planned("llama", seq=32).backward_trace(checkpointing=True)
    monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
    assert planned("llama", seq=32).backward_trace(checkpointing=True) == plain
    assert functional.linear is zero3_linear_wrap


def test_scores_of_attention_never_exist() -> None:
    model = planned("llama", seq=32, batch=1, max_position_embeddings=4096)
    model.seq = 4096
    scores = 4 * 4 * 4096**2  # four heads in float32
    assert model.forward_trace().peak.total < scores / 8


class Scores(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return type("Output", (), {"loss": self.function(self.layer(x), dim=-1).sum()})


def test_the_gradient_of_a_softmax_takes_the_memory_of_cudas_kernel() -> None:
    """It makes the product of gradient and scores, which that of a log-softmax does not."""
    x = torch.empty(32 * ROWS, WIDTH, device="meta")

    def peak(function: Any) -> int:
        model = Scores(function).to("meta")
        return trace_pass(model, {"x": x}, blocks=[model.layer], rates=Rates(), backward=True).peak.total

    peak(torch.softmax)  # the first trace of a process imports modules
    assert peak(torch.softmax) - peak(torch.log_softmax) == 32 * TENSOR
