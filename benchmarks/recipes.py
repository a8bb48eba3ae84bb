"""The recipes of docs/recipes.md: their JSON, command, measured and planned figures, and learning rates.

`benchmarks.pages` puts them on the page, from ds_configs/, from rows and from `ds-zo plan`. The text between the blocks
is written by hand and has no figures.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from benchmarks.accuracy import best_rates
from benchmarks.blocks import read_yaml
from benchmarks.prose import WIDTH
from ds_zo.bench.contenders import EXACT_PINNING
from ds_zo.config import backend_of, with_section_on_top
from ds_zo.planner import Estimate, Plan, plan
from ds_zo.records.rows import Row, read_objects, table

REPO = Path(__file__).resolve().parents[1]
RESULTS = REPO / "benchmarks" / "results"
CONFIGS = REPO / "ds_configs"
OWN_ROWS = "h200_recipes.jsonl"
"""Rows of `benchmarks.recipe_speed`, which trains with the recipes' own JSONs. The tables show them first."""
_TEXT_OPTIONS = "--task alpaca --data alpaca.jsonl --epochs 1"


@dataclass(frozen=True)
class Measured:
    """A row of benchmarks/results/ with the memory and speed of a recipe, or of a run that resembles it."""

    file: str
    """Path of the JSONL file below benchmarks/results/."""
    run_id: str
    case: str
    differs: str = ""
    """How the row's run differs from the recipe's JSON and model; empty if it does not, apart from the schedule."""
    part: str = ""
    """Key of the row that holds the figures, where one row has those of two phases; empty: the row itself."""
    without_effect: str = ""
    """A setting of the row's run that differs from the recipe's and changes neither memory nor speed."""
    tokens: str = ""
    """Sequences x tokens of the row's batch, where it has the recipe's number of tokens in another shape."""

    @property
    def row(self) -> Row:
        wanted = (self.run_id, self.case, "ok")
        rows = read_objects(RESULTS / self.file)
        [found] = [row for row in rows if (row["run_id"], row["case"], row["status"]) == wanted]
        return found

    @property
    def figures(self) -> Row:
        found: Row = self.row[self.part] if self.part else self.row
        return found


@dataclass(frozen=True)
class Recipe:
    """One JSON of ds_configs/, for one kind of model on one kind of machine."""

    file: str
    """Name of the JSON in ds_configs/, without its suffix."""
    title: str
    """Heading of the recipe in docs/recipes.md."""
    model: str
    """Name on the Hub, for the command."""
    shape: str
    """The planner's name of a model of that shape."""
    length: int
    """Tokens of a sequence."""
    contender: str
    """The planner's name of the method."""
    others: tuple[Measured, ...] = ()
    """Rows of other suites than `recipe_speed`."""
    device_gb: float = 24
    """Memory of the GPU, in GB of 10**9 bytes."""
    host_gb: float = 64
    """Memory of the machine that the plan must fit into, in GB of 10**9 bytes."""
    options: str = _TEXT_OPTIONS
    """Further arguments of launch/train.py."""
    planned_as: str = ""
    """How the planned run differs from the recipe, or its figures from those of a run; empty if they do not."""
    reads_folder: bool = False
    """Whether the model is downloaded to a folder first, for a host that cannot load it whole."""

    @property
    def anchor(self) -> str:
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")

    @property
    def text(self) -> str:
        return (CONFIGS / f"{self.file}.json").read_text(encoding="utf-8")

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def batch(self) -> int:
        return int(self.config["train_micro_batch_size_per_gpu"])

    @property
    def stream(self) -> dict[str, Any]:
        section: dict[str, Any] = with_section_on_top(self.config).get("ds_zo", {}).get("stream", {})
        return {key: value for key, value in section.items() if value is not None}

    @property
    def offload(self) -> bool | None:
        """Whether blocks stream; None for a stock optimizer, whose placement its planner's name says."""
        streams = "offload_param" in self.config["zero_optimization"]
        return streams if backend_of(self.config) is not None else None

    @property
    def params(self) -> dict[str, Any]:
        """The optimizer's parameters that change a plan."""
        params = self.config["optimizer"]["params"]
        return {key: params[key] for key in ("subspace_dim", "projector", "edge") if key in params}

    @property
    def measured(self) -> tuple[Measured, ...]:
        """The row that `recipe_speed` has of this JSON, if any, and the rows of other suites."""
        return tuple(filter(None, (_own_row(self),))) + self.others

    @property
    def folder(self) -> str:
        """The folder that the model is downloaded to."""
        return self.model.rpartition("/")[2]

    @property
    def train_command(self) -> str:
        words = f"deepspeed launch/train.py --deepspeed ds_configs/{self.file}.json"
        model = f"./{self.folder}" if self.reads_folder else self.model
        return f"{words} --model {model} --max-length {self.length} {self.options}"

    @property
    def train_commands(self) -> list[str]:
        """Those of a user who has the data, but not the model."""
        if not self.reads_folder:
            return [self.train_command]
        return [f'hf download {self.model} --exclude "*/*" --local-dir {self.folder}', self.train_command]

    @property
    def plan_command(self) -> str:
        words = ["ds-zo", "plan", "--model", f"random:{self.shape}", "--backend", self.contender]
        words += ["--batch", str(self.batch), "--seq", str(self.length)]
        words += ["--device-memory-gb", f"{self.device_gb:g}", "--host-memory-gb", f"{self.host_gb:g}"]
        if self.offload is not None:
            words.append("--offload" if self.offload else "--no-offload")
        for option, value in (("--stream", self.stream), ("--params", self.params)):
            if value:
                words += [option, json.dumps(value)]
        return shlex.join(words)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the run that measured this JSON; the plan is made for them too."""
        found = _own_row(self)
        return {} if found is None else found.row["env"]

    def plan(self) -> tuple[Plan, Estimate]:
        return _plan(self)


@cache
def _own_row(recipe: Recipe) -> Measured | None:
    """The last row of `recipe_speed` with the JSON as it is now."""
    rows = read_objects(RESULTS / OWN_ROWS) if (RESULTS / OWN_ROWS).exists() else []
    mine = [row for row in rows if row["case"] == recipe.file and row["status"] == "ok"]
    written = with_section_on_top(recipe.config)
    same = [row for row in mine if with_section_on_top(row["params"]["config"]) == written]
    return Measured(OWN_ROWS, same[-1]["run_id"], recipe.file) if same else None


@cache
def _plan(recipe: Recipe) -> tuple[Plan, Estimate]:
    found = plan(
        f"random:{recipe.shape}",
        device_memory_gb=recipe.device_gb,
        host_memory_gb=recipe.host_gb,
        batch=recipe.batch,
        seq=recipe.length,
        backends=[recipe.contender],
        stream=recipe.stream,
        params=recipe.params,
        offload=recipe.offload,
        native_pins=recipe.env == EXACT_PINNING,
    )
    return found, found[recipe.contender]


@cache
def _data() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_suffix(".yaml"))


RECIPES = tuple(
    Recipe(**{**recipe, "others": tuple(Measured(**found) for found in recipe.get("others", ()))})
    for recipe in _data()["recipes"]
)


def _figures(gpu_gb: float, host_gb: float, tokens_per_s: float) -> list[str]:
    return [f"{gpu_gb:.1f} GB", f"{host_gb:.1f} GB", f"{tokens_per_s:,.0f}"]


def _shown(env: dict[str, str]) -> list[str]:
    return [f"`{name}={value}`" for name, value in env.items()]


def _measured_cells(found: Measured) -> list[str]:
    figures = found.figures
    tokens_per_s = figures.get("tokens_per_s_mean") or figures["tokens_per_s"]  # as on the other pages
    return _figures(figures["peak_gb"], figures["host_peak_gb"], tokens_per_s)


def _planned_cells(recipe: Recipe) -> list[str]:
    """Tokens/s in two digits: a plan is not more precise, and versions of transformers differ in the third."""
    found, estimate = recipe.plan()
    tokens_per_s = float(f"{found.tokens_per_s(estimate):.2g}")
    return _figures(estimate.device_nbytes / 1e9, estimate.host_peak_nbytes / 1e9, tokens_per_s)


def _continued(command: str) -> str:
    """The command on lines of at most `WIDTH` characters, broken before options."""
    first, *options = command.split(" --")
    lines = [first]
    for option in options:
        if len(lines[-1]) + len(option) + len(" -- \\") <= WIDTH:
            lines[-1] += f" --{option}"
        else:
            lines.append(f"    --{option}")
    return " \\\n".join(lines)


def recipe_block(recipe: Recipe) -> str:
    """The JSON, the commands and the figures of one recipe."""
    rows = []
    for found in recipe.measured:
        place = f"[{found.file}](../benchmarks/results/{found.file}), run {found.run_id}, case `{found.case}`"
        about = [found.differs or "this JSON"]
        if found.file == OWN_ROWS:
            about += _shown(found.row["env"])
        about += [found.without_effect] if found.without_effect else []
        about += [f"{found.tokens} tokens"] if found.tokens else []
        rows.append(["measured", *_measured_cells(found), ", ".join(about), place])
    planned = ", ".join([recipe.planned_as or "this JSON", *_shown(recipe.env)])
    is_measured = any(not found.differs for found in recipe.measured)
    rows.append(
        ["planned" if is_measured else "planned, not measured", *_planned_cells(recipe), planned, "`ds-zo plan`"]
    )
    return "\n".join(
        [
            f"[`ds_configs/{recipe.file}.json`](../ds_configs/{recipe.file}.json):",
            "",
            "```json",
            recipe.text.rstrip(),
            "```",
            "",
            "```bash",
            _continued(recipe.plan_command),
            "```",
            "",
            "<!-- needs: a GPU and the Hub -->",
            "```bash",
            *map(_continued, recipe.train_commands),
            "```",
            "",
            f"{recipe.batch} x {recipe.length} tokens a step:",
            "",
            table(["", "GPU memory", "host memory", "tokens/s", "of", "row"], rows),
        ]
    )


def overview() -> str:
    """One line a recipe: the row of exactly its JSON, or else its plan."""
    cells = []
    for recipe in RECIPES:
        exact = next((found for found in recipe.measured if not found.differs), None)
        figures = _measured_cells(exact) if exact else _planned_cells(recipe)
        link = f"[{recipe.title}](#{recipe.anchor})"
        rate = f"{recipe.config['optimizer']['params']['lr']:g}"
        cells.append(
            [link, recipe.shape, f"{recipe.device_gb:g} GB", *figures, "measured" if exact else "planned", rate]
        )
    return table(["recipe", "model", "card", "GPU memory", "host memory", "tokens/s", "", "learning rate"], cells)


def _rows(file: str) -> list[Row]:
    return read_objects(RESULTS / file)


def rates() -> str:
    """Learning rates by method: chosen on a small model, and those of ds_configs/ for large ones."""
    rows = [row for row in _rows("h200_accuracy.jsonl") if row["status"] == "ok"]
    chosen = best_rates(rows)
    cells = []
    for method, name in _data()["small model methods"].items():
        mine = [row for row in rows if row["method"] == method]
        [model] = {row["model"] for row in mine}
        tried = ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in mine}))
        basis = f"best on dev of SST-2 and RTE of {tried} (`h200_accuracy.jsonl`)"
        cells.append([name, model, f"{chosen[method]:g}", basis])
    own_names = _data()["methods at the rate of AdamW"]
    used = [row for row in _rows("h200_lsp_learned.jsonl") if row["method"] in own_names]
    for method, model in sorted({(row["method"], row["model"]) for row in used}):
        mine = [row for row in used if (row["method"], row["model"]) == (method, model) and row["task"] == "alpaca"]
        used_rates = sorted({row["lr"] for row in mine})
        tried = ", ".join(f"{rate:g}" for rate in used_rates)
        basis = "the only one tried on Alpaca" if len(used_rates) == 1 else f"best on dev of Alpaca of {tried}"
        best = min(mine, key=lambda row: row["dev"])  # perplexity
        cells.append([own_names[method], model, f"{best['lr']:g}", f"{basis} (`h200_lsp_learned.jsonl`)"])
    for name, model, file, source in _data()["large model rates"]:
        config = json.loads((CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
        rate = config["optimizer"]["params"]["lr"]
        cells.append([name, model, f"{rate:g}", f"`{file}.json`: {source}; not tuned here"])
    return table(["method", "model", "learning rate", "where it comes from"], cells)


@lru_cache(maxsize=1)
def blocks() -> dict[str, str]:
    """The text of every block of the page, by the block's name."""
    whole: dict[str, Callable[[], str]] = {"overview": overview, "rates": rates}
    return {
        **{name: make() for name, make in whole.items()},
        **{recipe.file: recipe_block(recipe) for recipe in RECIPES},
    }
