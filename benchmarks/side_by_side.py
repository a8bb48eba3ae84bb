"""Speed and memory of two checkouts, in turns on one machine.

git archive OLD | tar -x -C runs/old
python -m benchmarks.side_by_side --old runs/old --rounds 3 --out runs/side_by_side.jsonl
python -m benchmarks.side_by_side --old runs/old --only 'zo|lomo' --tiny --device cpu

Each checkout has one warm process, which forks a child for each case. Both checkouts run a case before the next case
begins, so that a change of the machine's speed reaches both. The table gives the median over all rounds and the ratio
new / old. Rows have the `side`, `old` or `new`, and the `round`. The cases are the suite `side-by-side`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed import cases_of
from ds_zo.bench.runner import is_named_like, prepare_to_fork
from ds_zo.records.rows import Row, append_row, table

_WORKER = """
import json, sys
from ds_zo.bench.runner import WARM, Case, import_warm, run_cases
warm = (*WARM, "benchmarks.zo_case", "benchmarks.lomo_cases", "benchmarks.lsp_cases", "benchmarks.adapter_speed")
import_warm(warm)
rows = sys.stdout
sys.stdout = sys.stderr
for line in sys.stdin:
    case = json.loads(line)
    device = case["params"]["device"]
    print(json.dumps(run_cases([Case(**case)], out=None, warm=warm, device=device)[0]), file=rows, flush=True)
"""
"""What the process of a checkout runs: a case for each line of its input, a row for each case."""


class _Checkout:
    """The warm process of one checkout."""

    def __init__(self, tree: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER], cwd=tree, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, case: dict[str, Any]) -> Row:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a checkout ended with status {self._process.wait()}")
        row: Row = json.loads(line)
        return row

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def summary(rows: Sequence[Row]) -> str:
    """A table with the medians of both sides, the range of rounds, and the ratios new / old."""
    lines = []
    for name in dict.fromkeys(row["case"] for row in rows):
        found = {side: [row for row in rows if row["case"] == name and row["side"] == side] for side in ("old", "new")}
        bad = [f"{side}: {row['status']}" for side, runs in found.items() for row in runs if row["status"] != "ok"]
        if bad or not all(found.values()):
            lines.append([name, *["-"] * 4, "; ".join(bad) or "not run on both sides"])
            continue
        seconds = {side: [1e3 * row["step_s"] for row in runs] for side, runs in found.items()}
        peaks = {side: max(row.get("peak_gb") or 0.0 for row in runs) for side, runs in found.items()}
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        shown = [f"{medians[side]:.1f} ({min(v):.1f} to {max(v):.1f})" for side, v in seconds.items()]
        ratio = f"{peaks['new'] / peaks['old']:.3f}" if peaks["old"] else "-"
        lines.append([name, *shown, f"{medians['new'] / medians['old']:.3f}", ratio, ""])
    return table(["case", "old, ms", "new, ms", "time", "memory", "note"], lines)


def main(argv: Sequence[str] | None = None) -> None:
    if argv is None:
        prepare_to_fork()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a folder with the other checkout")
    parser.add_argument("--new", type=Path, default=Path.cwd(), help="default: this folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="cases by a glob, a part of the name, or a regular expression")
    parser.add_argument("--out", type=Path, help="rows are appended here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on toy models")
    args = parser.parse_args(argv)
    cases = cases_of("side-by-side", device=args.device, tiny=args.tiny)
    cases = [case for case in cases if args.only is None or is_named_like(case.name, args.only)]
    sides = {side: _Checkout(tree.resolve()) for side, tree in (("old", args.old), ("new", args.new))}
    rows: list[Row] = []
    try:
        for number in range(args.rounds):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            for case in cases:
                given = {"name": case.name, "target": case.target, "params": case.params, "timeout_s": 240}
                for side in order:
                    found = sides[side].run(given)
                    rows.append({**found, "side": side, "round": number})
                    if args.out is not None:
                        append_row(args.out, rows[-1])
            print(summary(rows), flush=True)
    finally:
        for process in sides.values():
            process.close()


if __name__ == "__main__":
    main()
