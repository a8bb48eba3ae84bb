"""Host memory for streamed blocks that the ranks of a machine keep together. See [Note: shared host memory]."""

from __future__ import annotations

import os
import time

import torch

from ds_zo.streaming.host_store import PAGE, HostStore
from ds_zo.streaming.node import Node, SharedMemory, world_timeout

_POLL_S = 0.0005


class RanksStore(HostStore):
    """What several ranks keep together, each an equal piece of every buffer."""

    def __init__(self, node: Node, device: torch.device, *, pin: bool) -> None:
        super().__init__(device, pin=pin)
        self.node = node
        self.partition = node.partition
        self.device = device

    def own(self, home: torch.Tensor, nbytes: int) -> torch.Tensor:
        """This rank's piece of a buffer of so many bytes."""
        raise NotImplementedError

    def mark_written_back(self, number: int) -> None:
        """This rank's piece has been written back, as far as the current stream is concerned."""

    def wait(self, number: int) -> None:
        """Until every rank has written back its piece as often as this one was asked to."""


class SharedStore(RanksStore):
    """Buffers that every rank sees whole, of which each fills, pins and counts its own piece.

    `take` is made by all ranks in the same order. What a rank has written back to a block is told to the others by a
    count in shared memory, so that a rank that reads whole blocks knows when the pieces belong together.
    """

    def __init__(self, node: Node, memory: SharedMemory, *, num_units: int, device: torch.device, pin: bool) -> None:
        super().__init__(node, device, pin=pin)
        self._memory = memory
        self._timeout_s = world_timeout(device).total_seconds()
        header = _pages(8 * num_units * node.size)
        self._num_written_back = memory.tensor[: 8 * num_units * node.size].view(torch.int64).view(num_units, node.size)
        """How often each rank's piece of each unit was written back."""
        self._num_requested = [0] * num_units
        """How often that was asked for here, which is as often as anywhere."""
        self._marks = torch.zeros(num_units, dtype=torch.int64, device=device)
        self._whole: set[int] = set()
        self._pieces: dict[int, torch.Tensor] = {}
        """Buffers of which all, or this rank's piece, is pinned, by address."""
        self._end = header
        if self._pin:
            self._register(memory.tensor[:header])

    @staticmethod
    def capacity_nbytes(sizes: list[int], *, num_units: int, num_ranks: int) -> int:
        return _pages(8 * num_units * num_ranks) + sum(map(_pages, sizes))

    def take(self, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        begin, self._end = self._end, self._end + _pages(nbytes)
        buffer = self._memory.tensor[begin : begin + nbytes]
        piece = self.partition.piece(nbytes)
        self.nbytes += piece.stop - piece.start
        if self._pin:
            if piece.stop > piece.start:
                buffer[piece].zero_()  # memory comes from where this rank runs, and is there before it is registered
                pages = slice(begin + piece.start // PAGE * PAGE, begin + _pages(piece.stop))
                if self._register(self._memory.tensor[pages]):
                    self._pieces[buffer.data_ptr()] = self._memory.tensor[pages]
                    self.pinned_nbytes += piece.stop - piece.start
            self.node.barrier()  # or a rank that is late would wipe what another has stored
        return buffer

    def own(self, home: torch.Tensor, nbytes: int) -> torch.Tensor:
        return home[self.partition.piece(nbytes)]

    def writes(self, number: int) -> bool:
        """Whether this rank stores whole values of a unit, where one must."""
        return number % self.partition.size == self.partition.index

    def copy_whole(self, target: torch.Tensor, home: torch.Tensor) -> None:
        """A whole buffer to the device by this rank alone. Memory that is pinned in part can't be copied from in one
        go, so the first time pins the rest."""
        if home.data_ptr() in self._pieces and not self._pin_whole(home):
            target.copy_(home.clone())
        else:
            target.copy_(home, non_blocking=True)

    def _pin_whole(self, home: torch.Tensor) -> bool:
        self.node.host_wait()  # copies from what is unpinned now
        piece = self._pieces.pop(home.data_ptr())
        self._unregister(piece)
        if self._pin and self._register(home):
            self._whole.add(home.data_ptr())
            return True
        if self._register(piece):
            self._pieces[home.data_ptr()] = piece
        return False

    def mark_written_back(self, number: int) -> None:
        self._num_requested[number] += 1
        mark = self._marks[number : number + 1]
        mark.fill_(self._num_requested[number])
        self._num_written_back[number, self.partition.index : self.partition.index + 1].copy_(mark, non_blocking=True)

    def wait(self, number: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while int(self._num_written_back[number].min()) < self._num_requested[number]:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"ds_zo: a rank of this machine has not written back its piece of block {number} within "
                    f"{self._timeout_s:.0f} s, the process group's timeout: it died or stopped; start again from the "
                    "last checkpoint"
                )
            time.sleep(_POLL_S)

    def free(self, buffer: torch.Tensor) -> None:
        """By all ranks; each frees its own piece, once none reads it any more."""
        self.node.barrier()
        piece = self.partition.piece(buffer.numel())
        self.nbytes -= piece.stop - piece.start
        pinned = self._pieces.pop(buffer.data_ptr(), None)
        if pinned is not None:
            self._unregister(pinned)
            self.pinned_nbytes -= piece.stop - piece.start
        elif buffer.data_ptr() in self._whole:
            self._whole.discard(buffer.data_ptr())
            self._unregister(buffer)
            self.pinned_nbytes -= piece.stop - piece.start
        begin = buffer.data_ptr() - self._memory.tensor.data_ptr()
        self._memory.free(begin + _pages(piece.start), begin + piece.stop // PAGE * PAGE)

    def private(self, buffer: torch.Tensor) -> torch.Tensor:
        """The buffer's bytes as memory of this process alone, copied where and when they are written to."""
        begin = buffer.data_ptr() - self._memory.tensor.data_ptr()
        return self._memory.private_view()[begin : begin + buffer.numel()]

    @staticmethod
    def has_room_for(nbytes: int) -> bool:
        """Whether the machine would keep half of its free memory."""
        return 2 * nbytes < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        super().close()
        self._memory.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
