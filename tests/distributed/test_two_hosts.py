"""Two hosts, each a network of its own, through `deepspeed --hostfile --no_ssh`: ZO and LOMO make the same weights on
both, and LOMO at stage 3 keeps its weights in shards on both."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import REPO, find_free_port, python_path
from tests.helpers.warm_interpreter import WarmInterpreter

TRAIN = """
import socket
import sys
import deepspeed, torch
import ds_zo
from tests.helpers.zo_runs import Toy, toy_batches, zo_json  # without transformers, which each host would import first

for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False  # nothing here needs DeepSpeed's compiled extensions
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank = torch.distributed.get_rank()
assert torch.distributed.get_world_size() == 2
hosts = [None, None]
torch.distributed.all_gather_object(hosts, (socket.gethostname(), sorted(name for _, name in socket.if_nameindex())))
assert hosts[0][0] != hosts[1][0] and hosts[0][1] != hosts[1][1], hosts
found = {}
zo = deepspeed.initialize(model=Toy(), config={**zo_json(interval=2), "train_micro_batch_size_per_gpu": 1})[0]
for batch in toy_batches(3, size=2):
    loss = zo(batch["ids"][rank : rank + 1])
    zo.backward(loss)
    zo.step()
found |= {f"zo {name}": value.clone() for name, value in zo.module.state_dict().items()}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "LOMO", "params": {"lr": 0.1}},
          "gradient_clipping": 0.5, "zero_optimization": {"stage": 3}}
model = Toy()
with torch.no_grad():
    model.head.weight.add_(rank)  # the first rank's weights count
lomo = deepspeed.initialize(model=model, config=config)[0]
assert lomo.backend.blocks.store.shards.partition.size == 2
for batch in toy_batches(2, size=2):
    lomo.backward(lomo(batch["ids"][rank : rank + 1]))
    lomo.step()
found |= {f"lomo {name}": value.clone() for name, value in lomo.module.state_dict().items()}
torch.save(found, f"{sys.argv[-1]}/{rank}.pt")
torch.distributed.barrier()
"""

HOSTS = """
set -e
ip link set lo up
unshare --net --uts sh -c 'hostname there; exec sleep 600' &
there=$!
trap 'kill $there' EXIT
on_there="nsenter --target $there --net --uts"
while [ "$($on_there hostname)" != there ]; do sleep 0.05; done
hostname here
ip link add here0 type veth peer name there0
ip link set there0 netns $there
ip addr add 10.77.0.1/24 dev here0 && ip link set here0 up
$on_there ip addr add 10.77.0.2/24 dev there0 && $on_there ip link set there0 up && $on_there ip link set lo up
launch="$DEEPSPEED --hostfile hosts --no_ssh --master_addr 10.77.0.1 --master_port $PORT --no_local_rank"
GLOO_SOCKET_IFNAME=there0 $on_there $launch --node_rank 1 train.py "$PWD" > there.log 2>&1 &
second=$!
GLOO_SOCKET_IFNAME=here0 $launch --node_rank 0 train.py "$PWD"
wait $second
"""
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--uts"]


def why_not() -> str | None:
    """Why this machine can't make a network namespace with a link in it, if so."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run(
        [*NAMESPACES, "ip", "link", "add", "here0", "type", "veth", "peer", "name", "there0"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces are not allowed here: {tried.stderr.strip()}"


@pytest.mark.slow
def test_two_hosts_through_the_multi_host_launcher(tmp_path: Path, warm_interpreter: WarmInterpreter) -> None:
    """Launchers and ranks are forks of one process, each in the network of its host."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("10.77.0.1 slots=1\n10.77.0.2 slots=1\n")
    set_by_launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    env["PYTHONPATH"] = python_path(REPO)
    launcher = [warm_interpreter.python(), "-m", "deepspeed.launcher.runner"]
    env |= {"DEEPSPEED": shlex.join(launcher), "PORT": str(find_free_port())}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # gloo, on any machine
    command = [*NAMESPACES, "bash", "-c", HOSTS]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    there = tmp_path / "there.log"
    assert done.returncode == 0, done.stderr[-4000:] + (there.read_text()[-4000:] if there.exists() else "")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() and {name.split()[0] for name in first} == {"zo", "lomo"}
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
