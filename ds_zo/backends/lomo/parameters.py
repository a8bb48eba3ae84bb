"""LOMO's state of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_zo.backends.common.ownership import LowBits
from ds_zo.backends.recompute.blocks import RecomputedBlock, shared_parameters
from ds_zo.config import ConfigError, LOMOParams, Resolved
from ds_zo.optim import OFFSET_ALIGNMENT, AdamMoments, FactoredMoments
from ds_zo.streaming.blocks import find_blocks

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    partial_grad: torch.Tensor | None = None
    """The sum of the parts of its gradient so far. None: no part is held. See [Note: gradients in parts]."""
    _residue: torch.Tensor | None = None
    _residue_version: int = 0
    """The parameter's version counter when the residue was set."""

    @property
    def residue(self) -> torch.Tensor | None:
        """The sum of what rounding has dropped. None before its first update, after a user has written to the
        parameter (by `load_state_dict`, for example), and unless `rounding` is "kahan"."""
        return self._residue if self._residue_version == self.parameter._version else None

    @residue.setter
    def residue(self, value: torch.Tensor | None) -> None:
        self._residue, self._residue_version = value, self.parameter._version


class Residues(LowBits):
    """The residues of `rounding: kahan`."""

    def __init__(self, states: Sequence[ParameterState]) -> None:
        self._state_of = {id(state.parameter): state for state in states}

    def added(self, parameter: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        state = self._state_of.get(id(parameter))
        return full if state is None or state.residue is None else full.add_(state.residue)

    def keep(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        state = self._state_of.get(id(parameter))
        if state is not None and parameter.dtype is not torch.float32:
            state.residue = (value - parameter.detach().float()).to(
                parameter.dtype, memory_format=torch.contiguous_format
            )


class Layer:
    """Parameters whose gradients are clipped by their common norm: a block's, or one parameter outside of blocks."""

    def __init__(self) -> None:
        self.states: list[ParameterState] = []
        self.waiting: list[tuple[ParameterState, torch.Tensor]] = []
        """The parameters whose gradients are complete in this pass and not consumed yet, with these gradients."""
        self.num_expected = 0
        """Number of its parameters that are trained in this pass."""


def make_parameter_states(module: nn.Module, config: Resolved, *, clips_by_layer: bool) -> list[ParameterState]:
    """One state per floating-point parameter, frozen ones included, in the order of `named_parameters`."""
    assert isinstance(config.optimizer, LOMOParams)
    trains_adapters = config.optimizer.adapter is not None
    adapters = _adapter_parameters(module) if trains_adapters else set()
    if trains_adapters and not adapters:
        raise ConfigError(
            "adapter trains the adapter parameters of a PEFT model, and this model has none: wrap it with "
            "peft.get_peft_model before deepspeed.initialize, or leave adapter out",
            at=f"{config.params_at}.adapter",
        )
    layer_of: dict[int, Layer] = {}
    if clips_by_layer:
        blocks = list(find_blocks(module, config.section.stream.blocks).values())
        layers = [Layer() for _ in blocks]
        layer_of = {parameter: layers[i] for parameter, i in block_numbers(module, blocks).items()}
    states: list[ParameterState] = []
    offset = 0
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_floating_point() and p.dtype not in _TRAINABLE_DTYPES:
            raise ConfigError(
                f"trained parameters are of dtype float32, bfloat16 or float16, got {name} of {p.dtype}: convert "
                "the model before deepspeed.initialize, or freeze the parameter",
                at=config.params_at,
            )
        if p.is_floating_point() and p.numel():
            layer = layer_of.get(id(p), Layer()) if clips_by_layer else None
            states.append(ParameterState(name, p, offset, id(p) in adapters, layer))
            if layer is not None:
                layer.states.append(states[-1])
        offset += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT
    return states


def block_numbers(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """The index of the block of each parameter that is used in one block only, by the parameter's id."""
    found: dict[int, int] = {}
    for i, (block, shared) in enumerate(zip(blocks, shared_parameters(module, blocks), strict=True)):
        elsewhere = {id(getattr(owner, name)) for owner, name in shared}
        found |= {id(p): i for p in block.parameters() if id(p) not in elsewhere}
    return found


def link_blocks(states: Sequence[ParameterState], blocks: Sequence[RecomputedBlock]) -> None:
    """Sets `ParameterState.block` and `RecomputedBlock.parameter_states`."""
    state_of = {id(state.parameter): state for state in states}
    for block in blocks:
        elsewhere = {id(getattr(owner, name)) for owner, name in block.shared}
        own = (p for p in block.unit.module.parameters() if id(p) in state_of and id(p) not in elsewhere)
        block.parameter_states = [state_of[id(p)] for p in own]
        for state in block.parameter_states:
            state.block = block


def _adapter_parameters(module: nn.Module) -> set[int]:
    """Ids of the parameters that PEFT has added. PEFT's layers list the attributes that hold them in
    `adapter_layer_names`."""
    found: set[int] = set()
    for m in module.modules():
        for name in getattr(m, "adapter_layer_names", ()):
            held = getattr(m, name, None)
            if isinstance(held, nn.Module):
                found |= {id(p) for p in held.parameters()}
            elif isinstance(held, nn.Parameter):
                found.add(id(held))
    return found
