"""BLOOM's attention without its whole matrix of scores: a few heads at a time, by PyTorch's fused attention.

transformers computes the scores of all heads at once, several times over: 8 GB at 2,048 tokens for the 112 heads of
BLOOM-176B, which a card of 24 GB does not have beside a layer. The result is the same but for rounding.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_NUM_HEADS = 8
"""Heads whose bias (ALiBi plus causal mask) is held at a time."""


def attend_in_chunks(model: nn.Module) -> nn.Module:
    """Replaces the attention of every block of a BLOOM model, and returns the model."""
    for module in model.modules():
        if type(module).__name__ == "BloomAttention":
            module.forward = MethodType(_forward, module)
    return model


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layer_past: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    batch, _, length, _ = query.shape
    slopes = alibi.view(batch, self.num_heads, 1, -1)
    contexts = []
    for first in range(0, self.num_heads, _NUM_HEADS):
        heads = slice(first, first + _NUM_HEADS)
        bias = slopes[:, heads] if attention_mask is None else slopes[:, heads] + attention_mask
        q, k, v = (x[:, heads] for x in (query, key, value))
        contexts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.inv_norm_factor))
    context = torch.cat(contexts, dim=1).transpose(1, 2).reshape(batch, length, -1)
    output = F.dropout(self.dense(context), p=self.hidden_dropout, training=self.training)
    return residual + output, None
