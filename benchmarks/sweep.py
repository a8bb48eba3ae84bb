"""Runs the cases of a grid as rows: several processes at once, resumable, within a time limit.

[Note: a sweep may be cut into pieces] A case that has a good row is not run again. When the time is up, running cases
get SIGTERM and save a checkpoint. The next call resumes them if their folder still exists; otherwise they start again.
A sweep can thus be done in pieces of minutes, on machines that keep only the file of rows. If the seconds of a case are
known and it would not end within the piece, the next piece runs it, and a shorter case takes its place. A row is
written when its case ends: a sweep that is killed loses only the running cases.

[Note: one GPU for several cases] Each process gets at most twice its share of the device's memory, so that a process
that asks for too much fails alone, and its share of the cores. If the cases state their memory (`device_gb`), a case
waits until it fits beside the running ones, and may take half as much again as it states.

[Note: forked from a warm server] Importing torch, transformers and DeepSpeed takes longer than a short case. A fork
server imports them once and never initialises CUDA. PyTorch must then count devices through NVML, because a query of
the driver would make CUDA unusable in every fork. If CUDA was initialised nevertheless, the child ends with the status
`BAD_FORK`, and all later cases get fresh interpreters.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from benchmarks.grid import GridCase
from ds_zo.bench.runner import end_with_parent
from ds_zo.records.rows import Row, append_row, read_objects

Listing = Callable[[Sequence[Row]], Sequence[GridCase]]
"""A function from all rows so far to the cases that remain, in order. Rates that rows decide bring new cases."""
Expectation = Callable[[GridCase, Sequence[Row]], "float | None"]
"""Seconds a case will take; None: unknown."""
Start = Literal["forkserver", "fork", "spawn"]
"""How a process starts: as a fork of a warm server, as a fork of this process (which must not have initialised CUDA),
or as a fresh interpreter."""
PRELOAD = (
    *("ds_zo.tasks", "deepspeed"),
    *(
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
    ),
)
BAD_FORK = 97
"""Exit status of a child that cannot use CUDA because its parent had initialised it."""
_LAST_WORDS = 1500
_GRACE_SHARE = 0.1
_MEMORY_SHARE = 0.9
"""Share of the device's memory for all processes together: each has a CUDA context beside PyTorch's allocations."""
_MEMORY_STRETCH = 2.0
"""Factor by which a process may exceed its share of memory: few of the processes that run at once are large."""
MOST_POINTS = 40
"""Most losses in a row's curve. They are means over equal spans if a run read more."""
_STATED_STRETCH = 1.5
"""Factor by which a process may exceed the memory that its case states, which is an estimate."""
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Sweep:
    """The settings of a sweep that are not part of a case."""

    script: Path
    """The path of launch/train.py."""
    results: Path
    folder: Path
    """The folder of the cases' folders, each with a JSON, a log and checkpoints; a case's folder is removed when its
    row is written."""
    model: str
    data_root: Path | None = None
    """The folder of the tasks' data folders; None: the tasks' own data."""
    jobs: int = 1
    max_seconds: float | None = None
    grace_s: float | None = None
    """Seconds of `max_seconds` in which running cases save checkpoints; None: a tenth, 45 at most."""
    case_seconds: float | None = None
    most_seconds: float | None = None
    """Seconds after which a case is killed and recorded as a failure; None: no limit."""
    arguments: tuple[str, ...] = ()
    device_gb: float | None = None
    """The device's memory, which cases that state theirs share; None: only `jobs` limits the processes at once."""
    start: Start = "forkserver"
    preload: tuple[str, ...] = PRELOAD
    """Modules that are imported once, before the forks."""
    fallback: Start = "spawn"
    """How processes start after a child ended with `BAD_FORK`."""
    environment: dict[str, str] = field(default_factory=dict)
    num_points: int = MOST_POINTS

    @property
    def shared_gb(self) -> float:
        """Device memory that running cases may state together."""
        return float("inf") if self.device_gb is None else _MEMORY_SHARE * self.device_gb

    def memory_share(self, case: GridCase) -> float | None:
        """The fraction of the device's memory that a case's process may allocate; None: all of it."""
        if self.jobs == 1:
            return None
        if self.device_gb is not None and case.device_gb is not None:
            return min(_MEMORY_SHARE, _STATED_STRETCH * case.device_gb / self.device_gb)
        return min(_MEMORY_SHARE, _MEMORY_STRETCH * _MEMORY_SHARE / self.jobs)

    @property
    def span_s(self) -> float:
        """Seconds in which cases may run."""
        return float("inf") if self.max_seconds is None else max(0.0, self.max_seconds - self.saving_s)

    @property
    def saving_s(self) -> float:
        if self.grace_s is not None:
            return self.grace_s
        return 45.0 if self.max_seconds is None else min(45.0, _GRACE_SHARE * self.max_seconds)

    def checkpoint(self, case: GridCase) -> Path:
        """The file that exists if the case has a checkpoint to resume from."""
        return self.folder / safe_name(case.key) / "checkpoints" / "latest"

    def command(self, case: GridCase) -> list[str]:
        """The arguments of launch/train.py for a case."""
        folder = self.folder / safe_name(case.key)
        command = ["--deepspeed", str(folder / "config.json"), "--model", self.model, "--task", case.task]
        if self.data_root is not None and (self.data_root / case.task).is_dir():
            command += ["--data-dir", str(self.data_root / case.task)]
        command += ["--steps", str(case.steps), "--seed", str(case.seed), "--output-dir", str(folder), "--no-save"]
        if case.steps:
            command += ["--eval-every", str(case.eval_every), "--skip-zero-shot"]
        if case.lora_rank is not None:
            command += ["--lora-rank", str(case.lora_rank)]
        if self.case_seconds is not None:
            command += ["--max-seconds", f"{self.case_seconds:g}"]
        command += [*case.arguments, *self.arguments]
        if self.checkpoint(case).is_file():
            command += ["--resume", "latest"]
        return command


def safe_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", key)


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file that may not exist yet."""
    return [row for row in read_objects(path) if "key" in row] if path.is_file() else []


def rows_of(paths: Iterable[Path]) -> list[Row]:
    """Reads the rows of files that must exist: those that a table is made of."""
    found = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"looked for rows at {path}: not found")
        found += read_rows(path)
    return found


def remaining(cases: Iterable[GridCase], rows: Sequence[Row]) -> list[GridCase]:
    """Returns the cases that have no row, each once."""
    settled = {row["key"] for row in rows}
    found: dict[str, GridCase] = {}
    for case in cases:
        if case.key not in settled:
            found.setdefault(case.key, case)
    return list(found.values())


def nothing_known(case: GridCase, rows: Sequence[Row]) -> float | None:
    """The expectation of a case whose seconds nothing tells."""
    return None


def run(sweep: Sweep, listing: Listing, *, expectation: Expectation = nothing_known) -> int:
    """Runs cases until none is left or the time is up. Returns the number of rows written."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // sweep.jobs)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    start = sweep.start
    context: Any = multiprocessing.get_context(start)
    if sweep.start == "forkserver":  # [Note: forked from a warm server]
        multiprocessing.set_forkserver_preload(list(sweep.preload))
    elif sweep.start == "fork":
        for name in sweep.preload:
            importlib.import_module(name)
    deadline = time.monotonic() + sweep.span_s
    rows = read_rows(sweep.results)
    running: list[_Running] = []
    begun: set[str] = set()
    waiting, num_rows = _waiting(listing, rows, begun), 0
    previous = signal.signal(signal.SIGTERM, _interrupt)  # a `timeout` around the sweep must not leave its cases behind
    bar = tqdm(total=len(waiting), desc="sweep", unit="run", mininterval=1.0)
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            while len(running) < sweep.jobs:
                expected_s = [expectation(case, rows) for case in waiting]
                free_gb = sweep.shared_gb - sum(job.case.device_gb or 0.0 for job in running)
                case = next_case(sweep, waiting, expected_s, left_s, free_gb=free_gb)
                if case is None:
                    break
                begun.add(case.key)
                waiting.remove(case)
                running.append(_Running(sweep, case, context, start))
            if not running:
                break
            time.sleep(0.2)
            for job in running:
                job.end_if_hanging()
            for job in [job for job in running if not job.process.is_alive()]:
                running.remove(job)
                if job.process.exitcode == BAD_FORK and start != sweep.fallback:
                    start, context = sweep.fallback, multiprocessing.get_context(sweep.fallback)
                if job.process.exitcode == BAD_FORK and job.start != start:
                    begun.remove(job.case.key)
                else:
                    num_rows += job.finish()
                    bar.update()
                rows = read_rows(sweep.results)
                waiting = _waiting(listing, rows, begun)
                bar.total = num_rows + len(running) + len(waiting)
            bar.set_postfix_str(", ".join(job.case.key for job in running)[:80], refresh=False)
    finally:
        num_rows += _stop(running, sweep.saving_s)
        bar.close()
        signal.signal(signal.SIGTERM, previous)
    return num_rows


def _waiting(listing: Listing, rows: Sequence[Row], begun: set[str]) -> list[GridCase]:
    return [case for case in listing(rows) if case.key not in begun]


def next_case(
    sweep: Sweep,
    waiting: Sequence[GridCase],
    seconds: Sequence[float | None],
    left_s: float,
    *,
    free_gb: float = float("inf"),
) -> GridCase | None:
    """Returns the first case that fits the rest of this piece and the free memory. If there is none, in the first half
    of the piece, a case that is too long for any piece: checkpoints bring it to its end. See [Note: a sweep may be cut
    into pieces]."""
    too_long = None
    for case, expected_s in zip(waiting, seconds, strict=True):
        if (case.device_gb or 0.0) > free_gb:
            continue
        if expected_s is None or expected_s <= left_s or sweep.checkpoint(case).is_file():
            return case
        if too_long is None and expected_s > sweep.span_s < 2 * left_s:
            too_long = case
    return too_long


def _interrupt(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _stop(running: list[_Running], grace_s: float) -> int:
    for job in running:
        job.process.terminate()
    end = time.monotonic() + grace_s
    num_rows = 0
    for job in running:
        job.process.join(max(0.1, end - time.monotonic()))
        if job.process.is_alive():
            job.process.kill()
            job.process.join()
        num_rows += job.finish(stopped=True)
    return num_rows


class _Running:
    """A case in its process."""

    def __init__(self, sweep: Sweep, case: GridCase, context: Any, start: Start) -> None:
        self.sweep, self.case, self.start = sweep, case, start
        self.folder = sweep.folder / safe_name(case.key)
        self.resumed = sweep.checkpoint(case).is_file()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(case.config, indent=2), encoding="utf-8")
        (self.folder / "summary.json").unlink(missing_ok=True)
        self.began = time.monotonic()
        share = sweep.memory_share(case)  # [Note: one GPU for several cases]
        arguments = (str(sweep.script), sweep.command(case), str(self.folder / "log.txt"), sweep.environment, share)
        self.process = context.Process(target=_train, args=arguments, name=case.key)
        self.process.start()

    def end_if_hanging(self) -> None:
        if self.sweep.most_seconds is not None and time.monotonic() - self.began > self.sweep.most_seconds:
            self.process.kill()
            self.process.join()

    def finish(self, *, stopped: bool = False) -> int:
        """Writes the row and returns 1; returns 0 for a stopped case, which has none yet."""
        row: Row = {"key": self.case.key, **{k: v for k, v in asdict(self.case).items() if k != "arguments"}}
        row["arguments"] = [*self.case.arguments, *self.sweep.arguments]
        row |= {"wall_s": round(time.monotonic() - self.began, 1), "jobs": self.sweep.jobs, "resumed": self.resumed}
        row |= {"start": self.start, "model": self.sweep.model}
        summary = self.folder / "summary.json"
        if summary.is_file():
            found = json.loads(summary.read_text(encoding="utf-8"))
            row |= {"status": "ok", **{k: v for k, v in found.items() if k not in ("config", "model_folder")}}
            curve = found.get("curve") or []
            row |= {"lr": self.case.lr, "curve": thinned(curve, self.sweep.num_points)}
            row["first_step_s"] = first_step_s(curve)
        elif stopped:
            return 0
        else:
            log = self.folder / "log.txt"  # none where the process died before it could open one
            words = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
            row |= {"status": "failed", "exit": self.process.exitcode, "last_words": words[-_LAST_WORDS:]}
        append_row(self.sweep.results, row)
        if row["status"] == "ok":
            shutil.rmtree(self.folder, ignore_errors=True)
        return 1


def first_step_s(curve: Sequence[Row]) -> float | None:
    """Seconds of the first step, in which a method builds, records or fits once. A thinned curve does not show them."""
    return next((float(point["train_s"]) for point in curve if point["step"] == 1), None)


def thinned(curve: Sequence[Row], num_points: int) -> list[Row]:
    """Shortens a curve: losses as means over at most `num_points` spans, all scores, no nulls."""
    losses = [point for point in curve if point.get("loss") is not None]
    width = -(-len(losses) // num_points) if losses else 1
    spans = [losses[i : i + width] for i in range(0, len(losses), width)]
    means = [{**span[-1], "loss": round(sum(p["loss"] for p in span) / len(span), 5)} for span in spans]
    kept = sorted([*means, *(p for p in curve if p.get("loss") is None)], key=lambda point: point["step"])
    return [{name: value for name, value in point.items() if value is not None} for point in kept]


def _train(script: str, arguments: list[str], log: str, environment: dict[str, str], share: float | None) -> None:
    """Runs launch/train.py in the child as a shell would, with its output in a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which sends SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1, encoding="utf-8", errors="replace")
    for name in _LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    import torch

    if torch.cuda._is_in_bad_fork():
        os._exit(BAD_FORK)
    if share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)
    spec = importlib.util.spec_from_file_location("launch_train", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.argv = [script, *arguments]
    try:
        spec.loader.exec_module(module)
        module.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
