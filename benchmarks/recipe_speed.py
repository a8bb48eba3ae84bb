"""Memory and speed of the recipes in docs/recipes.md: each JSON of ds_configs/ as it is, with random weights.

python -m benchmarks.speed recipes --out benchmarks/results/h200_recipes.jsonl --only 'adalomo|lora' --total-s 300

The GPU's memory is limited to that of the recipe's card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from benchmarks.recipes import RECIPES, Recipe
from ds_zo.bench.runner import Case
from ds_zo.records.rows import Row

CONTENDERS = {"zero-offload": "zero2-offload", "zero-3": "zero3-offload-param"}
"""Names of `ds_zo.bench.contenders` where the planner has others."""
_MAX_S = 8.0
_TINY_SHAPES = {"llama": "llama-tiny", "opt": "opt-tiny"}


@dataclass(frozen=True)
class _Limit:
    """How long one recipe may take, and its host memory.

    The memory is not planned here: a plan would initialise CUDA in this process, and its forks could not use CUDA."""

    expected_s: float
    """Seconds on an H200, by rows of similar cases."""
    host_gb: float
    """As planned, or more where a run needs more than the plan."""
    exact_pins: bool = False
    """Whether DeepSpeed's own pinned memory is used, which is not rounded up to powers of two."""


LIMITS = {
    "lora_zo_7b_8gb": _Limit(25, 32),
    "adalomo_7b_24gb": _Limit(25, 16),
    "zo_70b_24gb_fp8": _Limit(70, 71),
    "zo_70b_24gb_bf12": _Limit(100, 106),
    "zero_offload": _Limit(90, 125, exact_pins=True),
    "zo_13b_24gb": _Limit(25, 52),
}
"""Recipes that have no other row of their JSON with these sequences, the fastest first."""


def cases_of(*, device: str = "cuda", tiny: bool = False) -> list[Case]:
    """One case for each recipe in LIMITS. `tiny` rehearses them on a model of two layers."""
    from ds_zo.bench.contenders import EXACT_PINNING

    by_file = {recipe.file: recipe for recipe in RECIPES}
    cases = []
    for file, limit in LIMITS.items():
        recipe = by_file[file]
        cases.append(
            Case(
                file,
                "benchmarks.recipe_speed:measure",
                _params(recipe, device=device, tiny=tiny),
                timeout_s=300 if tiny else 1.6 * limit.expected_s,
                env=EXACT_PINNING if limit.exact_pins and device == "cuda" else {},
                planned_host_gb=None if tiny else limit.host_gb,
                expected_s=limit.expected_s,
            )
        )
    return cases


def _params(recipe: Recipe, *, device: str, tiny: bool) -> Row:
    words = recipe.options.split()
    shape = _TINY_SHAPES[recipe.shape.partition("-")[0]] if tiny else recipe.shape
    spec: dict[str, Any] = {
        "model": f"random:{shape}",
        "batch": recipe.batch,
        "length": 16 if tiny else recipe.length,
        "steps": 2 if tiny else 6,
        "warmup": 2,
        "dtype": "bf16",
        "device": device,
        "device_memory_gb": recipe.device_gb if device == "cuda" else None,
        "checkpointing": "--gradient-checkpointing" in words,
        "profile": False,
        "max_s": _MAX_S,
    }
    lora_rank = int(words[words.index("--lora-rank") + 1]) if "--lora-rank" in words else None
    contender = CONTENDERS.get(recipe.contender, recipe.contender)
    return {
        "recipe": recipe.file,
        "contender": contender,
        "config": recipe.config,
        "spec": spec,
        "lora_rank": lora_rank,
    }


def measure(*, recipe: str, contender: str, config: Row, spec: Row, lora_rank: int | None) -> Row:
    """Trains with the JSON of a recipe. Runs in the case's own process."""
    from ds_zo.bench.entrant import run_contender

    def with_adapters(model: nn.Module) -> nn.Module:
        return _with_lora(model, rank=lora_rank) if lora_rank is not None else model

    row = run_contender(contender=contender, config=config, spec=spec, change_model=with_adapters)
    title = next(each.title for each in RECIPES if each.file == recipe)
    return row | {"title": title, "settings": f"ds_configs/{recipe}.json"}


def _with_lora(model: nn.Module, *, rank: int) -> nn.Module:
    """Adds the adapters that `ds-zo train --lora-rank` adds, to a base that is in host memory as it is there."""
    from peft import LoraConfig, get_peft_model

    from ds_zo.bench.shapes import materialise

    lora = LoraConfig(r=rank, lora_alpha=16.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base: Any = materialise(model, "cpu")
    return get_peft_model(base, lora)
