"""Scripts in processes forked from one that has imported the libraries, which takes longer than most scripts.
The test processes of xdist are such forks too.

ds_zo is not among what was imported: a script that forgets to import it fails here as it would in a fresh interpreter.
One such process serves all processes of a test run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ADDRESS = "DS_ZO_TESTS_WARM_INTERPRETER"
"""The environment variable that tells the processes of a test run where the server listens."""

SERVER = """
import contextlib, ctypes, functools, gc, importlib, json, os, runpy, select, signal, socket, struct, sys
gc.disable()
import accelerate, deepspeed, transformers
for name in sys.argv[2:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
import torch.utils.cpp_extension, transformers.models.llama.modeling_llama
with contextlib.suppress(ImportError):  # DeepSpeed imports them when it makes an engine; not every version has them
    import deepspeed.module_inject.auto_ep_config, deepspeed.module_inject.auto_ep_layer
import cpuinfo
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # it takes a second, and each CPU Adam calls it thrice
cpuinfo.get_cpu_info()
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
assert "ds_zo" not in sys.modules
gc.collect()
gc.freeze()  # or every child copies all pages to look through them, and once more when it ends
gc.enable()
given = os.environ["PYTHONPATH"].split(os.pathsep)
libc = ctypes.CDLL(None, use_errno=True)
listener = socket.socket(fileno=int(sys.argv[1]))
while True:
    with contextlib.suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    if sys.stdin in select.select([sys.stdin, listener], [], [])[0]:
        sys.exit()  # it is closed
    connection, _ = listener.accept()
    if os.fork() == 0:
        break
    connection.close()
listener.close()
files = socket.recv_fds(connection, 1, 64)[1]
job = json.loads(connection.makefile().readline())
ended, wakeup = socket.socketpair()
wakeup.setblocking(False)
signal.set_wakeup_fd(wakeup.fileno())
signal.signal(signal.SIGCHLD, lambda *_: None)
child = os.fork()
if child:
    with contextlib.suppress(OSError):
        connection.sendall(b"%d\\n" % child)
        if connection in select.select([connection, ended], [], [])[0]:
            os.killpg(child, signal.SIGKILL)  # who asked for the job has gone
        connection.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)
os.setsid()
signal.set_wakeup_fd(-1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
asking = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
names = [(f"/proc/{asking}/ns/{kind}", f"/proc/self/ns/{kind}") for kind in ("user", "net", "uts")]
for namespace in [os.open(theirs, os.O_RDONLY) for theirs, ours in names if os.readlink(theirs) != os.readlink(ours)]:
    assert libc.setns(namespace, 0) == 0, os.strerror(ctypes.get_errno())
for opened in (connection, ended, wakeup):
    opened.close()
above = max(*files, *job["files"]) + 1
for i, file in enumerate(files):
    os.dup2(file, above + i)
    os.close(file)
for i, number in enumerate(job["files"]):
    os.dup2(above + i, number)
os.closerange(above, above + len(files))
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["env"])
words = [*job["words"]]
while words[0] not in ("-c", "-m") and words[0].startswith("-"):
    del words[0]  # the interpreter's own options
if job["executable"]:  # as a fresh interpreter's
    sys.path = [folder for folder in sys.path if folder not in given]
sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
if words[0] == "-c":
    sys.argv = ["-c", *words[2:]]
    sys.path.insert(0, "")
    exec(words[1], {"__name__": "__main__"})
elif words[0] == "-m":
    sys.executable = job["executable"]
    sys.argv = words[1:]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")
"""
"""A connection is one job: what stands behind `python` in a command line, environment, folder, and open files.
The answers are the job's process and its exit status. A job joins the network of the process that asks for it, and is
killed when that process closes the connection."""

PYTHON = """
import json, os, signal, socket, sys
files = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")]
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
socket.send_fds(server, [b" "], files)
job = {"words": sys.argv[3:], "cwd": os.getcwd(), "env": dict(os.environ), "executable": sys.argv[2], "files": files}
server.sendall(json.dumps(job).encode() + b"\\n")
answers = server.makefile()
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: os.kill(child, number))
status = int(answers.readline())
sys.exit(status if status >= 0 else 128 - status)
"""
"""What stands in for `python`: it asks the server for a job and ends as the job ends."""


class WarmInterpreter:
    """Starts its server when it is first needed, unless another process of this test run has started one."""

    def __init__(self, python_path: str, modules: Sequence[str] = ()) -> None:
        """`python_path`: the server's PYTHONPATH. `modules`: the names of more libraries to import where installed."""
        self._python_path = python_path
        self._modules = modules
        self._server: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def start(self) -> None:
        """The server. `os.environ` names its address, so that child processes use the same one."""
        self._folder = Path(tempfile.mkdtemp())
        address = str(self._folder / "address")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            self._server = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(listener.fileno()), *self._modules],
                env={**os.environ, "PYTHONPATH": self._python_path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        source, command = self._folder / "python.py", self._folder / "python"
        source.write_text(PYTHON)
        words = [sys.executable, "-IS", str(source), address, str(command)]
        command.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        command.chmod(0o755)
        os.environ[ADDRESS] = address

    def close(self) -> None:
        if self._server is not None:
            assert self._server.stdin is not None and self._folder is not None
            self._server.stdin.close()
            self._server.wait(30)
            shutil.rmtree(self._folder)
            os.environ.pop(ADDRESS, None)

    def run(
        self, script: Path | str, *arguments: Any, cwd: Path, env: dict[str, str], timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """As `python SCRIPT ARGUMENTS` in that folder and environment."""
        return self.run_all(script, *arguments, cwd=cwd, envs=[env], timeout_s=timeout_s)[0]

    def run_all(
        self, script: Path | str, *arguments: Any, cwd: Path, envs: list[dict[str, str]], timeout_s: float = 300
    ) -> list[subprocess.CompletedProcess[str]]:
        """At the same time in each of the environments, as ranks are."""
        if not is_forkable():
            return run_fresh(script, *arguments, cwd=cwd, envs=envs, timeout_s=timeout_s)
        words = [str(script), *map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            files = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(envs))]
            jobs = [
                stack.enter_context(self._ask(words, cwd=cwd, env=env, out=out, err=err))
                for env, (out, err) in zip(envs, files, strict=True)
            ]
            statuses = _wait_for(jobs, [sys.executable, *words], timeout_s)
            texts = [(out.read_text(), err.read_text()) for out, err in files]
        ended = zip(statuses, texts, strict=True)
        return [subprocess.CompletedProcess(words, status, out, err) for status, (out, err) in ended]

    def python(self) -> str:
        """A command that stands for `python`, with a script, `-m` or `-c`. The process is a fork. So are those that a
        module starts by `sys.executable`, as launchers do."""
        return self.fork() if is_forkable() else sys.executable

    def fork(self) -> str:
        """The same, where no device can be seen."""
        return str(Path(self._address()).with_name("python"))

    def _address(self) -> str:
        if self._folder is not None:  # also after a test that put back the environment from before the start
            return str(self._folder / "address")
        if ADDRESS not in os.environ:
            self.start()
        return os.environ[ADDRESS]

    def _ask(self, words: list[str], *, cwd: Path, env: dict[str, str], out: Path, err: Path) -> socket.socket:
        job = {"words": words, "cwd": str(cwd), "env": env, "executable": None, "files": [0, 1, 2]}
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._address())
        with open(os.devnull) as nothing, out.open("w") as out_file, err.open("w") as err_file:
            socket.send_fds(server, [b" "], [file.fileno() for file in (nothing, out_file, err_file)])
        server.sendall(json.dumps(job).encode() + b"\n")
        return server


def is_forkable() -> bool:
    """A process that looked at a GPU has state that no child of it can use."""
    import torch

    return not torch.cuda.is_available()


def _wait_for(jobs: list[socket.socket], command: list[str], timeout_s: float) -> list[int]:
    """Their exit statuses. What takes longer is killed."""
    deadline = time.monotonic() + timeout_s
    answers = [job.makefile() for job in jobs]
    statuses = []
    try:
        for job, answer in zip(jobs, answers, strict=True):
            job.settimeout(max(0.001, deadline - time.monotonic()))
            answer.readline()  # its process
            statuses.append(int(answer.readline()))
    except TimeoutError:
        for job in jobs:
            job.shutdown(socket.SHUT_RDWR)
        raise subprocess.TimeoutExpired(command, timeout_s) from None
    return statuses


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
