"""What checkpoints cost: the five columns of the ZO paper's Table 6 as rows.

python -m benchmarks.speed checkpoints --set folder=DIR --out rows.jsonl

One process a case ([Note: fork from a warm parent]). A checkpoint is saved before every `every`-th step, and tokens/s
is the wall clock from the first save to the last step, or to the end of the last save where that comes later: a period
is as long as it would be in the middle of a run. `torch.save` is timed as users call it: it returns when the bytes are
in the page cache. Ours are fsynced, hashed and renamed, in the background in `zo-async`. A disk that takes longer for
one checkpoint than training takes for `every` steps sets the pace, so its speed (written and fsynced in the same
folder by a case of its own) stands beside. All blocks stream, as in the paper. At most two checkpoints of
one case are on disk at a time, and none after it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.methods import METHODS
from benchmarks.training_case import TrainingCase, random_batch
from ds_zo.bench.measure import memory_peaks, start_device, synchronize
from ds_zo.bench.shapes import materialise
from ds_zo.bench.trainer import Batch
from ds_zo.records.rows import Row

_SCRATCH = "checkpoint_speed-"


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


def run_case(**settings: Any) -> Row:
    """Measures one case in this process; in float32 without a GPU. The files that it writes in `folder` are removed at
    the end."""
    case = TrainingCase(**settings)
    where = start_device(case.device)
    if where.type != "cuda":
        case = replace(case, dtype="fp32")
    model: Any = case.lazy_model(where)
    num_parameters = sum(p.numel() for p in model.parameters())
    batch = random_batch(model, case.batch, case.length, where)
    with _scratch(case.folder) as scratch:
        make = _mezo if case.method.startswith("mezo") else _zo
        stamps = [time.perf_counter()]
        saving = make(model, batch, case, where, folder=scratch)
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
        "host_store_gb": None if saving.engine is None else saving.engine.backend.store.blocks.store.nbytes / 1e9,
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


def _mezo(model: Any, batch: Batch, case: TrainingCase, where: torch.device, *, folder: Path) -> _SavingMethod:
    model = materialise(model, where)
    step = partial(METHODS["mezo"].make(case, model, where).step, batch)
    if case.method == "mezo":
        return _SavingMethod(step)
    return _SavingMethod(step, lambda: torch.save(model.state_dict(), folder / "model.pt"))


def _zo(model: Any, batch: Batch, case: TrainingCase, where: torch.device, *, folder: Path) -> _SavingMethod:
    method = case.method
    case = replace(case, checkpoint={"asynchronous": method == "zo-async", "keep_last": 1})
    made = METHODS["zo"].make(case, model, where)
    step, engine = partial(made.step, batch), made.engine
    if method == "zo":
        return _SavingMethod(step, engine=engine)
    if method == "zo-torch-save":
        return _SavingMethod(step, lambda: torch.save(engine.module.state_dict(), folder / "model.pt"), engine=engine)

    def save() -> None:
        engine.save_checkpoint(str(folder))

    def prepare() -> None:
        """Takes, and pins, the spare host buffers of blocks that fold while they wait, without writing anything."""
        snapshot = engine.backend.snapshot(hold=True)
        for _ in range(engine.backend.store.interval):
            step()
        snapshot.abandon()

    return _SavingMethod(step, save, prepare if method == "zo-async" else _nothing, engine.wait_for_checkpoint, engine)
