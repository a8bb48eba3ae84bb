"""Shared fixtures. The environment is set here, before any test module imports DeepSpeed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_BIN = Path(sys.executable).parent
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_BIN.parent / "torch_extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if str(_BIN) not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = f"{_BIN}{os.pathsep}{os.environ['PATH']}"  # ninja, for DeepSpeed's JIT builds

REPO = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def free_port() -> int:
    return find_free_port()


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


@pytest.fixture(scope="session")
def single_process() -> Iterator[None]:
    """DeepSpeed's process group of one rank, for tests that call `deepspeed.initialize` in this process."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    environment = rank_environment(port=find_free_port())
    os.environ.update(environment)
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
    yield
    import torch.distributed

    torch.distributed.destroy_process_group()
    for name in environment:
        os.environ.pop(name, None)


def run_ranks_of(script: str, *arguments: str, num_ranks: int, timeout_s: float, **environment: Any) -> list[str]:
    """A script in fresh interpreters as a launcher's ranks on this machine: what each printed, by rank."""
    port = find_free_port()
    ranks = []
    for rank in range(num_ranks):
        path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, **rank_environment(rank=rank, world_size=num_ranks, port=port), "PYTHONPATH": path}
        env.update({name: str(value) for name, value in environment.items()})
        command = [sys.executable, "-c", script, *arguments]
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, f"exit status {rank.returncode}\n{out[-4000:]}\n{err[-4000:]}"
    return [out for out, _ in outputs]


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a script in a fresh interpreter as one rank of a launcher would be, and returns what it printed."""

    def run(script: str, *arguments: str, timeout_s: float = 300, **environment: Any) -> str:
        return run_ranks_of(script, *arguments, num_ranks=1, timeout_s=timeout_s, **environment)[0]

    return run


@pytest.fixture
def run_ranks() -> Callable[..., list[str]]:
    """The same with several ranks on this machine: what each printed, by rank."""

    def run(script: str, *arguments: str, num_ranks: int = 2, timeout_s: float = 300, **environment: Any) -> list[str]:
        return run_ranks_of(script, *arguments, num_ranks=num_ranks, timeout_s=timeout_s, **environment)

    return run


@pytest.fixture(scope="session")
def run_script() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Runs a script file as `python SCRIPT ARGUMENTS` would, less the time that importing the libraries takes."""
    from warm_interpreter import WarmInterpreter

    interpreter = WarmInterpreter(REPO)
    yield interpreter.run
    interpreter.close()
