"""Two gloo ranks on one GPU: reductions beside the backward pass, and blocks that are gathered, change no bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.lomo_rank_cases import CASES, resume, runs, save, uneven
from tests.helpers.ranks import job
from tests.helpers.weights import assert_close

pytestmark = pytest.mark.gpu


def test_ranks_stay_identical_and_sharded_blocks_change_no_bit_on_cuda() -> None:
    first, second = job(runs, 2, list(CASES))
    for case, mine in first.items():
        assert mine["digests"] == second[case]["digests"], case
        assert mine["norm"] == second[case]["norm"], case
    cases = [case for case in CASES if case != "bare"]
    shards = job(runs, 2, cases, 3)
    for sharded in shards:
        for case in cases:
            assert sharded[case]["digests"] == shards[0][case]["digests"], case
            if "streamed" in case:
                assert sharded[case]["digests"] == first[case]["digests"], case
                assert sharded[case]["kept"] < first[case]["kept"] or case == "streamed, then filled", case
            else:  # in shards on the devices: squares of gradients are added in another order
                assert 2 * sharded[case]["kept"] <= sharded[case]["blocks"] + 1024, case
                atol = 0.02 if case in ("bf16", "fp16") else 1e-5
                assert_close(sharded[case]["weights"], first[case]["weights"], atol=atol)


def test_ranks_may_lack_gradients_that_others_have_on_cuda() -> None:
    [alone], pair = job(uneven, 1, None), job(uneven, 2, None)
    for case, one in alone.items():
        assert pair[0][case]["digests"] == pair[1][case]["digests"], case
        assert_close(pair[0][case]["weights"], one["weights"], atol=1e-5)
    whole, sharded = job(uneven, 2, 0), job(uneven, 2, 3)
    for case in whole[0]:
        assert sharded[0][case]["digests"] == sharded[1][case]["digests"], case
        assert_close(sharded[0][case]["weights"], whole[0][case]["weights"], atol=1e-5)


def test_checkpoints_resume_on_another_number_of_ranks_on_cuda(tmp_path: Path) -> None:
    [saved, _] = job(save, 2, tmp_path / "2")
    for num_ranks in (1, 2):
        for resumed in job(resume, num_ranks, [tmp_path / "2"]):
            for case, weights in saved.items():
                atol = 0.02 if case == "on devices" else 1e-5  # the first is in bf16
                assert_close(resumed[f"2 {case}"], weights, atol=atol)
