"""Installs ds-zo by pip into environments of its own, and runs scripts without `import ds_zo` there. Minutes.

    python tools/check_autoload.py

The environments borrow torch, DeepSpeed and the other libraries of the Python that executes this script. It checks:

- a wheel, a wheel made from the sdist, an editable installation: no Python executes their files unasked, and `pip
  uninstall` leaves none of them;
- `ds-zo autoload on` and `off`;
- `ds-zo run` with the launchers of DeepSpeed, torch and Accelerate;
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
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        wheel, sdist_wheel, source = build(root)
        for name, what in (("wheel", [wheel]), ("sdist", [sdist_wheel]), ("editable", ["--editable", source])):
            python = make_environment(root / name)
            check_installation(python, name, what)
        python = make_environment(root / "launchers")
        pip(python, "install", "--no-deps", wheel)
        borrow_libraries(python)
        check_file(python)
        check_launchers(python, root / "launchers")
        check_hosts(python, root / "launchers")
    print("all is well")


def build(root: Path) -> tuple[str, str, str]:
    """A wheel, a wheel made from the sdist, and a copy of the sources."""
    source = root / "source"
    shutil.copytree(REPO / "ds_zo", source / "ds_zo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(REPO / name, source)
    wheels = []
    sdist = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    run([sys.executable, "-c", sdist, str(root)], cwd=source)
    (packed,) = root.glob("ds_zo-*.tar.gz")
    for name, what in (("of_source", source), ("of_sdist", packed)):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        run([*command, "--wheel-dir", str(root / name), str(what)])
        (wheel,) = (root / name).glob("ds_zo-*.whl")
        wheels.append(str(wheel))
    return wheels[0], wheels[1], str(source)


def make_environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def site_packages(python: Path) -> Path:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return packages


def borrow_libraries(python: Path) -> None:
    """Later than pip: it must not see the libraries' own ds-zo, if there is one."""
    (site_packages(python) / "a_libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")


def pip(python: Path, *words: str) -> None:
    run([sys.executable, "-m", "pip", "--python", str(python), "--quiet", *words])


def check_installation(python: Path, name: str, what: list[str]) -> None:
    def files() -> set[Path]:
        return {path for path in python.parents[1].rglob("*") if path.name != "__pycache__"}

    before = files()
    pip(python, "install", "--no-deps", *what)
    find = "import importlib.util as u; print(*u.find_spec('ds_zo').submodule_search_locations)"
    startup = f"{run([str(python), '-c', find]).strip()}/commands/startup"
    expect(
        loaded(python) == loaded(python, PYTHONPATH=startup, DS_ZO_AUTOLOAD="0") == "False False", f"{name}: unasked"
    )
    expect(loaded(python, PYTHONPATH=startup) == "True False", f"{name}: {startup} has no effect")
    pip(python, "uninstall", "--yes", "ds-zo")
    left = sorted(str(path) for path in files() - before)
    expect(not left, f"{name}: pip uninstall leaves {left}")
    print(f"{name}: installed, loaded, uninstalled without a trace")


def loaded(python: Path, **variables: str) -> str:
    """Whether autoload is installed when Python starts, and whether torch is imported."""
    code = "import sys; print('ds_zo_autoload' in sys.modules, 'torch' in sys.modules)"
    variables = {"DS_ZO_AUTOLOAD": "1", **variables}
    return run([str(python), "-c", code], cwd=None, **variables).strip()


def check_file(python: Path) -> None:
    for action, answer in (("on", "True False"), ("off", "False False")):
        run([str(python.with_name("ds-zo")), "autoload", action])
        expect(loaded(python) == answer, f"ds-zo autoload {action} has no effect")
    print("ds-zo autoload: on and off")


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
