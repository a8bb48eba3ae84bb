"""What LOMO keeps of each parameter, and what becomes of the gradients that arrive."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from ds_zo.backends.recompute.blocks import RecomputedBlock
from ds_zo.optim import AdamMoments, FactoredMoments


class BackwardPhase(Enum):
    IDLE = "no engine.backward is running: a gradient that arrives comes from a bare loss.backward()"
    MEASURE = "gradients are measured and dropped"
    UPDATE = "gradients are consumed by updates"
    DISCARD = "gradients are dropped, the graph is freed"


@dataclass
class ParameterState:
    """What is kept of a parameter besides itself."""

    name: str
    parameter: nn.Parameter
    offset: int
    """Of its rounding bits."""
    is_adapter: bool
    layer: Layer | None
    moments: AdamMoments | FactoredMoments | None = None
    last_pass: int = 0
    """The backward pass that its gradient last came in; see [Note: once a backward]."""
    last_update: int = 0
    """The backward pass that last changed it."""
    block: RecomputedBlock | None = None
    """The block that it stands in and nowhere else, where blocks stream."""
    residue: torch.Tensor | None = None
    """What rounding dropped so far (`rounding: kahan`)."""
    partial_grad: torch.Tensor | None = None
    """The sum so far of a gradient that comes in parts; see [Note: gradients in parts]."""


class Layer:
    """Parameters that are clipped by their own norm: a block, or one parameter outside of blocks."""

    def __init__(self) -> None:
        self.states: list[ParameterState] = []
        self.waiting: list[ParameterState] = []
        """Those whose gradients have come, in this pass."""
        self.num_expected = 0
