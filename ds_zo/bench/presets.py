"""The command line of a benchmark with presets: `run` makes rows and shows them, `report` shows them again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_zo.bench.runner import Case, prepare_to_fork, read_rows, run_cases

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 97,
}
"""Of a rehearsal: every case as it is, on a model that a CPU trains in no time."""
WARM = ("torch", "transformers", "deepspeed", "ds_zo", "transformers.models.llama.modeling_llama")
"""Imported once, before cases are forked."""


def main(
    arguments: Sequence[str] | None,
    *,
    description: str | None,
    presets: Mapping[str, Any],
    cases_of: Callable[..., list[Case]],
    warm: Sequence[str],
    markdown: Callable[..., str],
    plan: Callable[..., Any] | None = None,
) -> None:
    """`cases_of` takes a preset's name, `device` and `tiny`; `markdown` takes rows and, where there is one, `plan`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="a preset's cases, one process each; prints the report")
    run.add_argument("--preset", choices=presets, default="speed")
    run.add_argument("--out", type=Path, required=True, help="rows are appended here as they come")
    run.add_argument("--only", help="a glob or a part of case names")
    run.add_argument("--resume", action="store_true", help="go on with the last run in --out")
    run.add_argument("--total-s", type=float, help="end after this; --resume makes the rest")
    run.add_argument("--spawn", action="store_true", help="a fresh interpreter a case instead of a fork")
    run.add_argument("--device", default="cuda")
    run.add_argument("--tiny", action="store_true", help="a rehearsal on toy models")
    report = commands.add_parser("report", help="rows as Markdown")
    report.add_argument("rows", type=Path)
    report.add_argument("--out", type=Path, help="a file to write instead of printing")
    if plan is not None:
        words = "what the planner expects, beside (seconds a model, no GPU)"
        report.add_argument("--plan", action="store_true", help=words)
    args = parser.parse_args(arguments)
    if args.command == "report":
        planned = {"plan": plan} if plan is not None and args.plan else {}
        text = markdown(read_rows(args.rows), **planned)
        if args.out is None:
            print(text)
        else:
            args.out.write_text(text, encoding="utf-8")
        return
    if arguments is None:
        prepare_to_fork()
    cases = cases_of(args.preset, device=args.device, tiny=args.tiny)
    options = {name: getattr(args, name) for name in ("out", "only", "resume", "device", "spawn", "total_s")}
    print(markdown(run_cases(cases, warm=warm, **options)))
