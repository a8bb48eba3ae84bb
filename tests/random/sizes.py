"""How many random cases a test tries, and from which seed on.

DS_ZO_RANDOM_TIMES=50 tries fifty times as many as `tools/random.sh` does by itself, DS_ZO_RANDOM_SEED=1000 others. The
suite tries fewer, as `.ci/run` runs `tools/random.sh` too. A failure tells the seed of its case: that seed, with one
case, repeats it.
"""

from __future__ import annotations

import os

TIMES_IN_THE_SUITE = "0.2"


def seeds(by_random_sh: int) -> range:
    """Of as many cases as `num_cases` says."""
    return range(first_seed(), first_seed() + num_cases(by_random_sh))


def num_cases(by_random_sh: int) -> int:
    return max(1, round(by_random_sh * float(os.environ.get("DS_ZO_RANDOM_TIMES", TIMES_IN_THE_SUITE))))


def first_seed(in_the_suite: int = 0) -> int:
    return int(os.environ.get("DS_ZO_RANDOM_SEED", in_the_suite))
