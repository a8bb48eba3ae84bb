"""The cases that measure the recipes' own JSONs, one of them on a toy model, and how their rows are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import recipes
from benchmarks.recipe_speed import CONTENDERS, cases_of
from benchmarks.recipes import OWN_ROWS, RECIPES, recipe_block
from ds_zo.bench.contenders import ALL
from ds_zo.bench.entrant import EntrantSpec
from ds_zo.bench.runner import run_cases
from tests.helpers.clean_process import in_clean_process

BY_FILE = {recipe.file: recipe for recipe in RECIPES}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_case_is_its_recipe() -> None:
    for case in cases_of():
        recipe, spec = BY_FILE[case.name], EntrantSpec(**case.params["spec"])
        assert case.params["config"] == recipe.config
        assert (spec.batch, spec.length, spec.device_memory_gb) == (recipe.batch, recipe.length, recipe.device_gb)
        assert spec.checkpointing == ("--gradient-checkpointing" in recipe.options)
        assert (case.params["lora_rank"] is not None) == ("--lora-rank" in recipe.options)
        assert case.planned_host_gb is not None and case.planned_host_gb <= recipe.host_gb
        if not case.env:  # which changes what is pinned
            assert case.planned_host_gb >= recipe.plan()[1].host_peak_nbytes / 1e9
    assert all(name in ALL for name in CONTENDERS.values())


def test_adapters_on_a_streamed_base_give_a_row() -> None:
    [case] = [case for case in cases_of(device=DEVICE, tiny=True) if case.params["lora_rank"]]
    [row] = in_clean_process(run_cases, [case], out=None, device=DEVICE, warm=(), min_free_host_gib=0.5)
    assert row["status"] == "ok", row
    assert row["tokens_per_s"] > 0 and row["settings"] == "ds_configs/lora_zo_7b_8gb.json"


def test_the_last_row_of_the_json_as_it_is_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "RESULTS", tmp_path)
    recipe = replace(BY_FILE["zo_70b_24gb_bf12"], title="another")  # the lookup is cached by recipe
    assert recipe.measured == ()
    figures = {"peak_gb": 20.0, "host_peak_gb": 105.0, "tokens_per_s": 1200.0, "env": {"NAME": "value"}}
    row = {"case": recipe.file, "status": "ok", "params": {"config": recipe.config}, **figures}
    rows = [
        {**row, "run_id": "1"},
        {**row, "run_id": "2", "status": "not run"},
        {**row, "run_id": "2"},
        {**row, "run_id": "3", "params": {"config": {}}},
    ]
    (tmp_path / OWN_ROWS).write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    recipe = replace(recipe, title="a third")
    [found] = recipe.measured
    assert (found.run_id, found.row["status"]) == ("2", "ok")
    assert "| measured | 20.0 GB | 105.0 GB | 1,200 | this JSON, `NAME=value` |" in recipe_block(recipe)
