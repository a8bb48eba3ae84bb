"""Methods of the module and the optimizer that an engine replaces while it exists.

`zero_grad` of both also drops the sums that the engine has accumulated. These need not be gradients, so stock
`zero_grad` would not reach them.

`resize_token_embeddings` of a transformers model is refused: it replaces parameters by new ones of another shape. The
engine's storage, moments and directions belong to the old parameters and have their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ds_zo.backends.common.plain_copies import StandIn

_RESIZE = "resize_token_embeddings"


def replace_zero_grad(*owners: Any, drop_sums: Callable[[], None]) -> list[StandIn]:
    """Makes `zero_grad` of each owner call `drop_sums` too, which may itself call `zero_grad` of an owner. `drop_sums`
    must hold no reference to the engine."""
    is_dropping = False

    def zero(own: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        nonlocal is_dropping
        own(*args, **kwargs)
        if not is_dropping:
            is_dropping = True
            try:
                drop_sums()
            finally:
                is_dropping = False

    return [StandIn.put(owner, "zero_grad", partial(zero, owner.zero_grad)) for owner in owners]


def refuse_resizing(module: nn.Module) -> list[StandIn]:
    """Refuses `resize_token_embeddings` of a model and of its submodules. A call that changes no size still works."""
    owners = [m for m in module.modules() if hasattr(type(m), _RESIZE)]
    return [StandIn.put(m, _RESIZE, partial(_resize, m, getattr(m, _RESIZE))) for m in owners]


def _resize(
    owner: Any, own: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **rest: Any
) -> Any:
    num_tokens = owner.get_input_embeddings().weight.shape[0]
    wanted = num_tokens if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted == num_tokens:
        return own(new_num_tokens, pad_to_multiple_of, **rest)
    raise ValueError(
        f"an engine trains parameters of fixed shapes, got {_RESIZE} from {num_tokens} to {wanted} rows: call it "
        "before deepspeed.initialize (Accelerator.prepare, Trainer.train), or after engine.destroy() "
        f"({type(owner).__name__})"
    )
