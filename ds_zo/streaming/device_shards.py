"""Blocks whose weights are sharded over the devices of all ranks.

[Note: device shards] At ZeRO stage 3 without `offload_param`, each rank keeps an equal shard of every block's bytes on
its device, whichever machine it runs on. Using a block gathers the shards into a slot. A rank cannot read another
rank's shard by itself. So everything that reads weights (evaluation, `state_dict`, a parameter's value) is collective,
as with DeepSpeed's own stage 3. Ranks that make different calls would gather shards of different blocks and train on
wrong weights. So ranks compare their calls on the host, at the start of a pass and before every gather outside a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.node import Node, explain_lost_rank
from ds_zo.streaming.units import PlacedParameter, Unit


@dataclass(frozen=True)
class ParameterShard:
    """The elements of one parameter that are in one rank's shard."""

    rank: int
    begin: int
    """Index of the first of these elements in the parameter."""
    numel: int
    at: int
    """Byte offset of these elements in the rank's shard."""

    def view(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return shard[self.at : self.at + self.numel * dtype.itemsize].view(dtype)


class DeviceShards(HostStore):
    """This rank's shards of the blocks, on its device. See [Note: device shards]."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.device, pin=False)
        self.device, self.node, self.partition = node.device, node, node.partition

    def take(self, nbytes: int) -> torch.Tensor:
        """Returns a zeroed device buffer for a whole unit. `filled` replaces it by this rank's shard."""
        return torch.zeros(self.partition.padded_nbytes(nbytes), dtype=torch.uint8, device=self.device)

    def filled(self, unit: Unit) -> None:
        shard = unit.store_buffer.chunk(self.partition.size)[self.partition.index].clone()
        unit.assign_buffers(shard, None, streamed=True, low_streamed=False, is_sharded=True)
        self.nbytes += shard.numel()

    def segments(self, unit: Unit) -> dict[int, list[ParameterShard]]:
        """The shards of each of the unit's parameters, in rank order, by the parameter's id."""
        length = self.partition.shard_nbytes(unit.nbytes)
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

    def write(self, unit: Unit, placed: PlacedParameter, value: torch.Tensor) -> None:
        """Stores this rank's part of a parameter's new value. Every rank calls it with the whole value."""
        if value.shape != placed.parameter.shape:
            raise ValueError(
                f"{placed.name} has shape {tuple(placed.parameter.shape)}, got {tuple(value.shape)}: load weights that "
                "were saved from a model with the same config"
            )
        flat = value.detach().reshape(-1)
        for segment in self.segments(unit)[id(placed.parameter)]:
            if segment.rank == self.partition.index:
                part = flat[segment.begin : segment.begin + segment.numel]
                segment.view(unit.store_buffer, placed.parameter.dtype).copy_(part)
        # The next gather is on another stream and waits for this one's writes.
        unit.rewritten(unit.version, stream=self.node.streams.compute)

    def whole(self, unit: Unit) -> list[torch.Tensor]:
        """Gathers the unit's parameters into new device memory, in `placed` order. Collective."""
        self.node.streams.compute.wait(unit.written_back)
        buffer = torch.empty(self.partition.padded_nbytes(unit.nbytes), dtype=torch.uint8, device=self.device)
        self.gather(buffer, unit)
        return unit.views(unit.planes(buffer), [None] * len(unit.parts))

    def gather(self, buffer: torch.Tensor, unit: Unit) -> None:
        """Gathers a unit into a buffer padded to equal shards, on the current stream. Raises if ranks make different
        calls. Collective."""
        self.node.check_same_call(unit.index, f"ask for the weights of {unit.name}")
        buffer.chunk(self.partition.size)[self.partition.index].copy_(unit.store_buffer)
        with explain_lost_rank(self.device):
            for work in self.node.gather(buffer):
                work.wait()
