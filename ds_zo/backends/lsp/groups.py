"""All groups of a model, with the queue, streams and memory that groups with Adam on the CPU share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_zo.backends.lsp.host_group import DeviceGroup, GroupPhase, HostGroup, HostScratch, TransferStreams
from ds_zo.backends.lsp.matrices import MatrixGroup, MatrixState
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedDeviceGroup, SharedHostGroup
from ds_zo.config import LSPParams, Resolved
from ds_zo.optim.subspace_adam import Moments
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.units import Unit

_CORES_LEFT_TO_PYTHON = 2
"""Cores that Adam leaves to the threads that launch kernels."""
_NUMEL_PER_THREAD = 12_000_000
"""Elements for which an Adam thread takes about 35 ms a step, which the model's own computation hides.

More threads would finish sooner, but they spin between layers and disturb the thread that launches kernels. LLaMA-1.3B
at d = 512 took 187 ms a step with 2 threads and 210 ms with 14."""
_MIN_THREADS = 2

MatrixAndMoments = tuple[MatrixState, Moments | None]
"""A parameter and its moments; None if another rank keeps them."""


class LSPGroups:
    """Host groups and device groups of one model. Host groups are in the order of the module tree."""

    def __init__(
        self,
        groups: Sequence[MatrixGroup],
        settings: LSPParams,
        *,
        config: Resolved,
        ranks: CollectiveThread | None,
        device: torch.device,
        max_norm: float,
        unit_of: Mapping[int, Unit],
    ) -> None:
        """Places each group by [Note: projected and whole parameters]. `unit_of`: the block of each streamed parameter,
        by the parameter's id."""
        self.on_host: list[HostGroup] = []
        self.on_device: list[DeviceGroup] = []
        self.store = HostStore(device, pin=True, ring=False)
        numel = sum(math.prod(matrix.shape) for group in groups for matrix in group.matrices)
        self.queue = UpdateQueue(num_threads=_num_threads(device, numel, shared=ranks is not None), device=device)
        self.streams: TransferStreams | None = None
        """None on a CPU, or without host groups."""
        self._settings, self._ranks, self._device, self._max_norm = settings, ranks, device, max_norm
        self._has_owners = config.zero_stage > 0
        """See [Note: owners of layers]."""
        self._scratch = HostScratch()
        vectors: list[MatrixState] = []
        for group in groups:
            unit = unit_of.get(id(group.matrices[0].parameter))
            matrices = group.matrices
            if config.offload_optimizer and unit is None:
                vectors += [matrix for matrix in matrices if matrix.parameter.ndim < 2]
                matrices = [matrix for matrix in matrices if matrix.parameter.ndim >= 2]
            if not matrices:
                continue
            if config.offload_optimizer:
                self.on_host.append(self._host_group(MatrixGroup(group.name, group.is_block, matrices, group.modules)))
                self.on_host[-1].unit = unit
            else:
                self.on_device.append(self._device_group(matrices))
        if vectors:
            self.on_device.append(self._device_group(vectors))
        if device.type == "cuda" and self.on_host:
            sizes = [group.directions_host.numel() for group in self.on_host if not group.uploads_in_place]
            self.streams = TransferStreams(device, buffer_bytes=max(sizes, default=0))
            for host_group in self.on_host:
                host_group.streams = self.streams

    def _host_group(self, group: MatrixGroup) -> HostGroup:
        options: dict[str, Any] = {
            "device": self._device,
            "store": self.store,
            "queue": self.queue,
            "scratch": self._scratch,
            "max_norm": self._max_norm,
        }
        if self._ranks is None:
            return HostGroup(group, self._settings, **options)
        owner = len(self.on_host) % self._ranks.size if self._has_owners else None
        return SharedHostGroup(group, self._settings, ranks=self._ranks, owner=owner, **options)

    def _device_group(self, matrices: list[MatrixState]) -> DeviceGroup:
        options: dict[str, Any] = {"device": self._device, "max_norm": self._max_norm}
        if self._ranks is None:
            return DeviceGroup(matrices, self._settings, **options)
        return SharedDeviceGroup(matrices, self._settings, ranks=self._ranks, **options)

    def prefetch(self) -> None:
        """Uploads the pending updates that the forward pass needs first, while Adam has finished and buffers are
        free."""
        for group in self.on_host:
            if group.phase is GroupPhase.UPDATE_PENDING and not group.prefetch():
                return

    def undo_updates(self) -> None:
        """Undoes all started updates that are not committed ([Note: undone updates])."""
        for group in self.on_host:
            if group.phase is GroupPhase.UPDATING:
                group.undo_update()

    def close(self) -> None:
        """Frees pinned host memory after the last copy. With several ranks it does not wait: copies of a rank whose
        peer has died never end."""
        if self.streams is not None and self._ranks is None:
            for stream in (self.streams.down, self.streams.up):
                stream.synchronize()
        self.store.close()

    def matrices_and_moments(self) -> list[MatrixAndMoments]:
        """All parameters with their moments, for checkpoints and for new projectors."""
        found: list[MatrixAndMoments] = []
        for group in self.on_host:
            moments = group.moments if group.keeps_states else [None] * len(group.matrices)
            found += zip(group.matrices, moments, strict=True)
        for device_group in self.on_device:
            found += zip(device_group.matrices, device_group.moments, strict=True)
        return found

    def footprint(self, matrices: Sequence[MatrixState]) -> dict[str, int]:
        """Bytes that LSP needs besides the weights, without the scratch memory of products."""
        subspaces = [matrix.subspace for matrix in matrices if matrix.subspace is not None]
        on_device = sum(s.num_bytes for s in subspaces)
        on_device += sum(matrix.total.nbytes for matrix in matrices if matrix.total is not None)
        on_device += sum(m.num_bytes for group in self.on_device for m in group.moments)
        on_device += 0 if self.streams is None else self.streams.num_bytes
        on_host = self.store.nbytes + sum(m.num_bytes for group in self.on_host for m in group.moments)
        return {"device_bytes": on_device, "host_bytes": on_host}


def _num_threads(device: torch.device, numel: int, *, shared: bool) -> int | None:
    """Threads of torch that Adam may use; None: as many as torch has.

    On CUDA, Adam must leave a core to the main thread, which launches kernels. Launchers of several ranks may set
    torch to one thread: then Adam may use this rank's share of the cores."""
    if device.type != "cuda":
        return None
    num_threads = torch.get_num_threads()
    if shared:
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
        num_threads = max(num_threads, len(os.sched_getaffinity(0)) // max(1, num_ranks))
    needed = max(_MIN_THREADS, -(-numel // _NUMEL_PER_THREAD))
    return max(1, min(needed, num_threads - _CORES_LEFT_TO_PYTHON))
