"""LoRA adapters on a model of the meta device, for a trace of their training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from ds_zo.backends.adapter.experts import experts_forward, stack_ids, stack_names
from ds_zo.streaming.placement import is_linear


@contextmanager
def low_rank_adapters(
    module: nn.Module, blocks: Sequence[nn.Module], *, rank: int, experts_rank: int | None = None
) -> Iterator[None]:
    """Context in which the model is frozen, and each linear layer of a block has LoRA matrices of `rank`. They are
    computed by the operations that PEFT's layers run without dropout. `experts_rank`: the backend computes layers of
    experts, whose stacks have LoRA of this rank. None: their own forward runs, without adapters."""
    with ExitStack() as stack:
        for p in module.parameters():
            stack.callback(p.requires_grad_, p.requires_grad)
            p.requires_grad_(False)
        for m in (m for block in blocks for m in block.modules()):
            if not is_linear(m):
                continue
            weight: Any = m.weight
            outputs, inputs = weight.shape if isinstance(m, nn.Linear) else weight.shape[::-1]
            for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
                m.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta")))
                stack.callback(m._parameters.pop, name)
            stack.callback(m.register_forward_hook(_adapt).remove)
        if experts_rank is not None:
            _adapt_experts(module, experts_rank, stack)
        yield


def _adapt(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The output of a linear layer with its adapter. A subclass whose forward is not that of a linear layer, such as
    the routers of Llama 4 and Phi-MoE, is left alone, as PEFT cannot adapt it either."""
    sizes = [t.shape[-1] if isinstance(t, torch.Tensor) else None for t in (*args, output)]
    if sizes != [module.lora_A.shape[1], module.lora_B.shape[0]]:
        return output
    return output + functional.linear(functional.linear(args[0], module.lora_A), module.lora_B) * 1.0


@dataclass(frozen=True)
class _Weight:
    weight: torch.Tensor


class _StackAdapter:
    """LoRA of a stack of experts, with the attributes of PEFT's wrapper that the backend reads."""

    disable_adapters = merged = False
    active_adapters = ("default",)

    def __init__(self, layer: Any, name: str) -> None:
        self.num_experts = len(layer._parameters[name])
        self.lora_A, self.lora_B = ({"default": _Weight(layer._parameters[f"{name}_lora_{side}"])} for side in "AB")
        self.scaling = {"default": 1.0}
        self._did_swap_in_out_features = not layer.is_transposed  # A multiplies the rows first


def _adapt_experts(module: nn.Module, rank: int, stack: ExitStack) -> None:
    """Gives layers of experts the backend's forward. Their class gets it, so that equal blocks have equal modules."""
    stacks = stack_ids(module)
    layers: list[Any] = [m for m in module.modules() if any(id(p) in stacks for p in m._parameters.values())]
    for layer in layers if rank else ():
        for name in stack_names(layer):
            num_experts, *shape = layer._parameters[name].shape
            outputs, inputs = shape[::-1] if layer.is_transposed else shape
            for side, sizes in (("A", (rank * num_experts, inputs)), ("B", (outputs, rank * num_experts))):
                adapter = torch.empty(sizes, dtype=layer._parameters[name].dtype, device="meta")
                layer.register_parameter(f"{name}_lora_{side}", nn.Parameter(adapter))
                stack.callback(layer._parameters.pop, f"{name}_lora_{side}")

    def forward(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapters = {name: _StackAdapter(layer, name) for name in stack_names(layer) if rank}
        return experts_forward(layer, adapters, *args, **kwargs)

    for kind in {type(layer) for layer in layers}:
        stack.enter_context(patch.object(kind, "forward", forward))
