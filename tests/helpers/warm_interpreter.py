"""Scripts in processes forked from one that has imported the libraries, which takes longer than most scripts.

ds_zo is not among what was imported: a script that forgets to import it fails here as it would in a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SERVER = """
import contextlib, gc, json, os, runpy, sys
gc.disable()
import accelerate, deepspeed, transformers
import torch.utils.cpp_extension, transformers.models.llama.modeling_llama
with contextlib.suppress(ImportError):  # DeepSpeed imports them when it makes an engine; not every version has them
    import deepspeed.module_inject.auto_ep_config, deepspeed.module_inject.auto_ep_layer
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
assert "ds_zo" not in sys.modules
gc.collect()
gc.freeze()  # or every child copies all pages to look through them, and once more when it ends
gc.enable()
for line in sys.stdin:
    children = []
    for job in json.loads(line):
        child = os.fork()
        if child == 0:
            break
        children.append(child)
    else:
        print("CHILDREN", *children, flush=True)
        print("ENDED", *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
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

STAND_IN = """
import json, os, pathlib, sys, time
mine = pathlib.Path(FOLDER, os.environ["RANK"])
mine.with_suffix(".part").write_text(json.dumps({"arguments": sys.argv[1:], "env": dict(os.environ)}))
mine.with_suffix(".part").rename(mine.with_suffix(".started"))
while not mine.with_suffix(".ended").exists():
    time.sleep(0.05)
status, out, err = json.loads(mine.with_suffix(".ended").read_text())
print(out, flush=True)
print(err, file=sys.stderr, flush=True)
sys.exit(status)
"""
"""The script that a launcher starts in the place of a rank's: it imports no library."""


class WarmInterpreter:
    """Starts its server when it is first needed."""

    def __init__(self, python_path: str) -> None:
        """`python_path`: the server's PYTHONPATH."""
        self._python_path = python_path
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, script: Path | str, *arguments: Any, cwd: Path, env: dict[str, str], timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """As `python SCRIPT ARGUMENTS` in that folder and environment."""
        return self.run_all(script, *arguments, cwd=cwd, envs=[env], timeout_s=timeout_s)[0]

    def run_all(
        self, script: Path | str, *arguments: Any, cwd: Path, envs: list[dict[str, str]], timeout_s: float = 300
    ) -> list[subprocess.CompletedProcess[str]]:
        """At the same time in each of the environments, as ranks are."""
        if torch.cuda.is_available():  # whose state no child of a process that looked at it can use
            return run_fresh(script, *arguments, cwd=cwd, envs=envs, timeout_s=timeout_s)
        command = [sys.executable, str(script), *map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder:
            files = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(envs))]
            job = {"script": command[1], "arguments": command[2:], "cwd": str(cwd)}
            jobs = [
                {**job, "env": env, "out": str(out), "err": str(err)}
                for env, (out, err) in zip(envs, files, strict=True)
            ]
            statuses = self._ask(jobs, command, timeout_s)
            texts = [(out.read_text(), err.read_text()) for out, err in files]
        ended = zip(statuses, texts, strict=True)
        return [subprocess.CompletedProcess(command, status, out, err) for status, (out, err) in ended]

    def run_launched(
        self,
        launcher: list[str],
        script: Path | str,
        *arguments: Any,
        num_ranks: int,
        cwd: Path,
        env: dict[str, str],
        timeout_s: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """As `LAUNCHER SCRIPT ARGUMENTS`. The launcher starts stand-ins. The ranks are forks that have the arguments
        and the environments that the launcher gave to the stand-ins, which end as the ranks ended."""
        with tempfile.TemporaryDirectory() as folder:
            stand_in = Path(folder, "stand_in.py")
            stand_in.write_text(STAND_IN.replace("FOLDER", repr(folder)))
            command = [*launcher, str(stand_in), *map(str, arguments)]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)
            try:
                started = [Path(folder, f"{rank}.started") for rank in range(num_ranks)]
                deadline = time.monotonic() + timeout_s
                while not all(file.exists() for file in started) and process.poll() is None:
                    assert time.monotonic() < deadline, "the launcher did not start its ranks"
                    time.sleep(0.05)
                if process.poll() is None:
                    told = [json.loads(file.read_text()) for file in started]
                    assert all(rank["arguments"] == [*map(str, arguments)] for rank in told), told
                    envs = [rank["env"] for rank in told]
                    ranks = self.run_all(script, *arguments, cwd=cwd, envs=envs, timeout_s=timeout_s)
                    for file, rank in zip(started, ranks, strict=True):
                        part = file.with_suffix(".part")
                        part.write_text(json.dumps([rank.returncode, rank.stdout, rank.stderr]))
                        part.rename(file.with_suffix(".ended"))
                out, err = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
                process.wait()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _ask(self, jobs: list[dict[str, Any]], command: list[str], timeout_s: float) -> list[int]:
        if self._server is None:
            env = {**os.environ, "PYTHONPATH": self._python_path}
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER], env=env, stdin=pipe, stdout=pipe, text=True, bufsize=1
            )
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(jobs), file=self._server.stdin, flush=True)
        children = self._answer("CHILDREN")
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            self._answer("ENDED")
            raise subprocess.TimeoutExpired(command, timeout_s)
        return self._answer("ENDED")

    def _answer(self, mark: str) -> list[int]:
        assert self._server is not None and self._server.stdout is not None
        for line in self._server.stdout:
            if line.startswith(mark):
                return [int(word) for word in line.split()[1:]]
        raise RuntimeError("the warm interpreter ended")

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait(10)


def run_fresh(
    script: Path | str, *arguments: Any, cwd: Path, envs: list[dict[str, str]], timeout_s: float = 300
) -> list[subprocess.CompletedProcess[str]]:
    """The same in interpreters that have imported nothing."""
    command = [sys.executable, str(script), *map(str, arguments)]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(command, cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True) for env in envs]
    try:
        texts = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    ended = zip(ranks, texts, strict=True)
    return [subprocess.CompletedProcess(command, rank.returncode, out, err) for rank, (out, err) in ended]
