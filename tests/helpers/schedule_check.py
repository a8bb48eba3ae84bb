"""Checks a schedule of uploads, computations and downloads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_zo.streaming.schedule import Action, Kind


def validate(actions: Iterable[Action], *, num_slots: int, loaded: Mapping[int, int] | None = None) -> None:
    """Raises unless every computation finds its block in its slot and every download follows its block's computation.
    Raises also if an upload overwrites a block that was uploaded and not yet computed."""
    holds: dict[int, int] = {slot: block for block, slot in (loaded or {}).items()}
    computed: dict[int, bool] = dict.fromkeys(holds, True)  # blocks that an earlier pass has left may be overwritten
    for action in actions:
        block, slot = action.block, action.slot
        if not 0 <= slot < num_slots:
            raise ValueError(f"{action}: there are {num_slots} slots")
        if action.kind is Kind.UPLOAD:
            if slot in holds and not computed[slot]:
                raise ValueError(f"{action}: overwrites block {holds[slot]} before it was computed")
            holds[slot], computed[slot] = block, False
            continue
        if holds.get(slot) != block:
            raise ValueError(f"{action}: the slot holds {holds.get(slot)}")
        if action.kind is Kind.COMPUTE:
            computed[slot] = True
        elif not computed[slot]:
            raise ValueError(f"{action}: downloaded before it was computed")
