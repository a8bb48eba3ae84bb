"""Records which modules each pass is inside of, to detect working copies that would overlap in the scratch.

All units share one scratch, so a module's copy stays valid only until another module is entered. A block is planned
with room for the modules that it contains. A module may still call modules that it does not contain. It may refer to
one that PyTorch does not register as its child, or the caller may pass it one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_zo.streaming.units import Unit


class ScratchOverlap:
    """The modules that each pass is inside of."""

    def __init__(self) -> None:
        self._within: dict[int, list[tuple[nn.Module, Sequence[Unit]]]] = {}
        """By pass: each module that it is inside of, and the units that are materialised for it, innermost last."""

    def enclosing(self, index: int) -> list[Unit]:
        """The units that are materialised for the modules that pass `index` is inside of, innermost last."""
        return [unit for _, units in self._within.get(index, ()) for unit in units]

    def enter(self, index: int, module: nn.Module, units: Sequence[Unit]) -> None:
        """Notes that pass `index` enters a module that materialises `units`."""
        self._within.setdefault(index, []).append((module, units))

    def leave(self, index: int, module: nn.Module) -> Sequence[Unit]:
        """Undoes `enter`, and returns the module's units; none if entering failed."""
        within = self._within.get(index)
        return within.pop()[1] if within and within[-1][0] is module else ()

    def clear(self) -> None:
        """Forgets all entered modules: no pass is inside of any."""
        self._within.clear()


def overlapping_block(block: Unit, enclosing: Sequence[Unit], *, streams: bool) -> Sequence[Unit]:
    """The units whose copies overlap if a training pass enters `block` inside of the `enclosing` units. `streams`:
    whether any block streams."""
    for holder in enclosing:
        if streams and holder.is_block:
            raise ValueError(
                "a block must not run inside another block, whose weights occupy its memory, got block "
                f"{block.name} inside block {holder.name}: name the list whose entries are called whole, or [] for "
                "none (ds_zo.stream.blocks)"
            )
    return enclosing


def overlapping_outer(entering: Sequence[Unit], enclosing: Sequence[Unit], *, at: int | None) -> list[Unit]:
    """The units whose copies overlap if a training pass enters an outer module (one outside the blocks) inside of the
    `enclosing` units. `at` is the offset in bytes of the room that the scratch has for it, or None if none was
    planned."""
    found = [holder for holder in enclosing if not holder.is_block]
    if not has_room(enclosing, at=at):
        found += [unit for unit in entering if not any(unit is holder for holder in enclosing)]
    return found


def has_room(enclosing: Sequence[Unit], *, at: int | None) -> bool:
    """Whether the scratch at offset `at` (in bytes, or None) lies behind the copies of all `enclosing` units."""
    return all(holder.is_block and at is not None and holder.scratch_nbytes <= at for holder in enclosing)
