"""ZO beside in-memory MeZO: one case a process, one JSON row a case; tables and pictures from the rows alone.

python -m benchmarks.zo_speed preset targets --out rows.jsonl
python -m benchmarks.zo_speed preset paper --out rows.jsonl --only '^t1' --total-s 300 --resume
python -m benchmarks.zo_speed preset all --out rows.jsonl --skip 'split|half' --total-s 600
python -m benchmarks.zo_speed case --shape opt-6.7b --method zo --stream '{"master": "wire"}'
python -m benchmarks.zo_speed report rows.jsonl > report.md
python -m benchmarks.zo_speed timeline --shape opt-6.7b --layers 8 --out step.json
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import presets
from ds_zo.bench.runner import WARM, Case, prepare_to_fork, read_rows, run_cases, single_process
from ds_zo.records.rows import Row

_WARM = (*WARM, "benchmarks.zo_case")


def environment() -> Row:
    """The machine and the software, flat: what a row of one process says about them."""
    from ds_zo.records import environment as machine

    found = machine.environment()
    return {"gpu": found["gpu"], "cpus": found["cpus"], "commit": found["commit"], **found["versions"]}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if argv is None and args.forks:
        prepare_to_fork()
    args.run(args)


def _parser() -> argparse.ArgumentParser:
    from benchmarks.zo_case import METHODS
    from benchmarks.zo_presets import PRESETS
    from ds_zo.planner.models import DTYPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(forks=False)
    commands = parser.add_subparsers(dest="command", required=True)

    preset = commands.add_parser("preset", help="a preset's cases, one process each")
    preset.add_argument("preset", choices=sorted(PRESETS))
    presets.add_run_arguments(preset)
    preset.add_argument("--host-gb", type=float, help="paper: host memory for models too large for any host (Table 10)")
    preset.set_defaults(run=_preset, forks=True)

    case = commands.add_parser("case", help="one case in this process; prints its row")
    case.add_argument("--shape", required=True)
    case.add_argument("--method", choices=METHODS, required=True)
    case.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    case.add_argument("--batch", type=int, default=1)
    case.add_argument("--length", type=int, default=2048)
    case.add_argument("--layers", type=int, help="cut the model's depth")
    case.add_argument("--stream", default={}, type=json.loads, help="the ds_zo.stream section, as JSON")
    case.add_argument("--params", default={}, type=json.loads, help="more optimizer.params, as JSON")
    case.add_argument("--resident", action="store_true", help="no offload_param: all blocks stay on the GPU")
    case.add_argument("--cap-gb", type=float, help="refuse device memory beyond this many GB")
    case.add_argument("--lr", type=float, default=1e-7)
    case.add_argument("--warmup", type=int, default=4)
    case.add_argument("--steps", type=int, default=12)
    case.add_argument("--device", default="cuda")
    case.set_defaults(run=_case)

    report = commands.add_parser("report", help="Markdown tables from rows")
    report.add_argument("rows", type=Path, nargs="+")
    report.add_argument("--run-id", help="only rows of this run; else each table takes the newest row of a case")
    report.set_defaults(run=_report)

    timeline = commands.add_parser("timeline", help="what the streams did in one streamed step")
    timeline.add_argument("--out", type=Path, required=True, help="a JSON file")
    timeline.add_argument("--shape", default="opt-6.7b")
    timeline.add_argument("--layers", type=int, default=8)
    timeline.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    timeline.add_argument("--stream", default={"master": "wire", "resident_blocks": 0}, type=json.loads)
    timeline.set_defaults(run=_timeline, forks=True)
    return parser


def _preset(args: argparse.Namespace) -> None:
    from benchmarks.zo_presets import CASE, PRESETS, tiny

    cut = args.host_gb is not None and args.preset in ("paper", "all")
    cases = presets.chosen(PRESETS[args.preset](**({"host_gb": args.host_gb} if cut else {})), args)
    if args.device == "cpu":
        cases = [case for case in cases if case.target == CASE]
    if args.tiny:
        cases = [tiny(case, device=args.device) for case in cases]
    if args.list:
        print(presets.listed(cases))
        return
    run_preset(cases, args)


def run_preset(cases: Sequence[Case], args: argparse.Namespace) -> list[Row]:
    """The cases in order, under one run id, a line printed for each as it ends, and how they compare when all have or
    the run is stopped. One that the time left no longer holds is passed over for later ones that it does."""
    from benchmarks.report import report

    seen: list[Row] = []

    def show(row: Row) -> None:
        seen.append(row)
        print(json.dumps(_brief(row)), flush=True)

    try:
        results = presets.run_chosen(cases, args, warm=_WARM, on_row=show)
    except SystemExit:  # told to end: every case has its row
        print(report(seen), flush=True)
        raise
    print(report(results), flush=True)
    return results


def _brief(row: Row) -> Row:
    keys = ("case", "status", "tokens_per_s", "step_s", "peak_gb", "host_peak_gb", "loss", "load_s", "wall_s", "error")
    brief = {key: row[key] for key in keys if row.get(key) is not None}
    return {key: round(value, 4) if isinstance(value, float) else str(value)[:300] for key, value in brief.items()}


def _case(args: argparse.Namespace) -> None:
    from benchmarks.zo_case import run_case

    os.environ.update(single_process() | os.environ)
    params = {key: value for key, value in vars(args).items() if key not in ("command", "run", "forks")}
    print("ROW " + json.dumps(run_case(**params) | environment()), flush=True)


def _rows(args: argparse.Namespace) -> list[Row]:
    return [row for path in args.rows for row in read_rows(path) if args.run_id in (None, row.get("run_id"))]


def _report(args: argparse.Namespace) -> None:
    from benchmarks.report import report

    print(report(_rows(args)))


def _timeline(args: argparse.Namespace) -> None:
    params = {"shape": args.shape, "layers": args.layers, "dtype": args.dtype, "stream": args.stream}
    case = Case("timeline", "benchmarks.timeline:record", params, timeout_s=120)
    (row,) = run_cases([case], out=None, warm=_WARM)
    if row["status"] != "ok":
        raise SystemExit(f"no timeline: {row.get('error')}\n{row.get('last_words')}")
    args.out.write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main()
