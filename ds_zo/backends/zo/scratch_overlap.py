"""Which modules a pass is in, as far as copies of their weights could get in one another's way.

All units share one scratch, so a module's copy lasts while no other module is entered. A block is planned with room for
the modules that it contains. A module may run others all the same: by a reference that torch does not know of, or
because the caller passed it one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_zo.streaming.units import Unit


class ScratchOverlap:
    def __init__(self) -> None:
        self._within: dict[int, list[Sequence[Unit]]] = {}
        self.crowded: dict[int, Unit] = {}
        """Units whose copies were in the way of others', by id: they need memory of their own. None of them streams."""

    def around(self, index: int) -> list[Unit]:
        """What the modules that pass `index` is in have brought up, the innermost last."""
        return [unit for units in self._within.get(index, ()) for unit in units]

    def enter(self, index: int, units: Sequence[Unit]) -> None:
        self._within.setdefault(index, []).append(units)

    def leave(self, index: int, units: Sequence[Unit]) -> None:
        """Nothing where entering failed."""
        within = self._within.get(index)
        if within and within[-1] is units:
            within.pop()

    def clear(self) -> None:
        """No pass is in any module."""
        self._within.clear()

    def note_block(self, block: Unit, around: Sequence[Unit], *, streams: bool) -> None:
        """`block` is entered in a training pass. `streams`: some block does."""
        for outer in around:
            if streams and outer.is_block:
                raise ValueError(
                    f"block {block.name} is run inside block {outer.name}, whose weights are in its place then: name "
                    "the list whose entries are called whole, or [] for none (ds_zo.stream.blocks)"
                )
            self.crowded[id(outer)] = outer

    def note_edge(self, entering: Sequence[Unit], around: Sequence[Unit], *, at: int | None) -> None:
        """The same of a module outside the blocks, with room planned `at` bytes into the scratch."""
        for outer in around:
            if not outer.is_block:
                self.crowded[id(outer)] = outer
        if not has_room(around, at=at):
            self.crowded |= {id(unit): unit for unit in entering if not any(unit is outer for outer in around)}


def has_room(around: Sequence[Unit], *, at: int | None) -> bool:
    """Whether `at` is behind the copies of all that is `around`."""
    return all(outer.is_block and at is not None and outer.scratch_nbytes <= at for outer in around)
