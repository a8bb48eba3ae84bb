"""Lockstep passes without a model: the state that each pass owns, the state that must not leak, and early ends of a
run."""

from __future__ import annotations

import contextvars
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_zo.backends.zo.lockstep import CannotInterleave, Lockstep
from tests.helpers.thread_state import PassingMode, thread_state, var
from tests.helpers.zo_runs import same_snapshot, set_snapshot, snapshot

CPU = torch.device("cpu")


def together(lockstep: Lockstep, *calls: Callable[[], Any]) -> list[Any]:
    return lockstep.together(calls, lambda request, index: None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_every_pass_runs_a_block_before_any_goes_on() -> None:
    lockstep = Lockstep(CPU)
    order: list[str] = []

    def call(index: int) -> int:
        for block in "ab":
            order.append(f"{index} before {block}")
            lockstep.pause(block)
            order.append(f"{index} runs {block}")
        return index

    results = lockstep.together(
        [lambda: call(0), lambda: call(1)], lambda request, index: order.append(f"ready {request} for {index}")
    )
    assert results == [0, 1]
    assert order == [
        *("0 before a", "1 before a"),
        *("ready a for 0", "0 runs a", "0 before b", "ready a for 1", "1 runs a", "1 before b"),
        *("ready b for 0", "0 runs b", "ready b for 1", "1 runs b"),
    ]


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad off": (torch.no_grad, torch.is_grad_enabled),
    "grad on": (torch.enable_grad, torch.is_grad_enabled),
    "autocast": (
        lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "default dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "attention kernels": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
    ),
    "order of attention kernels": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True),
        torch._C._get_sdp_priority_order,
    ),
    "cuDNN": (
        lambda: torch.backends.cudnn.flags(enabled=False, benchmark=True, deterministic=True, allow_tf32=False),
        lambda: (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
    ),
    "oneDNN": (
        lambda: torch.backends.mkldnn.flags(enabled=False, deterministic=True, allow_tf32=None),
        lambda: (torch.backends.mkldnn.enabled, torch.backends.mkldnn.deterministic),
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), torch.is_anomaly_enabled),
    "saved tensors": (lambda: saved_tensors_hooks(abs, abs), lambda: top_saved_tensors_hooks(True)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("grad", [True, False])
def test_a_setting_open_across_a_block_stays_in_its_pass(name: str, grad: bool) -> None:
    """The second pass changes no setting. It and the caller afterwards must see the setting from outside the passes."""
    enter, read = SETTINGS[name]
    lockstep = Lockstep(CPU)

    def setting() -> list[Any]:
        with enter():
            first = read()
            lockstep.pause("block")
            return [first, read()]

    def plain() -> list[Any]:
        first = read()
        lockstep.pause("block")
        return [first, read()]

    with torch.set_grad_enabled(grad):
        outside, before = thread_state(), read()
        with enter():
            inside = read()
        assert together(lockstep, setting, plain) == [[inside, inside], [before, before]]
        assert together(lockstep, setting, setting) == [[inside, inside]] * 2
        assert thread_state() == outside


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["before any block", "inside a block", "after the last"])
@pytest.mark.parametrize("how", ["together", "one by one"])
def test_an_error_surfaces_and_leaves_nothing_behind(failing: int, when: str, how: str) -> None:
    lockstep = Lockstep(CPU)
    alive: list[weakref.ref[torch.Tensor]] = []
    unwound: list[int] = []
    error = ValueError("the user's own")

    def call(index: int) -> None:
        activation = torch.ones(3)
        alive.append(weakref.ref(activation))
        try:
            with (
                torch.no_grad(),
                torch.autocast("cpu", dtype=torch.bfloat16),
                default_dtype(torch.float64),
                sdpa_kernel(SDPBackend.MATH),
            ):
                var.set(f"pass {index}")
                if when == "before any block" and index == failing:
                    raise error
                if how == "together":
                    lockstep.pause("block")
                if when == "inside a block" and index == failing:
                    raise error
                if how == "together":
                    lockstep.pause("another")
            if index == failing:
                raise error
        finally:
            unwound.append(index)

    outside = thread_state()
    calls = [lambda: call(0), lambda: call(1)]
    with pytest.raises(ValueError, match="the user's own") as caught:
        contextvars.copy_context().run(together, lockstep, *calls) if how == "together" else (
            contextvars.copy_context().run(lockstep.one_by_one, calls)
        )
    assert caught.value is error
    error.__traceback__ = None
    del caught
    assert thread_state() == outside
    assert len(unwound) == len(alive), "a pass that started was left hanging"
    assert not lockstep.inside
    assert [ref() for ref in alive] == [None] * len(alive)
    assert lockstep.one_by_one([lambda: 1, lambda: 2]) == [1, 2]
    assert together(lockstep, lambda: 1, lambda: 2) == [1, 2]


def test_a_pass_that_raises_on_its_way_out_leaves_nothing_behind() -> None:
    """An error in the first pass ends the second and third passes, and the second raises another error while it
    unwinds."""
    lockstep = Lockstep(CPU)
    unwound: list[int] = []

    def call(index: int) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            try:
                lockstep.pause("block")
                raise ValueError("the first")
            finally:
                unwound.append(index)
                if index == 1:
                    raise ValueError("on the way out")

    outside = thread_state()
    with pytest.raises(ValueError, match="on the way out"):
        together(lockstep, *(partial(call, index) for index in range(3)))
    assert sorted(unwound) == [0, 1, 2]
    assert thread_state() == outside
    assert together(lockstep, lambda: 1, lambda: 2) == [1, 2]


def test_context_variables_are_seen_and_do_not_leak() -> None:
    lockstep = Lockstep(CPU)

    def call(index: int) -> list[str]:
        seen = [var.get()]
        var.set(f"pass {index}")
        lockstep.pause("block")
        return [*seen, var.get()]

    token = var.set("caller")
    try:
        assert together(lockstep, lambda: call(0), lambda: call(1)) == [["caller", "pass 0"], ["caller", "pass 1"]]
        assert var.get() == "caller"
    finally:
        var.reset(token)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


@pytest.mark.parametrize("num_passes", [2, 4])
def test_passes_draw_the_same_numbers_and_end_as_after_one(num_passes: int) -> None:
    lockstep = Lockstep(CPU)

    def call() -> list[Any]:
        found = [draw()]
        for block in "abc":
            lockstep.pause(block)
            found.append(draw())
        return found

    start = snapshot()
    alone = [draw() for _ in range(4)]
    end = snapshot()
    for _ in range(2):  # the first run finds out that Python's generators are used
        set_snapshot(start)
        assert together(lockstep, *[call] * num_passes) == [alone] * num_passes
        assert same_snapshot(snapshot(), end)
    set_snapshot(start)
    assert lockstep.one_by_one([lambda: [draw() for _ in range(4)]] * num_passes) == [alone] * num_passes
    assert same_snapshot(snapshot(), end)


def test_passes_that_call_different_blocks_are_refused_as_if_never_run() -> None:
    lockstep = Lockstep(CPU)

    def call(blocks: str) -> None:
        for block in blocks:
            draw()
            lockstep.pause(block)

    start, outside = snapshot(), thread_state()
    for other in ("ac", "a", "abb"):
        with pytest.raises(CannotInterleave, match="different blocks"):
            together(lockstep, lambda: call("ab"), lambda other=other: call(other))
        assert same_snapshot(snapshot(), start)
        assert thread_state() == outside


@pytest.mark.parametrize("enter", [lambda: torch.device("meta"), PassingMode, torch.inference_mode])
def test_a_mode_open_across_a_block_is_refused(enter: Callable[[], Any]) -> None:
    lockstep = Lockstep(CPU)

    def call() -> None:
        lockstep.pause("fine")
        with enter():
            lockstep.pause("block")

    outside = thread_state()
    with pytest.raises(CannotInterleave, match="open while a block runs"):
        together(lockstep, call, call)
    assert thread_state() == outside
    with enter():  # one that the caller opened around everything is nobody's trouble
        assert together(lockstep, lambda: lockstep.pause("block"), lambda: lockstep.pause("block")) == [None, None]
