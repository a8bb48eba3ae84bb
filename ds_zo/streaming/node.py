"""The ranks of one machine, and host memory that they share.

[Note: shared host memory] At ZeRO stage 3 the ranks of a machine keep one copy of the streamed blocks among them, in
memory that all of them map. Each rank fills, pins, uploads and writes back its own equal piece of every block; reading
needs nobody's help, since a piece of another rank is memory like any other. So evaluating, saving and exporting are not
collective, whatever one rank does alone. The memory has no name in any file system (memfd): nothing is left behind by a
rank that is killed, and a container's small /dev/shm does not limit it.
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

ALIGN = 256
"""Bytes: where a piece may begin."""
_MADV_REMOVE = 9


class RankPartition:
    """One rank's part among `size`: an equal piece of any buffer."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def piece_nbytes(self, nbytes: int) -> int:
        return -(-nbytes // (self.size * ALIGN)) * ALIGN

    def padded_nbytes(self, nbytes: int) -> int:
        """Room for equal pieces."""
        return self.size * self.piece_nbytes(nbytes)

    def begin(self, nbytes: int) -> int:
        """Of this rank's piece where there is room for equal ones."""
        return self.index * self.piece_nbytes(nbytes)

    def piece(self, nbytes: int) -> slice:
        """This rank's bytes of a buffer. The last pieces of a small buffer may be short, or empty."""
        begin = min(nbytes, self.begin(nbytes))
        return slice(begin, min(nbytes, begin + self.piece_nbytes(nbytes)))


class Node:
    """The ranks of `process_group` that run on this machine, or all of them `everywhere`. Making one is collective."""

    def __init__(self, process_group: Any, *, device: torch.device, everywhere: bool = False) -> None:
        self.device = device
        self.streams: list[torch.cuda.Stream] = []
        """Besides the current one, those that copy what ranks share."""
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        places: list[Any] = [None] * len(ranks)
        if not everywhere:
            dist.all_gather_object(places, _place(), group=process_group)
        timeout = world_timeout(device)
        by_place: dict[Any, list[int]] = {}
        for rank, place in zip(ranks, places, strict=True):
            by_place.setdefault(place, []).append(rank)
        self.group: Any = None
        self.ranks: list[int] = []
        for members in by_place.values():  # every rank makes every group
            group = dist.new_group(members, timeout=timeout)
            if dist.get_rank() in members:
                self.group, self.ranks = group, members
        self._on_host = dist.new_group(self.ranks, backend="gloo", timeout=timeout) if everywhere else None
        self.partition = RankPartition(self.ranks.index(dist.get_rank()), len(self.ranks))
        self._token = torch.zeros(1, device=device)
        backend = dist.get_backend(self.group)
        self._by_broadcast = device.type == "cuda" and "gloo" in str(backend)
        """Gloo gathers nothing on a GPU, but broadcasts there."""

    @property
    def size(self) -> int:
        return self.partition.size

    def host_wait(self) -> None:
        """Until what this rank's streams were given is done."""
        if self.device.type == "cuda":
            for stream in (torch.cuda.current_stream(self.device), *self.streams):
                stream.synchronize()

    def barrier(self) -> None:
        """Until every rank of the machine, and what its streams were given before, is here."""
        self.host_wait()
        self.meet()
        with explain_lost_rank(self.device):
            self._token.item()

    def meet(self) -> None:
        """What follows on the current stream follows what every rank's stream held before."""
        with explain_lost_rank(self.device):
            dist.all_reduce(self._token, group=self.group)

    def agree(self, place: int, doing: str) -> None:
        """Raises, on all ranks, where they are not at the same place. On the host: no stream waits."""
        assert self._on_host is not None
        places = [torch.zeros(1, dtype=torch.int64) for _ in self.ranks]
        with explain_lost_rank(self.device):
            dist.all_gather(places, torch.tensor([place]), group=self._on_host)
        elsewhere = [rank for rank, other in zip(self.ranks, places, strict=True) if int(other) != place]
        if elsewhere:
            raise RuntimeError(
                f"ds_zo: rank {dist.get_rank()} was to {doing} while rank {elsewhere[0]} did something else: where "
                "weights are sharded every rank makes the same calls, evaluating and state_dict() included, on as many "
                "batches (zero_optimization.stage; at stage 0 each rank has the whole model)"
            )

    def gather(self, buffer: torch.Tensor) -> list[Any]:
        """Fills equal pieces of a device buffer, of which each rank has its own there, from all ranks. Returns what to
        `wait()` for, on the stream that goes on."""
        if self._by_broadcast:
            pieces = buffer.chunk(self.size)
            return [
                dist.broadcast(piece, src, group=self.group, async_op=True)
                for piece, src in zip(pieces, self.ranks, strict=True)
            ]
        mine = buffer.chunk(self.size)[self.partition.index]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return [gather(buffer, mine, group=self.group, async_op=True)]

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        shared = torch.tensor([number], dtype=torch.int64, device=self.device)
        with explain_lost_rank(self.device):
            dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=self.group)
            return int(shared.item())

    def map_shared(self, nbytes: int) -> SharedMemory | None:
        """Memory that all ranks of the machine map; None, on all of them, where one can't."""
        memory = SharedMemory.create(nbytes) if self.partition.index == 0 else None
        address: list[Any] = [None if memory is None else memory.address]
        dist.broadcast_object_list(address, src=self.ranks[0], group=self.group, device=self.device)
        if memory is None and address[0] is not None:
            memory = SharedMemory.attach(address[0], nbytes)
        if self.smallest(int(memory is not None)) == 1:
            return memory
        return None


class SharedMemory:
    """A stretch of memory without a name, mapped here."""

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
            logger.warning(f"ds_zo: this machine gives no shared memory ({error})")
            return None

    @property
    def address(self) -> tuple[int, int]:
        return os.getpid(), self._descriptor

    @classmethod
    def attach(cls, address: tuple[int, int], nbytes: int) -> SharedMemory | None:
        """While the rank that created it lives."""
        try:
            return cls(os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDWR), nbytes)
        except OSError as error:
            logger.warning(f"ds_zo: another rank's memory can't be mapped ({error})")
            return None

    def private_view(self) -> torch.Tensor:
        """The same bytes as memory of this process alone: pages are copied when they are written to."""
        private = mmap.mmap(self._descriptor, self._nbytes, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(private, dtype=torch.uint8)

    def free(self, begin: int, end: int) -> None:
        """Whole pages that nobody reads again. A wish, so no error if unheard."""
        if end > begin:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.madvise(ctypes.c_void_p(self.tensor.data_ptr() + begin), ctypes.c_size_t(end - begin), _MADV_REMOVE)

    def close(self) -> None:
        """No further views; those that exist stay good."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1


def _place() -> tuple[str, ...]:
    """What ranks that can map one another's memory have in common."""
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
    """How long ranks wait for one another: what the process group was made with. Groups made from it would take
    torch's default, half an hour, unless they are told."""
    group: Any = dist.group.WORLD
    try:
        found: timedelta = group._get_backend(device).options._timeout
        return found
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


def use_world_timeout(group: Any, device: torch.device) -> None:
    """Gives a group that somebody else made (DeepSpeed's data-parallel one) the waiting time that the user chose."""
    if group is not None and group is not dist.group.WORLD:
        with contextlib.suppress(AttributeError, RuntimeError):
            group._get_backend(device)._set_default_timeout(world_timeout(device))


@contextlib.contextmanager
def explain_lost_rank(device: torch.device) -> Iterator[None]:
    """Around waiting for other ranks: says what it means when that fails, and what to do."""
    try:
        yield
    except RuntimeError as error:  # what every backend of torch.distributed raises
        if "ds_zo: rank" in str(error):
            raise
        raise RuntimeError(
            f"ds_zo: rank {dist.get_rank()} of {dist.get_world_size()} waited for another that died or stopped (ranks "
            f"wait {world_timeout(device).total_seconds():.0f} s at most: timeout of deepspeed.init_distributed): start "
            "the job again and load_checkpoint the last checkpoint, which no rank's death harms"
        ) from error
