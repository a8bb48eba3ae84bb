"""LOMO and AdaLOMO with a loss or a gradient that is not finite, in random modes, against a plain loop that skips."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.helpers.nonfinite_cases import check, check_all, draw
from tests.helpers.ranks import run_job
from tests.random.sizes import seeds


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("seed", seeds(40))
def test_a_run_goes_on_as_a_plain_loop_that_skips(seed: int) -> None:
    print(draw(seed, num_ranks=1))
    check(seed)


def test_all_ranks_skip_or_none() -> None:
    """What is not finite, is so on one rank of two. A third of the cases are those that the draw makes rarest."""
    tried = [*seeds(10)]
    in_shards = (seed for seed in count(tried[-1] + 1) if draw(seed, num_ranks=2).updates_shards)
    tried += islice(in_shards, len(tried) // 2)
    print(f"seeds {tried}")
    for rank, failed in enumerate(run_job(check_all, 2, tried, timeout_s=120 + 2 * len(tried))):
        assert isinstance(failed, dict), f"rank {rank}: {failed}"
        for seed, text in failed.items():
            raise AssertionError(f"rank {rank}, seed {seed}: {draw(seed, num_ranks=2)}\n{text}")
