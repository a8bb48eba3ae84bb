"""Scripts in processes forked from one that has imported the libraries, which takes longer than most scripts.

ds_zo is not among what was imported: a script that forgets to import it fails here as it would in a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

SERVER = """
import json, os, runpy, sys
import accelerate, deepspeed, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
assert "ds_zo" not in sys.modules
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print("CHILD", child, flush=True)
        print("STATUS", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.setsid()
    for number, name in ((0, os.devnull), (1, job["out"]), (2, job["err"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(job["script"])))
    runpy.run_path(job["script"], run_name="__main__")
    break
"""


class WarmInterpreter:
    """Starts its server when it is first needed."""

    def __init__(self, pythonpath: Path) -> None:
        self._pythonpath = str(pythonpath)
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, script: Path | str, *arguments: Any, cwd: Path, env: dict[str, str], timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """As `python SCRIPT ARGUMENTS` in that folder and environment."""
        command = [sys.executable, str(script), *map(str, arguments)]
        if torch.cuda.is_available():  # whose state no child of a process that looked at it can use
            return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {"script": command[1], "arguments": command[2:], "cwd": str(cwd), "env": env}
            status = self._ask({**job, "out": str(out), "err": str(err)}, command, timeout_s)
            return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())

    def _ask(self, job: dict[str, Any], command: list[str], timeout_s: float) -> int:
        if self._server is None:
            env = {**os.environ, "PYTHONPATH": self._pythonpath}
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER], env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        child = int(self._answer("CHILD "))
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            os.killpg(child, signal.SIGKILL)
            self._answer("STATUS ")
            raise subprocess.TimeoutExpired(command, timeout_s)
        return int(self._answer("STATUS "))

    def _answer(self, mark: str) -> str:
        assert self._server is not None and self._server.stdout is not None
        for line in self._server.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError("the warm interpreter ended")

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(10)
