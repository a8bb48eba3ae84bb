"""Compares bases with checkpoints of ds_zo versions that saved a hash of the base's stored bytes, and no sums.

A folder's tensors are encoded again for this, on the CPU. The run may have encoded them on a device that rounds
otherwise, and these checkpoints do not name the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.checkpoint.files import hash_json, hash_tensors
from ds_zo.checkpoint.layout import allocate_buffers, host_tensors, rebuild
from ds_zo.ops.nf4 import Quantised
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.placement import base_matrix_ids
from ds_zo.streaming.units import Part, PlacedParameter, Unit

Read = Callable[[str], torch.Tensor | Quantised]
"""Returns the value of a parameter, by its name in the run's model, as a model's files hold it."""


def hash_of_parameters(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> str:
    """The hash that checkpoints of adapters have. `groups`: the stored tensors of each parameter by its name."""
    with ThreadPoolExecutor() as threads:
        return hash_json(dict(zip(groups, threads.map(hash_tensors, groups.values()), strict=True)))


def hash_of_units(units: Iterable[Unit], names: Collection[str]) -> str:
    """The hash that checkpoints of ZO have."""
    tensors = (host_tensors(unit) if any(p.name in names for p in unit.placed) else {} for unit in units)
    own = ({name: value for name, value in of.items() if name.partition(":")[0] in names} for of in tensors)
    return hash_json([hash_tensors(of) for of in own])


def is_of(state: Mapping[str, Any], read: Read, *, model: nn.Module, block_paths: Any) -> bool:
    """Whether the values that `read` returns have the hash in the state of a checkpoint. `model`: the run's model in
    the run's dtype, without values."""
    found = _zo_hash(state, read) if "units" in state else _adapter_hash(state, read, model, block_paths)
    return bool(found == state["base"]["sha256"])


def _zo_hash(state: Mapping[str, Any], read: Read) -> str:
    names = set(state["omitted"])

    def filled(description: Mapping[str, Any]) -> Unit:
        unit = rebuild(description)
        allocate_buffers(unit, torch.device("cpu"))
        for placed in (p for p in unit.placed if p.name in names):
            unit.store_one(placed, read(placed.name))
        return unit

    return hash_of_units(map(filled, state["units"]), names)


def _adapter_hash(state: Mapping[str, Any], read: Read, model: nn.Module, block_paths: Any) -> str:
    """The matrices of blocks are taken to be in the checkpoint's one format of fewer bits, where it has one."""
    formats = set(state["base"]["stored_as"].split())
    wire = next((fmt.dtype for fmt in _NARROW if fmt.name in formats), None)
    in_blocks = {id(p) for block in find_blocks(model, block_paths).values() for p in block.parameters()}
    encoded = in_blocks & base_matrix_ids(model) if wire is not None else set()
    parameters, hashes = dict(model.named_parameters()), {}
    for name in state["omitted"]:
        p = parameters[name]
        stored_as = wire if wire is not None and id(p) in encoded else p.dtype
        part = Part([PlacedParameter(name, p, 0, 0, False)], p.dtype, stored_as, split=False, frozen=True)
        unit = Unit(name, nn.Module(), [part], index=0, is_block=True)
        allocate_buffers(unit, torch.device("cpu"))
        unit.store_one(part.placed[0], read(name))
        hashes[name] = hash_tensors(host_tensors(unit))
    return hash_json(hashes)


_FORMATS = (*(found.form for found in ops.PACKED.values()), *ops.FORMATS.values())
_NARROW = [form for form in _FORMATS if form.scale_dtype is not None]
"""Formats with scales. Weights of a model have no such dtype."""
