"""`deepspeed --num_gpus 2` and `torchrun` start ranks that share a host store, and ranks that share a batch.

DeepSpeed's launcher starts them as below `ds-zo run`. The examples are tested with `accelerate launch`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_zo.commands.run import STARTUP
from tests.helpers.autoload_env import make_environment
from tests.helpers.processes import REPO, python_path
from tests.helpers.warm_interpreter import WarmInterpreter

SCRIPT = """
import os, sys
import torch
import deepspeed
if "DS_ZO_AUTOLOAD" in os.environ:
    assert "ds_zo" in sys.modules, "imported after DeepSpeed"
import ds_zo
from tests.helpers.zo_runs import Toy, one_step, zo_json

for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False  # nothing here needs DeepSpeed's compiled extensions
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank = torch.distributed.get_rank()
json = zo_json(interval=2, params={"num_directions": 2, "direction_parallel": 2})
json["zero_optimization"]["stage"] = 3
rows = [{"ids": torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(i))} for i in range(8)]
engine, _, loader, _ = deepspeed.initialize(model=Toy(), config=json, training_data=rows)
dealt = []
for batch in loader:
    dealt.append(batch["ids"])
    one_step(engine, batch)
assert len(dealt) == 4, "all rows, two a step"
assert type(engine.backend.store.blocks.transport).__name__ == "NodeGather"
weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
torch.save({"dealt": torch.stack(dealt), **weights}, f"{sys.argv[-1]}/{rank}.pt")
torch.distributed.barrier()
"""
FRESH = """
assert "transformers" not in sys.modules, "a model of plain torch does not wait for it"
"""

LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "deepspeed": lambda port: [
        *("deepspeed.launcher.runner", "--num_gpus", "2"),
        *("--master_port", str(port), "--no_local_rank", "--no_python"),
    ],
    "torchrun": lambda port: [
        *("torch.distributed.run", "--nproc_per_node", "2"),
        *("--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"),
    ],
}
"""Module and options of each launcher."""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launcher(launcher: str, tmp_path: Path, free_port: int, warm_interpreter: WarmInterpreter) -> None:
    """The launchers are forks of a process that has the libraries, and so are the ranks of torchrun. DeepSpeed's ranks
    are fresh interpreters, as `ds-zo run` starts them."""
    script = tmp_path / "train.py"
    set_by_launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    env["PYTHONPATH"] = python_path(REPO)
    command = [warm_interpreter.python(), "-m", *LAUNCHERS[launcher](free_port)]
    if launcher == "deepspeed":
        command.append(str(make_environment(tmp_path / "environment")))
        env |= {"DS_ZO_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), env["PYTHONPATH"]])}
        script.write_text(SCRIPT + FRESH)
    else:
        script.write_text(SCRIPT)
    command += [str(script), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["dealt"].unique(dim=0).shape[0] == 4, "every batch another"
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
