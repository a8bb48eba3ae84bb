"""Walks through autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def nodes_before(starts: Iterable[Any], *, ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Nodes of a graph that a backward pass from `starts` reaches, up to `ends`, which are left out."""
    due, seen = list(starts), {None, *ends}
    while due:
        node = due.pop()
        if node not in seen:
            seen.add(node)
            yield node
            due += [before for before, _ in node.next_functions]
