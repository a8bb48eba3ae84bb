"""Shared fixtures. The environment is set here, before any test module imports DeepSpeed."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cpuinfo
import pytest

from tests.helpers.processes import REPO, find_free_port, let_cpus_have_fp16, python_path, rank_environment

if TYPE_CHECKING:
    from tests.helpers.warm_interpreter import WarmInterpreter

_BIN = Path(sys.executable).parent
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_BIN.parent / "torch_extensions"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if str(_BIN) not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = f"{_BIN}{os.pathsep}{os.environ['PATH']}"  # ninja, for DeepSpeed's JIT builds

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
"""Reading the processor's features takes a second. DeepSpeed reads them three times for each CPU Adam."""


IMPORTED_BY_TESTS = [
    *("datasets", "matplotlib.pyplot", "pandas", "peft", "sympy", "torch._dynamo", "torch.distributed.fsdp", "triton"),
    "deepspeed.runtime.zero.muon.muon_optimizer",  # DeepSpeed's own engine imports it, and torch's compiler
]
"""Libraries that several test files import. One process imports them for all."""


def pytest_configure(config: pytest.Config) -> None:
    """A run that leaves the GPU's tests out is the CPU's, wherever it is made: engines are held against plain loops on
    the CPU, bit for bit, and ranks outnumber the devices. Before anything has looked for a device."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs so. Python then installs no handler, and tests of Ctrl-C would see none.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not gpu" in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed's launcher shows its ranks the devices again
        if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
            from tests.helpers.warm_interpreter import WarmInterpreter

            interpreter = WarmInterpreter(python_path(REPO), IMPORTED_BY_TESTS)
            interpreter.start()
            config.add_cleanup(interpreter.close)
            # All processes of xdist are forks of it.
            config.option.tx = [f"popen//python={interpreter.fork()}" for _ in config.option.tx]
    config.option.loadscopereorder = False  # keeps the order of `pytest_collection_modifyitems`


def pytest_report_header(config: pytest.Config) -> str | None:
    if "not gpu" in config.getoption("markexpr"):
        return None
    import torch

    if torch.cuda.is_available():
        return (
            "device: CUDA, where tests without the mark `gpu` go too; most of them are the CPU's: -m 'not gpu' hides it"
        )
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests begin, then large files: a process that comes to a long file at the end works on alone."""
    import torch

    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: (item.path not in slow, -item.path.stat().st_size))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The libraries, which it imports, stay: no collection of garbage has to look through them. Later ones come
    seldom: an engine allocates thousands of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.fixture(autouse=True)
def _torch_linear_is_restored() -> Iterator[None]:
    """DeepSpeed's `zero.Init` leaves its own `functional.linear` behind. A test must not depend on which tests the same
    process ran before it."""
    from torch.nn import functional

    linear = functional.linear
    yield
    functional.linear = linear


@pytest.fixture(autouse=True)
def _level_of_deepspeeds_logger_is_restored() -> Iterator[None]:
    """Trainer and `--log-level` set it for the whole process."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    yield
    if level:  # else the test was the first to import DeepSpeed
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _accelerates_choice_of_deepspeed_is_forgotten() -> Iterator[None]:
    """TrainingArguments with a JSON set it for the whole process. A plain Trainer of a later test would call
    DeepSpeed."""
    yield
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What DeepSpeed's logger says, which passes nothing on to other loggers."""
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=logger.name):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that the test registers are those of this test alone."""
    from ds_zo.config import registry

    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture(scope="session")
def single_process() -> Iterator[None]:
    """DeepSpeed's process group of one rank, for tests that call `deepspeed.initialize` in this process."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    environment = rank_environment(port=find_free_port())
    os.environ.update(environment)
    let_cpus_have_fp16()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name(), auto_mpi_discovery=False)
    yield
    import torch.distributed

    torch.distributed.destroy_process_group()
    for name in environment:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def warm_interpreter() -> Iterator[WarmInterpreter]:
    from tests.helpers.warm_interpreter import WarmInterpreter

    interpreter = WarmInterpreter(python_path(REPO))
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="session")
def run_script(warm_interpreter: WarmInterpreter) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script file as `python SCRIPT ARGUMENTS` would, less the time that importing the libraries takes."""
    return warm_interpreter.run


@pytest.fixture(scope="session")
def run_ranks(warm_interpreter: WarmInterpreter) -> Callable[..., list[str]]:
    """Runs a script's text as a launcher's ranks on this machine: what each printed, by rank. ds_zo is not imported
    yet; `fresh`: nothing is, as where it has an environment, which interpreters and libraries read when they start."""
    from tests.helpers.warm_interpreter import run_fresh

    def run(
        script: str,
        *arguments: str,
        num_ranks: int = 2,
        timeout_s: float = 300,
        fresh: bool = False,
        **environment: Any,
    ) -> list[str]:
        port = find_free_port()
        more = {"PYTHONPATH": python_path(REPO), **{name: str(value) for name, value in environment.items()}}
        envs = [
            {**os.environ, **rank_environment(rank=rank, world_size=num_ranks, port=port), **more}
            for rank in range(num_ranks)
        ]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "script.py")
            file.write_text(script)
            run_all = run_fresh if fresh or environment else warm_interpreter.run_all
            ranks = run_all(file, *arguments, cwd=Path.cwd(), envs=envs, timeout_s=timeout_s)
        for rank in ranks:
            assert rank.returncode == 0, f"exit status {rank.returncode}\n{rank.stdout[-4000:]}\n{rank.stderr[-4000:]}"
        return [rank.stdout for rank in ranks]

    return run


@pytest.fixture(scope="session")
def run_python(run_ranks: Callable[..., list[str]]) -> Callable[..., str]:
    """The same as the only rank."""

    def run(script: str, *arguments: str, **options: Any) -> str:
        return run_ranks(script, *arguments, num_ranks=1, **options)[0]

    return run


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of 128 GiB with one H200, as far as a bench's plan asks; what is changed further is undone too."""
    from ds_zo.records import environment

    monkeypatch.setattr(environment, "gpu_memory_gb", lambda: 150.75)
    monkeypatch.setattr(environment, "host_total_bytes", lambda: 128 * 2**30)
    monkeypatch.setattr(environment, "may_lock_memory", lambda: True)
    return monkeypatch


@pytest.fixture(scope="module")
def models_are_traced_once() -> Iterator[None]:
    """Plans of the same model with the same batch and length share its traces, which take most of their time."""
    import dataclasses
    import importlib

    from ds_zo import planner

    load_model = planner.load_model

    @functools.cache
    def loaded(name: str, **options: Any) -> planner.Model:
        return load_model(name, batch=1, **options)

    def load_once(name: str, *, batch: int, rates: planner.Rates | None = None, **options: Any) -> planner.Model:
        return dataclasses.replace(loaded(name, **options), batch=batch, rates=rates or planner.Rates())

    with pytest.MonkeyPatch.context() as patch:
        for module in (planner, importlib.import_module("ds_zo.planner.plan")):
            patch.setattr(module, "load_model", load_once)
        yield


@pytest.fixture(scope="module")
def deterministic() -> Iterator[None]:
    """Kernels of torch whose results have the same bits in each run."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
