"""Runs cases, each in a process of its own, and records one row for each: a crash or an out-of-memory is a result too.

[Note: fork from a warm parent] Importing torch, transformers and DeepSpeed takes tens of seconds on a cold machine,
longer than most cases compute. The parent process imports them once, never initialises CUDA, and forks a child for each
case; the child initialises CUDA itself. When PyTorch is imported it asks the driver whether there is a GPU, after which
a fork cannot use CUDA, unless PYTORCH_NVML_BASED_CUDA_CHECK is set: commands call `prepare_to_fork` first. A case gets
a fresh interpreter instead of a fork in two cases: the parent has initialised CUDA, or the case sets variables that
libraries read when they are loaded. The child freezes the objects that it inherits. Otherwise a full garbage collection
would traverse the parent's 400,000 objects and copy their pages, 0.3 to 0.6 s in the middle of a timed step.
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
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Runs the cases and returns one row for each; appends each row to `out` and passes it to `on_row`. Tables compare
    rows of one `run_id`.

    `only` selects cases by name, as `is_named_like` matches it. `resume` continues the last run of `out`: a case that
    has a row there keeps it. On another machine than that run's, `resume` begins a new run, unless no row is missing. A
    child is stopped when the host has less than `min_free_host_gib` left. The call ends after `total_s` seconds: the
    running case and the remaining ones get rows with status `not run`, which `resume` runs later. SIGTERM ends the call
    in the same way, and then the process.
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
    harness = _Harness(min_free_bytes=int(min_free_host_gib * 2**30), spawn=spawn)
    results: list[Row] = []
    bar = _CaseBar(total=len(chosen), unit="case", file=sys.stderr, dynamic_ncols=True, disable=None)
    with bar, _stopping_on_sigterm(harness):
        for case in chosen:
            bar.set_description(case.name)
            row = known.get((case.name, case.config_hash))
            if row is None:
                row = common | harness.run(case, ends=ends)
                if out is not None:
                    append_row(out, row)
                if on_row is not None:
                    on_row(row)
            results.append(row)
            if bar.disable:  # no terminal: a line for each case
                print(f"{len(results)}/{len(chosen)} {case.name}: {row['status']}", file=sys.stderr, flush=True)
            bar.update()
            bar.set_postfix_str(f"{case.name}: {row['status']}", refresh=True)
    return results


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

    def __init__(self, *, min_free_bytes: int, spawn: bool) -> None:
        self._min_free_bytes = min_free_bytes
        self._spawn = spawn
        self._last_end = -math.inf
        self.stop_requested = False
        """Whether SIGTERM has asked the call to end."""

    def run(self, case: Case, *, ends: float) -> Row:
        """Runs one case. `ends` is the `time.monotonic()` at which the whole call ends."""
        row: Row = {
            "case": case.name,
            "target": case.target,
            "params": case.params,
            "env": dict(case.env),
            "config_hash": case.config_hash,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if self.stop_requested:
            return row | {"status": NOT_RUN, "error": f"{_STOPPED}; --resume runs it", "wall_s": 0.0}
        free = self._free_bytes(case)
        room_gb = (free - self._min_free_bytes) / 1e9
        if case.planned_host_gb is not None and case.planned_host_gb > room_gb:
            reason = f"not run: planned {case.planned_host_gb:.1f} of {room_gb:.1f} GB of host memory"
            return row | {"status": "skipped", "error": reason, "wall_s": 0.0}
        left_s = ends - time.monotonic()
        if left_s < max(0.0, case.expected_s):
            wants = f": may take {case.expected_s:.0f} s, {max(0.0, left_s):.0f} s were left" if case.expected_s else ""
            return row | {"status": NOT_RUN, "error": f"time (--total-s){wants}; --resume runs it", "wall_s": 0.0}
        with tempfile.TemporaryDirectory(prefix="ds_zo_bench_") as folder:
            (Path(folder) / "log").touch()
            start = time.perf_counter()
            outcome = self._one(case, Path(folder), free, ends=ends)
            self._last_end = time.monotonic()
            outcome["wall_s"] = round(time.perf_counter() - start, 3)
        return row | outcome

    def _free_bytes(self, case: Case) -> int:
        """Free bytes of the host. If this case needs more, waits for up to `_SETTLE_S` until the memory of the case
        before is free."""
        from ds_zo.records.environment import host_free_bytes, host_total_bytes

        needed = (case.planned_host_gb or 0.0) * 1e9 + self._min_free_bytes
        may_come = needed <= host_total_bytes()
        while (free := host_free_bytes()) < needed and may_come and time.monotonic() < self._last_end + _SETTLE_S:
            time.sleep(_POLL_S)
        return free

    def _one(self, case: Case, folder: Path, free_bytes: int, *, ends: float) -> Row:
        begun = time.time()
        env = {**single_process(), **case.env}
        at_load = [name for name in case.env if not name.startswith(_READ_AT_USE)]
        forks = not self._spawn and not any(name.startswith(_READ_AT_LOAD) for name in at_load)
        start = _fork if forks and not _cuda_was_touched() else _start_interpreter
        pid = start(case, folder, env)
        with _ended(pid):
            watched = self._watch(pid, case, free_bytes, ends=ends)
        if watched.exit_status == _BAD_FORK and forks:
            self._spawn = True
            return self._one(case, folder, free_bytes, ends=ends)
        outcome: Row = {
            "last_words": _last_words(folder / "log"),
            "host_drop_gb": round(watched.host_drop_bytes / 1e9, 3),
        }
        if watched.stopped is not None:
            _remove_locks(begun)
        # A stopped child may have a result too: after writing it, freeing tens of pinned gigabytes takes seconds.
        with suppress(OSError, json.JSONDecodeError):
            return outcome | json.loads((folder / "result.json").read_text(encoding="utf-8"))
        if watched.stopped is not None:
            status, reason = watched.stopped
            return outcome | {"status": status, "error": reason}
        if watched.exit_status == -signal.SIGKILL:
            return outcome | {"status": "killed", "error": "killed from outside, as the kernel does out of memory"}
        return outcome | {"status": "crash", "error": f"ended without a result, exit status {watched.exit_status}"}

    def _watch(self, pid: int, case: Case, free_bytes: int, *, ends: float) -> _Watched:
        from ds_zo.records.environment import host_free_bytes

        deadline = time.monotonic() + case.timeout_s
        least = free_bytes
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return _Watched(os.waitstatus_to_exitcode(status), None, max(0, free_bytes - least))
            free = host_free_bytes()
            least = min(least, free)
            stopped = None
            if free < self._min_free_bytes:
                stopped = ("killed", f"stopped with {free / 2**30:.1f} GiB of host memory left")
            elif time.monotonic() > deadline:
                stopped = ("timeout", f"no answer within {case.timeout_s:g} s")
            elif time.monotonic() > ends:
                stopped = (NOT_RUN, "time (--total-s): stopped before it was done; --resume runs it")
            elif self.stop_requested:
                stopped = (NOT_RUN, f"{_STOPPED} before it was done; --resume runs it")
            if stopped is not None:
                if stopped[0] != "killed":
                    os.kill(pid, signal.SIGUSR1)  # faulthandler writes the stack to the log
                    time.sleep(_LAST_WORDS_S)
                _end(pid)
                return _Watched(None, stopped, max(0, free_bytes - least))
            time.sleep(_POLL_S)


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


@dataclass(frozen=True)
class _Watched:
    exit_status: int | None
    """The exit status as `subprocess` has it, negative for a signal; None if the harness stopped the child."""
    stopped: tuple[str, str] | None
    """(status, reason) if the harness stopped the child, else None."""
    host_drop_bytes: int
    """Largest drop of the host's free memory while the child ran, by any process."""


@contextmanager
def _ended(pid: int) -> Iterator[None]:
    """Ends the child's whole process group on exit from the context."""
    try:
        yield
    finally:
        _end(pid)


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


def _fork(case: Case, folder: Path, env: Mapping[str, str]) -> int:
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
        _child(case, folder)
    return pid


def _start_interpreter(case: Case, folder: Path, env: Mapping[str, str]) -> int:
    spec = {"name": case.name, "target": case.target, "params": case.params}
    (folder / "case.json").write_text(json.dumps(spec), encoding="utf-8")
    code = "import sys; from ds_zo.bench.runner import _child_of_file; _child_of_file(sys.argv[1])"
    path = os.pathsep.join(filter(None, (*sys.path, os.environ.get("PYTHONPATH"))))
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    child.returncode = 0  # `_watch` waits for the process
    return child.pid


def _child_of_file(folder: str) -> NoReturn:
    _child(Case(**json.loads((Path(folder) / "case.json").read_text(encoding="utf-8"))), Path(folder))


def _child(case: Case, folder: Path) -> NoReturn:
    """Calls the target and writes its result to a file. The process ends without interpreter shutdown, in which some
    libraries hang or abort."""
    status = 1
    try:
        end_with_parent(signal.SIGKILL)
        faulthandler.enable(file=sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        if sys.modules.get("torch") is not None and sys.modules["torch"].cuda._is_in_bad_fork():
            os._exit(_BAD_FORK)
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


def end_with_parent(number: signal.Signals) -> None:
    """Makes the kernel send this signal to the process when its parent dies, so that no child keeps the GPU (Linux
    only)."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))
