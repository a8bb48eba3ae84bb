"""All groups of a model, with the queue, streams and memory that groups with Adam on the CPU share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_zo.backends.lsp.device_group import DeviceAdam, DeviceGroup
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.matrices import MatrixGroup, MatrixState
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.backends.lsp.scheduler import UpdateQueue
from ds_zo.backends.lsp.shared_groups import SharedDeviceGroup, SharedHostGroup
from ds_zo.backends.lsp.transfers import Transfers
from ds_zo.config import LSPParams, Resolved
from ds_zo.optim.subspace_adam import HostScratch, Moments, clip_coefs
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.streams import Streams
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


@dataclass
class StartedStep:
    """What `LSPGroups.start_updates` found."""

    norm: torch.Tensor | None = None
    """The global norm of the gradients, without the loss scale; None: it was not measured."""
    factor: float = 1.0
    """Adam multiplies gradients by it, to unscale and clip them."""
    is_skipped: bool = False
    """Gradients are not finite under loss scaling."""


class LSPGroups:
    """Host groups and device groups of one model. Host groups are in the order of the module tree."""

    def __init__(
        self,
        groups: Sequence[MatrixGroup],
        settings: LSPParams,
        *,
        config: Resolved,
        ranks: CollectiveThread | None,
        streams: Streams,
        unit_of: Mapping[int, Unit],
    ) -> None:
        """Places each group by [Note: projected and whole parameters]. `unit_of`: the block of each streamed parameter,
        by the parameter's id."""
        self._device = device = streams.device
        self.on_host: list[HostGroup] = []
        self.matrices = sorted((m for group in groups for m in group.matrices), key=lambda matrix: matrix.index)
        """All trained parameters, in the model's order."""
        self.clips_globally = config.gradient_clipping > 0 and settings.clip_scope == "global"
        self.store = HostStore(device, pin=True, ring=False)
        numel = sum(math.prod(matrix.shape) for matrix in self.matrices)
        self.queue = UpdateQueue(num_threads=_num_threads(device, numel, shared=ranks is not None), device=device)
        self.transfers = Transfers(streams, order=self.queue.order)
        self._settings, self._config, self._ranks = settings, config, ranks
        self._scratch = HostScratch()
        on_device: list[list[MatrixState]] = []
        vectors: list[MatrixState] = []
        for group in groups:
            unit = unit_of.get(id(group.matrices[0].parameter))
            matrices = group.matrices
            if not config.offload_optimizer:
                on_device.append(matrices)
                continue
            if unit is None:
                vectors += [matrix for matrix in matrices if matrix.parameter.ndim < 2]
                matrices = [matrix for matrix in matrices if matrix.parameter.ndim >= 2]
            if matrices:
                self.on_host.append(self._host_group(replace(group, matrices=matrices), unit))
        on_device += [vectors] if vectors else []
        self.on_device = [
            DeviceGroup(matrices) if ranks is None else SharedDeviceGroup(matrices, ranks=ranks)
            for matrices in on_device
        ]
        self.device_adam = DeviceAdam(self.on_device, settings, **self._options)
        self.transfers.make_buffers(max((group.buffer_bytes for group in self.on_host), default=0))

    @property
    def _options(self) -> dict[str, Any]:
        return {"device": self._device, "max_norm": 0.0 if self.clips_globally else self._largest_norm}

    @property
    def _largest_norm(self) -> float:
        """The norm that one parameter's gradient is clipped to. The norm of all is then at most `gradient_clipping`.

        Clipping each to `gradient_clipping` itself would rarely clip. Steps with large gradients would then fill Adam's
        second moments, which AdamW prevents by clipping the norm of all."""
        return self._config.gradient_clipping / math.sqrt(max(len(self.matrices), 1))

    def _host_group(self, group: MatrixGroup, unit: Unit | None) -> HostGroup:
        options = {**self._options, "store": self.store, "queue": self.queue, "scratch": self._scratch, "unit": unit}
        options["transfers"] = self.transfers
        if self._ranks is None:
            return HostGroup(group, self._settings, **options)
        owner = len(self.on_host) % self._ranks.size if self._config.zero_stage > 0 else None
        return SharedHostGroup(group, self._settings, ranks=self._ranks, owner=owner, **options)

    @property
    def has_owners(self) -> bool:
        """Whether each layer's states are on one rank only ([Note: owners of layers])."""
        return bool(self.on_host) and self._ranks is not None and self._config.zero_stage > 0

    # Updates

    def start_updates(self, takes_part: Callable[[MatrixState], bool], *, loss_scale: float | None) -> StartedStep:
        """Starts the updates that the backward pass has not started. All ranks start the same groups.

        `loss_scale`: None without loss scaling. With it, gradients that are not finite are dropped: the step is
        skipped, and no state changes."""
        for device_group in self.on_device:
            device_group.start([takes_part(matrix) for matrix in device_group.matrices])
        downloads = not self.clips_globally and loss_scale is None
        started = []
        for group in self.on_host:  # in the order of the next forward pass
            trained = [takes_part(matrix) for matrix in group.matrices]
            if group.can_start(trained):
                group.start(trained, downloads=downloads)
                started.append(group)
        for device_group in self.on_device:
            device_group.finish()
        if downloads:
            return StartedStep()
        found = {id(m): m.gradient for group in self.on_device for m in group.matrices if m.has_total}
        for group in started:
            found |= group.averages()
        step = self._measured([found[id(matrix)] for matrix in self.matrices if id(matrix) in found], loss_scale)
        for group in started:
            if step.is_skipped:
                group.discard()
            else:
                group.start_download(step.factor)
        return step

    @torch.no_grad()
    def _measured(self, grads: list[torch.Tensor], loss_scale: float | None) -> StartedStep:
        """Measures the global norm of gradients. Without loss scaling it clips them by it.

        One norm is taken of each gradient, in the model's order, so that any number of ranks adds up the same numbers.
        Without loss scaling the host reads nothing: a norm that is not finite makes all gradients NaN, which skips the
        step. With it, Adam clips and unscales in float32, because fp16 gradients that are divided by the scale
        underflow."""
        if not grads:
            return StartedStep()
        norm = torch.stack(torch._foreach_norm(grads, dtype=torch.float32)).norm()
        max_norm = self._config.gradient_clipping if self.clips_globally else 0.0
        if loss_scale is None:
            coef = clip_coefs(norm, max_norm)
            torch._foreach_mul_(grads, torch.where(norm.isfinite(), coef, torch.nan))
            return StartedStep(norm)
        norm /= loss_scale
        is_finite = bool(norm.isfinite())
        return StartedStep(norm, float(clip_coefs(norm, max_norm)) / loss_scale, is_skipped=not is_finite)

    def prefetch(self) -> None:
        """Uploads the pending updates that the forward pass needs first, while Adam has finished and buffers are
        free."""
        self.transfers.up.advance()
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
        if self._ranks is None:
            for lane in (self.transfers.down, self.transfers.up):
                lane.stream.synchronize()
        self.store.close()

    def matrices_and_moments(self) -> list[MatrixAndMoments]:
        """All parameters with their moments, for checkpoints and for new projectors."""
        found: list[MatrixAndMoments] = []
        for group in self.on_host:
            moments: Sequence[Moments | None] = group.moments or [None] * len(group.matrices)
            found += zip(group.matrices, moments, strict=True)
        for device_group in self.on_device:
            found += zip(device_group.matrices, device_group.moments, strict=True)
        return found

    def footprint(self) -> dict[str, int]:
        """Bytes that LSP needs besides the weights, without the scratch memory of products."""
        on_device = sum(matrix.subspace.num_bytes for matrix in self.matrices if matrix.subspace is not None)
        on_device += sum(matrix.total.nbytes for matrix in self.matrices if matrix.total is not None)
        on_device += sum(m.num_bytes for group in self.on_device for m in group.moments)
        on_device += self.transfers.num_bytes
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
