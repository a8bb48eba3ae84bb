"""Weights whose names fit and whose shapes or kinds of number do not: refused before any tensor is replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ds_zo.checkpoint import CheckpointError
from tests.helpers.checkpoint_runs import JSONS as ZO
from tests.helpers.lomo_runs import config_for, start, streamed
from tests.helpers.lsp_runs import lsp_json

pytestmark = pytest.mark.usefixtures("single_process")

CONFIGS: dict[str, dict[str, Any]] = {
    "zo": ZO["bf12 wire"],
    "lomo": streamed(),
    "adalomo": config_for("AdaLOMO"),
    "lsp": lsp_json(),
}


class Headed(nn.Module):
    """Blocks, a buffer, and a head whose one row would fill two by broadcasting."""

    def __init__(self, num_labels: int = 2, *, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, width)
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("places", torch.arange(3))
        self.head = nn.Linear(width, num_labels)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x)).pow(2).mean()


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def assert_refused(engine: Any, folder: Path, match: str, **options: Any) -> None:
    """And nothing changes."""
    before = state_of(engine)
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(str(folder), **options)
    assert all(torch.equal(value, before[key]) for key, value in state_of(engine).items()), folder


def wrong_states() -> dict[str, dict[str, torch.Tensor]]:
    right = Headed(seed=1).state_dict()
    return {
        "one label": Headed(1, seed=1).state_dict(),
        "width": Headed(width=12, seed=1).state_dict(),
        "scalar buffer": {**right, "table": torch.ones(1)},
        "whole numbers": {**right, "last.weight": torch.ones(16, 16, dtype=torch.int8)},
        "fractions": {**right, "places": torch.ones(3)},
    }


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("backend", CONFIGS)
def test_a_model_folder_of_other_shapes_changes_nothing(backend: str, strict: bool, tmp_path: Path) -> None:
    engine = start(CONFIGS[backend], Headed())
    before = state_of(engine)
    for name, state in wrong_states().items():
        (tmp_path / name).mkdir()
        save_file(state, tmp_path / name / "model.safetensors")
        match = r"has (shape|dtype) .* there and .* here.* \([a-z.]+\)$"
        assert_refused(engine, tmp_path / name, match, load_module_strict=strict)
    save_file(
        {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in before.items()},
        tmp_path / "model.safetensors",
    )
    engine.load_checkpoint(str(tmp_path), load_module_strict=strict)  # of another width
    engine.destroy()


@pytest.mark.parametrize(("theirs", "ours"), [("zo", "lsp"), ("lomo", "zo"), ("lsp", "adalomo"), ("zo", "zo")])
def test_a_checkpoint_of_other_shapes_changes_nothing(theirs: str, ours: str, tmp_path: Path) -> None:
    start(CONFIGS[theirs], Headed(1, seed=1)).save_checkpoint(str(tmp_path))
    match = r"head\.(weight|bias) has shape \(1,.*\) there and \(2,.*\) here"
    assert_refused(start(CONFIGS[ours], Headed()), tmp_path, match, load_optimizer_states=theirs == ours)


@pytest.mark.parametrize("backend", CONFIGS)
def test_a_buffer_of_another_shape_in_an_own_checkpoint_changes_nothing(backend: str, tmp_path: Path) -> None:
    model = Headed(seed=1)
    model.table = torch.ones(1)
    start(CONFIGS[backend], model).save_checkpoint(str(tmp_path))
    assert_refused(start(CONFIGS[backend], Headed()), tmp_path, r"table has shape \(1,\) there and \(3,\) here")


@pytest.mark.parametrize("backend", ["zo", "lomo"])
def test_a_stock_checkpoint_of_another_shape_changes_nothing(backend: str, tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    state = {"module": Headed(1, seed=1).state_dict()}
    torch.save(state, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    match = r"head\.bias has shape \(1,\) there and \(2,\) here"
    assert_refused(start(CONFIGS[backend], Headed()), tmp_path, match, load_module_only=True)


@pytest.mark.parametrize("damage", ["cut", "no shard", "no JSON", "no map"])
def test_a_damaged_model_folder_is_refused_before_anything_changes(damage: str, tmp_path: Path) -> None:
    state = Headed(seed=1).state_dict()
    files = {"a.safetensors": [n for n in state if n < "last"], "b.safetensors": [n for n in state if n >= "last"]}
    for file, names in files.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in files.items() for name in names}}))
    shard = tmp_path / "b.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-5])
    elif damage == "no shard":
        shard.unlink()
    else:
        index.write_text("{" if damage == "no JSON" else '{"weight_map": [1]}')
    match = f"whole safetensors files, and those of {tmp_path} can't be read"
    assert_refused(start(CONFIGS["lomo"], Headed()), tmp_path, match)
