"""Speed and memory of two checkouts, in turns on one machine.

git archive OLD | tar -x -C runs/old
python -m benchmarks.side_by_side --old runs/old --out runs/side_by_side.jsonl
python -m benchmarks.side_by_side --old runs/old --only 'zo|lomo' --tiny --device cpu

Of each case both checkouts load their model at once. Then they take turns: only one of them has work at a time, so that
a change of the machine's speed reaches both. A round is one turn of each. Every turn writes a row, with its `side`,
`old` or `new`, and its `round`. The table gives the median over all rounds and the ratio new / old. The cases are in
`side_by_side.yaml`; the same code, `checkout_worker`, trains them with either checkout's package.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.blocks import read_yaml
from benchmarks.checkout_worker import TrainedCase
from ds_zo.bench.runner import is_named_like, new_run_id
from ds_zo.records.rows import Row, append_row, table

_REPO = Path(__file__).parents[1]
_CASES = Path(__file__).with_suffix(".yaml")
_WORKER = """
import sys
sys.path.insert(0, {tree!r})
import ds_zo
sys.path.insert(0, {repo!r})
from benchmarks.checkout_worker import main
main()
"""
"""What the process of a checkout runs: that checkout's package, and this one's worker."""
_LIMIT_S = 300
"""Longest wait for a checkout's answer."""
_START_S, _FIRST_STEP_S = 20.0, 2.5
"""Seconds that imports and a first step take."""
_SHOWN = (
    "case",
    "side",
    "round",
    "status",
    "step_s",
    "step_s_min",
    "step_s_max",
    "loss",
    "peak_gb",
    "host_peak_gb",
    "error",
)
"""Keys of a row that are printed."""


class Checkout:
    """The process of one checkout."""

    def __init__(self, side: str, tree: Path) -> None:
        if not (tree / "ds_zo" / "__init__.py").exists():
            raise SystemExit(f"a checkout has a folder ds_zo, got {tree} (--{side})")
        self._name = f"the {side} checkout, {tree},"
        code = _WORKER.format(tree=str(tree), repo=str(_REPO))
        env = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # the fork of a process may use CUDA
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", code], cwd=tree, env=env, **pipes)

    def send(self, words: dict[str, Any] | None) -> None:
        """None: the end of a case."""
        assert self._process.stdin is not None
        self._process.stdin.write(("" if words is None else json.dumps(words)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Row:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _LIMIT_S)[0]:
            self._process.kill()
            raise SystemExit(f"{self._name} gave no answer within {_LIMIT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}")
        row: Row = json.loads(line)
        return row

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def cases_of(*, device: str, tiny: bool) -> list[TrainedCase]:
    """All cases. `tiny` rehearses them on toy models."""
    cases = [TrainedCase(name, device=device, **own) for name, own in read_yaml(_CASES).items()]
    return [_rehearsed(case) for case in cases] if tiny else cases


def _rehearsed(case: TrainedCase) -> TrainedCase:
    config = json.loads(json.dumps(case.config))
    config.get("ds_zo", {}).get("stream", {}).pop("device_memory_gb", None)
    if "subspace_dim" in config["optimizer"]["params"]:
        config["optimizer"]["params"]["subspace_dim"] = 8
    shape = f"{case.shape.partition('-')[0]}-tiny"
    few: dict[str, Any] = {"length": 16, "layers": 4, "warmup": 1, "steps": 2, "load_s": 0.0, "step_s": 0.0}
    return replace(case, shape=shape, config=config, cap_gb=None, **few)


def expected_s(cases: Sequence[TrainedCase], rounds: int) -> float:
    """Seconds that all cases take on an H200."""
    steps = sum(2 * case.step_s * (case.warmup + rounds * (case.steps + 1)) for case in cases)
    return _START_S + steps + sum(case.load_s + 2 * _FIRST_STEP_S for case in cases)


def rows_of(case: TrainedCase, checkouts: dict[str, Checkout], *, rounds: int) -> Iterator[Row]:
    """A row of each turn. A checkout whose turn fails has no further turns."""
    for checkout in checkouts.values():
        checkout.send(asdict(case))
    running = {}
    for side, checkout in checkouts.items():
        loaded = checkout.answer()
        if loaded["status"] == "ok":
            running[side] = checkout
        else:
            yield {"side": side, "round": 0, **loaded}
    for number in range(rounds):
        for side in sorted(running, reverse=number % 2 == 0):  # old first in the first round
            running[side].send({"warmup": 1 if number else case.warmup, "steps": case.steps})
            row = running[side].answer()
            yield {"side": side, "round": number, **row}
            if row["status"] != "ok":
                del running[side]
    for checkout in running.values():
        checkout.send(None)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a folder with the other checkout")
    parser.add_argument("--new", type=Path, default=_REPO, help="default: the checkout of this command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="cases by a glob, a part of the name, or a regular expression")
    parser.add_argument("--out", type=Path, help="rows are appended here, each as it comes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on toy models")
    args = parser.parse_args(argv)
    cases = cases_of(device=args.device, tiny=args.tiny)
    cases = [case for case in cases if args.only is None or is_named_like(case.name, args.only)]
    expected = "a rehearsal" if args.tiny else f"about {expected_s(cases, args.rounds):.0f} s on an H200"
    print(f"{len(cases)} cases, {args.rounds} rounds: {expected}", flush=True)
    checkouts = {side: Checkout(side, tree.resolve()) for side, tree in (("old", args.old), ("new", args.new))}
    rows: list[Row] = []
    try:
        about = {side: {"run_id": new_run_id(), **checkout.answer()} for side, checkout in checkouts.items()}
        for case in cases:
            for row in rows_of(case, checkouts, rounds=args.rounds):
                rows.append({**about[row["side"]], "case": case.name, "params": asdict(case), **row})
                if args.out is not None:
                    append_row(args.out, rows[-1])
                print(json.dumps({key: rows[-1][key] for key in _SHOWN if key in rows[-1]}), flush=True)
    finally:
        for checkout in checkouts.values():
            checkout.close()
    print(summary(rows))


if __name__ == "__main__":
    main()
