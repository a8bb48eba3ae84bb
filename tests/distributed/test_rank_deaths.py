"""A rank that dies or stops ends the others, with a message that says how to go on."""

from __future__ import annotations

import pytest

from tests.helpers.rank_deaths import JSONS, end
from tests.helpers.ranks import run_job


@pytest.mark.parametrize(("name", "stops"), [*((name, False) for name in JSONS), ("ZO", True)])
def test_a_rank_that_dies_or_stops_ends_the_others(name: str, stops: bool) -> None:
    """At once where its connections close, within the group's timeout (3 s here) where they don't."""
    (message, seconds), last = run_job(end, 2, name, stops, wait=3)
    assert last is None or last == "no answer"
    assert "died or stopped" in message and "load_checkpoint" in message, message
    assert seconds < 15
