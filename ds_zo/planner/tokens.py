"""The number of tokens a step at which copies between host and device do not bound the speed.

Streamed blocks cross the link once or twice a step, however many tokens the step has. Computation grows with the
tokens, so from some number on it hides the copies.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_zo.planner.estimate import Estimate
from ds_zo.planner.plan import Plan

SLACK = 0.02
"""A step counts as bound by copies if they make it longer than its computation by more than this share."""
_MOST_TOKENS = 2**24


def waits(estimate: Estimate) -> bool:
    """Whether copies bound a step."""
    if estimate.compute_s is None:
        raise ValueError(
            f"tokens a step are chosen for backends of ds_zo, got {estimate.contender}: name one of them (--backend)"
        )
    return estimate.step_s > (1 + SLACK) * estimate.compute_s


def smallest_unbound(planned: Callable[[int], Plan]) -> Plan:
    """The plan with the smallest batch in which copies do not bound the step of its one method. `planned` returns the
    plan for a batch."""
    bound, found = 0, planned(1)
    while waits(found.estimates[0]):
        bound = found.batch
        if 2 * bound * found.seq > _MOST_TOKENS:
            raise ValueError(
                f"copies bound the step of {found.estimates[0].contender} at any number of tokens, got {bound} x "
                f"{found.seq}: plan without offload_activations, with more --device-memory-gb or for a faster link"
            )
        found = planned(2 * bound)
    while found.batch - bound > 1:
        middle = planned((bound + found.batch) // 2)
        if waits(middle.estimates[0]):
            bound = middle.batch
        else:
            found = middle
    return found
