"""Memory and speed of training steps, random weights: the suites of `suites/` as rows.

python -m benchmarks.speed zo-targets --out rows.jsonl
python -m benchmarks.speed zo --out rows.jsonl --only '^t1' --skip 'split|half' --total-s 300 --resume
python -m benchmarks.speed lomo-speed --tiny --device cpu
python -m benchmarks.speed checkpoints --set folder=DIR --out rows.jsonl
python -m benchmarks.speed training_speed:measure --set shape=opt-6.7b --set method=zo --set 'stream={"master": "wire"}'
python -m benchmarks.speed --report rows.jsonl

The keys of a suite's file:

SUITE: a list of groups, and of names of other suites
with       what the cases of a group share
cases      by name: the parameters of `target`, most of them fields of `TrainingCase`, and limits
target     a module of benchmarks and its function; without it `training_speed:measure`
timeout_s  seconds after which a case is given up; without it 30 and three times `expected_s`
host_gb    host memory in GB that a case needs
expected_s seconds that a case is expected to take on an H200
tiny       parameters in a rehearsal, besides those of all cases; null: the case is not rehearsed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import recipe_speed
from benchmarks.blocks import read_yaml
from benchmarks.report import report
from ds_zo.bench.builds import Builds
from ds_zo.bench.runner import WARM, Case, is_named_like, prepare_to_fork, read_rows, run_cases
from ds_zo.planner.shapes import tiny_of
from ds_zo.records.rows import Row

_FOLDER = Path(__file__).with_name("suites")
_IN_CODE = {"recipes": recipe_speed.cases_of}
"""Suites whose parameters are made from other files."""
_TINY: dict[str, Any] = {"layers": 4, "batch": 2, "length": 16, "warmup": 1, "steps": 2, "cap_gb": None, "age": False}
"""What a rehearsal changes of each `TrainingCase`, besides its shape."""
_SHOWN = (
    *("case", "status", "tokens_per_s", "step_s", "peak_gb", "peak_reserved_gb", "host_peak_gb", "host_gb", "up_gbps"),
    *("link_busy", "loss", "finite", "load_s", "first_step_s", "wall_s", "error"),
)
"""Keys of a row that are printed when a case ends."""


@cache
def suites() -> dict[str, list[Any]]:
    """The groups of all suites in files, by name."""
    found: dict[str, list[Any]] = {}
    for file in sorted(_FOLDER.glob("*.yaml")):
        found |= read_yaml(file)
    return found


def cases_of(
    suite: str, *, device: str = "cuda", tiny: bool = False, given: Mapping[str, Any] | None = None
) -> list[Case]:
    """The cases of a suite. `tiny` rehearses them on toy models. `given` replaces parameters of all cases."""
    if suite in _IN_CODE:
        if given:
            raise SystemExit(
                f"suite {suite} takes its settings from ds_configs/, got {', '.join(given)}: leave out --set"
            )
        return _IN_CODE[suite](device=device, tiny=tiny)
    found = []
    for group in suites()[suite]:
        if isinstance(group, str):
            found += cases_of(group, device=device, tiny=tiny, given=given)
            continue
        for name, own in group["cases"].items():
            params = {**group.get("with", {}), **own}
            rehearsal = params.pop("tiny", {})
            if not tiny:
                found.append(_case(name, params, device=device, given=given or {}))
            elif rehearsal is not None:
                params = (_rehearsed(params) if "shape" in params else params) | rehearsal
                found.append(_case(name, params | {"host_gb": None}, device=device, given=given or {}))
    return found


def _case(name: str, params: dict[str, Any], *, device: str, given: Mapping[str, Any]) -> Case:
    target = params.pop("target", "training_speed:measure")
    host_gb, expected_s = params.pop("host_gb", None), params.pop("expected_s", 0.0)
    timeout_s = params.pop("timeout_s", 30 + 3 * expected_s)
    changed = {key: value for key, value in {"device": device, **given}.items() if "shape" in params or key in params}
    return Case(
        name,
        f"benchmarks.{target}",
        params | changed,
        timeout_s=timeout_s,
        planned_host_gb=host_gb,
        expected_s=expected_s,
    )


def _rehearsed(params: dict[str, Any]) -> dict[str, Any]:
    """The same kind of case on a model that a CPU trains at once."""
    small = {**params, **_TINY, "shape": tiny_of(params["shape"])}
    if "stream" in params:
        small["stream"] = {key: value for key, value in params["stream"].items() if key != "device_memory_gb"}
        small["stream"] |= {"resident_blocks": 1} if params["stream"].get("resident_blocks") else {}
    if "inputs" in params:
        small["inputs"] = [[2, 4], [1, 8]]
    if "then_batch" in params:
        small["then_batch"] = 1
    if params["method"] == "lsp":
        settings = params.get("params", {})
        small["params"] = {**settings, "fit_steps": 1} | ({"subspace_dim": 8} if "subspace_dim" in settings else {})
    return small


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join([*suites(), *_IN_CODE])
    parser.add_argument("suite", nargs="?", help=f"{names}; or MODULE:FUNCTION, one case of it with --set")
    parser.add_argument("--out", type=Path, help="rows are appended here as they come; without it they are only shown")
    parser.add_argument("--only", help="cases by a glob, a part of the name, or a regular expression")
    parser.add_argument("--skip", help="of these leave out, named likewise")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of all cases")
    parser.add_argument("--resume", action="store_true", help="go on with the last run in --out, keeping its rows")
    parser.add_argument("--total-s", type=float, help="end after this, starting no case that would not end before")
    parser.add_argument("--spawn", action="store_true", help="a fresh interpreter a case instead of a fork")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on toy models, also with --device cpu")
    parser.add_argument("--list", action="store_true", help="print the cases and their expected seconds instead")
    parser.add_argument("--report", type=Path, metavar="ROWS", help="print a file of rows as Markdown instead")
    args = parser.parse_args(argv)
    if args.report is not None:
        print(report(read_rows(args.report)))
        return
    if args.suite not in (*suites(), *_IN_CODE) and ":" not in str(args.suite):
        parser.error(f"a suite is one of {names}, or MODULE:FUNCTION, got {args.suite or 'none'}: choose one")
    if argv is None and not args.list:
        prepare_to_fork()
    cases = chosen(args)
    if args.list:
        lines = [f"{case.expected_s:6.0f}  {case.name}" for case in cases]  # 0: unknown
        print("\n".join([*lines, f"{sum(case.expected_s for case in cases):6.0f}  in all"]))
    else:
        run(cases, args)


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that a command line names."""
    given = dict(map(_setting, args.set))
    if ":" in args.suite:
        cases = [Case("case", f"benchmarks.{args.suite}", {"device": args.device, **given})]
    else:
        cases = cases_of(args.suite, device=args.device, tiny=args.tiny, given=given)
    found = [case for case in cases if args.only is None or is_named_like(case.name, args.only)]
    found = [case for case in found if args.skip is None or not is_named_like(case.name, args.skip)]
    if not found:
        sys.exit(f"no case is left of {', '.join(c.name for c in cases)} (--only {args.only}, --skip {args.skip})")
    return found


def _setting(text: str) -> tuple[str, Any]:
    """A key, and its value as JSON; what is no JSON is a word."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise SystemExit(f"a setting is KEY=VALUE, got {text!r} (--set)")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def run(cases: Sequence[Case], args: argparse.Namespace) -> list[Row]:
    """Runs the cases in order, and prints a line for each as it ends. Prints the report when all have, or at a stop."""
    Builds(wanted=args.device == "cuda" and any(case.env for case in cases)).wait()
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        brief = {key: row[key] for key in _SHOWN if row.get(key) is not None}
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in brief.items()}), flush=True)

    given = {name: getattr(args, name) for name in ("out", "resume", "device", "spawn", "total_s")}
    warm = dict.fromkeys([*WARM, *(case.target.partition(":")[0] for case in cases)])
    try:
        rows = run_cases(cases, **given, warm=tuple(warm), on_row=show)
    finally:
        print(report(rows), flush=True)
    return rows


if __name__ == "__main__":
    main()
