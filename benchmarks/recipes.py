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
from ds_zo.config import backend_of, with_section_on_top
from ds_zo.planner import Estimate, Plan, plan
from ds_zo.records.prose import WIDTH
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
    """How the planned run differs from the recipe; empty if it does not."""

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
    def train_command(self) -> str:
        words = f"deepspeed launch/train.py --deepspeed ds_configs/{self.file}.json"
        return f"{words} --model {self.model} --max-length {self.length} {self.options}"

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
    )
    return found, found[recipe.contender]


_LLAMA_7B = "compare/llama-7b/24gb/rows.jsonl"
_LLAMA_7B_WHOLE = "compare/llama-7b/uncapped/rows.jsonl"
_LLAMA_RUN = "20261115T212128Z"
_ZO_RUN = "20261115T145440Z"
RECIPES = (
    Recipe(
        "adalomo_7b_24gb",
        "7B and 8B, all weights, AdaLOMO",
        "meta-llama/Llama-3.1-8B",
        "llama-8b",
        1024,
        "adalomo",
        (
            Measured(
                "h200_lomo.jsonl",
                "20261115T093417Z",
                "speed/adalomo",
                "LLaMA-7B, weights on the GPU, gradient checkpointing",
            ),
        ),
    ),
    Recipe(
        "lomo_7b_24gb",
        "7B, all weights, LOMO",
        "huggyllama/llama-7b",
        "llama-7b",
        1024,
        "lomo",
        (
            Measured(_LLAMA_7B, _LLAMA_RUN, "lomo-streamed"),
            Measured(
                "h200_lomo.jsonl", "20261115T093718Z", "streamed/7b-6gb", "`device_memory_gb` 6, `resident_blocks` 0"
            ),
            Measured(
                "h200_lomo.jsonl",
                "20261115T093417Z",
                "speed/lomo_clipped",
                "`gradient_clipping` 1, weights on the GPU, gradient checkpointing",
            ),
        ),
    ),
    Recipe(
        "lsp_7b_24gb",
        "7B, all weights, LSP",
        "huggyllama/llama-7b",
        "llama-7b",
        1024,
        "lsp",
        (
            Measured("lean/held-7b-24gb/rows.jsonl", "20261118T195231Z", "lsp", "`gradient_clipping` 0"),
            Measured("h200_lsp.jsonl", "20261115T150212Z", "capped/7b/4/lsp-512", "`projector` random, `edge` lsp"),
            Measured(
                "h200_lsp.jsonl",
                "20261115T150212Z",
                "capped/7b/4/lsp-512-streamed",
                "`projector` random, `edge` lsp, with `offload_param` and `device_memory_gb` 8",
            ),
        ),
        options=f"{_TEXT_OPTIONS} --gradient-checkpointing",
    ),
    Recipe(
        "lomo_13b_24gb",
        "13B, all weights, LOMO",
        "huggyllama/llama-13b",
        "llama-13b",
        1024,
        "lomo",
        (Measured("h200_lomo.jsonl", "20261115T093749Z", "streamed/13b-24gb"),),
    ),
    Recipe(
        "lomo_30b_24gb",
        "30B, all weights, LOMO",
        "huggyllama/llama-30b",
        "llama-30b",
        1024,
        "lomo",
        (Measured("h200_lomo.jsonl", "20261115T131141Z", "streamed/30b-24gb"),),
        host_gb=96,
    ),
    Recipe(
        "zo_13b_24gb",
        "13B, all weights, ZO",
        "facebook/opt-13b",
        "opt-13b",
        128,
        "zo",
        (Measured("h200_zo_low_planes.jsonl", "20261116T073822Z", "zo", tokens="1 x 2048"),),
        options="--task sst2 --hub --steps 20000",
    ),
    Recipe(
        "zo_30b_24gb",
        "30B, all weights, ZO",
        "facebook/opt-30b",
        "opt-30b",
        128,
        "zo",
        (
            Measured("h200_zo_targets.jsonl", _ZO_RUN, "30b.capped", part="filled", tokens="1 x 2048"),
            Measured("h200_zo_targets.jsonl", _ZO_RUN, "30b.capped", "`resident_blocks` 0", tokens="1 x 2048"),
        ),
        host_gb=96,
        options="--task sst2 --hub --steps 20000",
    ),
    Recipe(
        "zo_70b_24gb_bf12",
        "70B, all weights, ZO with 12 bits a weight",
        "meta-llama/Llama-2-70b-hf",
        "llama-70b",
        128,
        "zo",
        host_gb=128,
        options="--task sst2 --hub --steps 20000",
    ),
    Recipe(
        "zo_70b_24gb_fp8",
        "70B, all weights, ZO with 8 bits a weight",
        "meta-llama/Llama-2-70b-hf",
        "llama-70b",
        128,
        "zo",
        (
            Measured(
                "h200_zo_targets.jsonl",
                _ZO_RUN,
                "66b.capped.fp8",
                "OPT-66B, `device_memory_gb` 24",
                part="filled",
                tokens="1 x 2048",
            ),
            Measured(
                "h200_zo_targets.jsonl", _ZO_RUN, "66b.capped.fp8", "OPT-66B, `resident_blocks` 0", tokens="1 x 2048"
            ),
        ),
        host_gb=96,
        options="--task sst2 --hub --steps 20000",
    ),
    Recipe(
        "lora_zo_7b_8gb",
        "7B, LoRA by ZO with a streamed base",
        "huggyllama/llama-7b",
        "llama-7b",
        256,
        "zo",
        device_gb=8,
        options="--task sst2 --hub --steps 20000 --lora-rank 8",
        planned_as="ZO of all weights: adapters are not in the plan",
    ),
    Recipe(
        "adapter_70b_16gb",
        "70B, LoRA by AdamW with a streamed NF4 base",
        "meta-llama/Llama-2-70b-hf",
        "llama-70b",
        1024,
        "adapter",
        (Measured("h200_adapter.jsonl", "20261117T050543Z", "70b/nf4-16gb", without_effect="`gradient_clipping` 1"),),
        device_gb=16,
        options=f"{_TEXT_OPTIONS} --lora-rank 16 --lora-targets all-linear",
    ),
    Recipe(
        "zero_offload",
        "Stock ZeRO-Offload",
        "huggyllama/llama-7b",
        "llama-7b",
        256,
        "zero-offload",
        (
            Measured(
                _LLAMA_7B_WHOLE,
                _LLAMA_RUN,
                "zero2-offload",
                "`gradient_clipping` 0, `overlap_comm`, exact pinning (`DS_PIN_MEMORY_BACKEND=native`)",
                tokens="4 x 1024",
            ),
        ),
        device_gb=48,
        host_gb=192,
        options=f"{_TEXT_OPTIONS} --gradient-checkpointing",
    ),
    Recipe(
        "zero3",
        "Stock ZeRO-3 with offloaded parameters",
        "huggyllama/llama-7b",
        "llama-7b",
        256,
        "zero-3",
        (
            Measured(
                "compare/llama-1.3b/24gb/rows.jsonl",
                "20261116T002503Z",
                "zero3-offload-param",
                "LLaMA-1.3B, `gradient_clipping` 0, larger buckets",
                tokens="4 x 1024",
            ),
        ),
        host_gb=192,
        options=f"{_TEXT_OPTIONS} --gradient-checkpointing",
    ),
)

_MEZO = "[MeZO's command for OPT-13B](https://github.com/princeton-nlp/MeZO/tree/main/large_models)"
_LOMO_ARGS = "[LOMO's settings for LLaMA-7B](https://github.com/OpenLMLab/LOMO/tree/main/lomo)"
_ADALOMO_ARGS = "[AdaLomo's script for LLaMA-7B](https://github.com/OpenLMLab/LOMO/tree/main/adalomo)"
_ALPACA = (
    "[Stanford Alpaca's settings for LLaMA-7B](https://github.com/tatsu-lab/stanford_alpaca#fine-tuning), batch 128"
)
SMALL_MODEL_METHODS = {
    "adamw": "AdamW",
    "lora": "LoRA",
    "lomo": "LOMO, clipped",
    "adalomo": "AdaLOMO",
    "zo": "ZO",
}
"""Methods of h200_accuracy.jsonl whose learning rate was chosen on a small model, with their names in the table."""
USED_METHODS = {"adamw": "AdamW", "lsp-512-dense": "LSP", "lsp-512-dense-random": "LSP, random projectors"}
"""Methods of h200_lsp_learned.jsonl, with their names in the table."""
LARGE_MODEL_RATES = (
    ("AdamW", "7B", "zero_offload", _ALPACA),
    ("LOMO, clipped", "7B", "lomo", _LOMO_ARGS),
    ("LOMO, not clipped", "7B and larger", "lomo_7b_24gb", "a third of the clipped one, without a source"),
    ("AdaLOMO", "7B", "adalomo_7b_24gb", _ADALOMO_ARGS),
    ("LSP", "7B", "lsp_7b_24gb", "AdamW's: its updates of a matrix are as large"),
    ("ZO", "up to 7B", "zo", f"ten times that of {_MEZO}"),
    ("ZO", "13B and larger", "zo_13b_24gb", _MEZO),
    ("ZO with LoRA", "7B and larger", "lora_zo_7b_8gb", f"{_MEZO} with LoRA"),
    ("LoRA by AdamW", "70B", "adapter_70b_16gb", "[QLoRA's settings for LLaMA-65B](https://arxiv.org/abs/2305.14314)"),
)
"""Method, model, the JSON in ds_configs/ with its learning rate for such a model, and where that rate comes from."""


def _figures(gpu_gb: float, host_gb: float, tokens_per_s: float) -> list[str]:
    return [f"{gpu_gb:.1f} GB", f"{host_gb:.1f} GB", f"{tokens_per_s:,.0f}"]


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
            about += [f"`{name}={value}`" for name, value in found.row["env"].items()]
        about += [found.without_effect] if found.without_effect else []
        about += [f"{found.tokens} tokens"] if found.tokens else []
        rows.append(["measured", *_measured_cells(found), ", ".join(about), place])
    planned = recipe.planned_as or "this JSON"
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
            _continued(recipe.train_command),
            "```",
            "",
            f"Learning rate to start from: {recipe.config['optimizer']['params']['lr']:g}. "
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
    for method, name in SMALL_MODEL_METHODS.items():
        mine = [row for row in rows if row["method"] == method]
        [model] = {row["model"] for row in mine}
        tried = ", ".join(f"{rate:g}" for rate in sorted({row["lr"] for row in mine}))
        basis = f"best on dev of SST-2 and RTE of {tried} (`h200_accuracy.jsonl`)"
        cells.append([name, model, f"{chosen[method]:g}", basis])
    used = [row for row in _rows("h200_lsp_learned.jsonl") if row["method"] in USED_METHODS]
    for method, model in sorted({(row["method"], row["model"]) for row in used}):
        mine = [row for row in used if (row["method"], row["model"]) == (method, model) and row["task"] == "alpaca"]
        used_rates = sorted({row["lr"] for row in mine})
        tried = ", ".join(f"{rate:g}" for rate in used_rates)
        basis = "the only one tried on Alpaca" if len(used_rates) == 1 else f"best on dev of Alpaca of {tried}"
        best = min(mine, key=lambda row: row["dev"])  # perplexity
        cells.append([USED_METHODS[method], model, f"{best['lr']:g}", f"{basis} (`h200_lsp_learned.jsonl`)"])
    for name, model, file, source in LARGE_MODEL_RATES:
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
