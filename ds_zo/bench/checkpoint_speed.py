"""What checkpoints cost: the five columns of the ZO paper's Table 6, one case a process, one JSON row a case.

python -m ds_zo.bench.checkpoint_speed case --shape opt-6.7b --method zo-async --folder DIR
python -m ds_zo.bench.checkpoint_speed table --folder DIR --out rows.jsonl

A checkpoint is saved every `--every` steps, and tokens/s is wall-clock over all steps, saves included, whatever waits
for the disk. `torch.save` is timed as users call it: it returns when the bytes are in the page cache. Ours are fsynced,
hashed and renamed, in the background in `zo-async`. A disk that takes longer for one checkpoint than training takes
for `--every` steps makes the next save wait, so `disk_gbps` (written and fsynced in the same folder before the case)
and `checkpoint_gb` stand in every row. All blocks stream, as in the paper; `--stream` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_zo.bench.zo_speed import Row, environment

METHODS = ("mezo", "mezo-torch-save", "zo", "zo-torch-save", "zo-sync", "zo-async")
TABLE = ("opt-1.3b", "opt-2.7b", "opt-6.7b")


def disk_gbps(folder: Path, *, nbytes: int = 4 * 2**30) -> float:
    """Sequential writing with one fsync at the end, from memory that is not compressible."""
    chunk = os.urandom(64 * 2**20)
    path = folder / ".disk"
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for _ in range(nbytes // len(chunk)):
            os.write(fd, chunk)
        os.fsync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - start
    path.unlink()
    return nbytes / seconds / 1e9


class _Case:
    """A step to time, and what saves a checkpoint after every few of them."""

    def __init__(self, args: argparse.Namespace, folder: Path, device: torch.device) -> None:
        from ds_zo.bench.shapes import config_of, materialise, random_model

        shape = config_of(args.shape, num_layers=args.layers, max_length=args.length)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = random_model(shape, dtype=dtype, device=device)
        ids = torch.randint(0, min(50000, shape.vocab_size), (args.batch, args.length), device=device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.save: Callable[[], None] = lambda: None
        self.finish: Callable[[], None] = lambda: None
        self.engine: Any = None
        self._file = folder / "model.pt"
        if args.method.startswith("mezo"):
            self._make_mezo(materialise(model).eval(), ids, args)
        else:
            self._make_zo(model, ids, args, folder, device)

    def _make_mezo(self, model: Any, ids: torch.Tensor, args: argparse.Namespace) -> None:
        from ds_zo.bench.mezo import MeZO

        trainer = MeZO(model, lr=args.lr, zo_eps=1e-3)

        def step() -> torch.Tensor:
            return trainer.step(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)

        self.step: Callable[[], torch.Tensor] = step
        if args.method == "mezo-torch-save":
            self.save = lambda: torch.save(model.state_dict(), self._file)

    def _make_zo(
        self, model: Any, ids: torch.Tensor, args: argparse.Namespace, folder: Path, device: torch.device
    ) -> None:
        import deepspeed

        import ds_zo  # noqa: F401

        checkpoint = {"asynchronous": args.method == "zo-async", "keep_last": 1}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": args.batch,
            "optimizer": {"type": "ZO", "params": {"lr": args.lr, "zo_eps": 1e-3}},
            "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
            "ds_zo": {"stream": json.loads(args.stream), "checkpoint": checkpoint},
        }
        if device.type == "cuda":
            config["bf16"] = {"enabled": True}
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        engine.train()
        self.engine = engine

        def step() -> torch.Tensor:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            return loss

        self.step = step
        if args.method == "zo-torch-save":
            self.save = lambda: torch.save(engine.module.state_dict(), self._file)
        elif args.method in ("zo-sync", "zo-async"):
            self.save = lambda: engine.save_checkpoint(str(folder)) and None
            self.finish = engine.wait_for_checkpoint


def run_case(args: argparse.Namespace) -> Row:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    folder = Path(args.folder) / f"checkpoint_speed-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        return _measure(args, folder, device)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure(args: argparse.Namespace, folder: Path, device: torch.device) -> Row:
    gbps = disk_gbps(folder, nbytes=int(args.disk_gb * 2**30))
    case = _Case(args, folder, device)

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(args.warmup):
        case.step()
    case.save()  # allocates and pins what later saves reuse
    case.finish()
    case.step()
    synchronise()
    if case.engine is not None:
        case.engine._background.waited_s = 0.0
    save_s = []
    start = time.perf_counter()
    for number in range(1, args.steps + 1):
        loss = case.step()
        if number % args.every == 0:
            before = time.perf_counter()
            case.save()
            save_s.append(time.perf_counter() - before)
    synchronise()
    wall = time.perf_counter() - start
    waited = 0.0 if case.engine is None else case.engine._background.waited_s
    before = time.perf_counter()
    case.finish()
    last_s = time.perf_counter() - before
    return {
        "shape": args.shape,
        "method": args.method,
        "batch": args.batch,
        "length": args.length,
        "parameters": case.num_parameters,
        "stream": json.loads(args.stream) if args.method.startswith("zo") else None,
        "steps": args.steps,
        "every": args.every,
        "tokens_per_s": args.batch * args.length * args.steps / wall,
        "step_s": wall / args.steps,
        "save_call_s": save_s,
        "waited_for_writer_s": waited,
        "left_after_last_step_s": last_s,
        "checkpoint_gb": sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e9,
        "disk_gbps": gbps,
        "host_store_gb": None if case.engine is None else case.engine.backend.homes.store.nbytes / 1e9,
        "host_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "loss": float(loss.detach()),
    }


def run_table(args: argparse.Namespace) -> None:
    """All rows, a process each; a case that fails or hangs is a row with its last words."""
    with Path(args.out).open("a") as out:
        for shape in args.shapes.split(","):
            for method in args.methods.split(","):
                command = [sys.executable, "-m", "ds_zo.bench.checkpoint_speed", "case", "--shape", shape]
                command += ["--method", method, "--folder", args.folder, "--stream", args.stream]
                command += ["--steps", str(args.steps), "--every", str(args.every), "--disk-gb", str(args.disk_gb)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s)
                    found = [text for text in done.stdout.splitlines() if text.startswith("ROW ")]
                    row = json.loads(found[-1][4:]) if found else {"error": done.stderr[-1500:]}
                except subprocess.TimeoutExpired:
                    row = {"error": f"no answer within {args.timeout_s} s"}
                row = {"shape": shape, "method": method} | row
                out.write(json.dumps(row) + "\n")
                out.flush()
                shown = ("shape", "method", "tokens_per_s", "step_s", "disk_gbps", "checkpoint_gb", "error")
                print(json.dumps({name: row[name] for name in shown if name in row}), flush=True)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", help="where checkpoints go: its disk is what is measured")
    parser.add_argument(
        "--stream", default='{"master": "wire", "resident_blocks": 0}', help="the ds_zo.stream section, as JSON"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--disk-gb", type=float, default=4.0, help="GiB written to measure the disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    case = commands.add_parser("case", help="one case in this process; prints its row")
    case.add_argument("--shape", required=True)
    case.add_argument("--method", choices=METHODS, required=True)
    case.add_argument("--batch", type=int, default=1)
    case.add_argument("--length", type=int, default=2048)
    case.add_argument("--layers", type=int, help="cut the model's depth")
    case.add_argument("--lr", type=float, default=1e-7)
    case.add_argument("--warmup", type=int, default=4)
    table = commands.add_parser("table", help="all cases, one process each")
    table.add_argument("--shapes", default=",".join(TABLE))
    table.add_argument("--methods", default=",".join(METHODS))
    table.add_argument("--out", required=True)
    table.add_argument("--timeout-s", type=float, default=300)
    for command in (case, table):
        _common(command)
    args = parser.parse_args()
    if args.command == "table":
        run_table(args)
        return
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    where = environment() if torch.cuda.is_available() else {"gpu": None}
    print("ROW " + json.dumps(run_case(args) | where), flush=True)


if __name__ == "__main__":
    main()
