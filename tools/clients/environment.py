"""An environment of a client's own, made from pinned releases, and processes that run in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.client import Client

REPO = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900
_OFFLINE = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_HF": "1",  # ms-swift asks ModelScope otherwise
    "WANDB_MODE": "disabled",
}


class ClientFault(Exception):
    """A client did not do what a check expects. The text goes into the table's row."""


@dataclass(frozen=True)
class Environment:
    """A folder that `python -m venv` made."""

    folder: Path

    def run(self, command: str | Sequence[str], *, cwd: Path, variables: Mapping[str, str] | None = None) -> str:
        """Runs a command without a GPU and without the network. Returns what it printed, which is also in `log.txt`.

        ClientFault: the command failed, or took more than 15 minutes.
        """
        words = shlex.split(command) if isinstance(command, str) else list(command)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env = {
            **inherited,
            **_OFFLINE,
            "HF_HOME": str(cwd / "cache"),
            "MODELSCOPE_CACHE": str(cwd / "cache"),
            **(variables or {}),
        }
        env["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{env['PATH']}"
        env["TORCH_EXTENSIONS_DIR"] = str(self.folder / "torch_extensions")
        log = cwd / "log.txt"
        with log.open("a+", encoding="utf-8") as file:
            file.write(f"$ {shlex.join(words)}\n")
            file.flush()
            begin = file.tell()
            process = subprocess.Popen(
                words, cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    _stop(process)
            file.seek(begin)
            printed = file.read()
        if status != 0:
            ended = f"took more than {_TIMEOUT_S} s" if status is None else f"exited with {status}"
            raise ClientFault(f"{words[0]} {ended}: {_last_error(printed)} (log: {log})")
        return printed


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the command's process group. A launcher needs time to end its workers, which have groups of their own."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def make_environment(client: Client, folder: Path) -> Environment:
    """Makes the environment, unless the folder has one with the same pins."""
    wanted = "\n".join(client.requires) + "\n"
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return Environment(folder)
    print(f"==> installing {client.requires[0]} into {folder} (minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install.append("--no-compile")  # Python compiles the few modules that are imported
    plugin = ["ninja", "--editable", str(REPO)] if client.trains else []
    subprocess.run([*install, *client.requires, *plugin], check=True)
    stamp.write_text(wanted, encoding="utf-8")
    return Environment(folder)


def run_script(environment: Environment, name: str, *arguments: str, cwd: Path) -> Any:
    """Runs a file of the folder `scripts`. Returns the JSON on the last line that it printed."""
    script = str(Path(__file__).parent / "scripts" / name)
    return json.loads(environment.run(["python", script, *arguments], cwd=cwd).splitlines()[-1])


def _last_error(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*Error\b", line)]
    own = [line for line in errors if "ChildFailedError" not in line and "CalledProcessError" not in line]
    return (own or lines or ["it printed nothing"])[-1][:300]
