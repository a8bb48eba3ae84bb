"""Runs cases, each in a process of its own, and records one row for each: a crash or an out-of-memory is a result too.

[Note: fork from a warm parent] Importing torch, transformers and DeepSpeed takes tens of seconds on a cold machine,
longer than most cases compute. The parent process imports them once, never initialises CUDA, and forks a child for each
case; the child initialises CUDA itself. When PyTorch is imported it asks the driver whether there is a GPU, after which
a fork cannot use CUDA, unless PYTORCH_NVML_BASED_CUDA_CHECK is set: commands call `prepare_to_fork` first. A case gets
a fresh interpreter instead of a fork in two cases: the parent has initialised CUDA, or the case sets variables that
libraries read when they are loaded. The child freezes the objects that it inherits. Otherwise a full garbage collection
would traverse the parent's 400,000 objects and copy their pages, 0.3 to 0.6 s in the middle of a timed step.

[Note: one device for several cases] Each process gets at most twice its share of the device's memory, so that a process
that asks for too much fails alone. Cases that state their memory (`device_gb`) wait until it fits beside the running
ones, and may take half as much again as they state.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from ds_zo.records.rows import Row, append_row, read_objects

HARNESS_KEYS = (
    *("run_id", "case", "status", "target", "params", "env", "config_hash", "device", "wall_s", "target_s"),
    *("host_drop_gb", "last_words", "error", "failed_in", "started", "gpu", "cpus", "machine", "commit", "versions"),
)
"""Keys of a row that the harness writes. The other keys are those that the case's target returned."""
_READ_AT_USE = ("DS_PIN_MEMORY_",)
_READ_AT_LOAD = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "LD_", "PYTORCH_", "TORCH_", "CUDA_", "DS_", "PYTHON")
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
WARM = (
    "torch",
    "transformers.modeling_utils",  # takes 3 s; `transformers` imports it when a model is made
    "transformers.models.auto.modeling_auto",
    "transformers.models.opt.modeling_opt",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "deepspeed",
    "torch.utils.cpp_extension",  # takes 0.6 s; DeepSpeed imports it when an engine is made
    "ds_zo",
    "ds_zo.backends.zo.backend",
    "ds_zo.backends.lomo.backend",
    "ds_zo.backends.lsp.backend",
    "ds_zo.backends.adapter.backend",
)
"""Modules that most cases import, and that do not initialise CUDA when they are imported."""
_POLL_S = 0.02
_LAST_WORDS = 4000
_LAST_WORDS_S = 0.3
_NUM_FRAMES = 12
_SETTLE_S = 10.0
"""Seconds for which the harness waits until the memory of an ended case's helper processes is free."""
NOT_RUN = "not run"
"""Status of a case that a call had no time for; `resume` runs it."""
VOID = "void"
"""Status that a person writes into a row whose failure the harness caused; `error` says why."""
_STOPPED = "stopped from outside (SIGTERM)"
_DEVICE_SHARE = 0.9
"""Share of the device's memory for all processes together: each has a CUDA context beside PyTorch's allocations."""
_EQUAL_STRETCH, _STATED_STRETCH = 2.0, 1.5
"""Factors by which a process may exceed an equal share of that memory, or the memory that its case states."""
_BAD_FORK = 97
"""Exit status of a forked child that found CUDA initialised by its parent."""


@dataclass(frozen=True)
class Case:
    """One measurement: a function that a child process of its own calls."""

    name: str
    target: str
    """`package.module:function`. It is called with `params`, and returns a mapping that JSON can hold."""
    params: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 120.0
    env: Mapping[str, str] = field(default_factory=dict)
    planned_host_gb: float | None = None
    """Host memory in GB that the case is expected to need; None: unknown. With less available it is recorded as
    skipped."""
    expected_s: float = 0.0
    """Seconds that the case is expected to take; 0: unknown. It is not started when a call has less time left."""
    device_gb: float | None = None
    """Device memory in GB by which cases that run at once share the device; None: an equal share."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the case's row, however the case ends."""

    @property
    def config_hash(self) -> str:
        """Hash of the target, its parameters and its environment: everything that decides what is measured."""
        text = json.dumps([self.target, self.params, dict(self.env)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def prepare_to_fork() -> None:
    """Restarts this command with PYTORCH_NVML_BASED_CUDA_CHECK set, unless it is set, so that a CUDA build of PyTorch
    does not initialise CUDA. A command's main calls it first; a library never does."""
    import torch

    if torch.version.cuda is not None and os.environ.get(_NVML_CHECK) is None:
        os.environ[_NVML_CHECK] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def import_warm(names: Sequence[str] = WARM) -> None:
    """Imports the modules that children inherit: [Note: fork from a warm parent]."""
    for name in names:
        importlib.import_module(name)


def run_cases(
    cases: Sequence[Case],
    *,
    out: Path | None,
    run_id: str | None = None,
    only: str | None = None,
    resume: bool = False,
    min_free_host_gib: float = 4.0,
    warm: Sequence[str] = WARM,
    device: str = "cuda",
    spawn: bool = False,
    total_s: float | None = None,
    jobs: int = 1,
    device_gb: float | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Runs the cases and returns one row for each; appends each row to `out` and passes it to `on_row`. Tables compare
    rows of one `run_id`.

    `only` selects cases by name, as `is_named_like` matches it. `resume` continues the last run of `out`: a case that
    has a row there keeps it. On another machine than that run's, `resume` begins a new run, unless no row is missing. A
    child is stopped when the host has less than `min_free_host_gib` left. The call ends after `total_s` seconds: the
    running cases and the remaining ones get rows with status `not run`, which `resume` runs later. SIGTERM ends the
    call in the same way, and then the process. `jobs` cases run at once: [Note: one device for several cases].
    `device_gb` is the device's memory, where cases state theirs.
    """
    ends = time.monotonic() + (math.inf if total_s is None else total_s)
    chosen = [case for case in cases if only is None or is_named_like(case.name, only)]
    if not chosen:
        raise ValueError(f"no case is named like {only!r}; there are {', '.join(case.name for case in cases)}")
    if not spawn:
        import_warm(warm)
    from ds_zo.records.environment import environment

    found = environment()
    begun: list[Row] = []
    if resume and out is not None and out.exists():
        resumed = run_id or run_to_resume((out, chosen))
        begun = [row for row in read_rows(out) if row["run_id"] == resumed]
    has_row = {(row["case"], row["config_hash"]): row for row in begun if row["status"] != NOT_RUN}
    known = {key: row for key, row in has_row.items() if row["status"] not in ("skipped", VOID)}
    if any(row.get("machine") != found["machine"] for row in begun):
        if not _has_rows_for(chosen, begun):
            raise ValueError(
                f"a run is of one machine, but {run_id} was begun on another: leave it out, or use --resume (--run-id)"
            )
        known = has_row
    run_id = run_id or (begun[0]["run_id"] if begun else new_run_id())
    common = {"run_id": run_id, "device": device, **found}
    harness = _Harness(
        min_free_bytes=int(min_free_host_gib * 2**30), spawn=spawn, jobs=jobs, device_gb=device_gb, ends=ends
    )
    rows = {id(case): row for case in chosen if (row := known.get((case.name, case.config_hash))) is not None}
    bar = _CaseBar(total=len(chosen), initial=len(rows), unit="case", file=sys.stderr, dynamic_ncols=True, disable=None)
    with bar, _stopping_on_sigterm(harness):
        for case, outcome in harness.rows([case for case in chosen if id(case) not in rows], say=bar.set_description):
            row = common | outcome
            rows[id(case)] = row
            if out is not None:
                append_row(out, row)
            if on_row is not None:
                on_row(row)
            if bar.disable:  # no terminal: a line for each case
                print(f"{len(rows)}/{len(chosen)} {case.name}: {row['status']}", file=sys.stderr, flush=True)
            bar.update()
            bar.set_postfix_str(f"{case.name}: {row['status']}", refresh=True)
    return [rows[id(case)] for case in chosen]


def is_named_like(name: str, pattern: str) -> bool:
    """Whether a name matches a glob, contains the pattern, or contains a match of it as a regular expression."""
    if fnmatch(name, pattern) or pattern in name:
        return True
    with suppress(re.error):
        return re.search(pattern, name) is not None
    return False


def new_run_id() -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def run_to_resume(*parts: tuple[Path, Sequence[Case]]) -> str | None:
    """Returns the last run of these files if this machine made it, or if no row of their cases is missing. None: there
    is no run, or a new one must begin."""
    from ds_zo.records.environment import machine_id

    rows = [read_rows(out) if out.exists() else [] for out, _ in parts]
    last = next((found[-1] for found in rows if found), None)
    if last is None:
        return None
    run_id = str(last["run_id"])
    of_run = [[row for row in found if row["run_id"] == run_id] for found in rows]
    here = all(row.get("machine") == machine_id() for found in of_run for row in found)
    if here or all(_has_rows_for(cases, found) for (_, cases), found in zip(parts, of_run, strict=True)):
        return run_id
    print(f"run {run_id} is of another machine: a new run begins here", file=sys.stderr)
    return None


def _has_rows_for(cases: Sequence[Case], rows: Sequence[Row]) -> bool:
    found = {(row["case"], row["config_hash"]) for row in rows if row["status"] != NOT_RUN}
    return all((case.name, case.config_hash) in found for case in cases)


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file, without `not run` rows of cases that the same run has measured later."""
    rows = read_objects(path)
    cases = [(row.get("run_id"), row.get("case")) for row in rows]
    last = {case: i for i, case in enumerate(cases)}
    return [row for i, row in enumerate(rows) if row.get("status") != NOT_RUN or last[cases[i]] == i]


class _CaseBar(tqdm):
    monitor_interval = 0  # tqdm's monitor is a thread, and threads do not survive a fork


class _Harness:
    """Starts child processes, watches them, and records how each of them ended."""

    def __init__(self, *, min_free_bytes: int, spawn: bool, jobs: int, device_gb: float | None, ends: float) -> None:
        self._min_free_bytes = min_free_bytes
        self._spawn = spawn
        self._jobs = jobs
        self._device_gb = device_gb
        self._ends = ends
        """The `time.monotonic()` at which the call ends."""
        self._running: list[_Child] = []
        self._last_end = -math.inf
        self.stop_requested = False
        """Whether SIGTERM has asked the call to end."""

    def rows(self, cases: Sequence[Case], *, say: Callable[[str], object]) -> Iterator[tuple[Case, Row]]:
        """Runs the cases, and yields each of them with its row when it has one. `say` is told the last one begun."""
        waiting = list(cases)
        try:
            while waiting or self._running:
                while len(self._running) < self._jobs and (case := self._next(waiting)) is not None:
                    waiting.remove(case)
                    say(case.name)
                    free = self._free_bytes(case)
                    refused = self._refused(case, free)
                    if refused is None:
                        self._running.append(_Child(case, free, spawn=self._spawn, share=self._share(case)))
                    else:
                        yield case, _about(case) | refused | {"wall_s": 0.0}
                for child in [child for child in self._running if self._has_ended(child)]:
                    self._running.remove(child)
                    self._last_end = time.monotonic()
                    row = child.close()
                    if child.exit_status == _BAD_FORK and child.is_fork:
                        self._spawn = True
                        waiting.insert(0, child.case)
                    else:
                        yield child.case, _about(child.case, child.started) | row
                if self._running:
                    time.sleep(_POLL_S)
        finally:
            for child in self._running:
                child.close()

    def _next(self, waiting: Sequence[Case]) -> Case | None:
        """The first case whose memory fits beside the running ones. Any case fits alone."""
        if self._device_gb is None or not self._running:
            return waiting[0] if waiting else None
        free_gb = _DEVICE_SHARE * self._device_gb - sum(child.case.device_gb or 0.0 for child in self._running)
        return next((case for case in waiting if (case.device_gb or 0.0) <= free_gb), None)

    def _share(self, case: Case) -> float | None:
        """The fraction of the device's memory that a case's process may allocate; None: all of it."""
        if self._jobs == 1:
            return None
        if self._device_gb is not None and case.device_gb is not None:
            return min(_DEVICE_SHARE, _STATED_STRETCH * case.device_gb / self._device_gb)
        return min(_DEVICE_SHARE, _EQUAL_STRETCH * _DEVICE_SHARE / self._jobs)

    def _refused(self, case: Case, free_bytes: int) -> Row | None:
        """Status and reason of a case that is not started; None: it is."""
        if self.stop_requested:
            return {"status": NOT_RUN, "error": f"{_STOPPED}; --resume runs it"}
        room_gb = (free_bytes - self._min_free_bytes) / 1e9
        if case.planned_host_gb is not None and case.planned_host_gb > room_gb:
            reason = f"not run: planned {case.planned_host_gb:.1f} of {room_gb:.1f} GB of host memory"
            return {"status": "skipped", "error": reason}
        left_s = self._ends - time.monotonic()
        if left_s < max(0.0, case.expected_s):
            wants = f": may take {case.expected_s:.0f} s, {max(0.0, left_s):.0f} s were left" if case.expected_s else ""
            return {"status": NOT_RUN, "error": f"time (--total-s){wants}; --resume runs it"}
        return None

    def _free_bytes(self, case: Case) -> int:
        """Free bytes of the host. If this case needs more and no other runs, waits for up to `_SETTLE_S` until the
        memory of the case before is free."""
        from ds_zo.records.environment import host_free_bytes, host_total_bytes

        needed = (case.planned_host_gb or 0.0) * 1e9 + self._min_free_bytes
        may_come = needed <= host_total_bytes() and not self._running
        while (free := host_free_bytes()) < needed and may_come and time.monotonic() < self._last_end + _SETTLE_S:
            time.sleep(_POLL_S)
        return free

    def _has_ended(self, child: _Child) -> bool:
        """Whether a child has ended, or has been stopped here."""
        from ds_zo.records.environment import host_free_bytes

        if child.poll():
            return True
        free = host_free_bytes()
        child.least_bytes = min(child.least_bytes, free)
        if free < self._min_free_bytes:
            child.stop("killed", f"stopped with {free / 2**30:.1f} GiB of host memory left")
        elif time.monotonic() > child.deadline:
            child.stop("timeout", f"no answer within {child.case.timeout_s:g} s")
        elif time.monotonic() > self._ends:
            child.stop(NOT_RUN, "time (--total-s): stopped before it was done; --resume runs it")
        elif self.stop_requested:
            child.stop(NOT_RUN, f"{_STOPPED} before it was done; --resume runs it")
        return child.stopped is not None


class _Child:
    """A case in its process."""

    def __init__(self, case: Case, free_bytes: int, *, spawn: bool, share: float | None) -> None:
        self.case = case
        self.started = _now()
        self.exit_status: int | None = None
        """The exit status as `subprocess` has it, negative for a signal; None if the harness stopped the child."""
        self.stopped: tuple[str, str] | None = None
        """(status, reason) if the harness stopped the child, else None."""
        self.least_bytes = free_bytes
        """The least free memory of the host while the child ran."""
        self.deadline = time.monotonic() + case.timeout_s
        at_load = [name for name in case.env if not name.startswith(_READ_AT_USE)]
        must_load = any(name.startswith(_READ_AT_LOAD) for name in at_load)
        self.is_fork = not (spawn or must_load or _cuda_was_touched())
        self._free_bytes, self._begun, self._start = free_bytes, time.time(), time.perf_counter()
        self._folder = Path(tempfile.mkdtemp(prefix="ds_zo_bench_"))
        (self._folder / "log").touch()
        start = _fork if self.is_fork else _start_interpreter
        self.pid = start(case, self._folder, {**single_process(), **case.env}, share)

    def poll(self) -> bool:
        """Whether the process has ended by itself."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            self.exit_status = os.waitstatus_to_exitcode(status)
        return bool(ended)

    def stop(self, status: str, reason: str) -> None:
        """Ends the process. Unless memory is short, faulthandler first writes its stack to the log."""
        if status != "killed":
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(_LAST_WORDS_S)
        self.stopped = status, reason
        _end(self.pid)

    def close(self) -> Row:
        """Ends the child's whole process group, and returns how the case ended."""
        _end(self.pid)
        outcome = self._outcome()
        shutil.rmtree(self._folder, ignore_errors=True)
        return outcome | {"wall_s": round(time.perf_counter() - self._start, 3)}

    def _outcome(self) -> Row:
        outcome: Row = {
            "last_words": _last_words(self._folder / "log"),
            "host_drop_gb": round(max(0, self._free_bytes - self.least_bytes) / 1e9, 3),
        }
        if self.stopped is not None:
            _remove_locks(self._begun)
        # A stopped child may have a result too: after writing it, freeing tens of pinned gigabytes takes seconds.
        with suppress(OSError, json.JSONDecodeError):
            return outcome | json.loads((self._folder / "result.json").read_text(encoding="utf-8"))
        if self.stopped is not None:
            status, reason = self.stopped
            return outcome | {"status": status, "error": reason}
        if self.exit_status == -signal.SIGKILL:
            return outcome | {"status": "killed", "error": "killed from outside, as the kernel does out of memory"}
        return outcome | {"status": "crash", "error": f"ended without a result, exit status {self.exit_status}"}


def _about(case: Case, started: str | None = None) -> Row:
    """What a row says of its case, however that ends. `started` None: the case does not run."""
    return {
        **case.labels,
        "case": case.name,
        "target": case.target,
        "params": case.params,
        "env": dict(case.env),
        "config_hash": case.config_hash,
        "started": started or _now(),
    }


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def _stopping_on_sigterm(harness: _Harness) -> Iterator[None]:
    """On SIGTERM the harness stops the running case, writes the remaining rows, and then ends the process with the
    status of the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def request_stop(*_: Any) -> None:
        harness.stop_requested = True

    before = signal.signal(signal.SIGTERM, request_stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if harness.stop_requested:
        raise SystemExit(128 + signal.SIGTERM)


def _last_words(log: Path) -> str:
    """Returns the end of a child's log. Of a stack dump it keeps the innermost frames, because the stack of a forked
    child continues into its parent's."""
    kept: list[str] = []
    num_frames = 0
    for line in log.read_bytes().decode(errors="replace").splitlines():
        num_frames = num_frames + 1 if line.startswith("  File ") and num_frames else 0
        if line.endswith("(most recent call first):"):
            num_frames = 1
        if num_frames <= _NUM_FRAMES and not line.startswith("Extension modules:"):
            kept.append(line)
    return without_folders("\n".join(kept))[-_LAST_WORDS:]


def without_folders(text: str) -> str:
    """Removes the folders of `sys.path` from paths in a text: they are private to the machine, and long."""
    for folder in sorted((path for path in sys.path if len(path) > 1 and os.path.isabs(path)), key=len, reverse=True):
        text = text.replace(folder.rstrip("/") + "/", "")
    return text


def _end(pid: int) -> None:
    """Kills a child and its process group. The child leads a session of its own, except in the moment after a fork."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # the process has been waited for
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _remove_locks(since: float) -> None:
    """Removes locks of extension builds that a stopped child has left: other processes would wait for them for ever."""
    from ds_zo.records.environment import extensions_folder

    for lock in extensions_folder().glob("*/lock"):
        with suppress(OSError):
            if lock.stat().st_mtime >= since:
                lock.unlink()


def _cuda_was_touched() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork())


def single_process() -> dict[str, str]:
    """Environment variables that a launcher sets for a single rank; torch chooses the port."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _fork(case: Case, folder: Path, env: Mapping[str, str], share: float | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # [Note: fork from a warm parent]
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        # A test runner's capture replaces these objects, but the child's output must reach the log.
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(env)
        _child(case, folder, share)
    return pid


def _start_interpreter(case: Case, folder: Path, env: Mapping[str, str], share: float | None) -> int:
    spec = {"name": case.name, "target": case.target, "params": case.params}
    (folder / "case.json").write_text(json.dumps(spec), encoding="utf-8")
    code = "import sys; from ds_zo.bench.runner import _child_of_file; _child_of_file(*sys.argv[1:])"
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(share or "")],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    child.returncode = 0  # `_Child.poll` waits for the process
    return child.pid


def _child_of_file(folder: str, share: str) -> NoReturn:
    case = Case(**json.loads((Path(folder) / "case.json").read_text(encoding="utf-8")))
    _child(case, Path(folder), float(share) if share else None)


def _child(case: Case, folder: Path, share: float | None) -> NoReturn:
    """Calls the target and writes its result to a file. The process ends without interpreter shutdown, in which some
    libraries hang or abort."""
    status = 1
    try:
        _end_with_parent()
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        if sys.modules.get("torch") is not None and sys.modules["torch"].cuda._is_in_bad_fork():
            os._exit(_BAD_FORK)
        if share is not None:
            _limit_device_memory(share)
        start = time.perf_counter()
        outcome = {**_outcome(case), "target_s": round(time.perf_counter() - start, 3)}
        part = folder / "result.json.part"
        part.write_text(json.dumps(outcome), encoding="utf-8")
        part.rename(folder / "result.json")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _limit_device_memory(share: float) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


def _outcome(case: Case) -> Row:
    module, _, function = case.target.partition(":")
    try:
        result = dict(getattr(importlib.import_module(module), function)(**case.params))
        taken = sorted(result.keys() & set(HARNESS_KEYS))
        if taken:
            raise ValueError(f"{case.target} returned keys that the harness writes: {', '.join(taken)}; rename them")
        json.dumps(result)
        return {"status": "ok", **result, **_gpu()}
    except BaseException as error:
        traceback.print_exc()
        status = "oom" if is_out_of_memory(error) else "crash"
        words = without_folders(f"{type(error).__name__}: {error}")[:_LAST_WORDS]
        return {"status": status, "error": words, "failed_in": _failed_in(error, module), **_gpu()}


def _failed_in(error: BaseException, module: str) -> str | None:
    """Name of the innermost function of the target's own module in the traceback; None if there is none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_globals.get("__name__") == module]
    return frames[-1].f_code.co_name if frames else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that device or host memory ran out. PyTorch, CUDA, Python or a check of ds_zo may have
    raised it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = (
        *("out of memory", "can't allocate memory", "cannot allocate memory", "CUBLAS_STATUS_ALLOC_FAILED"),
        "(ds_zo.stream.device_memory_gb)",
    )
    return any(sign.lower() in str(error).lower() for sign in signs)


def _gpu() -> Row:
    torch = sys.modules.get("torch")
    known = torch is not None and torch.cuda.is_initialized()
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and known else {}


def _end_with_parent() -> None:
    """Makes the kernel kill the process when its parent dies, so that no child keeps the GPU (Linux only)."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL))
