"""The description of a frozen base that a checkpoint leaves out: its source, its formats and sums of its values.

See [Note: frozen base].
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ds_zo import ops
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.logs import warn
from ds_zo.streaming.loading import source_of
from ds_zo.streaming.units import Unit


def sums_of_units(units: Iterable[Unit], names: Collection[str]) -> dict[str, str]:
    """The sum of each parameter's value before it was encoded. Values that are not encoded are summed again where they
    may have changed."""
    found: dict[str, str] = {}
    for unit in units:
        for part, planes in zip(unit.parts, unit.planes(unit.store_buffer), strict=True):
            for placed in (p for p in part.placed if p.name in names):
                found[placed.name] = placed.value_sum
                if is_own_storage(unit):
                    found[placed.name] = ops.value_sum(placed.parameter)
                elif part.viewable and unit.may_be_changed:
                    found[placed.name] = ops.value_sum(placed.view(planes.storage))
    return found


def is_own_storage(unit: Unit) -> bool:
    """Whether the unit's parameters are used as they are. Nothing counts a user's writes to them."""
    return not unit.streamed and unit.viewable


def describe_base(module: nn.Module, sums: Mapping[str, str], formats: Iterable[str]) -> dict[str, Any]:
    return {"source": source_of(module), "stored_as": " ".join(sorted(set(formats))), "sums": dict(sums)}


def check_base(saved: Mapping[str, Any], here: Mapping[str, Any], *, folder: Path) -> None:
    """Raises if a checkpoint was saved over another base than this run's. Both are given by `describe_base`."""
    there, sums = saved["sums"], here["sums"]
    forms = {
        name: (there[name].split()[0], sums[name].partition(" ")[0]) for name in sorted(there.keys() & sums.keys())
    }
    other = [name for name, (form, own) in forms.items() if form == own and there[name] != sums[name]]
    if other:
        refuse_base(saved, folder=folder, found=f"{here['source']}, in which {_some(other)} differs")
    unlike = [name for name, (form, own) in forms.items() if form != own]
    if unlike:
        form, own = forms[unlike[0]]
        warn(
            f"the frozen base of checkpoint {folder} was read as {form} and is read as {own} here, so {_some(unlike)} "
            "is not compared"
        )
    elif saved["stored_as"] != here["stored_as"]:
        warn(
            f"the frozen base of checkpoint {folder} has the values of this run's and was stored as "
            f"{saved['stored_as']}; it is stored as {here['stored_as']} here, so losses differ by its rounding"
        )


def refuse_base(saved: Mapping[str, Any], *, folder: Path, found: str) -> None:
    raise CheckpointError(
        f"checkpoint {folder} has no frozen weights and needs the base of its run ({saved['source']}), got another "
        f"base ({found}): load the same model"
    )


def _some(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
