"""Ctrl-C at any line of an update: saved and resumed, the run has the bits of one that was never interrupted."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ds_zo
from ds_zo.streaming.interrupts import Interrupts
from tests.helpers.equivalence_runs import on_device
from tests.helpers.lomo_runs import config_for, start, streamed
from tests.helpers.weights import parameters_of
from tests.helpers.zo_runs import Toy, toy_batches

pytestmark = pytest.mark.usefixtures("single_process")
ROOT = str(Path(ds_zo.__file__).parent)
BATCHES = toy_batches(4)
LSP = {"subspace_dim": 2, "nonzeros_per_row": 1, "projector": "random"}
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "zo": (
        streamed("ZO", lr=1e-3, stream={"resident_blocks": 1, "writeback_interval": 1}, bf16={"enabled": True}),
        {
            *("_replay_pending", "_apply", "append", "step", "_take_model_step"),
            *("acquire_low", "written", "commit", "_execute", "fetch", "_stop_using"),
        },
    ),
    "lomo": (config_for("LOMO"), {"backward", "_record_outcome", "_update", "_consume", "step", "_take_model_step"}),
    "lsp": (
        config_for("LSP", params=LSP, lr=1e-2, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
        {
            "backward",
            "apply_pending_update",
            "apply_pending_updates",
            "_upload_and_apply",
            "_apply",
            "step",
            "_take_model_step",
        },
    ),
}
"""A configuration, and the functions in which an update is made."""
EVERY = {"zo": 9, "lomo": 3, "lsp": 8}
"""Of their lines; all of them were tried once."""
INTERRUPTED = 2
"""The step that is."""
Line = tuple[str, int]


def train(engine: Any, names: set[str], seen: Callable[[Line], None]) -> None:
    """To the last batch, from where the engine says that it is. `seen`: before each line of the watched step."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or code.co_name not in names:
            return None
        if event == "line":
            seen((Path(code.co_filename).name, frame.f_lineno))
        return trace

    while engine.global_steps < len(BATCHES):
        sys.settrace(trace if engine.global_steps == INTERRUPTED else None)
        try:
            engine.backward(engine(**on_device(engine, BATCHES[engine.global_steps])))
            engine.step()
        finally:
            sys.settrace(None)


@pytest.mark.parametrize("kind", RUNS)
def test_an_update_is_made_once_and_whole(kind: str, tmp_path: Path) -> None:
    config, names = RUNS[kind]
    lines: dict[Line, int] = {}
    whole = start(config, Toy())
    train(whole, names, lambda line: lines.update({line: lines.get(line, 0) + 1}))
    expected = parameters_of(whole)
    outcomes = set()
    for number, (target, num_times) in enumerate(list(lines.items())[:: EVERY[kind]]):
        left = 1 if number % 2 else num_times  # the first time that it runs, or the last

        def press(line: Line, target: Line = target) -> None:
            nonlocal left
            left -= line == target
            if line == target and left == 0:
                signal.raise_signal(signal.SIGINT)

        engine = start(config, Toy())
        with pytest.raises(KeyboardInterrupt):
            train(engine, names, press)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        outcomes.add(engine.global_steps)
        engine.save_checkpoint(str(tmp_path), tag="interrupted")
        engine.destroy()
        resumed = start(config, Toy())
        resumed.load_checkpoint(str(tmp_path), tag="interrupted")
        train(resumed, set(), lambda line: None)
        found = parameters_of(resumed)
        resumed.destroy()
        different = [name for name in expected if not torch.equal(found[name], expected[name])]
        assert not different, (target, engine.global_steps)
    assert outcomes == {INTERRUPTED, INTERRUPTED + 1}, "before the step is made, and after"


CONTEXTS = (
    "recompute/blocks.py",
    "streaming/block_store.py",
    "streaming/use.py",
    "autograd/graph.py",
    "autograd/grad_mode.py",
    "autocast_mode.py",
    "zo/backend.py",
    "zo/passes.py",
)
"""Where streamed blocks enter and leave contexts, and those that are torch's."""


def press_at(forward: Callable[[], Any], target: tuple[Line, int] | None) -> dict[Line, int]:
    """Runs a forward with Ctrl-C at the n-th time that a line is reached; how often each of `CONTEXTS` was."""
    reached: dict[Line, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(CONTEXTS):
            return None
        if event == "line":
            line = (Path(code.co_filename).name, frame.f_lineno)
            reached[line] = reached.get(line, 0) + 1
            if (line, reached[line]) == target:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        forward()
    finally:
        sys.settrace(None)
    return reached


@pytest.mark.parametrize(("kind", "trains"), [("LOMO", True), ("LOMO", False), ("ZO", True)])
def test_ctrl_c_in_a_streamed_forward_leaves_no_mode_of_torch_behind(kind: str, trains: bool) -> None:
    """Left behind, hooks on saved tensors keep every later engine of the process from training."""
    engine = start(streamed(kind, lr=1e-3), Toy())

    def forward() -> None:
        torch._C._set_grad_enabled(trains)  # not a context, which could be left behind itself
        engine(**on_device(engine, BATCHES[0]))

    def modes() -> tuple[Any, ...]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        found = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_cache_enabled()
        torch._C._set_grad_enabled(True)
        return hooks, *found

    forward()
    before = modes()
    lines = press_at(forward, None)
    assert kind == "ZO" or {name for name, _ in lines} >= {"blocks.py", "block_store.py", "autocast_mode.py"}
    num_interrupts = 0
    for number, (line, num_times) in enumerate(lines.items()):
        if number % 3 and line[0] not in ("graph.py", "grad_mode.py"):  # all of them were tried once
            continue
        try:
            press_at(forward, (line, num_times))
        except KeyboardInterrupt:
            num_interrupts += 1
        assert modes() == before, line
        engine.backward(engine(**on_device(engine, BATCHES[1])))
        engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert num_interrupts > len(lines) // 6, "not every forward comes by every line"


def test_ctrl_c_at_the_end_of_an_update_does_not_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the last look at whether one came."""
    ours = Interrupts()
    put_back = ours._restore_handler

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        put_back()

    monkeypatch.setattr(ours, "_restore_handler", press)
    with pytest.raises(KeyboardInterrupt), ours.deferred():
        pass


def test_a_thread_that_is_main_by_name_alone_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in programs that embed Python: `threading` takes the thread that imported it first for the main one."""
    reached = []

    def train() -> None:
        with Interrupts().deferred():
            reached.append("inside")
        reached.append("after")

    thread = threading.Thread(target=train)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "main_thread", lambda: thread)
        thread.start()
        thread.join()
    assert reached == ["inside", "after"]


def test_a_second_one_does_not_wait_and_nobody_elses_handler_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Interrupts()
    reached = []
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with pytest.raises(KeyboardInterrupt), ours.deferred():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        now_s += 0.1
        signal.raise_signal(signal.SIGINT)
        reached.append("after its echo")
        now_s += 0.6
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first", "after its echo"]
    with pytest.raises(KeyboardInterrupt), ours.deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("an echo is not delivered on its own")
    assert reached[2:] == ["an echo is not delivered on its own"]
    ours.hold()
    with ours.deferred():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ours.release()
    thread = threading.Thread(target=lambda: ours.deferred().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ours.deferred():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
