"""Units as named tensors, and descriptions from which units are made again without the model.

A unit's planes are saved parameter by parameter, without padding. The tensor `NAME` holds the bytes of a parameter as
the host store keeps them. `NAME:low` holds the low bits of a split master, and `NAME:exponents` the scales of formats
that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.streaming.units import Part, PlacedParameter, Unit

LOW = ":low"
SCALES = ":exponents"
"""Also the scales of NF4 and MXFP4, which are no exponents. A hash of the weights covers this name."""
Read = Callable[[str], torch.Tensor]
Form = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's dtype and shape."""


def unit_tensors(unit: Unit, buffer: torch.Tensor, low: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Views, by name, of buffers that are laid out like the unit's own. `low` is None without a low plane."""
    return {
        name: view
        for part, planes in zip(unit.parts, unit.planes(buffer, low), strict=True)
        for placed in part.placed
        for name, view in _views(part, placed, planes)
    }


def host_tensors(unit: Unit) -> dict[str, torch.Tensor]:
    """The tensors of the unit's own buffers, in host memory, by name."""
    return unit_tensors(unit, unit.store_buffer.cpu(), None if unit.low_buffer is None else unit.low_buffer.cpu())


def fill_unit(unit: Unit, read: Read, *, omitted: Collection[str] = ()) -> None:
    """Fills the unit's own buffers from tensors that `unit_tensors` named. Those of `omitted` parameters stay."""
    for name, view in unit_tensors(unit, unit.store_buffer, unit.low_buffer).items():
        if name.partition(":")[0] not in omitted:
            view.copy_(read(name).view(view.shape))


def _views(part: Part, placed: PlacedParameter, planes: ops.Planes) -> Iterable[tuple[str, torch.Tensor]]:
    stored = part.stored(placed, planes.storage)
    yield placed.name, stored.view(torch.uint8) if stored.dtype in ops.PACKED else stored
    if planes.low is not None:
        yield placed.name + LOW, placed.view(planes.low)
    if planes.scales is not None:
        yield placed.name + SCALES, planes.scales[part.scales_of(placed)]


def describe(unit: Unit) -> dict[str, Any]:
    """Everything about a unit but its bytes and its version, as plain data."""
    return {
        "name": unit.name,
        "is_block": unit.is_block,
        "index": unit.index,
        "parts": [
            {
                "dtype": _name(part.dtype),
                "wire": _name(part.wire),
                "split": part.split,
                "direct": part.direct,
                **({"frozen": True} if part.frozen and not part.direct else {}),
                "params": [
                    {
                        "name": p.name,
                        "shape": list(p.parameter.shape),
                        "offset": p.offset,
                        "group": p.group,
                        "trainable": p.trainable,
                        **({"still": list(p.still)} if any(p.still) else {}),
                    }
                    for p in part.placed
                ],
            }
            for part in unit.parts
        ],
    }


def rebuild(description: Mapping[str, Any]) -> Unit:
    """The unit of a description, with placeholders for parameters and without buffers."""
    parts = [
        Part(
            [
                PlacedParameter(
                    p["name"],
                    nn.Parameter(torch.zeros((), dtype=_dtype(part["dtype"])).expand(p["shape"]), requires_grad=False),
                    p["offset"],
                    p["group"],
                    p["trainable"],
                    still_of(p),
                )
                for p in part["params"]
            ],
            _dtype(part["dtype"]),
            _dtype(part["wire"]),
            split=part["split"],
            frozen=part["direct"] or part.get("frozen", False),
        )
        for part in description["parts"]
    ]
    return Unit(description["name"], nn.Module(), parts, index=description["index"], is_block=description["is_block"])


def still_of(parameter: Mapping[str, Any]) -> tuple[int, int]:
    """First and last-plus-one element of a parameter that no update changes (rows at `padding_idx`).

    Descriptions by ds_zo versions that updated these rows have no such entry: (0, 0).
    """
    first, end = parameter.get("still", (0, 0))
    return first, end


def unit_key(description: Mapping[str, Any]) -> str:
    """The name of the unit's first parameter. It is unique, while two units may have the name of one module."""
    name: str = description["parts"][0]["params"][0]["name"]
    return name


def check_stored(state: Mapping[str, Any], form: Callable[[str], Form]) -> None:
    """Raises where the tensors of a checkpoint are not those of the units that its state describes."""
    omitted = state["omitted"]
    for description in state["units"]:
        placed = [p for part in description["parts"] for p in part["params"]]
        if not all(type(p["offset"]) is int and p["offset"] >= 0 for p in placed):
            raise ValueError(f"offsets are {[p['offset'] for p in placed]}")
        if not all(type(p["group"]) is int and 0 <= p["group"] < state["num_groups"] for p in placed):
            raise ValueError(f"parameter groups are {[p['group'] for p in placed]}")
        unit = rebuild(description)
        allocate_buffers(unit, torch.device("meta"))
        for name, view in unit_tensors(unit, unit.store_buffer, unit.low_buffer).items():
            if name.partition(":")[0] in omitted:
                continue
            dtype, shape = form(name)
            if dtype is not view.dtype or torch.Size(shape).numel() != view.numel():
                raise ValueError(f"{name} is {dtype} of shape {shape}, expected {view.dtype} of {tuple(view.shape)}")


def allocate_buffers(unit: Unit, device: torch.device) -> None:
    """Gives a unit buffers of zeros on `device`."""
    low = torch.zeros(unit.low_nbytes, dtype=torch.uint8, device=device) if unit.low_nbytes else None
    unit.assign_buffers(
        torch.zeros(unit.nbytes, dtype=torch.uint8, device=device), low, streamed=False, low_streamed=False
    )


def shapes_of(descriptions: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Every parameter's shape by name."""
    return {p["name"]: tuple(p["shape"]) for unit in descriptions for part in unit["parts"] for p in part["params"]}


def difference(saved: Mapping[str, Sequence[int]], present: Mapping[str, Sequence[int]]) -> str | None:
    """A description of how two sets of shapes differ; None where they are equal."""
    texts = []
    missing, unknown = sorted(present.keys() - saved.keys()), sorted(saved.keys() - present.keys())
    for what, names in (("it lacks", missing), ("the model does not have", unknown)):
        if names:
            texts.append(f"{what} {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    for name in saved.keys() & present.keys():
        if tuple(saved[name]) != tuple(present[name]):
            texts.append(f"{name} has shape {tuple(saved[name])} there and {tuple(present[name])} here")
            break
    return "; ".join(texts) or None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
