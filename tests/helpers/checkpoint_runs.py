"""Engines that save and load, in every way that weights are stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from ds_zo.checkpoint.layout import unit_tensors
from tests.helpers.zo_runs import Toy, engine_for, toy_batches, zo_json

BF16 = {"bf16": {"enabled": True}}
JSONS: dict[str, dict[str, Any]] = {
    "fp32": zo_json(interval=3),
    "fp32 some resident": zo_json(interval=3, resident_blocks=1),
    "fp32 resident": zo_json(interval=3, offload=False),
    "bf16 split": zo_json(interval=3, **BF16),
    "bf16 split some resident": zo_json(interval=3, resident_blocks=1, **BF16),
    "bf16 wire": zo_json(interval=3, master="wire", **BF16),
    "bf16 over fp32": zo_json(interval=3, wire_dtype="fp32", **BF16),
    "fp8 wire": zo_json(interval=3, wire_dtype="fp8", master="wire", **BF16),
    "fp8 split": zo_json(interval=3, wire_dtype="fp8", **BF16),
    "bf12 wire": zo_json(interval=3, wire_dtype="bf12", master="wire", resident_blocks=1, **BF16),
    "bf12 split": zo_json(interval=3, wire_dtype="bf12", **BF16),
    "two directions": zo_json(interval=3, params={"num_directions": 2, "weight_decay": 0.1}),
}
BATCHES = toy_batches(16)


def with_checkpoint(json: dict[str, Any], **settings: Any) -> dict[str, Any]:
    json = copy.deepcopy(json)
    json["ds_zo"]["checkpoint"] = settings
    return json


def start(name: str, **settings: Any) -> Any:
    return engine_for(Toy(), with_checkpoint(JSONS[name], **settings))


def loaded(folder: Path, name: str = "fp32", **arguments: Any) -> Any:
    """A new engine with a trajectory, which goes on from what a folder has."""
    engine = start(name, trajectory=True)
    engine.load_checkpoint(str(folder), **arguments)
    return engine


def planes(engine: Any) -> dict[str, Any]:
    """Everything a ZO run consists of, bit by bit."""
    store = engine.backend.store
    found: dict[str, Any] = {"length": store.log.length, "rows": store.log.rows.clone()}
    for unit in store.blocks.placement.units:
        key = next(unit.placed).name
        found[f"{key} version"] = unit.version
        for name, value in unit_tensors(unit, unit.store_buffer, unit.low_buffer).items():
            found[name] = value.clone()
    return found


def assert_same_bits(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.view(torch.uint8), b[name].view(torch.uint8)), name
        else:
            assert value == b[name], name
