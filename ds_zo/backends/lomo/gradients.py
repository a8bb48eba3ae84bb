"""LOMO's state of a parameter and of a layer, and the phases of a backward."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn

from ds_zo.backends.recompute.blocks import RecomputedBlock
from ds_zo.optim import AdamMoments, FactoredMoments


class BackwardPhase(Enum):
    IDLE = "no engine.backward is running: a gradient comes from a loss.backward() that the user calls directly"
    MEASURE = "the norms of gradients are computed, gradients are dropped, the graph is retained"
    UPDATE = "gradients are consumed by updates"
    DISCARD = "gradients are dropped, and the pass only frees the graph"


@dataclass
class ParameterState:
    """LOMO's state of one parameter."""

    name: str
    parameter: nn.Parameter
    offset: int
    """Position of its first element in the model's stream of rounding bits, in elements."""
    is_adapter: bool
    """PEFT has added it, and AdamW trains it (`adapter` in the optimizer's params)."""
    layer: Layer | None
    """The layer that it is clipped with. None: gradients are not clipped by layer."""
    moments: AdamMoments | FactoredMoments | None = None
    """None before its first update, and for LOMO's parameters that are not adapters."""
    last_pass: int = 0
    """Number of the last backward pass that completed its gradient. See [Note: one update per backward]."""
    last_update: int = 0
    """Number of the last backward pass that updated it."""
    block: RecomputedBlock | None = None
    """The streamed block that holds it. None: blocks are not streamed, or it is also used outside of one block."""
    residue: torch.Tensor | None = None
    """The sum of what rounding has dropped. None before its first update, and unless `rounding` is "kahan"."""
    partial_grad: torch.Tensor | None = None
    """The sum of the parts of its gradient so far. None: no part is held. See [Note: gradients in parts]."""


class Layer:
    """Parameters whose gradients are clipped by their common norm: a block's, or one parameter outside of blocks."""

    def __init__(self) -> None:
        self.states: list[ParameterState] = []
        self.waiting: list[tuple[ParameterState, torch.Tensor]] = []
        """The parameters whose gradients are complete in this pass and not consumed yet, with these gradients."""
        self.num_expected = 0
        """Number of its parameters that are trained in this pass."""
