"""What is measured is what happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_zo.bench import measure
from ds_zo.bench.measure import measure_steps


class Clock:
    """In place of the module `time`: its seconds are those that were slept, however busy the machine is."""

    def __init__(self) -> None:
        self._now = 0.0

    def perf_counter(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_steps_are_timed_after_the_warm_up_and_losses_are_theirs(clock: Clock) -> None:
    calls = iter(range(100))

    def step() -> torch.Tensor:
        call = next(calls)
        clock.sleep(0.05 if call == 4 else 0.01)
        return torch.tensor(float(call), requires_grad=True)

    measured = measure_steps(step, warmup=2, steps=3, device="cpu")
    assert measured["losses"] == [2.0, 3.0, 4.0] and measured["loss"] == 4.0
    times = [measured[name] for name in ("step_s_min", "step_s", "step_s_max", "step_wall_s")]
    assert times == pytest.approx([0.01, 0.01, 0.05, 0.07 / 3])


def test_slow_steps_are_fewer_and_so_is_their_warm_up(clock: Clock) -> None:
    def made(max_s: float, **options: Any) -> tuple[int, int]:
        row = measure_steps(lambda: clock.sleep(0.01), warmup=5, steps=50, device="cpu", max_s=max_s, **options)
        return len(row["warmup_seconds"]), len(row["seconds"])

    assert made(0.001) == (2, 2)
    assert made(0.001, period=4) == (4, 4)
    assert made(0.001, ages_after=lambda: 7) == (7, 2), "what makes steps cheaper than they are is not left out"
    assert made(0.035) == (2, 3)
    assert made(0.205) == (5, 20)
    pauses = iter([0.3])
    row = measure_steps(lambda: clock.sleep(next(pauses, 0.01)), warmup=5, steps=8, device="cpu", max_s=0.2)
    assert (len(row["warmup_seconds"]), len(row["seconds"])) == (2, 8), "compiling says nothing of the steps to come"
    fits = iter([0.1, 0.1, 0.1])
    row = measure_steps(
        lambda: clock.sleep(next(fits, 0.01)), warmup=2, steps=8, device="cpu", max_s=0.2, ages_after=lambda: 5
    )
    assert (len(row["warmup_seconds"]), len(row["seconds"])) == (5, 8), "nor do the steps in which LSP fits projectors"


def test_steps_that_differ_in_turns_are_timed_in_whole_turns() -> None:
    for warmup, steps, made in ((1, 11, (4, 8)), (5, 3, (8, 4)), (0, 4, (0, 4))):
        measured = measure_steps(lambda: None, warmup=warmup, steps=steps, device="cpu", period=4)
        assert (len(measured["warmup_seconds"]), len(measured["seconds"])) == made
