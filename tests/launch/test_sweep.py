"""launch/sweep.py on the real launch/train.py; and ZO taking the steps of its MeZO reference."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ds_zo.bench.sweep import read_rows

SCRIPT = Path(__file__).resolve().parent.parent.parent / "launch" / "sweep.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launch_sweep", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_zo_takes_the_references_steps_at_equal_z(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "rows.jsonl"
    grid = ["--grid", "smoke", "--methods", "mezo,zo", "--lrs", "1e-4", "--steps", "6", "--results", str(results)]
    command = [sys.executable, str(SCRIPT), *grid, "--start", "fork", "--", "--num-eval", "4"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert first.returncode == 0, first.stderr[-3000:]
    rows = {row["method"]: row for row in read_rows(results)}
    assert {row["status"] for row in rows.values()} == {"ok"}, rows
    losses = {name: [point["loss"] for point in row["curve"] if point["loss"]] for name, row in rows.items()}
    assert losses["zo"] == pytest.approx(losses["mezo"], rel=1e-5)
    assert rows["zo"]["after_values"] == rows["mezo"]["after_values"] and rows["zo"]["steps"] == 6
    script.main([*grid, "--dry-run"])
    said = first.stdout + capsys.readouterr().out
    assert "2 cases, 2 to run now" in said and "2 cases, 0 to run now" in said


def test_tuning_is_the_part_of_the_grid_that_chooses_rates(
    tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--grid", "accuracy", "--tune", "--dry-run", "--results", str(tmp_path / "rows.jsonl")])
    said = capsys.readouterr().out.splitlines()[1:]
    assert {line.split("_")[0] for line in said} == {"adamw", "lora", "zo", "lomo", "adalomo", "lsp"}
    assert {line.split("_")[1] for line in said} == {"sst2", "rte"}
    with pytest.raises(SystemExit, match=r"grid smoke has the methods .*; got nope \(--methods\)"):
        script.main(["--grid", "smoke", "--methods", "nope", "--results", "x"])
