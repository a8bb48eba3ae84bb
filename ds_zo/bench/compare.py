"""Head to head: stock DeepSpeed and ours on one model, one machine, one run, as rows, a table and a page.

ds-zo bench --model random:llama-1.3b --batch 4 --seq 1024 --out results/llama-1.3b
ds-zo bench --model random:opt-13b --device-memory-gb none,24 --contenders zo,lomo-streamed --out results/opt-13b
ds-zo bench --report-only --out results/opt-13b

[Note: one case, two cards] Several caps are one run with a table each: OUT/uncapped, OUT/24gb. The largest card comes
first. A contender that is set up alike for a smaller one, and whose allocator never held more than that one has, would
do there what it did: its row is shown in both tables, and the smaller card's says so.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_zo.bench.runner import Case, Row, append_row, prepare_to_fork, read_rows, run_cases

MACHINE = "machine"
"""The case that measures link and CPU-Adam bandwidth."""
_BUILD_S = 300.0
"""The first use of CPU Adam may compile it, and a build that is stopped leaves a lock behind."""
_IMPORTS_GB = 1.5
"""Host memory of a child before its model: Python, torch, CUDA."""
_LISTS = ("seconds", "warmup_seconds", "losses", "last_words", "versions", "params", "env", "link_gbps")


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
    what.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    what.add_argument("--gradient-clipping", type=float, default=0.0, help="default: none (it costs LOMO a pass)")
    what.add_argument(
        "--device-memory-gb",
        type=_caps,
        metavar="GB[,GB]",
        default=[None],
        help="emulate smaller cards, on which allocations beyond this fail; none is the card as it is",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--steps", type=int, default=16, help="timed steps (default: %(default)s)")
    how.add_argument("--warmup", type=int, default=4, help="untimed steps before them (default: %(default)s)")
    how.add_argument(
        "--max-s", type=float, default=40.0, help="fewer timed steps where they take longer (default: %(default)s)"
    )
    how.add_argument("--seed", type=int, default=0, help="of weights and data (default: %(default)s)")
    how.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    how.add_argument("--timeout-s", type=float, default=150.0, help="limit of one case (default: %(default)s)")
    how.add_argument(
        "--min-free-host-gib", type=float, default=4.0, help="a case leaves this much (default: %(default)s)"
    )
    how.add_argument("--total-s", type=float, help="end after this; --resume makes the rest")
    how.add_argument("--spawn", action="store_true", help="a fresh interpreter a case instead of a fork")
    how.add_argument("--no-profile", action="store_true", help="leave out bytes moved and exposed copies")
    to = parser.add_argument_group("results")
    to.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default: %(default)s")
    to.add_argument("--run-id", help="default: the time; tables compare rows of one run")
    to.add_argument("--resume", action="store_true", help="go on with the last run in DIR, if it was on this machine")
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
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    """What the arguments ask for; a `ValueError` says what is wrong with them."""
    from ds_zo.bench.contenders import ALL

    if args.list:
        width = max(map(len, ALL))
        for name, contender in ALL.items():
            print(f"{name:<{width}}  {contender.title}: {contender.settings}")
        return
    if args.report_only:
        for folder in folders_with_rows(args.out):
            _write(last_run(folder / "rows.jsonl", args.run_id), folder, args)
        return
    device = args.device or _device()
    ends = time.monotonic() + (math.inf if args.total_s is None else args.total_s)
    run_id, done = args.run_id, list[Row]()
    for cap in args.device_memory_gb:
        folder = args.out if len(args.device_memory_gb) == 1 else args.out / folder_of(cap)
        cases = make_cases(args, device=device, device_memory_gb=cap)
        write_configs(cases, folder / "configs")
        carry_over(done, cases, folder / "rows.jsonl")
        rows = run_cases(
            cases,
            out=folder / "rows.jsonl",
            run_id=run_id,
            resume=args.resume or bool(done),
            min_free_host_gib=args.min_free_host_gib,
            device=device,
            spawn=args.spawn,
            total_s=None if math.isinf(ends) else ends - time.monotonic(),
        )
        run_id = rows[0]["run_id"]
        done += rows
        _write(rows, folder, args)


def _write(rows: Sequence[Row], folder: Path, args: argparse.Namespace) -> None:
    from ds_zo.bench.report import in_table_order, write_report

    ordered = in_table_order(rows)
    write_csv(ordered, folder / "rows.csv")
    print(write_report(ordered, folder, target_loss=args.target_loss))


def _caps(text: str) -> list[float | None]:
    """The largest first: what ran there may hold for smaller ones."""
    caps = {None if word == "none" else float(word) for word in text.split(",")}
    return sorted(caps, key=lambda cap: -math.inf if cap is None else -cap)


def folder_of(cap: float | None) -> str:
    return "uncapped" if cap is None else f"{cap:g}gb"


def folders_with_rows(out: Path) -> list[Path]:
    """A comparison's own folder, or those of its caps."""
    if (out / "rows.jsonl").exists():
        return [out]
    found = sorted(path.parent for path in out.glob("*/rows.jsonl"))
    if not found:
        raise ValueError(f"looked for rows in {out}: there are none (--out)")
    return found


def carry_over(done: Sequence[Row], cases: Sequence[Case], out: Path) -> None:
    """Writes rows that hold for these cases too into their file, unless it has them: [Note: one case, two cards]."""
    known = {(row["run_id"], row["case"], row["config_hash"]) for row in (read_rows(out) if out.exists() else ())}
    for case in cases:
        row = next((row for row in done if row["case"] == case.name and holds_for(row, case)), None)
        if row is not None and (row["run_id"], case.name, case.config_hash) not in known:
            moved = {"params": case.params, "config_hash": case.config_hash}
            if case.name != MACHINE:
                moved["ran_with_gb"] = row.get("ran_with_gb") or row["params"]["spec"]["device_memory_gb"] or "all"
            append_row(out, row | moved)


def holds_for(row: Row, case: Case) -> bool:
    """Whether what a row says of a larger card is what the case would find on its own."""
    if row["status"] != "ok" or row["target"] != case.target:
        return False
    if case.name == MACHINE:
        return bool(row["params"] == case.params)
    there, here = row["params"]["spec"], case.params["spec"]
    alike = {**there, "device_memory_gb": None} == {**here, "device_memory_gb": None}
    held_gb = max(row["reserved_before_gb"], row["peak_reserved_gb"])
    return alike and row["params"]["config"] == case.params["config"] and held_gb <= here["device_memory_gb"]


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def last_run(path: Path, run_id: str | None) -> list[Row]:
    """The rows of a run, by default the last one; of a case that was run again, the last row."""
    rows = read_rows(path) if path.exists() else []
    if not rows:
        raise ValueError(f"looked for rows in {path}: there are none (--out)")
    run_id = run_id or rows[-1]["run_id"]
    found = {row["case"]: row for row in rows if row["run_id"] == run_id}
    if not found:
        known = ", ".join(dict.fromkeys(row["run_id"] for row in rows))
        raise ValueError(f"{path} has no run {run_id}; it has {known} (--run-id)")
    return list(found.values())


def make_cases(args: argparse.Namespace, *, device: str, device_memory_gb: float | None = None) -> list[Case]:
    """The machine, then contenders by the host memory they fill, which takes most of the time: where that runs out,
    most have a row."""
    from ds_zo.bench.contenders import chosen, config_of, shared_config
    from ds_zo.bench.entrant import Spec

    names = args.contenders.split(",") if args.contenders else None
    rates = _rates(args.lr)
    shared = shared_config(batch=args.batch, dtype=args.dtype, gradient_clipping=args.gradient_clipping)
    spec = Spec(
        model=args.model,
        batch=args.batch,
        length=args.seq,
        steps=args.steps,
        warmup=args.warmup,
        dtype=args.dtype,
        device=device,
        layers=args.layers,
        device_memory_gb=device_memory_gb,
        checkpointing=not args.no_checkpointing,
        data=None if args.data is None else str(args.data),
        seed=args.seed,
        profile=not args.no_profile,
        max_s=args.max_s,
    )
    num_parameters = count_parameters(spec)
    machine = Case(
        MACHINE, "ds_zo.bench.entrant:measure_machine", {"device": device}, timeout_s=max(args.timeout_s, _BUILD_S)
    )
    cases = [machine]
    for contender in sorted(chosen(names), key=lambda contender: contender.host_bytes(num_parameters)):
        if contender.missing is not None:
            print(f"{contender.name} left out: {contender.missing}", file=sys.stderr)
            continue
        config = config_of(contender, shared, lr=rates.get(contender.name), device_memory_gb=device_memory_gb)
        cases.append(
            Case(
                contender.name,
                "ds_zo.bench.entrant:run_contender",
                {"contender": contender.name, "config": config, "spec": asdict(spec)},
                timeout_s=args.timeout_s,
                planned_host_gb=contender.host_bytes(num_parameters) / 1e9 + _IMPORTS_GB if device == "cuda" else None,
            )
        )
    return cases


def count_parameters(spec: Any) -> int:
    """From the config alone, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from ds_zo.bench.shapes import config_of_model

    config = config_of_model(spec.model, num_layers=spec.layers, max_length=spec.length)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def _rates(given: Sequence[str]) -> dict[str, float]:
    rates = {}
    for text in given:
        name, _, rate = text.partition("=")
        try:
            rates[name] = float(rate)
        except ValueError:
            raise ValueError(f"a learning rate is NAME=NUMBER, got {text!r}, say zo=1e-6 (--lr)") from None
    return rates


def write_configs(cases: Sequence[Case], folder: Path) -> None:
    """Each contender's JSON, ready for `deepspeed launch/train.py --deepspeed FILE`."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if "config" in case.params:
            text = json.dumps(case.params["config"], indent=2) + "\n"
            (folder / f"{case.name}.json").write_text(text, encoding="utf-8")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """The numbers, without curves and last words."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _LISTS))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
