"""Outputs of modules inside a block that a forward of transformers collects, such as router logits.

[Note: recorded outputs] A model of transformers declares which outputs of inner modules a caller may ask for, for
example by `output_router_logits`. Forward hooks append these outputs to lists of the forward that is running. While a
recomputed block runs, they append to lists of the block's call instead. The tensors in these lists are further outputs
of the block's autograd node, and the node's tensors are then appended to the lists of the forward. So a loss on router
logits has gradients. No forward is running in the backward pass, so each recomputation makes such lists again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ds_zo.versions import output_collector

Recorded = Mapping[str, list[Any]]
"""Outputs of inner modules in the order in which the modules ran, by the name under which a model returns them."""
_OF_BLOCKS = "hidden_states"
"""The name of outputs of whole blocks, which are recorded after a block's autograd node."""


def recorded_names() -> tuple[str, ...]:
    """The names of outputs inside blocks that the running forward collects."""
    collector = output_collector()
    running = None if collector is None else collector.get()
    return tuple(name for name, found in (running or {}).items() if isinstance(found, list) and name != _OF_BLOCKS)


@contextmanager
def recording(names: Sequence[str]) -> Iterator[Recorded]:
    """Context of one run of a block. Yields the lists to which hooks append outputs of these names."""
    recorded: dict[str, list[Any]] = {name: [] for name in names}
    if not recorded:
        yield recorded
        return
    collector = output_collector()
    running = collector.get()
    token = collector.set(running := {}) if running is None else None
    before = dict(running)
    running.update(recorded)
    try:
        yield recorded
    finally:
        running.clear()
        running.update(before)
        if token is not None:
            collector.reset(token)


def add_recorded(recorded: Recorded) -> None:
    """Appends the outputs of a block to the lists of the running forward."""
    for name, found in recorded.items():
        output_collector().get()[name].extend(found)
