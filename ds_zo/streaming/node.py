"""The ranks of one machine, and host memory that they share.

[Note: shared host memory] At ZeRO stage 3 the ranks of a machine store one copy of the streamed blocks, in memory that
all of them map. Each rank pins, uploads and writes back its own shard of every block; shards have equal size. A rank
can read the shards of other ranks by itself. So evaluation, saving and exporting are not collective: one rank may do
them alone. The memory has no name in any file system (memfd). A killed rank leaves nothing behind, and a container's
small /dev/shm does not limit the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ds_zo.streaming.streams import Streams

ALIGN = 256
"""Bytes. Every shard begins at a multiple of it."""
_MADV_REMOVE = 9


class RankPartition:
    """The division of any buffer into `size` equal shards, one for each rank, as seen by rank `index`."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def shard_nbytes(self, nbytes: int) -> int:
        return -(-nbytes // (self.size * ALIGN)) * ALIGN

    def padded_nbytes(self, nbytes: int) -> int:
        """Bytes of a buffer of `nbytes` padded to `size` equal shards."""
        return self.size * self.shard_nbytes(nbytes)

    def begin(self, nbytes: int) -> int:
        """First byte of this rank's shard in the padded buffer."""
        return self.index * self.shard_nbytes(nbytes)

    def shard(self, nbytes: int) -> slice:
        """This rank's bytes of an unpadded buffer of `nbytes`. The last shards may be shorter, or empty."""
        begin = min(nbytes, self.begin(nbytes))
        return slice(begin, min(nbytes, begin + self.shard_nbytes(nbytes)))


class Node:
    """The ranks of `process_group` that run on this machine; with `all_machines`, all ranks of the group. The
    constructor is collective."""

    def __init__(self, process_group: Any, *, streams: Streams, all_machines: bool = False) -> None:
        self.device = streams.device
        self.streams = streams
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        places: list[Any] = [None] * len(ranks)
        if not all_machines:
            dist.all_gather_object(places, _place(), group=process_group)
        timeout = world_timeout(self.device)
        by_place: dict[Any, list[int]] = {}
        for rank, place in zip(ranks, places, strict=True):
            by_place.setdefault(place, []).append(rank)
        self.group: Any = None
        self.ranks: list[int] = []
        for members in by_place.values():  # new_group is collective: every rank makes the groups of all machines
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                self.group, self.ranks = group, members
        self._on_host = dist.new_group(self.ranks, backend="gloo", timeout=timeout) if all_machines else None
        self.partition = RankPartition(self.ranks.index(dist.get_rank()), len(self.ranks))
        self._token = torch.zeros(1, device=self.device)
        backend = dist.get_backend(self.group)
        self._by_broadcast = self.device.type == "cuda" and "gloo" in str(backend)
        """Whether `gather` is made of broadcasts: gloo has no all-gather of CUDA tensors."""

    @property
    def size(self) -> int:
        return self.partition.size

    def host_wait(self) -> None:
        """Blocks the host until the streams that compute or copy weights have finished all work issued so far."""
        own = self.streams
        for stream in (own.compute, own.upload, own.download, own.gathered):
            stream.synchronize()

    def barrier(self) -> None:
        """Blocks the host until every rank has called it and has finished the work that it had issued before."""
        self.host_wait()
        self.stream_barrier()
        with explain_lost_rank(self.device):
            self._token.item()

    def stream_barrier(self) -> None:
        """A barrier on the current stream: later work on it starts after the work that every rank has issued on its
        current stream before."""
        with explain_lost_rank(self.device):
            dist.all_reduce(self._token, group=self.group)

    def check_same_call(self, place: int, doing: str) -> None:
        """Raises on all ranks if they do not all pass the same `place`. Uses a host collective: no stream waits.
        `doing` completes "rank N was to ..." in the message."""
        assert self._on_host is not None
        places = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        with explain_lost_rank(self.device):
            dist.all_gather(places, torch.tensor([place]), group=self._on_host)
        elsewhere = [rank for rank, other in zip(self.ranks, places, strict=True) if int(other) != place]
        if elsewhere:
            raise RuntimeError(
                f"ds_zo: rank {dist.get_rank()} was to {doing} while rank {elsewhere[0]} did something else: where "
                "weights are sharded, every rank makes the same calls, evaluation and state_dict() included, on the "
                "same number of batches; at stage 0 each rank has the whole model (zero_optimization.stage)"
            )

    def gather(self, buffer: torch.Tensor) -> list[Any]:
        """All-gathers a device buffer of equal shards, in which each rank has filled its own shard. Returns the pending
        operations; call `wait()` on each, on the stream that uses the result."""
        if self._by_broadcast:
            shards = buffer.chunk(self.size)
            return [
                dist.broadcast(shard, src, group=self.group, async_op=True)
                for shard, src in zip(shards, self.ranks, strict=True)
            ]
        mine = buffer.chunk(self.size)[self.partition.index]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(buffer, mine, group=self.group, async_op=True)]

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' `number`s. Collective."""
        shared = torch.tensor([number], dtype=torch.int64, device=self.device)
        with explain_lost_rank(self.device):
            dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group)
            return int(shared.item())

    def map_shared(self, nbytes: int) -> SharedMemory | None:
        """Maps memory that all ranks of the machine share. Returns None on all ranks if one of them cannot map it.
        Collective."""
        memory = SharedMemory.create(nbytes) if self.partition.index == 0 else None
        address: list[Any] = [None if memory is None else memory.address]
        dist.broadcast_object_list(address, src=self.ranks[0], group=self.group, device=self.device)
        if memory is None and address[0] is not None:
            memory = SharedMemory.attach(address[0], nbytes)
        if self.smallest(int(memory is not None)) == 1:
            return memory
        return None


class SharedMemory:
    """Anonymous shared memory (memfd), mapped into this process."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self._nbytes = nbytes
        self.tensor = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory | None:
        try:
            descriptor = os.memfd_create("ds_zo")
            os.ftruncate(descriptor, nbytes)
            return cls(descriptor, nbytes)
        except (AttributeError, OSError) as error:
            logger.warning(f"ds_zo: this machine provides no shared memory ({error})")
            return None

    @property
    def address(self) -> tuple[int, int]:
        """Process id and file descriptor, for `attach` in another process."""
        return os.getpid(), self._descriptor

    @classmethod
    def attach(cls, address: tuple[int, int], nbytes: int) -> SharedMemory | None:
        """Maps the memory of another process, which must still be running. Returns None if it cannot be mapped."""
        try:
            return cls(os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDWR), nbytes)
        except OSError as error:
            logger.warning(f"ds_zo: the memory of another rank can't be mapped ({error})")
            return None

    def private_view(self) -> torch.Tensor:
        """A copy-on-write view of the same bytes: this process's writes to it are seen by no other process."""
        private = mmap.mmap(self._descriptor, self._nbytes, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(private, dtype=torch.uint8)

    def free(self, begin: int, end: int) -> None:
        """Returns the whole pages in [begin, end) to the system, once no rank reads them. Failure is ignored: the
        memory then only stays in use."""
        if end > begin:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(self.tensor.data_ptr() + begin), ctypes.c_size_t(end - begin), _MADV_REMOVE)

    def close(self) -> None:
        """Closes the descriptor: no further views can be made, existing ones stay valid."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1


def _place() -> tuple[str, ...]:
    """Identifies the machine and process namespace: ranks with equal values can map one another's memory."""
    facts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            if path.startswith("/proc/self"):
                facts.append(os.readlink(path))
            else:
                with open(path, encoding="ascii") as file:
                    facts.append(file.read().strip())
        except OSError:
            facts.append("")
    return tuple(facts)


def world_timeout(device: torch.device) -> timedelta:
    """The timeout that the default process group was made with. A new group must be given it explicitly: it would
    otherwise get torch's default timeout, not the user's."""
    group: Any = dist.group.WORLD
    try:
        found: timedelta = group._get_backend(device).options._timeout
        return found
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


def use_world_timeout(group: Any, device: torch.device) -> None:
    """Sets the default group's timeout on a group that was made without it, such as DeepSpeed's data-parallel group."""
    if group is not None and group is not dist.group.WORLD:
        with contextlib.suppress(AttributeError, RuntimeError):
            group._get_backend(device)._set_default_timeout(world_timeout(device))


@contextlib.contextmanager
def explain_lost_rank(device: torch.device) -> Iterator[None]:
    """Around waits for other ranks: turns the error of a failed wait into one that names the cause and the remedy."""
    try:
        yield
    except RuntimeError as error:  # what every backend of torch.distributed raises
        if "ds_zo: rank" in str(error):
            raise
        raise RuntimeError(
            f"ds_zo: rank {dist.get_rank()} of {dist.get_world_size()} waited for another that died or stopped (ranks "
            f"wait {world_timeout(device).total_seconds():.0f} s at most: timeout of deepspeed.init_distributed): "
            "start the job again and load_checkpoint the last checkpoint, which no rank's death harms"
        ) from error
