"""LoRA adapters on a model of the meta device, for a trace of their training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_zo.streaming.placement import is_linear


@contextmanager
def low_rank_adapters(module: nn.Module, blocks: Sequence[nn.Module], *, rank: int) -> Iterator[None]:
    """Context in which the model is frozen, and each linear layer of a block has LoRA matrices of `rank`. They are
    computed by the operations that PEFT's layers run without dropout."""
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
        yield


def _adapt(module: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The output of a linear layer with its adapter. A subclass whose forward is not that of a linear layer, such as
    the routers of Llama 4 and Phi-MoE, is left alone, as PEFT cannot adapt it either."""
    sizes = [t.shape[-1] if isinstance(t, torch.Tensor) else None for t in (*args, output)]
    if sizes != [module.lora_A.shape[1], module.lora_B.shape[0]]:
        return output
    return output + functional.linear(functional.linear(args[0], module.lora_A), module.lora_B) * 1.0
