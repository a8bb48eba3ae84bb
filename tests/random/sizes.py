"""How many random cases a test tries, and from which seed on.

DS_ZO_RANDOM_TIMES=50 tries fifty times as many as the suite does, DS_ZO_RANDOM_SEED=1000 others. A failure tells the
seed of its case: that seed, with one case, repeats it.
"""

from __future__ import annotations

import os


def num_cases(in_the_suite: int) -> int:
    return in_the_suite * int(os.environ.get("DS_ZO_RANDOM_TIMES", "1"))


def first_seed(in_the_suite: int = 0) -> int:
    return int(os.environ.get("DS_ZO_RANDOM_SEED", in_the_suite))
