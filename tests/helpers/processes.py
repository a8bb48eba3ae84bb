"""Environments of processes that tests start. Importing it imports neither torch nor DeepSpeed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def python_path(*folders: Path) -> str:
    """For a child process: these folders, then those that this process was given."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(*, rank: int = 0, world_size: int = 1, port: int) -> dict[str, str]:
    """What a launcher would set for one rank on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def let_cpus_have_fp16() -> None:
    """In this process. DeepSpeed refuses fp16 on a CPU without FP16 instructions, although torch computes it there:
    tests of fp16 go below that check."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
