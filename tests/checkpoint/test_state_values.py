"""What goes into a checkpoint comes out, or is refused when it goes in."""

from __future__ import annotations

import argparse
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from ds_zo.checkpoint import CheckpointError, files
from ds_zo.checkpoint.encoding import decode, encode
from tests.helpers.zo_runs import Toy, engine_for, zo_json

pytestmark = pytest.mark.usefixtures("single_process")


class Mode(str, enum.Enum):
    FAST = "fast"


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return all(j == k and type(j) is type(k) and equal(v, w) for (j, v), (k, w) in pairs)
    return bool(a == b)


def through_files(value: Any, folder: Path) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    files.write_json(folder / "state.json", encode(value, tensors))
    files.write_tensors(folder / "state.safetensors", tensors)
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return decode(json.loads((folder / "state.json").read_text()), found)


@pytest.mark.parametrize(
    "value",
    [
        {"ema.w": torch.tensor([1.0]), "ema": {"w": torch.tensor([2.0])}},
        {1: torch.tensor([3.0]), "1": torch.tensor([4.0]), None: np.array([5]), (1, 2): torch.tensor([6.0])},
        {"a": [torch.tensor([1.0])], "a.0": torch.tensor([2.0]), "a.0'": torch.tensor([3.0])},
        {"\udcff": torch.tensor([1.0]), "?": torch.tensor([2.0])},
        np.array(5.0),
        np.array(7, dtype=np.uint16),
        np.array(True),
        np.zeros((2, 3), order="F")[::-1],
        np.zeros((0, 3)),
        {"sets": {frozenset({1, 2}), frozenset()}},
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([60000], dtype=torch.uint16),
        torch.tensor([4_000_000_000], dtype=torch.uint32),
        torch.tensor(2**63 + 1, dtype=torch.uint64),
    ],
    ids=str,
)
def test_values_come_back(value: Any, tmp_path: Path) -> None:
    assert equal(through_files(value, tmp_path), value)


def test_a_text_enum_comes_back_as_its_text(tmp_path: Path) -> None:
    assert through_files({Mode.FAST: Mode.FAST}, tmp_path) == {"fast": "fast"}


@pytest.mark.parametrize(
    "value",
    [
        np.longdouble(1),
        np.zeros(2, dtype=np.longdouble),
        np.zeros(2, dtype=">f4"),
        np.ma.array([1, 2], mask=[False, True]),
        np.array(["text"]),
        torch.zeros(2, dtype=torch.complex128),
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_values_that_files_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"holds dense tensors of the dtypes .* got a .* \(state\.x\)$"):
        encode({"x": value}, {})


def test_state_written_before_names_were_made_unique_loads() -> None:
    """As a checkpoint of an earlier version has it."""
    state = {
        "w": {"$tensor": "state.w"},
        "n": {"$dict": [[1, {"$array": "state.n.1", "dtype": "<f8"}]]},
        "s": {"$set": [1]},
    }
    tensors = {"state.w": torch.ones(2), "state.n.1": torch.tensor([5.0], dtype=torch.float64)}
    found = decode(state, tensors)
    assert equal(found["w"], torch.ones(2)) and found["s"] == {1} and found["n"][1].tolist() == [5.0]
    assert decode({"$namespace": {"lr": 1.0}}, {}) == argparse.Namespace(lr=1.0)


# Buffers


def with_buffer(model: torch.nn.Module, dtype: torch.dtype, fill: float) -> torch.nn.Module:
    model.register_buffer("table", torch.full((4,), fill).to(dtype))
    return model


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("backend", ["zo", "lomo"])
def test_buffers_of_rare_dtypes_are_saved(backend: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def engine_with(fill: float) -> Any:
        model = with_buffer(Toy(), dtype, fill)
        return engine_for(model, zo_json(interval=3)) if backend == "zo" else engine_for(model, LOMO)

    engine_with(7).save_checkpoint(str(tmp_path))
    other = engine_with(1)
    other.load_checkpoint(str(tmp_path))
    assert other.module.table.dtype is dtype
    assert torch.equal(other.module.table, torch.full((4,), 7.0).to(dtype))


LOMO = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "LOMO", "params": {"lr": 1e-2}}}


@pytest.mark.parametrize("config", [zo_json(interval=3), LOMO], ids=["zo", "lomo"])
def test_a_buffer_that_no_checkpoint_can_hold_is_refused_at_initialize(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"got table of torch\.complex128.*persistent=False.*\(table\)"):
        engine_for(with_buffer(Toy(), torch.complex128, 1), config)
    model = Toy()
    model.register_buffer("table", torch.zeros(4, dtype=torch.complex128), persistent=False)
    engine_for(model, config).destroy()
