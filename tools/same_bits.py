"""Trains two checkouts on small runs of every backend, and compares losses and weights bit for bit.

git archive OLD | tar -x -C runs/old
python tools/same_bits.py --old runs/old                    # on the CPU: two minutes on two cores
python tools/same_bits.py --old runs/old --device cuda      # with deterministic kernels
python tools/same_bits.py --old runs/old --only 'lomo|lsp'  # some of the runs

The runs are those of tests/helpers/recorded_runs.py. The command fails if a run differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
RUNS = REPO / "tests" / "helpers" / "recorded_runs.py"
Rows = dict[tuple[str, int], dict[str, Any]]


def record(tree: Path, arguments: list[str]) -> Rows:
    """The rows of all runs with the package of `tree`, by run and rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.jsonl")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        subprocess.run([sys.executable, str(RUNS), "--out", str(out), *arguments], env=env, cwd=folder, check=True)
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return {(row.pop("run"), row.pop("rank")): row for row in rows}


def differences(old: Rows, new: Rows) -> list[str]:
    """A line for each run that differs between the checkouts, that failed, or that another one resumes otherwise."""
    lines = [f"{name} (rank {rank}): in one checkout only" for name, rank in sorted(old.keys() ^ new.keys())]
    for key in sorted(old.keys() & new.keys()):
        name, rank = key
        sides = {"old": old[key], "new": new[key]}
        failed = [f"{side} failed: {row['error']}" for side, row in sides.items() if "error" in row]
        unequal = [part for part in old[key] if old[key][part] != new[key].get(part)]
        if failed or unequal:
            lines.append(f"{name} (rank {rank}): {'; '.join(failed) or 'other ' + ', '.join(unequal)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a folder with the other checkout")
    parser.add_argument("--new", type=Path, default=REPO, help="default: the checkout of this script")
    parser.add_argument("--only", default="", help="runs whose names match this regular expression")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    arguments = ["--only", args.only, "--device", args.device]
    old, new = (record(tree.resolve(), arguments) for tree in (args.old, args.new))
    lines = differences(old, new)
    print("\n".join([*lines, f"{len(new)} ranks of runs compared, {len(lines)} differ"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
