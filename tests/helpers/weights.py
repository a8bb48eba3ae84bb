"""Weights by name: copied from modules and engines, and compared."""

from __future__ import annotations

from collections.abc import Mapping
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


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, atol: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=atol, msg=name)
