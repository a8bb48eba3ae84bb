"""kill -9 at random moments of a run that saves all the time: it always resumes, from something whole.

Children are forked from this process, which has everything imported. The suite kills each case once, tools/random.sh
four times. `DS_ZO_NUM_KILLS=200` asks for more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
NUM_KILLS = int(os.environ.get("DS_ZO_NUM_KILLS", "8"))

SCRIPT = """
import gc, os, random, signal, socket, sys, threading, time
from pathlib import Path
import torch
import torch._dynamo  # what an engine would import when it is made
import transformers.loss.loss_utils
import deepspeed
import ds_zo.backends.zo.backend, ds_zo.backends.lomo.adalomo, ds_zo.backends.lsp.backend
import ds_zo.backends.adapter.backend
from deepspeed.accelerator import get_accelerator
from tests.helpers.checkpoint_runs import BATCHES, JSONS, assert_same_bits, planes, with_checkpoint
from tests.helpers.first_order_runs import Epochs, assert_same_run, engine_of, everything, play
from tests.helpers.first_order_runs import JSONS as FIRST_ORDER
from tests.helpers.zo_runs import Toy, engine_for, one_step

# Nothing here starts a thread: what is forked from this process is whole.
gc.collect()
gc.freeze()  # or every child copies all pages to look through them
folder, num_kills = Path(sys.argv[1]), int(sys.argv[2])
random.seed(int(sys.argv[3]))
CASES = [("fp32", {}), ("bf16 split", {"asynchronous": True}), ("bf16 wire", {"trajectory": True, "keep_last": 2}),
         ("fp8 split", {"trajectory": True, "asynchronous": True, "keep_last": 1}),
         ("LOMO, bf16, streamed", {"asynchronous": True}), ("AdaLOMO, bf16, streamed", {"keep_last": 2}),
         ("LSP, refits, window", {"asynchronous": True, "keep_last": 1}), ("Adapter, nf4, window", {})]

class Run:
    # One case's engine, and how a step of it is made and looked at, whatever its backend.
    def __init__(self, number, **settings):
        self.name = CASES[number][0]
        self.first_order = self.name in FIRST_ORDER
        self.engine = engine_of(self.name, **settings) if self.first_order else engine_for(
            Toy(), with_checkpoint(JSONS[self.name], **settings))
        self.epochs = Epochs()

    @property
    def step(self):  # micro-batches where windows are longer than one: saves fall inside them
        return self.epochs.num_seen if self.first_order else self.engine.global_steps

    def make_step(self):
        if self.first_order:
            play(self.engine, self.epochs, 1)
        else:
            one_step(self.engine, BATCHES[self.step % len(BATCHES)])

    def save(self, saves):
        self.engine.save_checkpoint(str(saves), tag=f"at{self.step}", client_state=vars(self.epochs))

    def load(self, saves):
        _, client = self.engine.load_checkpoint(str(saves))
        if self.first_order and client is not None:  # None: killed before the first save was whole
            self.epochs = Epochs(client["order"], client["at"], client["num_seen"])

    def look(self):
        return everything(self.engine) if self.first_order else planes(self.engine)

    def compare(self, a, b):
        assert_same_run(a, b) if self.first_order else assert_same_bits(a, b)

def in_a_child(call):
    # What it writes to its descriptor is read here.
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        os.close(read)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        call(write)
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(1)

def line_of(descriptor):
    line = b""
    while not line.endswith(b"\\n"):
        got = os.read(descriptor, 1)
        assert got, "the child ended by itself"
        line += got
    return line

def run(number, told):
    saves = folder / f"case{number}"
    made = Run(number, **CASES[number][1])
    if (saves / "latest").exists():
        made.load(saves)
    else:
        made.save(saves)
    while True:
        os.write(told, b"%d\\n" % made.step)
        made.make_step()
        if made.step % 3 == 0 or (made.first_order and made.step % 3 == 1):
            made.save(saves)

def judge(requests, answers):
    # Loads what a killed run left, beside runs that were never interrupted.
    whole = {}
    seen = {}
    while True:
        number = int(line_of(requests))
        if number not in whole:
            whole[number] = Run(number)
            seen[number] = {0: whole[number].look()}
            random_of[number] = torch.get_rng_state()
        made = Run(number, **CASES[number][1])
        made.load(folder / f"case{number}")
        torch.set_rng_state(random_of[number])
        while whole[number].step < made.step:
            whole[number].make_step()
            seen[number][whole[number].step] = whole[number].look()
        random_of[number] = torch.get_rng_state()
        made.compare(made.look(), seen[number][made.step])
        made.engine.destroy()
        os.write(answers, b"%d\\n" % made.step)

random_of = {}
requests_out, requests_in = os.pipe()[::-1]
judging, answers = in_a_child(lambda write: judge(requests_in, write))
lost = []
for kill in range(num_kills):
    number = kill % len(CASES)
    child, told = in_a_child(lambda write: run(number, write))
    steps = line_of(told)
    time.sleep(random.expovariate(8.0))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    while chunk := os.read(told, 65536):
        steps += chunk
    os.close(told)
    os.write(requests_out, b"%d\\n" % number)
    last, step = int(steps.split()[-1]), int(line_of(answers))
    # At most one window is lost, two while a save is on its way; with the trajectory no step that was told of.
    settings = CASES[number][1]
    allowed = 0 if "trajectory" in settings else 6 if "asynchronous" in settings else 3
    assert last - step <= allowed, (CASES[number], last, step)
    lost.append(last - step)
    print("KILLED", CASES[number][0], "after step", last, "resumed at", step, flush=True)
os.kill(judging, signal.SIGKILL)

def end(number, told):
    # As a script ends whose last line is an asynchronous save: the interpreter waits for threads, takes no new work.
    made = Run(number, **CASES[number][1])
    made.make_step()
    made.save(folder / f"end{number}")
    threading._shutdown()
    saved = folder / f"end{number}" / "at1" / "manifest.json"
    os.write(told, b"%d\\n" % saved.exists())

for number in [i for i, case in enumerate(CASES) if "asynchronous" in case[1]][:2]:
    child, told = in_a_child(lambda write: end(number, write))
    assert int(line_of(told)) == 1, CASES[number]
    os.waitpid(child, 0)
print("OUT", len(lost), max(lost))
"""


@pytest.mark.slow
def test_kill_at_random_moments(run_python, tmp_path: Path) -> None:
    out = run_python(SCRIPT, str(tmp_path), str(NUM_KILLS), "1", timeout_s=240 + 10 * NUM_KILLS)
    assert f"OUT {NUM_KILLS} " in out
    assert out.count("KILLED") == NUM_KILLS


PREEMPTED = """
import os, random, runpy, signal, sys, threading
write = sys.stdout.write
def watched(text):
    if "before:" in text:  # the first evaluation: steps follow
        threading.Timer(0.5 + random.random(), os.kill, (os.getpid(), signal.SIGTERM)).start()
    return write(text)
sys.stdout.write = watched
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_sigterm_saves_and_exits_cleanly(tmp_path: Path, run_script: Callable[..., Any]) -> None:
    """launch/train.py, pre-empted in the middle, then resumed to the end of its steps."""
    config = tmp_path / "zo.json"
    config.write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "ZO", "params": {"lr": 1e-4}}})
    )
    output = tmp_path / "out"
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    script = REPO / "launch" / "train.py"
    arguments = ["--deepspeed", str(config), "--num-eval", "4", "--output-dir", str(output), "--max-length", "32"]
    preempted = tmp_path / "preempted.py"
    preempted.write_text(PREEMPTED)
    stopped = run_script(preempted, script, *arguments, "--steps", 100_000, cwd=REPO, env=env)
    assert stopped.returncode == 0, stopped.stderr[-3000:]
    assert "stopped by SIGTERM" in stopped.stdout
    step = int((output / "checkpoints" / "latest").read_text().removeprefix("step"))
    done = run_script(script, *arguments, "--steps", step + 2, "--resume", "latest", cwd=REPO, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((output / "summary.json").read_text())["steps"] == step + 2
