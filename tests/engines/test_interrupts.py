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
from equivalence_runs import on_device, parameters_of
from lomo_runs import config_for, start, streamed
from zo_runs import Toy, toy_batches

import ds_zo
from ds_zo.engines.interrupts import Interrupts

pytestmark = pytest.mark.usefixtures("single_process")
ROOT = str(Path(ds_zo.__file__).parent)
BATCHES = toy_batches(4)
LSP = {"subspace_dim": 2, "nonzeros_per_row": 1, "projector": "random"}
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "zo": (
        streamed("ZO", lr=1e-3, stream={"resident_blocks": 1, "writeback_interval": 1}, bf16={"enabled": True}),
        {
            *("_bring_up_to_date", "_apply", "append", "step", "_take_model_step"),
            *("arrive_low", "written", "_send_back", "_upload_lows", "_upload_low"),
        },
    ),
    "lomo": (config_for("LOMO"), {"backward", "_settle", "_update", "_consume", "step", "_take_model_step"}),
    "lsp": (
        config_for("LSP", params=LSP, lr=1e-2, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
        {"backward", "settle", "_settle", "_apply", "step", "_take_model_step"},
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


def test_a_thread_that_is_main_by_name_alone_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in programs that embed Python: `threading` takes the thread that imported it first for the main one."""
    reached = []

    def train() -> None:
        with Interrupts().whole():
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
    with pytest.raises(KeyboardInterrupt), ours.whole():
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        now_s += 0.1
        signal.raise_signal(signal.SIGINT)
        reached.append("after its echo")
        now_s += 0.6
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["after the first", "after its echo"]
    with pytest.raises(KeyboardInterrupt), ours.whole():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("an echo is not delivered on its own")
    assert reached[2:] == ["an echo is not delivered on its own"]
    ours.hold()
    with ours.whole():
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        ours.release()
    thread = threading.Thread(target=lambda: ours.whole().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ours.whole():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
