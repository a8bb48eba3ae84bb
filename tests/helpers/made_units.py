"""Units for runtimes, without a model."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import nn

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.streams import InlineStreams, Streams
from ds_zo.streaming.transport import LocalCopy
from ds_zo.streaming.units import Part, PlacedParameter, Unit


def make_units(
    sizes: Sequence[int], *, streamed: Container[int], wire: torch.dtype = torch.float32
) -> tuple[list[Unit], list[torch.Tensor]]:
    """Units and their low planes. Every element of unit i is i, and so is every byte of its low plane."""
    store = HostStore(torch.device("cpu"), pin=False)
    units, lows = [], []
    for i, size in enumerate(sizes):
        placed = PlacedParameter(f"p{i}", nn.Parameter(torch.zeros(size, dtype=wire)), 0, 0, True)
        part = Part([placed], wire, wire, split=wire.itemsize < 4, frozen=False)
        unit = Unit(f"u{i}", nn.Module(), [part], index=i, is_block=True)
        low = store.take(unit.low_nbytes) if unit.low_nbytes else None
        unit.assign_buffers(store.take(unit.nbytes), low, streamed=i in streamed, low_streamed=True)
        unit.store_buffer.fill_(i)
        units.append(unit)
        if low is not None:
            lows.append(low.fill_(i))
    return units, lows


def make_runtime(
    units: Sequence[Unit], *, num_slots: int = 2, num_low_slots: int = 1, streams: Streams | None = None
) -> Runtime:
    streams = streams or InlineStreams(torch.device("cpu"))
    transport = LocalCopy(streams, HostStore(streams.device, pin=False))
    return Runtime(units, transport, num_slots=num_slots, num_low_slots=num_low_slots)
