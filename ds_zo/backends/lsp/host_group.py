"""Host updates: a layer's summed gradients are copied to the host, Adam runs there, and its directions are copied back.

- Download: as soon as the layer's last gradient has come, inside the backward pass, if the engine says that a step
  follows; otherwise in `step`.
- Upload: as soon as Adam has finished, which is often inside the backward pass too, to the device memory of the sums.
  Directions of whole matrices have no such memory: a few groups are uploaded ahead of their application.
- Commit: in `step`, which fixes learning rate and weight decay.
- Application: shortly before the layer's next forward. Until then the update is pending, and the weights are those of
  the step before. `apply_pending_update` applies it.

So weights never change inside a backward pass. The synchronous schedule does the same work without overlap and gives
the same bits. See [Note: order of copies] in `transfers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial

import torch

from ds_zo.backends.lsp.buffer_layout import BufferLayout
from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.backends.lsp.matrices import MatrixGroup
from ds_zo.backends.lsp.products import LaunchCache, Rate, apply_directions_
from ds_zo.backends.lsp.scheduler import Job, UpdateQueue
from ds_zo.backends.lsp.transfers import Copy, Transfers
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import HostScratch, Moments
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.interrupts import interrupts
from ds_zo.streaming.units import Unit


class GroupPhase(Enum):
    """How far the present step of a group is."""

    SUMMING = "gradients are added up on the device"
    UPDATING = "gradients are being downloaded, or Adam runs, or directions are being uploaded over the sums"
    UPDATE_PENDING = "the step is committed; its directions, which are or will be on the host, are not applied yet"


class HostGroup:
    """Parameters whose Adam runs on the CPU together: their sums on the device, their transfers and current phase."""

    def __init__(
        self,
        group: MatrixGroup,
        settings: LSPParams,
        *,
        device: torch.device,
        store: HostStore,
        queue: UpdateQueue,
        transfers: Transfers,
        scratch: HostScratch,
        max_norm: float,
        unit: Unit | None,
        num_extra: int = 0,
        keeps_states: bool = True,
        uploads: bool = True,
    ) -> None:
        """`unit`: the streamed block that the parameters belong to; None if the weights stay on the device.
        `num_extra`: float32 numbers that a subclass uses behind the sums. `keeps_states`: this rank runs Adam.
        `uploads` False: a subclass brings directions to the device."""
        self.name, self.is_block, self.unit = group.name, group.is_block, unit
        self.matrices = sorted(group.matrices, key=lambda matrix: matrix.subspace is None)
        """Projected matrices come first: their sums are contiguous and are downloaded in one copy."""
        self.phase = GroupPhase.SUMMING
        self.job: Job | None = None
        self._transfers, self._compute = transfers, transfers.streams.compute
        self._queue, self._device = queue, device
        self._launch_cache = LaunchCache()
        self._rates: list[Rate | None] = []
        self._factor = 1.0
        """Adam multiplies this step's gradients by it."""
        num_projected = sum(matrix.subspace is not None for matrix in self.matrices)
        # Gradients and directions of whole matrices are copied in their own dtype, those of vectors, being small, not.
        dtypes = [
            torch.float32 if matrix.subspace is not None or matrix.parameter.ndim < 2 else matrix.parameter.dtype
            for matrix in self.matrices
        ]
        shapes = [matrix.shape for matrix in self.matrices]
        self._layout = layout = BufferLayout(shapes, dtypes, num_projected=num_projected, gap=4 * num_extra)
        num_sums = layout.projected_numel + num_extra
        self._uploads_early = uploads and layout.end - layout.whole_start <= 4 * layout.projected_numel
        """Directions are uploaded to `device_memory` as soon as Adam has finished."""
        self.buffer_bytes = layout.end if uploads and not self._uploads_early else 0
        """Size of the buffer of `Transfers` that directions are uploaded to instead; 0: none."""
        self.device_memory = torch.zeros(layout.end // 4 if self._uploads_early else num_sums, device=device)
        self._sums_device = self.device_memory[:num_sums]
        self._upload: Copy | None = None
        """The upload of this step's directions to `device_memory`; None before Adam has finished."""
        for i, matrix in enumerate(self.matrices[:num_projected]):
            matrix.total = self._layout.view(i, self._sums_device)
        self.adam: HostAdam | None = None
        """None: another rank runs Adam and keeps its states."""
        if keeps_states:
            options = {"store": store, "scratch": scratch, "max_norm": max_norm}
            self.adam = HostAdam(self.matrices, self._layout, settings, **options)  # type: ignore[arg-type]
        self.download: Copy | None = None
        """The last download; None before the first."""

    @property
    def moments(self) -> list[Moments]:
        """The moments that this rank keeps: of each parameter, or none."""
        return [] if self.adam is None else self.adam.moments

    # Download

    def can_start(self, trained: Sequence[bool]) -> bool:
        """Whether there is anything to update. `trained`: for each parameter, whether it is trained."""
        return self.phase is GroupPhase.SUMMING and any(matrix.has_total for matrix in self.matrices)

    @torch.no_grad()
    def start(self, trained: Sequence[bool], *, downloads: bool = True) -> None:
        """Begins this step's update: starts the download of the gradients and queues the Adam job that waits for it.

        `downloads` False: the caller changes `averages()` first and then calls `start_download`."""
        assert self.phase is GroupPhase.SUMMING
        self.job = Job(self._update, [i for i, matrix in enumerate(self.matrices) if matrix.has_total])
        self.phase = GroupPhase.UPDATING
        if downloads:
            self.start_download()

    def averages(self) -> dict[int, torch.Tensor]:
        """This step's gradients by the id of their MatrixState. The caller may change them in place."""
        assert self.job is not None
        return {id(self.matrices[i]): self.matrices[i].gradient for i in self.job.active}

    def start_download(self, factor: float = 1.0) -> None:
        """Passes the gradients to Adam, which multiplies them by `factor`."""
        assert self.job is not None
        self._factor = factor
        whole = [i for i in self.job.active if i >= self._layout.num_projected]
        self._download_and_queue(self.job, {i: self.matrices[i].gradient for i in whole})
        for i in whole:
            self.matrices[i].drop_gradient()

    def _download_and_queue(self, job: Job, whole: dict[int, torch.Tensor]) -> None:
        """`whole`: gradients of whole parameters by index."""
        pairs = self._gradient_pairs(job, whole)
        summed, streams = self._compute.recorded(), self._transfers.streams
        self.download = Copy(pairs, streams=streams, after=summed, on_issue=partial(self._queue.put, job))
        job.ready = self.download.end
        self._transfers.down.put(self.download)

    def _gradient_pairs(self, job: Job, whole: dict[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Targets and sources of the download."""
        assert self.adam is not None
        layout, gradients = self._layout, self.adam.gradients
        pairs = [(layout.view(i, gradients), grad) for i, grad in whole.items()]
        if any(i < layout.num_projected for i in job.active):
            pairs.insert(0, (layout.flat(gradients), layout.flat(self._sums_device)))
        if whole:
            norms = torch._foreach_norm(list(whole.values()), dtype=torch.float32)
            pairs.append((self.adam.whole_norms[: len(whole)], torch.stack(norms)))
        return pairs

    def _update(self, job: Job) -> torch.Tensor:
        """Runs in the Adam thread, at the end of the download. Returns the gradients' norms."""
        assert self.adam is not None
        self._transfers.down.advance()
        norms = self.adam.update(job.active, factor=self._factor)
        if self._uploads_early:
            parts = [self._layout.flat, self._layout.whole]
            pairs = [(part(self.device_memory), part(self.adam.directions)) for part in parts]
            filled = [(target, source) for target, source in pairs if target.numel()]
            self._upload = Copy(filled, streams=self._transfers.streams)
            self._transfers.up.put(self._upload)
        return norms

    # Undoing: [Note: undone updates]

    @torch.no_grad()
    def undo_update(self) -> None:
        """Undoes `start`: gradients and moments are as before it, and the group is SUMMING again."""
        assert self.phase is GroupPhase.UPDATING and self.job is not None and self.adam is not None
        for i, grad in self._undo_adam(self.adam, self.job).items():
            if i >= self._layout.num_projected:
                self.matrices[i].restore_gradient(grad, device=self._device)
        self.job = None
        self.phase = GroupPhase.SUMMING

    def _undo_adam(self, adam: HostAdam, job: Job) -> dict[int, torch.Tensor]:
        """Restores moments and sums. Returns this step's gradients by index."""
        grads = dict(zip(job.active, adam.undo(job.active, job.wait()), strict=True))
        if self._wait_for_upload():
            for i, grad in grads.items():
                if i < self._layout.num_projected:
                    self._layout.view(i, self._sums_device).copy_(grad)
        return grads

    def discard(self) -> None:
        """Drops this step's gradients after `start`, before `start_download`."""
        for matrix in self.matrices:
            matrix.clear()
        self.job = None
        self.phase = GroupPhase.SUMMING

    # Commit

    def commit(self, rates: list[Rate | None]) -> None:
        """Makes the started update final. A rate is None for a parameter that is not trained in this step."""
        assert self.phase is GroupPhase.UPDATING
        self._rates = rates
        for matrix in self.matrices:
            matrix.clear()
        self.phase = GroupPhase.UPDATE_PENDING

    # Upload and application

    def prefetch(self) -> bool:
        """Starts the upload of a committed update to a buffer of `Transfers`. False: Adam has not finished, or no
        buffer is free."""
        transfers, job = self._transfers, self.job
        assert self.phase is GroupPhase.UPDATE_PENDING and job is not None
        if not self.buffer_bytes:
            return True
        if not job.is_finished:
            return False
        if transfers.buffer_of(self) is None and self.adam is not None:
            if not transfers.has_free_buffer():
                return False
            transfers.upload(self, self.adam.directions)
        return True

    def _wait_for_upload(self) -> bool:
        """Makes the current stream wait for the upload to `device_memory`. False: there is none."""
        upload, self._upload = self._upload, None
        if upload is None:
            return False
        self._transfers.up.issue_now(upload)
        self._compute.wait(upload.end)
        return True

    @torch.no_grad()
    def apply_pending_update(self) -> None:
        """Brings the weights to the last step. On CUDA that holds for work that is issued after this call."""
        if self.phase is not GroupPhase.UPDATE_PENDING:
            return
        assert self.job is not None
        self.job.wait()
        with interrupts.deferred(), without_interception():
            self._upload_and_apply(self.job)

    def _upload_and_apply(self, job: Job) -> None:
        assert self.adam is not None
        source, upload_buffer = self.adam.directions, None
        if self._wait_for_upload():
            source = self.device_memory
        else:
            upload_buffer = self._transfers.buffer_of(self)
            if upload_buffer is None and job.is_finite:
                upload_buffer = self._transfers.upload(self, source)
        if upload_buffer is not None:
            self._compute.wait(upload_buffer.filled)
            source = upload_buffer.buffer
        if job.is_finite:
            self._apply({i: self._layout.view(i, source) for i in job.active})
        if upload_buffer is not None:
            self._compute.record(upload_buffer.drained)
            upload_buffer.owner = None
        self.phase = GroupPhase.SUMMING

    def _apply(self, directions: dict[int, torch.Tensor]) -> None:
        """Moves the weights. Directions are given by the index of their parameter."""
        updates = ((self.matrices[i], direction, self._rates[i]) for i, direction in directions.items())
        apply_directions_(self._launch_cache, updates)
