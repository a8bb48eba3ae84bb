"""What test cases run in their children."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def add(*, a: int, b: int) -> dict[str, Any]:
    print("adding")
    told = {"rank": os.environ["RANK"], "word": os.environ.get("BENCH_WORD")}
    return {"sum": a + b, "pid": os.getpid(), "frozen": gc.get_freeze_count(), **told}


def multiply_in_threads() -> dict[str, Any]:
    """Hangs in a child whose parent had started OpenMP's threads."""
    import torch

    torch.set_num_threads(2)
    square = torch.ones(400, 400)
    return {"total": float((square @ square).sum()), "cuda": torch.cuda.is_initialized()}


def run_out_of_memory() -> dict[str, Any]:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")


def abort() -> dict[str, Any]:
    print("about to abort", flush=True)
    os.abort()


def die_as_if_killed() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def find_cuda_touched(*, count: str) -> dict[str, Any]:
    """Ends as a forked child does whose parent had initialised CUDA."""
    with Path(count).open("a") as file:
        file.write("x")
    os._exit(97)


def meet(*, folder: str, name: str, others: int) -> dict[str, Any]:
    """Returns when so many other cases run beside this one."""
    (Path(folder) / name).touch()
    while len(list(Path(folder).iterdir())) <= others:
        time.sleep(0.01)
    return {"met": name}


def hang_with_grandchild(*, pid_file: str, lock: str) -> dict[str, Any]:
    Path(lock).touch()
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pid_file).write_text(str(grandchild.pid))
    wait_for_ever()
    return {}


def wait_for_ever() -> None:
    time.sleep(600)


def terminate_parent_and_wait() -> dict[str, Any]:
    print("waiting", flush=True)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
    return {}


def take_a_harness_key() -> dict[str, Any]:
    return {"status": "fine"}


def allocate_on_gpu(*, gb: float, cap_gb: float) -> dict[str, Any]:
    import torch
    from deepspeed.accelerator import get_accelerator

    from ds_zo.bench.measure import cap_device_memory

    cap_device_memory(cap_gb)
    block = torch.zeros(int(gb * 1e9), dtype=torch.uint8, device="cuda")
    free_gb = get_accelerator().available_memory() / 1e9
    return {"sum": int(block[:10].sum()), "has_arguments": len(sys.argv) > 1, "free_gb": free_gb}


def copy_and_compute() -> dict[str, Any]:
    import torch

    from ds_zo.bench.traces import profile_steps

    host = torch.empty(64_000_000, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    square = torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        there.copy_(host, non_blocking=True)
        host[:16_000_000].copy_(there[:16_000_000], non_blocking=True)
        square @ square

    step()
    return profile_steps(step, steps=4)
