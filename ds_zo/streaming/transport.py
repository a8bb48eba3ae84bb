"""Transports move the stored bytes of units to slots and back. Each kind of store has one.

A new one has the methods `fetch` and `copy_back`.

`LocalCopy` serves units that this rank stores. `NodeGather` serves blocks in memory that the ranks of a machine share.
`ShardGather` serves blocks that are sharded over devices. A unit on the device needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_zo.streaming.device_shards import DeviceShards
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.node import Node, explain_lost_rank
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.streams import DONE, Event, Streams
from ds_zo.streaming.units import Unit


class Transport:
    """The copies of one store's units. Every copy waits for the kernels and copies that use the same bytes."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.bytes_up = self.bytes_down = 0
        """Bytes that were uploaded and downloaded so far."""
        self.bytes_wire = 0
        """Bytes that this rank has sent to other ranks."""

    def slot_nbytes(self, nbytes: int) -> int:
        """Bytes of a slot that can hold a unit of so many bytes."""
        return nbytes

    def fetch(self, unit: Unit, slot: Slot, *, low: bool = False) -> None:
        """Uploads the unit's stored bytes, or its low plane, to the slot: calls `slot.take`, waits for `drained`,
        `saved` and `unit.written_back`, copies, records `filled`, calls `slot.uploaded`."""
        raise NotImplementedError

    def commit(self, unit: Unit, slot: Slot | None, low: Slot | None) -> None:
        """Copies the unit's bytes back from its slot, its low slot or both, and records `saved` of the slots."""
        stream = self.streams.download
        with stream.issuing():
            for used in (slot, low):
                if used is not None:
                    stream.wait(used.drained)
                    self.copy_back(unit, used, low=used is low)
                    used.is_saving = True
            self._committed(unit)
        unit.folded(unit.version if slot is None else slot.version, stream=stream)

    def copy_back(self, unit: Unit, used: Slot, *, low: bool) -> None:
        """Copies a slot to the unit's stored bytes, or to its low plane, on the download stream, which waits for
        `drained`. Records `saved`."""
        raise NotImplementedError

    def _committed(self, unit: Unit) -> None:
        """Called on the download stream after the copies of a `commit`."""

    def host_wait(self, unit: Unit) -> None:
        """Blocks the host until the last `commit` is in the unit's buffers."""
        unit.written_back.synchronize()


def stored_bytes(unit: Unit, *, low: bool) -> torch.Tensor:
    """The unit's stored bytes, or its low plane."""
    buffer = unit.low_buffer if low else unit.store_buffer
    assert buffer is not None
    return buffer


MakeTransport = Callable[[Streams, HostStore], Transport]
"""Makes the transport of units that this rank stores."""


class LocalCopy(Transport):
    """Copies of units that this rank stores. A pageable buffer is uploaded through the store's pinned ring."""

    def __init__(self, streams: Streams, store: HostStore) -> None:
        super().__init__(streams)
        self._store = store

    def fetch(self, unit: Unit, slot: Slot, *, low: bool = False) -> None:
        source = stored_bytes(unit, low=low)
        stream = self.streams.low_upload if low else self.streams.upload
        stream.wait(slot.drained)
        stream.wait(unit.written_back)
        with stream.issuing():
            slot.take(unit)
            # Chunk by chunk behind a download that may be under way, else in one copy.
            whole: list[tuple[slice, Event]] = [(slice(source.numel()), DONE)]
            chunks = list(slot.chunks(source.numel())) if slot.is_saving else whole
            for chunk, saved in chunks:
                stream.wait(saved)
                self._store.upload(slot.buffer[chunk], source[chunk], slot.filled, stream=stream)
            slot.is_saving &= len(chunks) < len(slot.saved)  # the last chunks of a larger unit are not awaited yet
        slot.uploaded()
        self.bytes_up += source.numel()

    def copy_back(self, unit: Unit, used: Slot, *, low: bool) -> None:
        target = stored_bytes(unit, low=low)
        for chunk, saved in used.chunks(target.numel()):
            target[chunk].copy_(used.buffer[chunk], non_blocking=True)
            self.streams.download.record(saved)
        self.bytes_down += target.numel()


class GatheringTransport(Transport):
    """Copies of blocks of which every rank owns an equal shard. All uploads are on one stream, so that `meet` follows
    this rank's reads of whole units."""

    reads_alone = True
    """Whether a rank can read a whole unit by itself. Otherwise every upload is collective."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.streams)
        self._node, self._partition = node, node.partition
        self._met = node.streams.event()

    def slot_nbytes(self, nbytes: int) -> int:
        return self._partition.padded_nbytes(nbytes)

    def meet(self, order: Sequence[Unit]) -> None:
        """All ranks start a pass that gathers the units of `order`. Orders every download of this pass after the start
        of the pass on all ranks: until a rank has started it, that rank may be reading whole units by itself."""
        with self.streams.upload.issuing():
            self._meet(order)
        self.streams.upload.record(self._met)
        self.streams.download.wait(self._met)

    def fetch(self, unit: Unit, slot: Slot, *, low: bool = False) -> None:
        """Uploads the whole unit to this rank's slot alone."""
        self._wait_for_shards(unit)
        upload = self.streams.upload
        self._wait_until_free(unit, slot)
        with upload.issuing():
            slot.take(unit)
            self._read_whole(unit, slot, low=low)
        upload.record(slot.filled)
        slot.uploaded()
        self.bytes_up += unit.low_nbytes if low else unit.nbytes

    def gather(self, unit: Unit, slot: Slot, *, low: bool = False) -> None:
        """Uploads this rank's shard, and gathers the unit on all ranks."""
        nbytes = unit.low_nbytes if low else unit.nbytes
        self._wait_until_free(unit, slot)
        own = self._own(unit, low=low)
        begin = self._partition.begin(nbytes)
        with self.streams.upload.issuing():
            slot.take(unit)
            slot.buffer[begin : begin + own.numel()].copy_(own, non_blocking=True)
            with explain_lost_rank(self.streams.device):
                gathering = self._node.gather(slot.buffer[: self._partition.padded_nbytes(nbytes)])
        with self.streams.gathered.issuing(), explain_lost_rank(self.streams.device):
            for work in gathering:
                work.wait()
        self.streams.gathered.record(slot.filled)
        slot.uploaded()
        self.bytes_up += own.numel()
        self.bytes_wire += self._partition.shard_nbytes(nbytes) * (self._partition.size - 1)

    def copy_back(self, unit: Unit, used: Slot, *, low: bool) -> None:
        """Copies this rank's shard back."""
        own = self._own(unit, low=low)
        begin = self._partition.begin(unit.low_nbytes if low else unit.nbytes)
        own.copy_(used.buffer[begin : begin + own.numel()], non_blocking=True)
        self.streams.download.record(used.saved[0])
        self.bytes_down += own.numel()

    def _wait_until_free(self, unit: Unit, slot: Slot) -> None:
        """Makes the upload stream wait for all that uses the slot or the unit's bytes: kernels, a gather into the slot
        that no kernel has waited for, and downloads."""
        for event in (slot.drained, unit.written_back, slot.filled, *(slot.saved[:1] if slot.is_saving else ())):
            self.streams.upload.wait(event)
        slot.is_saving = False

    # What the stores do differently

    def _own(self, unit: Unit, *, low: bool) -> torch.Tensor:
        """This rank's shard of the unit's stored bytes."""
        raise NotImplementedError

    def _read_whole(self, unit: Unit, slot: Slot, *, low: bool) -> None:
        """Copies all of a unit to the slot, on the current stream."""
        raise NotImplementedError

    def _meet(self, order: Sequence[Unit]) -> None:
        raise NotImplementedError

    def _wait_for_shards(self, unit: Unit) -> None:
        """Blocks the host until every rank has written back its shard of the unit as often as this rank has issued its
        own."""


class NodeGather(GatheringTransport):
    """Copies of blocks in shared memory ([Note: shared host memory])."""

    def __init__(self, store: SharedStore) -> None:
        super().__init__(store.node)
        self._store = store

    def host_wait(self, unit: Unit) -> None:
        super().host_wait(unit)
        if unit.streamed:
            self._store.wait(unit.index)

    def _own(self, unit: Unit, *, low: bool) -> torch.Tensor:
        buffer = stored_bytes(unit, low=low)
        return buffer[self._partition.shard(buffer.numel())]

    def _read_whole(self, unit: Unit, slot: Slot, *, low: bool) -> None:
        source = stored_bytes(unit, low=low)
        self._store.copy_whole(slot.buffer[: source.numel()], source)

    def _meet(self, order: Sequence[Unit]) -> None:
        self._node.stream_barrier()

    def _committed(self, unit: Unit) -> None:
        """Records that this rank has written back its shard of the unit."""
        self._store.mark_written_back(unit.index)

    def _wait_for_shards(self, unit: Unit) -> None:
        self._store.wait(unit.index)


class ShardGather(GatheringTransport):
    """Copies of blocks that are sharded over devices ([Note: device shards])."""

    reads_alone = False

    def __init__(self, shards: DeviceShards) -> None:
        super().__init__(shards.node)
        self._shards = shards

    def _own(self, unit: Unit, *, low: bool) -> torch.Tensor:
        return unit.store_buffer

    def _read_whole(self, unit: Unit, slot: Slot, *, low: bool) -> None:
        nbytes = self._partition.padded_nbytes(unit.nbytes)
        self._shards.gather(slot.buffer[:nbytes], unit)
        self.bytes_wire += self._partition.shard_nbytes(unit.nbytes) * (self._partition.size - 1)

    def _meet(self, order: Sequence[Unit]) -> None:
        """Raises if ranks start passes at different blocks."""
        first = order[0].index if order else None
        self._node.check_same_call(-1 - (first or 0), f"start a pass at block {first}")
