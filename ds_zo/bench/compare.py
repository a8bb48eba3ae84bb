"""Head to head: stock DeepSpeed and ours on one model, one machine, one run, as rows, a table and a page.

ds-zo bench --model random:llama-1.3b --batch 4 --seq 1024 --out results/llama-1.3b
ds-zo bench --model random:opt-13b --device-memory-gb none,24 --contenders zo,lomo-streamed --out results/opt-13b
ds-zo bench --model random:llama-1.3b --batch 32 --contenders lomo,zero2-offload --accumulate zero2-offload=4
ds-zo bench --model random:llama-1.3b --batch 32 --best-batch --device-memory-gb 24 --contenders lsp,zero2-offload
ds-zo bench --report-only --out results

Several caps have a folder each: OUT/uncapped, OUT/24gb.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ds_zo.bench.best_batch import run_best
from ds_zo.bench.builds import Builds
from ds_zo.bench.runner import (
    NOT_RUN,
    Case,
    import_warm,
    new_run_id,
    prepare_to_fork,
    read_rows,
    run_cases,
    run_to_resume,
)
from ds_zo.bench.table_cases import make_cases
from ds_zo.records.rows import Row

_LISTS = ("seconds", "warmup_seconds", "losses", "last_words", "versions", "params", "env", "link_gbps", "laps_s")
_OF_A_TABLE = "model batch length dtype device layers device_memory_gb checkpointing data seed".split()
"""Settings in `spec` that all rows of a table share."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--model",
        default="random:opt-125m",
        metavar="NAME",
        help="random:SHAPE (random weights, say random:opt-6.7b), a local folder or a Hub name (default: %(default)s)",
    )
    what.add_argument("--layers", type=int, metavar="N", help="cut a random model's depth")
    what.add_argument("--batch", type=int, default=1, help="sequences a step (default: %(default)s)")
    what.add_argument(
        "--seq", type=int, default=1024, metavar="LENGTH", help="tokens a sequence (default: %(default)s)"
    )
    what.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="default: %(default)s")
    what.add_argument("--data", type=Path, metavar="FILE", help="text for a model that is not random")
    what.add_argument(
        "--contenders", metavar="A,B", help="default: all; `ds-zo bench --list` says which there are and their settings"
    )
    what.add_argument("--lr", action="append", default=[], metavar="NAME=LR", help="a contender's learning rate")
    what.add_argument(
        "--accumulate",
        action="append",
        default=[],
        metavar="NAME=N",
        help="divide a contender's batch into N micro-batches, so that tokens a step stay equal",
    )
    what.add_argument(
        "--best-batch",
        action="store_true",
        help="divide each contender's batch into the micro-batches that give the most tokens/s, found by trials",
    )
    what.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    what.add_argument("--gradient-clipping", type=float, default=0.0, help="default: none (it costs LOMO a pass)")
    what.add_argument(
        "--device-memory-gb",
        type=_caps,
        metavar="GB[,GB]",
        default=[None],
        help="emulate smaller cards, on which allocations beyond this fail; none: the whole card",
    )
    what.add_argument(
        "--start-uncapped",
        action="store_true",
        help="stock DeepSpeed and peers: limit the memory of steps only, and start on the whole card",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--steps", type=int, default=8, help="timed steps (default: %(default)s)")
    how.add_argument("--warmup", type=int, default=3, help="untimed steps before them (default: %(default)s)")
    how.add_argument(
        "--max-s",
        type=float,
        default=4.0,
        help="seconds of timed steps: slower cases time fewer steps, at least two (default: %(default)s)",
    )
    how.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    how.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    how.add_argument("--timeout-s", type=float, default=240.0, help="limit of one case (default: %(default)s)")
    how.add_argument(
        "--min-free-host-gib",
        type=float,
        default=4.0,
        help="stop a case that leaves less host memory (default: %(default)s)",
    )
    how.add_argument("--total-s", type=float, help="end after this many seconds; --resume runs the rest")
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="list the cases with their planned memory and time, and end",
    )
    how.add_argument("--spawn", action="store_true", help="start each case in a fresh interpreter instead of a fork")
    how.add_argument("--no-profile", action="store_true", help="leave out bytes moved and exposed copies")
    to = parser.add_argument_group("results")
    to.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: %(default)s")
    to.add_argument("--run-id", help="default: the time; a run that DIR has is continued; a table has rows of one run")
    to.add_argument("--resume", action="store_true", help="continue the last run in DIR, if this machine made it")
    to.add_argument("--target-loss", type=float, metavar="L", help="also report the time to this loss")
    to.add_argument("--report-only", action="store_true", help="draw table and page again from the rows in DIR")
    to.add_argument("--list", action="store_true", help="list contenders with their settings, and end")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ds-zo bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    if argv is None:
        prepare_to_fork()
    try:
        run(parser.parse_args(argv))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """Runs the command that the arguments describe. Raises a `ValueError` that names a wrong argument."""
    from ds_zo.bench.contenders import ALL

    if args.list:
        width = max(map(len, ALL))
        for name, contender in ALL.items():
            print(f"{name:<{width}}  {contender.title}: {contender.settings}")
    elif args.report_only:
        for folder, rows in runs_of(folders_with_rows(args.out), args.run_id):
            write_configs({row["case"]: row["params"] for row in rows}, folder / "configs")
            print(_write(rows, folder, args))
    else:
        _compare(args)


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments once, before every case fails for the same reason."""
    for name, least in (("batch", 1), ("seq", 2), ("steps", 1), ("warmup", 0), ("layers", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be >= {least}, got {value} (--{name})")
    if args.best_batch and (args.accumulate or args.layers or len(args.device_memory_gb) > 1):
        raise ValueError(
            "the search for micro-batches takes one whole model and one cap: leave out --accumulate, --layers and "
            "further caps (--best-batch)"
        )
    for name, value in (("timeout-s", args.timeout_s), ("max-s", args.max_s), ("total-s", args.total_s)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be > 0 seconds, got {value:g} (--{name})")
    for name, value in (("gradient-clipping", args.gradient_clipping), ("min-free-host-gib", args.min_free_host_gib)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0, got {value:g} (--{name})")
    if args.data is not None and not args.data.is_file():
        raise ValueError(f"data must be a text file, got {args.data}, which is not a file (--data)")
    if args.device == "cuda" and _device() != "cuda" and not args.dry_run:
        raise ValueError("PyTorch finds no GPU here, got cuda: see ds-zo report, or use cpu (--device)")
    for gb in args.device_memory_gb:
        if gb is not None and not 0 < gb < math.inf:
            raise ValueError(f"a cap must be > 0 GB, or none for the whole card, got {gb:g} (--device-memory-gb)")


def _compare(args: argparse.Namespace) -> None:
    _check(args)
    ends = time.monotonic() + (math.inf if args.total_s is None else args.total_s)
    builds = Builds(wanted=args.device != "cpu" and not args.dry_run)
    device, caps = args.device or _device(), args.device_memory_gb
    tables = {
        args.out if len(caps) == 1 else args.out / folder_of(cap): make_cases(args, device=device, device_memory_gb=cap)
        for cap in caps
    }
    run_id = _run_id(args, tables)
    if args.dry_run:
        print("\n".join(_listed(tables)))
        return
    for folder, cases in tables.items():
        write_configs({case.name: case.params for case in cases}, folder / "configs")
    try:
        if not args.spawn:
            import_warm()
        builds.wait()
        for folder, cases in tables.items():
            if args.best_batch:
                run_best(args, folder=folder, run_id=run_id, device=device, ends=ends)
                best = last_run(folder / "rows.jsonl", run_id)
                write_configs({row["case"]: row["params"] for row in best}, folder / "configs")
            else:
                run_cases(
                    cases,
                    out=folder / "rows.jsonl",
                    run_id=run_id,
                    resume=True,
                    min_free_host_gib=args.min_free_host_gib,
                    device=device,
                    spawn=args.spawn,
                    total_s=None if math.isinf(ends) else ends - time.monotonic(),
                )
    finally:  # also on SIGTERM
        begun = [folder for folder in tables if (folder / "rows.jsonl").exists()]
        for folder, rows in runs_of(begun, run_id, needed=False):
            print(_write(rows, folder, args))


def _run_id(args: argparse.Namespace, tables: Mapping[Path, Sequence[Case]]) -> str:
    """The run that the rows belong to. A run whose rows have other settings of a table is not continued."""
    parts = [(folder / "rows.jsonl", cases) for folder, cases in tables.items()]
    found = args.run_id or (run_to_resume(*parts) if args.resume else None)
    others = _differences(parts, found) if found else []
    if others and args.run_id:
        raise ValueError(
            f"a table is of one model on one card, but run {args.run_id} in {args.out} has another "
            f"{', '.join(others)}: name a new run, or another folder (--run-id, --out)"
        )
    if others:
        print(f"run {found} has another {', '.join(others)}: a new run begins here", file=sys.stderr)
        found = None
    return found or new_run_id()


def _differences(parts: Sequence[tuple[Path, Sequence[Case]]], run_id: str) -> list[str]:
    """Returns the settings that the cases have otherwise than the rows of a run, of those that a whole table shares."""
    found = [
        key
        for out, cases in parts
        for row in (read_rows(out) if out.exists() else ())
        for case in cases[1:2]  # the first contender's: the machine's case has no such settings
        for key in _OF_A_TABLE
        if row["run_id"] == run_id
        and row["status"] != NOT_RUN
        and "spec" in row.get("params", ())
        and row["params"]["spec"].get(key) != case.params["spec"][key]
    ]
    return list(dict.fromkeys(found))


def _listed(tables: Mapping[Path, Sequence[Case]]) -> Iterator[str]:
    """Lists every case with its planned memory and time."""
    for folder, cases in tables.items():
        yield f"{folder.name}: about {sum(case.expected_s for case in cases):.0f} s"
        for case in cases[1:]:  # without the machine's
            told = " ".join(f"{name}={value}" for name, value in case.env.items())
            host = f", {case.planned_host_gb:.1f} GB of host memory" if case.planned_host_gb else ""
            yield f"    {case.name:<24} {case.expected_s:4.0f} s{host} {told}".rstrip()


def _write(rows: Sequence[Row], folder: Path, args: argparse.Namespace) -> str:
    from ds_zo.bench.report import in_table_order, write_report

    ordered = in_table_order(rows)
    write_csv(ordered, folder / "rows.csv")
    return write_report(ordered, folder, target_loss=args.target_loss)


def _caps(text: str) -> list[float | None]:
    """Reads the caps in GB, the largest first: a row of a larger card may hold for a smaller one. None: no cap."""
    try:
        caps = {None if word.strip() == "none" else float(word) for word in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers of GB, or none for the whole card, got {text!r}") from None
    return sorted(caps, key=lambda cap: -math.inf if cap is None else -cap)


def folder_of(cap: float | None) -> str:
    return "uncapped" if cap is None else f"{cap:g}gb"


def folders_with_rows(out: Path) -> list[Path]:
    """Returns a comparison's own folder, or the folders of its caps."""
    if (out / "rows.jsonl").exists():
        return [out]
    found = sorted(path.parent for pattern in ("*", "*/*") for path in out.glob(f"{pattern}/rows.jsonl"))
    if not found:
        raise ValueError(f"looked for rows in {out}: there are none (--out)")
    return found


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def last_run(path: Path, run_id: str | None) -> list[Row]:
    """Returns the rows of a run, by default the last run. A case that was run again has its last row only."""
    rows = read_rows(path) if path.exists() else []
    if not rows:
        raise ValueError(f"looked for rows in {path}: there are none (--out)")
    run_id = run_id or rows[-1]["run_id"]
    found = {row["case"]: row for row in rows if row["run_id"] == run_id}
    if not found:
        known = ", ".join(dict.fromkeys(row["run_id"] for row in rows))
        raise ValueError(f"{path} has no run {run_id}; it has {known} (--run-id)")
    return list(found.values())


def runs_of(folders: Sequence[Path], run_id: str | None, *, needed: bool = True) -> list[tuple[Path, list[Row]]]:
    """Returns (folder, rows of `last_run`) for the folders that have a contender's row: a call may have ended before
    the first row of a folder. With `needed`, it is an error if no folder has one."""
    from ds_zo.bench.report import contenders

    found, lacking = [], []
    for folder in folders:
        try:
            rows = last_run(folder / "rows.jsonl", run_id)
            contenders(rows)
        except ValueError as error:
            lacking.append(f"{folder}: {error}")
        else:
            found.append((folder, rows))
    if needed and lacking and not found:
        raise ValueError("; ".join(lacking))
    for words in lacking:
        print(f"left out: {words}", file=sys.stderr)
    return found


def write_configs(params_of: Mapping[str, Row], folder: Path) -> None:
    """Writes each contender's JSON, ready for `deepspeed launch/train.py --deepspeed FILE`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, params in params_of.items():
        if "config" in params:
            text = json.dumps(params["config"], indent=2) + "\n"
            (folder / f"{name}.json").write_text(text, encoding="utf-8")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes the rows' numbers without learning curves and logs."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _LISTS))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
