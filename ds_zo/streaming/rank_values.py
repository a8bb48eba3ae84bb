"""Compares the values that ranks have stored, each of which may have read them from its own files."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import torch.distributed as dist

from ds_zo.config.agreement import check_agreement
from ds_zo.streaming.placement import Placement


def compare_values(placement: Placement, *, source: str, shares_memory: bool, process_group: Any) -> None:
    """Raises on every rank if ranks have stored other values of a parameter. Gives each rank the sums of the values
    that another rank has stored for it.

    Ranks that share memory store different units, so that nothing of theirs can be compared but the folder's name.
    """
    placed = [p for unit in placement.units for p in unit.placed]
    mine = {f"value of {p.name}": p.value_sum for p in placed if p.value_sum}
    if shares_memory:
        mine[f"folder of the model on {socket.gethostname()}"] = source
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(_gathered(digest, process_group))) == 1:
        return
    found, sources = zip(*_gathered((mine, source), process_group), strict=True)
    origin = {value: of for of_rank, of in zip(found, sources, strict=True) for value in of_rank.values()}
    check_agreement([{at: f"{v} of {origin[v]}" for at, v in of_rank.items()} for of_rank in found], may_lack=True)
    of_any = {at: value for of_rank in found for at, value in of_rank.items()}
    for p in placed:
        p.value_sum = of_any[f"value of {p.name}"]


def _gathered(value: Any, process_group: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, value, group=process_group)
    return found
