"""Blocks whose weights all ranks keep together in device memory.

[Note: device shards] At ZeRO stage 3 without `offload_param`, each rank keeps an equal piece of every block's bytes on
its device, whatever machine it is on, and a visit gathers the pieces into a slot. Nobody can read another's piece by
itself, so whatever reads weights (evaluating, `state_dict`, a parameter's value) is made by all ranks alike, as with
DeepSpeed's own stage 3. Ranks that are at different places would gather pieces of different blocks and go on with
nonsense; so they tell one another on the host where they are, at the start of a pass and before a gather that no pass
has announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ds_zo.streaming.node import Node, RankPartition, explain_lost_rank
from ds_zo.streaming.sharded import ShardedRuntime
from ds_zo.streaming.shared_store import RanksStore
from ds_zo.streaming.slots import Slot
from ds_zo.streaming.units import PlacedParameter, Unit


@dataclass(frozen=True)
class ParameterShard:
    """What one rank has of one parameter."""

    rank: int
    begin: int
    """Its first element's place in the parameter."""
    numel: int
    at: int
    """Bytes: where it stands in the rank's piece."""

    def view(self, piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return piece[self.at : self.at + self.numel * dtype.itemsize].view(dtype)


def segments_of(unit: Unit, partition: RankPartition) -> dict[int, list[ParameterShard]]:
    """By the parameter's id."""
    length = partition.piece_nbytes(unit.nbytes)
    found: dict[int, list[ParameterShard]] = {}
    for placed, begin, end in unit.spans():
        itemsize = placed.parameter.element_size()
        mine = found.setdefault(id(placed.parameter), [])
        for rank in range(begin // length, -(-end // length)):
            first, last = max(begin, rank * length), min(end, (rank + 1) * length)
            mine.append(
                ParameterShard(rank, (first - begin) // itemsize, (last - first) // itemsize, first - rank * length)
            )
    return found


class DeviceShards(RanksStore):
    """This rank's pieces. See [Note: device shards]."""

    def __init__(self, node: Node, *, device: torch.device) -> None:
        super().__init__(node, device, pin=False)

    def take(self, nbytes: int) -> torch.Tensor:
        """Room for a whole unit, until it is `filled`."""
        return torch.zeros(self.partition.padded_nbytes(nbytes), dtype=torch.uint8, device=self.device)

    def filled(self, unit: Unit) -> None:
        piece = unit.store_buffer.chunk(self.partition.size)[self.partition.index].clone()
        unit.assign_buffers(piece, None, streamed=True, low_streamed=False, is_sharded=True)
        self.nbytes += piece.numel()

    def own(self, home: torch.Tensor, nbytes: int) -> torch.Tensor:
        return home

    def segments(self, unit: Unit) -> dict[int, list[ParameterShard]]:
        return segments_of(unit, self.partition)

    def write(self, unit: Unit, placed: PlacedParameter, value: torch.Tensor) -> None:
        """This rank's part of a parameter's new value, which all ranks have."""
        if value.shape != placed.parameter.shape:
            raise ValueError(f"{placed.name} has shape {tuple(placed.parameter.shape)}, got {tuple(value.shape)}")
        flat = value.detach().reshape(-1)
        for segment in self.segments(unit)[id(placed.parameter)]:
            if segment.rank == self.partition.index:
                part = flat[segment.begin : segment.begin + segment.numel]
                segment.view(unit.store_buffer, placed.parameter.dtype).copy_(part)
        if self.device.type == "cuda":  # the next gather, on another stream, waits for it
            unit.written_back = unit.written_back or torch.cuda.Event()
            unit.written_back.record(torch.cuda.current_stream(self.device))

    def whole(self, unit: Unit) -> list[torch.Tensor]:
        """Its parameters on the device, in `placed` order. By all ranks."""
        if unit.written_back is not None:
            torch.cuda.current_stream(self.device).wait_event(unit.written_back)
        buffer = torch.empty(self.partition.padded_nbytes(unit.nbytes), dtype=torch.uint8, device=self.device)
        self.gather(buffer, unit)
        return unit.views(unit.planes(buffer), [None] * len(unit.parts))

    def gather(self, buffer: torch.Tensor, unit: Unit) -> None:
        """Into a buffer with room for equal pieces, by the current stream; ranks that are elsewhere are found out."""
        self.node.agree(unit.index, f"ask for the weights of {unit.name}")
        buffer.chunk(self.partition.size)[self.partition.index].copy_(unit.store_buffer)
        with explain_lost_rank(self.device):
            for work in self.node.gather(buffer):
                work.wait()


class DeviceShardRuntime(ShardedRuntime):
    """Brings blocks to slots from all ranks' pieces."""

    _store: DeviceShards

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._slots_agree = True
        """Slots hold the same on all ranks, whatever each has visited."""
        super().__init__(*args, **settings)

    def acquire(self, unit: Unit) -> Slot:
        if not self._is_collective and not self._slots_agree:
            self.forget()
            self._slots_agree = True
        return super().acquire(unit)

    @contextmanager
    def updating(self, unit: Unit) -> Iterator[torch.Tensor]:
        """Inside, the current stream may change this rank's piece: every gather so far has read it, none to come
        has."""
        if self._up is not None and self._compute is not None:
            self._compute.wait_stream(self._up)
        yield unit.store_buffer
        unit.version += 1
        if self._up is not None:
            unit.written_back = unit.written_back or torch.cuda.Event()
            self._record(unit.written_back, self._compute)

    def _copy_up(self, slot: Slot, home: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self._wait_until_free(slot)
        assert slot.unit is not None
        nbytes = slot.unit.nbytes
        self._store.gather(slot.buffer[: self._slot_nbytes(nbytes)], slot.unit)
        self.bytes_wire += self._partition.piece_nbytes(nbytes) * (self._partition.size - 1)

    def _meet(self, order: Sequence[int]) -> None:
        self._slots_agree = False
        self._store.node.agree(-1 - next(iter(order), 0), f"start a pass at block {next(iter(order), None)}")
