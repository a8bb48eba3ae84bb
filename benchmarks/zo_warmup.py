"""Compiles, all at once and before anything is timed, the kernels that a preset's cases will launch.

Triton keeps what it has compiled on disk, where the processes of later cases find it. A kernel takes a core about a
second, and there is one for each combination of what a step reads, replays, stores and writes: a preset has dozens. So
a toy case of each kind runs first, as many at a time as there are cores. Whatever this misses is compiled by the case
that needs it, before it is timed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ds_zo.bench.runner import single_process
from ds_zo.records.rows import Row

_RATE_JOBS = 4
"""Processes that compile the kernels whose rates are measured, a share each."""


def compile_kernels(*, kinds: Sequence[Mapping[str, Any]], device: str = "cuda", at_once: int | None = None) -> Row:
    """The row says which toy cases failed: what they would have compiled, the cases that need it do. In a process that
    has not touched CUDA, for it forks."""
    jobs: dict[str, Callable[[], object]] = {
        f"{kind['dtype']}{' resident' * kind['resident']} {kind['stream']}": partial(
            _toy_case, {**kind, "device": device}
        )
        for kind in kinds
    }
    if device != "cpu":
        jobs |= {f"rates {i}": partial(_rate_kernels, i) for i in range(_RATE_JOBS)}
    left, failed = list(jobs), []
    running: dict[int, str] = {}
    while left or running:
        while left and len(running) < (at_once or os.cpu_count() or 1):
            name = left.pop(0)
            running[_start(jobs[name])] = name
        pid, status = os.wait()
        name = running.pop(pid)
        if os.waitstatus_to_exitcode(status):
            failed.append(name)
    return {"method": "warmup", "num_jobs": len(jobs), "failed": failed}


def _start(job: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.environ.update(single_process())
            job()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def _toy_case(params: Mapping[str, Any]) -> None:
    from benchmarks.zo_case import run_case

    run_case(**params)


def _rate_kernels(share: int) -> None:
    from benchmarks import kernels

    for i, (_, call, _) in enumerate(kernels.cases(numel=2**16)):
        if i % _RATE_JOBS == share:
            call()
