"""What checkpoints cost: the five columns of the ZO paper's Table 6 as rows, and the report of them.

python -m benchmarks.checkpoint_speed table --folder DIR --out rows.jsonl [--only 6.7b] [--resume] [--budget-s 240]
python -m benchmarks.checkpoint_speed report rows.jsonl > report.md

One process a case ([Note: fork from a warm parent]). A checkpoint is saved before every `--every`-th step, and tokens/s
is the wall clock from the first save to the last step, or to the end of the last save where that comes later: a period
is as long as it would be in the middle of a run. `torch.save` is timed as users call it: it returns when the bytes are
in the page cache. Ours are fsynced, hashed and renamed, in the background in `zo-async`. A disk that takes longer for
one checkpoint than training takes for `--every` steps sets the pace, so its speed (written and fsynced in the same
folder by a case of its own) stands beside. All blocks stream, as in the paper. At most two checkpoints of
one case are on disk at a time, and none after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import report
from benchmarks.zo_case import ZOCase, mezo, token_ids, zo
from ds_zo.bench.measure import memory_peaks, start_device, synchronize
from ds_zo.bench.runner import Case, prepare_to_fork, read_rows, run_cases
from ds_zo.records.rows import Row

METHODS = ("mezo", "mezo-torch-save", "zo", "zo-torch-save", "zo-async")
SHAPES = ("opt-1.3b", "opt-2.7b", "opt-6.7b")
STREAM = {"master": "wire", "resident_blocks": 0}
_PARAMETERS_B = {"opt-1.3b": 1.32, "opt-2.7b": 2.65, "opt-6.7b": 6.66}
_EXPECTED_GB = 2.2
"""Host memory a billion parameters in 16 bits, times the copies a case has of them."""
_SCRATCH = "checkpoint_speed-"
_STEPS, _EVERY, _WARMUP = 30, 10, 8
_PERIODS = {"mezo": 2, "zo": 2, "mezo-torch-save": 1, "zo-torch-save": 1}
"""Of methods that have no background to fall behind: fewer say the same."""
_MEZO_WARMUP = 2
_EXPECTED_S = {"mezo": 0.6, "zo": 1.5, "zo-async": 3.0, "mezo-torch-save": 4.0, "zo-torch-save": 5.0}
"""A billion parameters, on one H200 and a fast disk, besides starting."""
_STARTING_S = 8.0


def _nothing() -> None:
    pass


@dataclass
class _SavingMethod:
    step: Callable[[], Any]
    save: Callable[[], None] | None = None
    prepare: Callable[[], None] = _nothing
    """Makes the first save that is timed one like those after it."""
    finish: Callable[[], None] = _nothing
    engine: Any = None


def run_disk(*, folder: str, gb: float = 4.0) -> Row:
    """Sequential writing with one fsync at the end, of bytes that no file system compresses: to one file, and to as
    many at a time as a checkpoint's writer has threads."""
    from ds_zo.checkpoint.workers import THREADS, in_threads

    chunk = os.urandom(32 * 2**20)

    def write(path: Path, num_chunks: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for _ in range(num_chunks):
                view = memoryview(chunk)
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)

    with _scratch(folder) as scratch:
        num_chunks = max(1, round(gb * 1e9 / len(chunk)))
        start = time.perf_counter()
        write(scratch / "one", num_chunks)
        one_s = time.perf_counter() - start
        (scratch / "one").unlink()
        each = max(1, num_chunks // THREADS)
        start = time.perf_counter()
        in_threads(lambda i: write(scratch / f"{i}", each), range(THREADS))
        many_s = time.perf_counter() - start
    return {
        "method": "disk",
        "written_gb": num_chunks * len(chunk) / 1e9,
        "disk_gbps": num_chunks * len(chunk) / one_s / 1e9,
        "threads": THREADS,
        "disk_gbps_threads": THREADS * each * len(chunk) / many_s / 1e9,
    }


@dataclass(frozen=True)
class CheckpointCase(ZOCase):
    """A case that saves checkpoints while it trains; float32 without a GPU."""

    folder: str = "."
    """Where checkpoints are written: the speed of its disk is part of the case."""
    every: int = _EVERY
    """Steps between two checkpoints."""
    stream: Mapping[str, Any] | None = field(default_factory=lambda: dict(STREAM))
    warmup: int = _WARMUP
    steps: int = _STEPS


def run_case(**settings: Any) -> Row:
    """Measures one `CheckpointCase` in this process. The files that it writes in `folder` are removed at the end."""
    case = CheckpointCase(**settings)
    where = start_device(case.device)
    if where.type != "cuda":
        case = replace(case, dtype="fp32")
    model: Any = case.lazy_model(where)
    num_parameters = sum(p.numel() for p in model.parameters())
    ids = token_ids(model.config, case.batch, case.length, where)
    with _scratch(case.folder) as scratch:
        make = _mezo if case.method.startswith("mezo") else _zo
        stamps = [time.perf_counter()]
        saving = make(model, ids, case, folder=scratch)
        stamps.append(time.perf_counter())
        for _ in range(case.warmup):
            saving.step()
        synchronize(where)
        stamps.append(time.perf_counter())
        saving.prepare()
        synchronize(where)
        save_s: list[float] = []
        start = time.perf_counter()
        stamps.append(start)
        for number in range(case.steps):
            if saving.save is not None and number % case.every == 0:
                before = time.perf_counter()
                saving.save()
                save_s.append(time.perf_counter() - before)
            loss = saving.step()
        synchronize(where)
        trained_s = time.perf_counter() - start
        saving.finish()
        wall_s = time.perf_counter() - start
        sizes = [path.stat().st_size for path in scratch.rglob("*") if path.is_file()]
        num_kept = max(1, sum(1 for path in scratch.iterdir() if path.is_dir() and not path.name.startswith(".")))
    return {
        "shape": case.shape,
        "method": case.method,
        "batch": case.batch,
        "length": case.length,
        "parameters": num_parameters,
        "layers": model.config.num_hidden_layers,
        "stream": dict(case.stream or {}) if saving.engine is not None else None,
        "steps": case.steps,
        "every": case.every,
        "tokens_per_s": case.batch * case.length * case.steps / wall_s,
        "step_s": wall_s / case.steps,
        **dict(zip(("load_s", "warmup_s", "prepare_s"), (b - a for a, b in pairwise(stamps)), strict=True)),
        "save_call_s": save_s,
        **_background(saving.engine),
        "left_after_last_step_s": wall_s - trained_s,
        "checkpoint_gb": sum(sizes) / num_kept / 1e9,
        "host_store_gb": None if saving.engine is None else saving.engine.backend.block_store.store.nbytes / 1e9,
        "loss": float(loss.detach()),
        **memory_peaks(where),
    }


def _background(engine: Any) -> Row:
    """How long the writer took for each checkpoint, and training waited for it to begin the next."""
    return {} if engine is None else {"write_s": engine._background.write_s, "waited_s": engine._background.waited_s}


@contextmanager
def _scratch(folder: str) -> Iterator[Path]:
    _remove_leftovers(Path(folder))
    path = Path(folder) / f"{_SCRATCH}{os.getpid()}"
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Of cases that were killed: a disk may hold no more than one case's files."""
    for path in folder.glob(f"{_SCRATCH}*"):
        if not Path("/proc", path.name.removeprefix(_SCRATCH)).exists():
            shutil.rmtree(path, ignore_errors=True)


def _mezo(model: Any, ids: torch.Tensor, case: CheckpointCase, *, folder: Path) -> _SavingMethod:
    step = partial(mezo(model, lr=case.rate).step, ids)
    if case.method == "mezo":
        return _SavingMethod(step)
    return _SavingMethod(step, lambda: torch.save(model.state_dict(), folder / "model.pt"))


def _zo(model: Any, ids: torch.Tensor, case: CheckpointCase, *, folder: Path) -> _SavingMethod:
    method = case.method
    checkpoint = {"asynchronous": method == "zo-async", "keep_last": 1}
    options: Row = {"stream": case.stream, "checkpoint": checkpoint}
    made = zo(model, dtype=case.dtype, batch=case.batch, lr=case.rate, **options)
    step, engine = partial(made.step, ids), made.engine
    if method == "zo":
        return _SavingMethod(step, engine=engine)
    if method == "zo-torch-save":
        return _SavingMethod(step, lambda: torch.save(engine.module.state_dict(), folder / "model.pt"), engine=engine)

    def save() -> None:
        engine.save_checkpoint(str(folder))

    def prepare() -> None:
        """Takes, and pins, the spare host buffers of blocks that fold while they wait, without writing anything."""
        snapshot = engine.backend.snapshot(hold=True)
        for _ in range(engine.backend.block_store.interval):
            step()
        snapshot.abandon()

    return _SavingMethod(step, save, prepare if method == "zo-async" else _nothing, engine.wait_for_checkpoint, engine)


# Cases


def cases(
    *,
    folder: str,
    shapes: Sequence[str] = SHAPES,
    methods: Sequence[str] = METHODS,
    disk_gb: float = 4.0,
    timeout_s: float = 90.0,
    **more: Any,
) -> list[Case]:
    """What decides first, for where time runs out: the disk, the largest shape with and without our checkpoints; then
    the table's other rows; at the end what takes longest, `torch.save` of the largest."""
    here = "benchmarks.checkpoint_speed"
    largest = max(shapes, key=lambda shape: _PARAMETERS_B.get(shape, 0.0))

    def turn(pair: tuple[str, str]) -> tuple[int, float]:
        shape, method = pair
        if shape != largest:
            return 1, _PARAMETERS_B.get(shape, 0.0)
        return (3 if method.endswith("torch-save") else 2 if method.startswith("mezo") else 0), 0.0

    found = [Case("disk", f"{here}:run_disk", {"folder": folder, "gb": disk_gb}, timeout_s=timeout_s)]
    for shape, method in sorted(((shape, method) for shape in shapes for method in methods), key=turn):
        case = CheckpointCase(shape, method, folder=folder, **more)
        if method in _PERIODS:
            case = replace(case, steps=min(case.steps, _PERIODS[method] * case.every))
        if method.startswith("mezo"):
            case = replace(case, warmup=min(case.warmup, _MEZO_WARMUP))
        copies = 0.5 if method == "mezo" else 1.0 if method in ("mezo-torch-save", "zo") else 2.0
        needed = _PARAMETERS_B[shape] * _EXPECTED_GB * copies if shape in _PARAMETERS_B else None
        expected_s = _STARTING_S + _EXPECTED_S[method] * _PARAMETERS_B[shape] if needed and method in _EXPECTED_S else 0
        limits = {"timeout_s": timeout_s, "planned_host_gb": needed, "expected_s": expected_s}
        found.append(case.to_run(f"{shape}/{method}", f"{here}:run_case", **limits))
    return found


# Command line


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="all cases, one process each")
    table.add_argument("--folder", default=".", help="where checkpoints go: its disk is what is measured")
    table.add_argument("--out", type=Path, required=True, help="JSONL file to append rows to")
    table.add_argument("--shapes", default=",".join(SHAPES))
    table.add_argument("--methods", default=",".join(METHODS), help="also zo-sync: ours in the foreground")
    table.add_argument("--only", help="cases by a glob or a part of the name")
    table.add_argument("--resume", action="store_true", help="go on with the last run of --out, keeping its rows")
    table.add_argument("--budget-s", type=float, help="end after this many seconds; --resume makes the rest")
    table.add_argument("--timeout-s", type=float, default=90.0, help="for one case")
    table.add_argument("--steps", type=int, default=_STEPS)
    table.add_argument("--every", type=int, default=_EVERY, help="steps between two checkpoints")
    table.add_argument("--disk-gb", type=float, default=4.0, help="GB written to measure the disk")
    table.add_argument("--stream", default=STREAM, type=json.loads, help="the ds_zo.stream section, as JSON")
    table.add_argument("--layers", type=int, help="cut the models' depth")
    table.add_argument("--length", type=int, default=2048)
    table.add_argument("--warmup", type=int, default=_WARMUP)
    table.add_argument("--device", default="cuda")
    shown = commands.add_parser("report", help="Markdown from rows")
    shown.add_argument("rows", type=Path)
    args = parser.parse_args(argv)
    if args.command == "report":
        print(report(read_rows(args.rows)))
        return
    if argv is None:
        prepare_to_fork()
    more = {name: getattr(args, name) for name in ("steps", "every", "stream", "layers", "length", "warmup", "device")}
    chosen = cases(
        folder=str(Path(args.folder).resolve()),
        shapes=args.shapes.split(","),
        methods=args.methods.split(","),
        disk_gb=args.disk_gb,
        timeout_s=args.timeout_s,
        **more,
    )
    run_cases(chosen, out=args.out, only=args.only, resume=args.resume, total_s=args.budget_s, device=args.device)
    _remove_leftovers(Path(args.folder))
    print(report(read_rows(args.out)))


if __name__ == "__main__":
    main()
