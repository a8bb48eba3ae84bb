"""Computes layers of experts whose weights are decoded one group of experts at a time.

[Note: experts in groups] A layer of experts holds most of a block's weights, so decoding all of them takes gigabytes.
While a block is materialised, a function in the form of transformers' experts interface replaces the forward of each
such layer. Generation, for which transformers changes its own function, takes it too. The rows of tokens are sorted by
expert. One copy to the host tells where the rows of each expert end. A product decodes a group of experts, multiplies
the rows of that group, and goes on to the next group. The backward pass decodes each group once more. Groups without
rows are skipped.

LoRA on experts, PEFT's `target_parameters`, adds the product of rows with A and then with B of their expert. PEFT's own
forward would make the sum of all weights and their updates, and a gradient of all weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_zo.backends.adapter.matrix_decoding import EncodedMatrix, matrix_of
from ds_zo.logs import show
from ds_zo.streaming.budget import num_in_group
from ds_zo.streaming.placement import Placement
from ds_zo.streaming.units import Unit

_ALIGNMENT_NBYTES = 16
"""Of the rows that torch's grouped products take."""
_RANK_MULTIPLE = 8
"""Ranks of LoRA are filled up with zeros to a multiple, so that rows in all dtypes are aligned."""


def _takes_functions(layer: nn.Module) -> bool:
    """Whether a module is a layer of experts whose forward is a function of transformers' experts interface."""
    has_all = all(hasattr(layer, name) for name in ("_apply_gate", "has_bias", "is_transposed", "num_experts"))
    is_decorated = has_all and hasattr(type(layer).forward, "__wrapped__")
    return is_decorated and "forward" not in vars(layer) and not getattr(layer, "_is_expert_parallel", False)


def stack_names(layer: nn.Module) -> tuple[str, str]:
    """Names of the stacks of weights of a layer of experts."""
    return "gate_up_proj" if getattr(layer, "has_gate", True) else "up_proj", "down_proj"


def stack_ids(module: nn.Module, device: torch.device | None = None) -> set[int]:
    """Ids of the stacks of experts of a model that can be computed in groups on a device."""
    if device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return set()  # torch has no grouped products there
    layers = filter(_takes_functions, module.modules())
    stacks = (layer._parameters.get(name) for layer in layers for name in stack_names(layer))
    return {
        id(p)
        for p in stacks
        if p is not None and p.dim() == 3 and not any(n * p.element_size() % _ALIGNMENT_NBYTES for n in p.shape[1:])
    }


def log_whole_stacks(placement: Placement) -> None:
    """Logs once which stacks of experts in four bits are decoded as a whole layer."""
    parts = (part for unit in placement.blocks for part in unit.parts if part.decodes_parameters and part.is_copied)
    found = [(placed, part) for part in parts for placed in part.placed if len(placed.shape) == 3]
    if found:
        placed, part = found[0]
        show(
            f"ds_zo: {placed.name} and {len(found) - 1} other stacks of experts are decoded whole, "
            f"{part.decoded_nbytes(placed) / 1e9:.2g} GB: groups of experts need a class with transformers' experts "
            f"interface, matrices of whole groups of {part.stored_as} and a device with grouped products"
        )


class ExpertLayers:
    """The layers of experts of a block, and PEFT's wrappers around them."""

    def __init__(self, unit: Unit) -> None:
        stacks = {id(placed.parameter) for part in unit.parts if part.in_groups for placed in part.placed}
        modules: list[Any] = list(unit.module.modules())
        layers = [m for m in modules if any(id(p) in stacks for p in m._parameters.values())]
        wrappers = [m for m in modules if type(m).__name__ == "ParamWrapper"]
        self._forwards: list[tuple[nn.Module, Any]] = []
        """Each layer and each wrapper of its stacks, and what takes the place of its forward. They are made once,
        because torch.compile compiles again for a new function."""
        for layer in layers:
            names = stack_names(layer)
            own = {w.parameter_name: w for w in wrappers if w.get_base_layer() is layer and w.parameter_name in names}
            self._forwards.append((layer, partial(experts_forward, layer, own)))
            self._forwards += [(wrapper, partial(_forward_of_base, wrapper)) for wrapper in own.values()]

    def attach(self) -> None:
        """From now until `detach`, the layers are computed in groups."""
        for m, forward in self._forwards:
            vars(m)["forward"] = forward

    def detach(self) -> None:
        for m, _ in self._forwards:
            vars(m).pop("forward", None)


@dataclass(frozen=True)
class _Routing:
    """Rows of tokens, one for each token and expert, sorted by expert."""

    expert_of_row: torch.Tensor
    ends: torch.Tensor
    """For each expert, the end of its rows."""

    @cached_property
    def ends_on_host(self) -> Sequence[int]:
        found: list[int] = self.ends.tolist()
        return found

    @classmethod
    def of(cls, expert_of_row: torch.Tensor, num_experts: int) -> _Routing:
        experts = torch.arange(num_experts, device=expert_of_row.device, dtype=expert_of_row.dtype)
        ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
        return cls(expert_of_row, ends)

    def groups(self, num_in_group: int) -> Iterator[tuple[range, slice, torch.Tensor]]:
        """The groups of experts that have rows: the experts, their rows, and the ends of each expert's rows in them."""
        num_experts = len(self.ends_on_host)
        for first in range(0, num_experts, num_in_group):
            experts = range(first, min(first + num_in_group, num_experts))
            begin, end = self.ends_on_host[first - 1] if first else 0, self.ends_on_host[experts[-1]]
            if begin < end:
                yield experts, slice(begin, end), self.ends[first : experts.stop] - begin


def _multiplied(rows: torch.Tensor, stack: EncodedMatrix, routing: _Routing, *, transposes: bool) -> torch.Tensor:
    """The products of rows with the weights of their experts. A row without an expert gives zeros."""
    shape = stack.placed.shape
    found = rows.new_zeros(len(rows), shape[1] if transposes else shape[2])
    for experts, span, ends in routing.groups(num_in_group(stack.placed)):
        weights = stack.experts_in_scratch(experts)
        found[span] = F.grouped_mm(rows[span], weights.mT if transposes else weights, offs=ends)
    return found


class _Product(torch.autograd.Function):
    """`_multiplied` with a gradient of the rows. Autograd saves no decoded weights."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, stack: EncodedMatrix, routing: _Routing, transposes: bool
    ) -> torch.Tensor:
        ctx.stack, ctx.routing, ctx.transposes = stack, routing, transposes
        return _multiplied(rows, stack, routing, transposes=transposes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        of_rows = _multiplied(grads[0].contiguous(), ctx.stack, ctx.routing, transposes=not ctx.transposes)
        return of_rows, None, None, None


def _project(layer: Any, wrappers: dict[str, Any], rows: torch.Tensor, name: str, routing: _Routing) -> torch.Tensor:
    """The rows through a stack of the layer, with its bias and its LoRA."""
    weight, transposes = getattr(layer, name), not layer.is_transposed
    rows, stack = rows.to(weight.dtype), matrix_of(weight)
    if stack is None:
        found = F.grouped_mm(rows, weight.mT if transposes else weight, offs=routing.ends)
    else:
        found = _Product.apply(rows, stack, routing, transposes)
    if layer.has_bias:
        found = found + getattr(layer, f"{name}_bias")[routing.expert_of_row]
    if name in wrappers:
        for first, second, scaling in _low_rank(wrappers[name], transposes=transposes, dtype=rows.dtype):
            inner = F.grouped_mm(rows, first, offs=routing.ends) * scaling
            found = found + F.grouped_mm(inner, second, offs=routing.ends)
    return found


def _low_rank(
    wrapper: Any, *, transposes: bool, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """For each active adapter of PEFT's wrapper: the stacks (experts, in, rank) and (experts, rank, out), and a factor
    of their product."""
    if wrapper.disable_adapters or wrapper.merged:
        return
    for adapter in (name for name in wrapper.active_adapters if name in wrapper.lora_A):
        a, b = wrapper.lora_A[adapter].weight.to(dtype), wrapper.lora_B[adapter].weight.to(dtype)
        a = a.view(wrapper.num_experts, -1, a.shape[1])
        b = b.view(len(b), -1, wrapper.num_experts).permute(2, 1, 0)
        a, b = (F.pad(f, (0, 0, 0, -f.shape[1] % _RANK_MULTIPLE)).contiguous() for f in (a, b))
        takes_rows_first = getattr(wrapper, "_did_swap_in_out_features", False) is transposes
        first, second = (a, b) if takes_rows_first else (b, a)
        yield first.mT, second, wrapper.scaling[adapter]


def experts_forward(
    layer: Any,
    wrappers: dict[str, Any],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """A function of transformers' experts interface. In the order of operations it is that for grouped products."""
    num_tokens, top_k = top_k_index.shape
    expert_of_row, order = torch.sort(top_k_index.reshape(-1), stable=True)
    routing = _Routing.of(expert_of_row, layer.num_experts)
    up, down = stack_names(layer)
    rows = _project(layer, wrappers, hidden_states[order // top_k], up, routing)
    rows = layer._apply_gate(rows) if up == "gate_up_proj" else layer.act_fn(rows)
    rows = _project(layer, wrappers, rows, down, routing)
    if getattr(layer, "has_post_expert_norm", False):
        rows = layer.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order, None]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return rows[place].view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _forward_of_base(wrapper: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward of PEFT's wrapper without its sum of weights and their updates: the layer reads A and B itself."""
    if wrapper.disable_adapters and wrapper.merged:
        raise ValueError(
            "adapters that are merged into the weights of experts cannot be switched off in a streamed block, got "
            f"disable_adapter for {wrapper.parameter_name}: call unmerge_adapter first"
        )
    wrapper._check_forward_args(x, *args, **kwargs)
    return wrapper.base_layer(x, *args, **kwargs)
