"""Models with random weights for LoRA: adapters on linear layers and experts, equal weights in all blocks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ds_zo.bench.shapes import materialise
from ds_zo.ops import mxfp4, nested, nf4
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.loading import attach_source
from ds_zo.streaming.placement import WIRE, base_matrix_ids, is_linear
from ds_zo.streaming.units import num_matrices

_CHUNK_NUMEL = 2**24
"""Weights that are quantised at a time."""
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""How the names of stacks of experts end."""


class RepeatedBlock:
    """A source that returns the first block's values for all blocks, with matrices quantised to `frozen_dtype`."""

    def __init__(self, model: Any, frozen_dtype: str) -> None:
        self._draw, self._blocks = model._ds_zo_source, list(find_blocks(model))
        self._form = frozen_dtype
        matrices = base_matrix_ids(model)
        self._quantised = {
            name
            for name, p in model.named_parameters()
            if id(p) in matrices and (frozen_dtype != "mxfp4" or p.dim() == 3)
        }
        """Names of quantised matrices; in MXFP4 those of experts alone, as gpt-oss ships them."""
        self.kept: dict[str, Any] = {}
        """The first block's matrices, on the GPU."""

    def shipped_wire(self, name: str) -> torch.dtype | None:
        is_quantised = name in self._quantised and self._block_of(name) is not None
        return WIRE[self._form] if is_quantised else None

    def __call__(self, name: str) -> Any:
        block = self._block_of(name)
        if block is None:
            return self._draw(name)
        rest = name.removeprefix(block)
        if name not in self._quantised:
            return self._draw(self._blocks[0] + rest)
        if rest not in self.kept:
            self.kept[rest] = _quantised(self._draw(self._blocks[0] + rest), name, self._form)
        return self.kept[rest]

    def _block_of(self, name: str) -> str | None:
        return next((block for block in self._blocks if name.startswith(f"{block}.")), None)


def _quantised(values: torch.Tensor, name: str, form: str) -> nf4.Quantised:
    """A matrix or a stack of experts, as a checkpoint holds it."""
    shape = tuple(values.shape)
    if form == "mxfp4":
        packed, scales = _planes(mxfp4.quantise, values.split(1))
        return mxfp4.MXFP4Values(packed, scales, shape)
    if form == "nf4_nested":
        rows = values.view(num_matrices(name, shape), -1)
        packed, scales = _planes(nested.quantise, rows)
        return nested.NestedValues(packed, scales.view(len(rows), -1), shape)
    return nf4.Quantised(*_planes(nf4.quantise, values.view(-1).split(_CHUNK_NUMEL)), shape)


def _planes(quantise: Any, parts: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scales = zip(*map(quantise, parts), strict=True)
    return torch.cat(packed), torch.cat(scales)


def repeat_first_block(model: Any, frozen_dtype: str = "nf4") -> dict[str, Any]:
    """Makes the model's source return the first block's values for all blocks, with quantised matrices. Returns the
    dictionary in which it keeps these, on the GPU."""
    source = RepeatedBlock(model, frozen_dtype)
    attach_source(model, source)
    return source.kept


@contextmanager
def shared_host_memory(num_own: int | None) -> Iterator[None]:
    """Inside, `num_own` streamed blocks get host memory of their own, and further blocks of their size share it in
    turns. Their stored bytes must be equal and frozen. None: every block gets its own."""
    taken: dict[int, list[torch.Tensor]] = {}
    take = HostStore.take

    def shared(store: HostStore, nbytes: int) -> torch.Tensor:
        found = taken.setdefault(nbytes, [])
        found.append(take(store, nbytes) if num_own is None or len(found) < num_own else found.pop(0))
        return found[-1]

    with patch.object(HostStore, "take", shared):
        yield


def has_peft() -> bool:
    return importlib.util.find_spec("peft") is not None


def with_lora(
    model: nn.Module, *, rank: int, dtype: torch.dtype, device: torch.device, experts_rank: int = 0
) -> nn.Module:
    """Adapters on all linear layers of the blocks: PEFT's, or the same operations where PEFT is not installed. Where
    experts are stacks, these layers are those of attention. `experts_rank`: PEFT's adapters on the stacks too, of this
    rank."""
    if experts_rank or has_peft():
        from peft import LoraConfig, get_peft_model

        ranks = dict.fromkeys(_EXPERTS, experts_rank) if experts_rank else {}
        names = (name for block in find_blocks(model).values() for name, m in block.named_modules() if is_linear(m))
        lora = LoraConfig(
            r=rank,
            lora_alpha=16,
            target_modules={name.rpartition(".")[2] for name in names},  # "all-linear" adds the experts of some models
            target_parameters=[*ranks] or None,
            rank_pattern=ranks,
            task_type="CAUSAL_LM",
        )
        base: Any = model
        adapted: nn.Module = get_peft_model(base, lora, autocast_adapter_dtype=False)
        return adapted
    model.requires_grad_(False)
    for m in (m for block in find_blocks(model).values() for m in block.modules() if isinstance(m, nn.Linear)):
        a = torch.empty(rank, m.in_features, dtype=dtype, device=device).normal_(0.0, m.in_features**-0.5)
        m.register_parameter("lora_A", nn.Parameter(a))
        zeros = torch.zeros(m.out_features, rank, dtype=dtype, device=device)
        m.register_parameter("lora_B", nn.Parameter(zeros))
        m.register_forward_hook(partial(_adapt, scaling=16 / rank))
    return model


def with_lora_over_4_bits(model: Any, *, rank: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Adapters over linear layers in NF4 by bitsandbytes, which are drawn and quantised one at a time. The model is on
    the meta device."""
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    layers, source = model.model.layers, model._ds_zo_source
    for name, m in [(n, m) for n, m in layers.named_modules() if isinstance(m, nn.Linear)]:
        owner, _, leaf = name.rpartition(".")
        sizes = {"input_features": m.in_features, "output_features": m.out_features, "bias": False}
        # On the meta device, or the layer would first draw float32 values on the CPU.
        new = bnb.nn.Linear4bit(**sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
        new.weight = bnb.nn.Params4bit(source(f"model.layers.{name}.weight"), requires_grad=False, quant_type="nf4")
        setattr(layers.get_submodule(owner), leaf, new.to(device))
    whole: Any = materialise(model, device)
    whole.is_loaded_in_4bit = True  # PEFT chooses its adapters for bitsandbytes by it
    return with_lora(whole, rank=rank, dtype=dtype, device=device)


def _adapt(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor, *, scaling: float) -> torch.Tensor:
    linear = nn.functional.linear
    return output + linear(linear(args[0], module.lora_A), module.lora_B) * scaling
