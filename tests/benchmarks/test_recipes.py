"""The recipes: valid JSONs, plans that fit, rows of the same settings, and a page that is current."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import AutoModelForCausalLM

from benchmarks.pages import MARKED, filled
from benchmarks.recipe_speed import CONTENDERS
from benchmarks.recipes import CONFIGS, RECIPES, RESULTS, Measured, Recipe
from ds_zo.cli import main
from ds_zo.config import backend_of, resolve
from ds_zo.planner.shapes import config_of
from ds_zo.records.rows import read_objects
from ds_zo.training.arguments import parse_args
from ds_zo.training.model import add_lora

pytestmark = pytest.mark.usefixtures("models_are_traced_once")

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs" / "recipes.md").read_text(encoding="utf-8")
FIVE = {"zo", "lomo", "lsp", "zero_offload", "zero3"}
"""JSONs that differ in the method only; tests/test_ds_configs.py compares them."""
PROSE = re.sub(r"```.*?```", "", MARKED.sub("", PAGE), flags=re.DOTALL)
EXACT = [(recipe, found) for recipe in RECIPES for found in recipe.measured if not found.differs]


def by_file(recipe: Recipe) -> str:
    return recipe.file


def test_every_json_of_the_folder_is_a_recipe_or_one_of_the_five() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == FIVE | {"adapter"} | {recipe.file for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES, ids=by_file)
def test_a_recipes_json_is_valid_and_has_bf16(recipe: Recipe) -> None:
    config = recipe.config
    DeepSpeedConfig(recipe.config)
    assert config["bf16"] == {"enabled": True}
    backend = backend_of(config)
    if backend is None:
        assert config["optimizer"]["type"] == "AdamW" and recipe.file in FIVE
    else:
        resolved = resolve(config)
        assert resolved.backend == recipe.contender == backend
        assert (resolved.ignored, resolved.warnings) == ((), ())
        assert resolved.stream == recipe.offload


@pytest.mark.parametrize("recipe", RECIPES, ids=by_file)
def test_the_plan_fits_by_the_command_shown(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in recipe.env.items():
        monkeypatch.setenv(name, value)
    assert main([*shlex.split(recipe.plan_command)[1:], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    found, estimate = recipe.plan()
    assert estimate.fits
    [planned] = shown["estimates"]
    assert planned == json.loads(json.dumps(found.to_json()))["estimates"][0]


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """The model, the batch and the streaming of a row's run, by the names of `Recipe`'s own."""
    params = row["params"]
    spec = params.get("spec", {})
    config = params.get("config", {})
    stream = config.get("ds_zo", {}).get("stream", params.get("stream") or {})
    shape = spec.get("model", "").removeprefix("random:") or params["shape"]
    batch = spec.get("batch", params.get("batch", row.get("batch")))
    length = spec.get("length") or row.get("length") or params["length"]
    return {"shape": shape, "batch": batch, "length": length, "stream": stream}


@pytest.mark.parametrize(("recipe", "found"), EXACT, ids=lambda value: getattr(value, "file", None))
def test_a_row_of_this_json_has_its_settings(recipe: Recipe, found: Measured) -> None:
    row = found.row
    settings = settings_of(row)
    if found.part:  # the blocks that stay on the device come in the row's second phase
        settings["stream"] = {key: value for key, value in settings["stream"].items() if key != "resident_blocks"}
    assert (settings["shape"], settings["stream"]) == (recipe.shape, recipe.stream)
    method = row["params"].get("method") or row["params"]["contender"].removesuffix("-streamed")
    if method == "lora":  # the name of `benchmarks.methods` for the backend that the row's JSON has
        method = backend_of(row["config"])
        assert row["gradient_clipping"] == recipe.config["gradient_clipping"]
    assert method in (recipe.contender, CONTENDERS.get(recipe.contender))


@pytest.mark.parametrize("recipe", [each for each in RECIPES if each.reads_folder], ids=by_file)
def test_the_command_for_a_mixture_trains_attention_alone(recipe: Recipe) -> None:
    """Neither experts nor routers, which PEFT's `all-linear` adds to some models."""
    download, train = (shlex.split(command) for command in recipe.train_commands)
    args = parse_args(train[2:])
    assert args.model == f"./{download[-1]}" and args.deepspeed == Path("ds_configs", f"{recipe.file}.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(recipe.shape, num_layers=1))
        model = add_lora(model, args)
    trained = {name.partition("layers.0.")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"self_attn.{x}_proj.lora_{half}.default.weight" for x in "qkvo" for half in "AB"}
    assert model.peft_config["default"].r == 16


@pytest.mark.parametrize(("recipe", "found"), EXACT, ids=lambda value: getattr(value, "file", None))
def test_the_plan_is_close_to_the_row(recipe: Recipe, found: Measured) -> None:
    if recipe.planned_as:
        pytest.skip(f"the plan is of {recipe.planned_as}")
    planned, estimate = recipe.plan()
    figures = found.figures
    assert estimate.device_nbytes / 1e9 == pytest.approx(figures["peak_gb"], rel=0.06)
    if not found.row.get("env"):  # exact pinning takes less than the plan
        assert estimate.host_peak_nbytes / 1e9 == pytest.approx(figures["host_peak_gb"], rel=0.08)
    assert planned.tokens_per_s(estimate) == pytest.approx(figures["tokens_per_s"], rel=0.35)


def test_every_row_that_a_recipe_names_trained_on_as_many_tokens() -> None:
    for recipe in RECIPES:
        for found in recipe.measured:
            assert found.row["status"] == "ok" and found.row["gpu"] == "NVIDIA H200", found
            settings = settings_of(found.row)
            shape = f"{settings['batch']} x {settings['length']}"
            assert shape == (found.tokens or f"{recipe.batch} x {recipe.length}"), found
            assert settings["batch"] * settings["length"] == recipe.batch * recipe.length


NUMBER = re.compile(r"\d[\d,.]*")
CONSTRAINTS = (REPO / "constraints.txt").read_text(encoding="utf-8")


def is_current(line: str, made: str) -> bool:
    """Planned figures may differ by 2% where another version of transformers computes a slightly different model."""
    if "planned" not in line or f"transformers=={version('transformers')};" in CONSTRAINTS:
        return line == made
    numbers = [
        [float(number.rstrip(",.").replace(",", "")) for number in NUMBER.findall(text)] for text in (line, made)
    ]
    return NUMBER.sub("", line) == NUMBER.sub("", made) and numbers[0] == pytest.approx(numbers[1], rel=0.02)


def test_the_page_is_current_and_has_every_recipe() -> None:
    lines, made = PAGE.splitlines(), filled(PAGE).splitlines()
    stale = [pair for pair in zip(lines, made, strict=True) if not is_current(*pair)]
    assert not stale, f"run: python -m benchmarks.pages; the first stale line: {stale[0]}"
    for recipe in RECIPES:
        assert f"\n### {recipe.title}\n" in PAGE


def test_the_text_between_blocks_has_no_measured_figures() -> None:
    """Sizes of cards and hosts are the reader's. Every other figure with a unit is in a block, which rows fill."""
    sizes = {f"{size:g} GB" for recipe in RECIPES for size in (recipe.device_gb, recipe.host_gb)}
    figures = re.findall(r"\d[\d.,]* ?(?:GB|GiB|MB|%|ms|s|tokens/s|tokens|points|times)\b", PROSE)
    assert set(figures) <= sizes, set(figures) - sizes


def test_the_stock_rows_say_what_the_text_says() -> None:
    within = read_objects(RESULTS / "compare" / "zero_offload_24gb.jsonl")
    assert {row["status"] for row in within if row["case"] == "zero2-offload"} == {"oom"}
    for cap in ("24gb", "uncapped"):
        rows = read_objects(RESULTS / "compare" / "llama-7b" / cap / "rows.jsonl")
        [row] = [row for row in rows if row["case"] == "zero3-offload-param"]
        assert row["status"] == "skipped"
