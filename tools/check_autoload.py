"""Installs ds-zo by pip into an environment of its own, and runs scripts without `import ds_zo` there. Minutes.

    python tools/check_autoload.py

The environment borrows torch, DeepSpeed and the other libraries of the Python that executes this script. It checks that
no Python executes files of ds-zo unasked, and `ds-zo run` with:

- the launchers of DeepSpeed, torch and Accelerate;
- DeepSpeed's multi-host launcher, also under Accelerate. A script in place of `pdsh` starts both hosts on this machine,
  and passes no variable on but those that DeepSpeed sends and those that a login would set.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
LIMIT_S = 600.0
"""Longest duration of one command."""
SOURCES = ("pyproject.toml", "ds_zo_autoload.py", "README.md", "LICENSE")

TRAIN = """
import os
import deepspeed
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).square().mean()

for name in deepspeed.ops.__compatible_ops__:
    deepspeed.ops.__compatible_ops__[name] = False  # nothing here needs DeepSpeed's compiled extensions
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "ZO", "params": {"lr": 1e-3}}}
engine = deepspeed.initialize(model=Model(), config=config)[0]
engine.backward(engine(torch.ones(1, 4)))
engine.step()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} trains with {type(engine).__name__}", flush=True)
"""

PDSH = """#!/bin/sh
# pdsh -S -f N -w HOSTS COMMAND ...: %n in COMMAND is the index of a host.
shift 5
for host in 0 1; do
    env -i PATH="$PATH" HOME="$HOME" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 \\
        sh -c "$(printf '%s ' "$@" | sed "s/%n/$host/")" &
done
wait
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        source, folder = root / "source", root / "environment"
        shutil.copytree(REPO / "ds_zo", source / "ds_zo", ignore=shutil.ignore_patterns("__pycache__"))
        for file in SOURCES:
            shutil.copy(REPO / file, source)
        python = make_environment(folder)
        pip = [sys.executable, "-m", "pip", "--quiet"]
        run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root), str(source)])
        (wheel,) = root.glob("ds_zo-*.whl")
        run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)])
        check_unasked(python)
        borrow_libraries(python)
        check_launchers(python, folder)
        check_hosts(python, folder)
    print("all is well")


def make_environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def borrow_libraries(python: Path) -> None:
    """Later than pip: it must not see the libraries' own ds-zo, if there is one."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "a_libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")


def check_unasked(python: Path) -> None:
    find = "import importlib.util as u; print(*u.find_spec('ds_zo').submodule_search_locations)"
    startup = f"{run([str(python), '-c', find]).strip()}/commands/startup"
    off = (loaded(python), loaded(python, PYTHONPATH=startup, DS_ZO_AUTOLOAD="0"))
    expect(off == ("False False", "False False"), "ds_zo is loaded unasked")
    expect(loaded(python, PYTHONPATH=startup) == "True False", f"{startup} has no effect")


def loaded(python: Path, **variables: str) -> str:
    """Whether autoload is installed when Python starts, and whether torch is imported."""
    code = "import sys; print('ds_zo_autoload' in sys.modules, 'torch' in sys.modules)"
    variables = {"DS_ZO_AUTOLOAD": "1", **variables}
    return run([str(python), "-c", code], cwd=None, **variables).strip()


def check_launchers(python: Path, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    launchers = {
        "deepspeed": ["deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank"],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
        "accelerate launch": [
            *("accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2", "--num_machines", "1"),
            *("--mixed_precision", "no", "--dynamo_backend", "no"),
        ],
    }
    options = {"deepspeed": "--master_port", "torchrun": "--master_port", "accelerate launch": "--main_process_port"}
    for name, (module, *words) in launchers.items():
        port = [options[name], str(free_port())]
        command = [str(python), "-m", module, *words, *port, str(script)]
        expect_ranks(run([str(folder / "bin" / "ds-zo"), "run", "--", *command], cwd=folder), f"ds-zo run -- {name}")


def check_hosts(python: Path, folder: Path) -> None:
    tools = folder / "tools"
    tools.mkdir()
    deepspeed = f"#!{python}\nfrom deepspeed.launcher.runner import main\nmain()\n"
    for name, text in {"pdsh": PDSH, "ssh": "#!/bin/sh\necho 127.0.0.1\n", "deepspeed": deepspeed}.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    (folder / "hosts").write_text("here slots=1\nthere slots=1\n", encoding="utf-8")
    launchers = {
        "deepspeed": ["deepspeed", "--hostfile", "hosts", "--no_local_rank", "--master_port", str(free_port())],
        "accelerate launch": [
            *(str(python), "-m", "accelerate.commands.launch", "--use_deepspeed", "--deepspeed_hostfile", "hosts"),
            *("--num_machines", "2", "--machine_rank", "0", "--num_processes", "2"),
            *("--deepspeed_multinode_launcher", "pdsh", "--main_process_ip", "127.0.0.1"),
            *("--main_process_port", str(free_port())),
            *("--mixed_precision", "no", "--dynamo_backend", "no"),
        ],
    }
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    for name, words in launchers.items():
        command = [str(folder / "bin" / "ds-zo"), "run", "--", *words, str(folder / "train.py")]
        expect_ranks(run(command, cwd=folder, PATH=path), f"ds-zo run -- {name}, two hosts")


def expect_ranks(output: str, name: str) -> None:
    for rank in range(2):
        expect(f"rank {rank} of 2 trains with PluginEngine" in output, f"{name}:\n{output}")
    print(f"{name}: both ranks have the plugin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: list[str], *, cwd: Path | None = None, **variables: str) -> str:
    set_elsewhere = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in set_elsewhere}
    env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks of a launcher too
        output, _ = process.communicate()
    expect(process.returncode == 0, f"{command} ended with status {process.returncode}:\n{output[-6000:]}")
    return output


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        sys.exit(f"error: {otherwise}")


if __name__ == "__main__":
    main()
