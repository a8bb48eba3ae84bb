"""Weights by name: copied from modules and engines, and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


def weights(module: nn.Module) -> Weights:
    """Copies of parameters and buffers. `state_dict` applies pending updates and waits for copies to the host."""
    return {name: value.detach().to("cpu", copy=True) for name, value in module.state_dict().items()}


def parameters_of(engine: Any) -> Weights:
    """Of the weights of the last step, those of `named_parameters`. A streamed block's own memory may be partly
    updated."""
    state = weights(engine.module)
    return {name: state[name] for name, _ in engine.module.named_parameters()}


def assert_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(theirs)} differ: {different[:4]}"


def parts_have_bits_of_whole(
    compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, *, sizes: Sequence[int]
) -> bool:
    """Whether this CPU computes parts of `sizes` rows with the bits of all rows. Its products may add in an order that
    depends on the number of rows."""
    with torch.no_grad():
        whole = compute(rows)
        return all(torch.equal(whole, torch.cat([compute(part) for part in rows.split(size)])) for size in sizes)


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, atol: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=atol, msg=name)
