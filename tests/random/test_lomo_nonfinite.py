"""LOMO and AdaLOMO with a loss or a gradient that is not finite, in random modes, against a plain loop that skips."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.helpers.nonfinite_cases import check, check_all, draw
from tests.helpers.ranks import run_job
from tests.random.sizes import first_seed, num_cases

NUM_CASES = num_cases(40)
FIRST_SEED = first_seed()


@pytest.mark.usefixtures("single_process")
def test_a_run_goes_on_as_a_plain_loop_that_skips() -> None:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + NUM_CASES - 1}")
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_CASES):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {draw(seed, num_ranks=1)}") from error


def test_all_ranks_skip_or_none() -> None:
    """What is not finite, is so on one rank of two. A third of the cases are those that the draw makes rarest."""
    num_cases = max(1, NUM_CASES // 4)
    seeds = list(range(FIRST_SEED, FIRST_SEED + num_cases))
    in_pieces = (seed for seed in count(seeds[-1] + 1) if draw(seed, num_ranks=2).updates_pieces)
    seeds += islice(in_pieces, num_cases // 2)
    print(f"seeds {seeds}")
    for rank, failed in enumerate(run_job(check_all, 2, seeds, timeout_s=120 + 2 * len(seeds))):
        assert isinstance(failed, dict), f"rank {rank}: {failed}"
        for seed, text in failed.items():
            raise AssertionError(f"rank {rank}, seed {seed}: {draw(seed, num_ranks=2)}\n{text}")
