"""The command line of a benchmark with presets: `run` makes rows and shows them, `report` shows them again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_zo.bench.runner import Case, is_named_like, prepare_to_fork, read_rows, run_cases
from ds_zo.records.rows import Row

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 97,
}
"""Fields of the model's configuration in a rehearsal: every case runs on a model that a CPU trains at once."""


def main(
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    presets: Mapping[str, Any],
    cases_of: Callable[..., list[Case]],
    warm: Sequence[str],
    markdown: Callable[..., str],
) -> None:
    """Runs the command line. `cases_of` takes a preset's name, `device` and `tiny`; `markdown` takes rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="a preset's cases, one process each; prints the report")
    run.add_argument("--preset", choices=presets, default="speed")
    add_run_arguments(run)
    report = commands.add_parser("report", help="rows as Markdown")
    report.add_argument("rows", type=Path)
    report.add_argument("--out", type=Path, help="a file to write instead of printing")
    args = parser.parse_args(arguments)
    if args.command == "report":
        text = markdown(read_rows(args.rows))
        if args.out is None:
            print(text)
        else:
            args.out.write_text(text, encoding="utf-8")
        return
    cases = chosen(cases_of(args.preset, device=args.device, tiny=args.tiny), args)
    if args.list:
        print(listed(cases))
        return
    if arguments is None:
        prepare_to_fork()
    print(markdown(run_chosen(cases, args, warm=warm)))


def run_rows(
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    cases_of: Callable[..., list[Case]],
    warm: Sequence[str],
    on_row: Callable[[Row], None],
    before: Callable[[Sequence[Case], str], None] | None = None,
) -> None:
    """Runs the command line of a benchmark without presets. `on_row` shows a row. `before` takes the chosen cases and
    the device, and is called before anything is timed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    args = parser.parse_args(arguments)
    if arguments is None and not args.list:
        prepare_to_fork()
    cases = chosen(cases_of(device=args.device, tiny=args.tiny), args)
    if args.list:
        print(listed(cases))
        return
    if before is not None:
        before(cases, args.device)
    run_chosen(cases, args, warm=warm, on_row=on_row)


def add_run_arguments(run: argparse.ArgumentParser) -> None:
    """Adds the arguments of every command that runs cases; `chosen` and `run_chosen` read them."""
    run.add_argument("--out", type=Path, help="rows are appended here as they come; without it they are only shown")
    run.add_argument("--only", help="cases by a glob, a part of the name, or a regular expression")
    run.add_argument("--skip", help="of these leave out, named likewise")
    run.add_argument("--resume", action="store_true", help="go on with the last run in --out, keeping its rows")
    run.add_argument("--total-s", type=float, help="end after this, starting no case that would not end before")
    run.add_argument("--spawn", action="store_true", help="a fresh interpreter a case instead of a fork")
    run.add_argument("--device", default="cuda")
    run.add_argument("--tiny", action="store_true", help="a rehearsal on toy models; with --device cpu without a GPU")
    run.add_argument("--list", action="store_true", help="print the cases and their expected seconds instead")


def chosen(cases: Sequence[Case], args: argparse.Namespace) -> list[Case]:
    found = [case for case in cases if args.only is None or is_named_like(case.name, args.only)]
    found = [case for case in found if args.skip is None or not is_named_like(case.name, args.skip)]
    if not found:
        names = ", ".join(case.name for case in cases)
        raise SystemExit(f"no case is left of {names} (--only {args.only}, --skip {args.skip})")
    return found


def listed(cases: Sequence[Case]) -> str:
    """Lists cases with their expected seconds; 0: unknown."""
    lines = [f"{case.expected_s:6.0f}  {case.name}" for case in cases]
    return "\n".join([*lines, f"{sum(case.expected_s for case in cases):6.0f}  in all"])


def run_chosen(cases: Sequence[Case], args: argparse.Namespace, **options: Any) -> list[Row]:
    given = {name: getattr(args, name) for name in ("out", "resume", "device", "spawn", "total_s")}
    return run_cases(cases, **given, **options)
