"""The causal language-modelling loss in token chunks.

A training pass without gradients needs float32 logits only while it sums them up. Upcasting a whole sequence at once
takes more memory than a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

_CHUNK_NUMEL = 2**24


def chunked_causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """What transformers' `ForCausalLMLoss` returns, summed in float32 a few hundred tokens at a time."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.reshape(-1, vocab_size)
    targets = shift_labels.reshape(-1).to(rows.device)
    num_rows = max(1, _CHUNK_NUMEL // vocab_size)
    total = torch.zeros((), dtype=torch.float32, device=rows.device)
    for chunk, wanted in zip(rows.split(num_rows), targets.split(num_rows), strict=True):
        total += cross_entropy(chunk.float(), wanted, ignore_index=ignore_index, reduction="sum")
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def models_with_causal_loss(module: nn.Module) -> list[nn.Module]:
    """The transformers models inside `module` whose loss is the plain causal one."""
    try:
        from transformers.loss.loss_utils import ForCausalLMLoss
    except ImportError:
        return []
    found = []
    for m in module.modules():
        causal = hasattr(type(m), "loss_function") and getattr(m, "loss_type", None) == "ForCausalLM"
        if causal and m.loss_function is ForCausalLMLoss:
            found.append(m)
    return found


@contextmanager
def losses_in_chunks(models: Sequence[nn.Module]) -> Iterator[None]:
    originals = [m.__dict__.get("_loss_function") for m in models]
    for m in models:
        m.loss_function = chunked_causal_lm_loss  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, original in zip(models, originals, strict=True):
            if original is None:
                del m._loss_function
            else:
                m.loss_function = original
