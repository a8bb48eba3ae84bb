"""Refuses `resize_token_embeddings` of a transformers model while an engine trains it.

The method replaces parameters by new ones of another shape. The engine's storage, moments and directions belong to the
old parameters and have their shapes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ds_zo.backends.common.plain_copies import StandIn

_NAME = "resize_token_embeddings"


class FixedEmbeddings:
    """Replaces `resize_token_embeddings` of a model and of its submodules until `close`. A call that changes no size
    still works."""

    def __init__(self, module: nn.Module) -> None:
        self._stand_ins: list[tuple[nn.Module, StandIn]] = []
        for owner in module.modules():
            if hasattr(type(owner), _NAME):
                own = getattr(owner, _NAME)
                stand_in = StandIn(partial(_resize, owner, own), own)
                object.__setattr__(owner, _NAME, stand_in)
                self._stand_ins.append((owner, stand_in))

    def close(self) -> None:
        for owner, stand_in in self._stand_ins:
            if owner.__dict__.get(_NAME) is stand_in:
                object.__delattr__(owner, _NAME)
        self._stand_ins = []


def _resize(
    owner: Any, own: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **rest: Any
) -> Any:
    """Replaces `resize_token_embeddings` of `owner`. `own` is the original method."""
    num_tokens = owner.get_input_embeddings().weight.shape[0]
    wanted = num_tokens if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted == num_tokens:
        return own(new_num_tokens, pad_to_multiple_of, **rest)
    raise ValueError(
        f"an engine trains parameters of fixed shapes, got {_NAME} from {num_tokens} to {wanted} rows: call it before "
        f"deepspeed.initialize (Accelerator.prepare, Trainer.train), or after engine.destroy() ({type(owner).__name__})"
    )
