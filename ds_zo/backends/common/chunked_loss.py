"""The causal language-modelling loss, computed in chunks of tokens.

The loss needs logits in float32, and a conversion of all logits at once takes more memory than a block. In chunks, only
one chunk's float32 logits exist at a time. With gradients, the backward converts each chunk again instead of saving
float32 tensors. It runs the same operations as the backward of `cross_entropy`, so gradients have the same bits.
The logits are those of a whole batch, or `DeferredLogits`, which the head computes in chunks too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, pad

from ds_zo.backends.common.chunked_head import ChunkedHeads, DeferredLogits, PassWeights, add_losses_
from ds_zo.backends.common.chunked_norm import ChunkedNorms
from ds_zo.streaming.blocks import find_blocks

LOSS_CHUNK_NUMEL = 2**22
"""Logits that the loss of ZO and LOMO converts to float32 at a time: 16 MB, and 16 MB for their log-softmax."""
_MOST_CHUNKS = 64
"""Chunks of a loss whose logits are all in memory. Many small chunks cost launches."""
_SUM = 2
"""The number of `reduction="sum"` in `aten.nll_loss_backward`."""


def chunked_causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """Replaces transformers' `ForCausalLMLoss`, with the same arguments. The loss is summed in float32, over chunks of
    a few hundred tokens."""
    targets = _targets(labels, shift_labels, ignore_index=ignore_index).reshape(-1).to(logits.device)
    num_rows = max(1, LOSS_CHUNK_NUMEL // vocab_size)
    if isinstance(logits, DeferredLogits) and logits.is_deferred(vocab_size):
        total = logits.summed_loss(targets, ignore_index=ignore_index, num_rows=num_rows)
    elif logits.requires_grad and torch.is_grad_enabled():
        rows = logits.reshape(-1, vocab_size)
        if len(rows) <= num_rows:
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = cross_entropy(rows.float(), targets, ignore_index=ignore_index, reduction=reduction)
            return (
                loss if num_items_in_batch is None else loss / torch.as_tensor(num_items_in_batch, device=loss.device)
            )
        total = _SummedByChunks.apply(rows, targets, ignore_index, num_rows)
    else:
        rows = logits.reshape(-1, vocab_size)
        total = _sum(rows, targets, ignore_index=ignore_index, num_rows=num_rows)
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def _targets(labels: torch.Tensor | None, shift_labels: torch.Tensor | None, *, ignore_index: int) -> torch.Tensor:
    """The token that each token has to predict."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return pad(labels, (0, 1), value=ignore_index)[..., 1:]


class RowLosses:
    """A causal loss of a forward without a graph, which keeps the losses of each sequence. It has the arguments of
    `chunked_causal_lm_loss`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Frees the losses of the newest forward."""
        self.loss: torch.Tensor | None = None
        """The newest loss that was returned."""
        self.version = 0
        """Its version: a change in place increases it."""
        self.sums = self.counts = torch.zeros(0)
        """The summed loss of each sequence, and its number of tokens that count."""
        self.num_items: torch.Tensor | int | None = None
        """`num_items_in_batch`: the loss is divided by it instead of by the number of tokens."""

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        targets = _targets(labels, shift_labels, ignore_index=ignore_index).to(logits.device)
        chunk = max(1, LOSS_CHUNK_NUMEL // vocab_size, -(-targets.numel() // _MOST_CHUNKS))
        tokens = zip(logits.reshape(-1, vocab_size).split(chunk), targets.reshape(-1).split(chunk), strict=True)
        losses = [cross_entropy(x.float(), y, ignore_index=ignore_index, reduction="none") for x, y in tokens]
        self.sums = torch.cat(losses).view(targets.shape).sum(1)
        self.counts, self.num_items = (targets != ignore_index).sum(1), num_items_in_batch
        self.loss = self.sums.sum() / (self.counts.sum() if num_items_in_batch is None else num_items_in_batch)
        self.version = self.loss._version
        return self.loss


def _sum(rows: torch.Tensor, targets: torch.Tensor, *, ignore_index: int, num_rows: int) -> torch.Tensor:
    """The summed loss of all tokens, `num_rows` tokens at a time."""
    total = rows.new_zeros((), dtype=torch.float32)  # made of the logits: [Note: activations that outlive a forward]
    add_losses_(total, rows, targets, ignore_index=ignore_index, num_rows=num_rows)
    return total


class _SummedByChunks(torch.autograd.Function):
    """`_sum` with a backward. It saves the logits, which the model's graph keeps anyway, and no float32 tensor."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, targets: torch.Tensor, ignore_index: int, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(rows, targets)
        ctx.settings = (ignore_index, num_rows)
        return _sum(rows, targets, ignore_index=ignore_index, num_rows=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, targets = ctx.saved_tensors
        ignore_index, num_rows = ctx.settings
        found = torch.empty_like(rows)
        weight = torch.ones((), dtype=torch.float32, device=rows.device)
        for chunk, wanted, out in zip(*(t.split(num_rows) for t in (rows, targets, found)), strict=True):
            logs = torch.log_softmax(chunk.float(), dim=-1)
            by_logs = torch.ops.aten.nll_loss_backward(grad, logs, wanted, None, _SUM, ignore_index, weight)
            out.copy_(torch.ops.aten._log_softmax_backward_data(by_logs, logs, -1, torch.float32))
        return found, None, None, None


def models_with_causal_loss(module: nn.Module) -> list[nn.Module]:
    """The transformers models inside `module` whose loss is `ForCausalLMLoss`."""
    losses = sys.modules.get("transformers.loss.loss_utils")  # it is imported if there is such a model
    if losses is None:
        return []
    found = []
    for m in module.modules():
        causal = hasattr(type(m), "loss_function") and getattr(m, "loss_type", None) == "ForCausalLM"
        if causal and m.loss_function is losses.ForCausalLMLoss:
            found.append(m)
    return found


@contextmanager
def losses_in_chunks(
    models: Sequence[nn.Module], loss: Callable[..., torch.Tensor] = chunked_causal_lm_loss
) -> Iterator[None]:
    """Context in which `models` compute their losses in chunks, by `loss`."""
    originals = [m.__dict__.get("_loss_function") for m in models]
    for m in models:
        m.loss_function = loss  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, original in zip(models, originals, strict=True):
            if original is None:
                del m._loss_function
            else:
                m.loss_function = original


class CausalLosses:
    """The norms outside of the blocks of a module, and the heads and losses of the models inside it that have a causal
    loss."""

    def __init__(
        self, module: nn.Module, *, blocks: str | Sequence[str] | None = None, pass_weights: PassWeights | None = None
    ) -> None:
        """`blocks`: see `find_blocks`. `pass_weights`: see `ChunkedHeads`."""
        self._models = models_with_causal_loss(module)
        self._heads = ChunkedHeads(self._models, pass_weights=pass_weights)
        self._norms = ChunkedNorms(module, find_blocks(module, blocks).values()) if pass_weights is None else None

    @contextmanager
    def in_chunks(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Context of a training forward: norms, heads and losses are computed in chunks of tokens where that saves
        memory. `call`: the keywords of the forward."""
        norms = nullcontext() if self._norms is None else self._norms.in_chunks()
        with norms, losses_in_chunks(self._models), self._heads.deferred(call):
            yield

    @contextmanager
    def of_rows(self, losses: RowLosses) -> Iterator[None]:
        """Context of a forward without a graph, whose losses of sequences `losses` keeps."""
        try:
            with losses_in_chunks(self._models, losses):
                yield
        finally:
            losses.forget()
