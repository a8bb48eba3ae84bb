"""benchmarks/results/README.md names every file of rows, and commands that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from benchmarks.grids import read_grid

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
INDEX = (RESULTS / "README.md").read_text(encoding="utf-8")


def test_every_file_is_in_the_index_and_every_name_is_a_file() -> None:
    files = {path.name for path in RESULTS.iterdir() if path.suffix in (".jsonl", ".png")}
    named = set(re.findall(r"\b(?:h200|cpu|gpu)_\w+\.(?:jsonl|png)", INDEX))
    assert files - named == set(), "not in the index"
    awaited = set(re.findall(r"`(\w+\.jsonl)` \(no rows yet\)", INDEX))
    assert named - files == awaited, "not in the folder, or marked though it is"


def test_its_commands_name_modules_and_grids_that_exist() -> None:
    modules = set(re.findall(r"python -m (benchmarks\.\w+)", INDEX))
    assert modules and all(importlib.util.find_spec(module) for module in modules)
    for grid in re.findall(r"--grid ([\w-]+)", INDEX):
        assert read_grid(grid)
