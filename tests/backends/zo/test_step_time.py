"""The write-back interval that measured speeds lead to."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ds_zo import ops
from ds_zo.backends.zo.fold_interval import INTERVALS, best_interval
from ds_zo.backends.zo.replay_log import ReplayLog
from ds_zo.backends.zo.step_time import TIMED_NUM_UPDATES, StepTimeModel, TimedForward, compute_and_draw_s
from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import engine_for, one_step, zo_json
from tests.helpers.zoo import CASES

GB = 10**9
MODEL = StepTimeModel(
    up_nbytes_per_s=54.5 * GB, down_nbytes_per_s=55.2 * GB, both_nbytes_per_s=100.8 * GB, compute_s=0.1, draw_s=0.008
)
"""About OPT-6.7B, one sequence, on an H200."""


def best(model: StepTimeModel, *, streamed_gb: float, low_gb: float = 0.0) -> int:
    return model.best_interval(streamed_nbytes=int(streamed_gb * GB), low_nbytes=int(low_gb * GB))


def test_a_slow_link_folds_rarely_and_slow_blocks_fold_often() -> None:
    assert best(MODEL, streamed_gb=12.9) >= 6  # 237 ms of uploads hide every draw
    assert best(replace(MODEL, compute_s=0.35), streamed_gb=12.9) <= 2  # the link waits for the blocks
    assert 2 <= best(MODEL, streamed_gb=9.8) <= best(MODEL, streamed_gb=12.9)  # bf12: 180 ms
    assert 1 < best(MODEL, streamed_gb=6.4) < 6  # fp8: 118 ms against 100 ms and the draws


def test_a_low_plane_makes_folds_cost_more() -> None:
    assert best(MODEL, streamed_gb=12.9, low_gb=12.9) > best(MODEL, streamed_gb=12.9)


def test_blocks_that_lag_most_are_waited_for() -> None:
    """At an interval of 32 computing takes less time than copying on average, but more where blocks lag by 20 steps or
    more. The link waits for these blocks, and cannot make up for the lost time."""
    split = {"streamed_nbytes": int(12.9 * GB), "low_nbytes": int(12.9 * GB)}
    model = replace(MODEL, draw_s=0.0065)
    assert model.busy_s(32) < model.link_s(32, **split) < model.link_s(24, **split)
    assert model.step_s(24, **split) < model.step_s(32, **split)
    assert model.best_interval(**split) == 24


def test_passes_one_by_one_upload_every_block_once_a_pass() -> None:
    sizes = {"streamed_nbytes": int(6.4 * GB), "low_nbytes": int(6.4 * GB)}
    once, twice = (MODEL.link_s(8, **sizes, num_uploads=n) for n in (1, 2))
    assert twice - once == pytest.approx(6.4 / 54.5)
    assert MODEL.best_interval(**sizes, num_uploads=2) > MODEL.best_interval(**sizes)


def test_no_interval_is_expected_to_be_faster_than_the_one_chosen() -> None:
    for compute_s in (0.02, 0.1, 0.2, 0.5):
        for streamed_gb in (0.5, 6.4, 12.9, 60.0):
            model = replace(MODEL, compute_s=compute_s)
            sizes = {"streamed_nbytes": int(streamed_gb * GB), "low_nbytes": 0}
            chosen = model.step_s(model.best_interval(**sizes), **sizes)
            assert all(chosen <= 1.0021 * model.step_s(k, **sizes) for k in (1, 2, 4, 8, 16, 32))


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("stream", [{}, {"resident_blocks": 1}, {"wire_dtype": "fp8"}], ids=str)
def test_a_timed_forward_replays_and_leaves_no_trace(
    stream: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["opt"]

    def run(times: bool) -> dict[str, torch.Tensor]:
        engine = engine_for(case.make(), zo_json(interval=8, **stream))
        store = engine.backend.store
        seen: list[dict[str, Any]] = []
        launch = ops.replay_perturb
        store.must_choose_interval = times
        gc.collect()  # an earlier test's engine folds its pending updates when it is collected
        with monkeypatch.context() as patch:
            patch.setattr(ops, "replay_perturb", lambda *args, **more: (seen.append(more), launch(*args, **more)))
            engine(**case.batch(0))
        engine.backend.rank_state()
        assert not store.must_choose_interval, "a checkpoint names the interval, on ranks that do not write it too"
        assert ({more["pending"].num_entries for more in seen} - {0} == set(TIMED_NUM_UPDATES)) == times
        if times:
            assert all(timed.busy_s > 0 for timed in store._timed_forwards)
        for step in range(3):
            one_step(engine, case.batch(step))
        return weights(engine.module)

    assert_equal(run(True), run(False))


@pytest.mark.usefixtures("single_process")
def test_the_log_of_updates_is_as_it_was_while_forwards_are_timed() -> None:
    store = engine_for(CASES["opt"].make(), zo_json(interval=8)).backend.store
    seen: list[torch.Tensor] = []
    store.time_forwards(lambda: seen.append(store.log.rows.clone()))
    assert len(seen) == len(TIMED_NUM_UPDATES) and not any(rows.any() for rows in seen)


class Counting(nn.Module):
    """A block whose forward leaves traces: running statistics, a count, random numbers from two generators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.table + 1  # another tensor each time
        return F.dropout(self.norm(self.linear(x)), 0.1 + 0.1 * random.random())


class CountingStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.usefixtures("single_process")
def test_of_all_forwards_of_the_first_step_one_leaves_traces() -> None:
    """The first step also runs passes one after the other and timed forwards: twelve passes, and buffers as after
    one."""

    def run(times: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor, object]:
        torch.manual_seed(0)
        random.seed(0)
        engine = engine_for(CountingStack().train(), zo_json(interval=8))
        engine.backend.store.must_choose_interval = times
        engine(torch.randn(4, 8))
        return weights(engine.module), torch.get_rng_state(), random.getstate()

    timed, plain = run(True), run(False)
    assert_equal(timed[0], plain[0])
    assert torch.equal(timed[1], plain[1]) and timed[2] == plain[2]
    for name, value in timed[0].items():
        if name.endswith("num_batches_tracked"):
            assert value == 1
        if name.endswith("table"):
            assert value.tolist() == [1.0, 2.0, 3.0]


def test_waits_for_uploads_do_not_count_as_computing() -> None:
    log = ReplayLog(num_groups=1, num_directions=1, device=torch.device("cpu"))
    first, few, many = (TimedForward(n, torch.device("cpu"), log=log) for n in (5, 1, 5))
    first._whole, few._whole, many._whole = (0.0, 9.0), (10.0, 13.0), (20.0, 24.0)
    few._waits, many._waits = [(10.5, 11.0), (12.0, 12.5)], [(21.0, 21.2)]
    compute_s, draw_s = compute_and_draw_s([first, few, many])
    assert draw_s == pytest.approx((3.8 - 2.0) / 4)
    assert compute_s == pytest.approx(2.0 - draw_s)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("interleave", [True, False])
def test_norms_that_are_frozen_at_first_count_each_batch_once(interleave: bool) -> None:
    """A forward with other `training` flags leaves the traces of one pass, whichever modules change their mode."""
    torch.manual_seed(0)
    chosen = random.Random(int(interleave))
    engine = engine_for(CountingStack().train(), zo_json(interval=8))
    counts = [0] * 3
    for _ in range(8):
        engine.train()
        for i, block in enumerate(engine.module.blocks):
            block.norm.train(trains := chosen.random() < 0.5)
            counts[i] += trains
        before = random.getstate(), torch.get_rng_state()
        one_step(engine, {"x": torch.randn(4, 8)})
        engine.backend._passes.runner.interleave = interleave
        assert random.getstate() != before[0] and not torch.equal(torch.get_rng_state(), before[1])
    assert [int(block.norm.num_batches_tracked) for block in engine.module.blocks] == counts
    assert [block.table.tolist()[0] for block in engine.module.blocks] == [8.0] * 3


def test_an_interval_that_does_not_fit_is_not_taken() -> None:
    fastest_first = {k: float(k) for k in INTERVALS}.__getitem__
    needed: Callable[[int], int] = lambda k: 200 if k <= 2 else 100  # noqa: E731
    assert best_interval(fastest_first) == 1
    assert best_interval(fastest_first, device_nbytes=needed, budget_nbytes=200 + MARGIN_NBYTES) == 1
    assert best_interval(fastest_first, device_nbytes=needed, budget_nbytes=199 + MARGIN_NBYTES) == 3
    assert best_interval(fastest_first, device_nbytes=needed, budget_nbytes=0) == 3, "none fits: those of fewest bytes"
