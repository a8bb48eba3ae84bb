"""Traversal of autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def nodes_before(starts: Iterable[Any], *, ends: Iterable[Any] = ()) -> Iterator[Any]:
    """The autograd nodes that a backward pass from the nodes `starts` reaches. The pass stops at the nodes `ends`,
    which are not returned. Both may contain None."""
    due, seen = list(starts), {None, *ends}
    while due:
        node = due.pop()
        if node not in seen:
            seen.add(node)
            yield node
            due += [before for before, _ in node.next_functions]
