"""Groups of parameters that several ranks train together: their gradients are averaged over ranks before Adam.

[Note: owners of layers] At ZeRO stage 0 every rank keeps all of Adam's moments and runs the same Adam step. From stage
1 on each layer has one owner rank, assigned round-robin. Only the owner downloads the averages, keeps the moments and
runs Adam. It then broadcasts the directions into the device memory of the sums. At every
stage all ranks apply the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_zo.backends.lsp.device_group import DeviceGroup
from ds_zo.backends.lsp.host_group import GroupPhase, HostGroup
from ds_zo.backends.lsp.matrices import MatrixGroup, MatrixState
from ds_zo.backends.lsp.products import Rate
from ds_zo.backends.lsp.ranks import CollectiveCall, CollectiveThread
from ds_zo.backends.lsp.scheduler import Job, RemoteJob
from ds_zo.config import LSPParams
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.interrupts import interrupts

_NO_GRADIENT = -1.0
"""Stands for the norm of a gradient that no rank had."""


class SharedHostGroup(HostGroup):
    """A HostGroup whose gradients are averaged over ranks. See [Note: owners of layers]."""

    def __init__(
        self,
        group: MatrixGroup,
        settings: LSPParams,
        *,
        ranks: CollectiveThread,
        owner: int | None,
        store: HostStore,
        **options: Any,
    ) -> None:
        """`owner`: the rank that keeps the moments; None: every rank does."""
        num_matrices = len(group.matrices)
        own: dict[str, Any] = {"keeps_states": owner in (None, ranks.index), "uploads": owner is None}
        super().__init__(group, settings, store=store, num_extra=num_matrices, **own, **options)
        self.owner = owner
        self._ranks = ranks
        self._flags = self._sums_device[-num_matrices:]
        """By parameter: 1 if this rank has a gradient, else 0. After the average: the share of ranks that have one.
        After the owner's broadcast: the norm of the gradient."""
        self._norms_host = store.take(4 * num_matrices).view(torch.float32)
        self._whole_grads: dict[int, torch.Tensor] = {}
        """Gradients of whole parameters by index, kept on the device until the step is committed."""
        self._whole_directions: dict[int, torch.Tensor] = {}
        """Directions of whole parameters by index, broadcast by the owner."""
        self._average_call: CollectiveCall | None = None
        self._broadcast_call: CollectiveCall | None = None

    # Average and download

    def can_start(self, trained: Sequence[bool]) -> bool:
        """All ranks answer the same, whatever gradients they have."""
        return self.phase is GroupPhase.SUMMING and any(trained)

    @torch.no_grad()
    def start(self, trained: Sequence[bool], *, downloads: bool = True) -> None:
        """Averages the gradients over ranks first. A trained parameter without a gradient on this rank counts as
        zero."""
        assert self.phase is GroupPhase.SUMMING
        present = [matrix.has_total and trains for matrix, trains in zip(self.matrices, trained, strict=True)]
        for matrix, has in zip(self.matrices, present, strict=True):
            if matrix.total is not None and not has:
                matrix.total.zero_()
        if all(present):
            self._flags.fill_(1.0)
        else:
            self._flags.copy_(torch.tensor([float(has) for has in present]))
        self._whole_grads = {}
        for i, matrix in enumerate(self.matrices):
            p = matrix.parameter
            if matrix.total is None and trained[i]:
                self._whole_grads[i] = matrix.new_gradient() if p.grad is None else p.grad.contiguous()
                p.grad = None
        job = RemoteJob(self._read_norms) if self.adam is None else Job(self._update)
        active = [i for i, has in enumerate(present) if has] if present == list(trained) else None
        self._average_call = self._ranks.submit(partial(self._average, job, self._whole_grads, active, downloads))
        self.job = job
        self.phase = GroupPhase.UPDATING

    def _average(self, job: Job, whole: dict[int, torch.Tensor], active: list[int] | None, downloads: bool) -> None:
        """Runs in the collective thread. `active`: indices of the parameters with a gradient; None if this rank lacks
        one, so that the averaged flags have to tell."""
        try:
            self._ranks.average_(self._sums_device)
            for grad in whole.values():
                self._ranks.average_(grad)
            if active is None:
                active = [i for i, share in enumerate(self._flags.tolist()) if share > 0]
            job.active = active
            if downloads:
                self._download_and_queue(job, whole)
        except BaseException as error:
            job.fail(error)
            raise

    def averages(self) -> dict[int, torch.Tensor]:
        """Averaged gradients by the id of their MatrixState, without those that no rank had."""
        assert self._average_call is not None and self.job is not None
        self._average_call.wait()
        return {
            id(self.matrices[i]): self._whole_grads[i] if i in self._whole_grads else self.matrices[i].gradient
            for i in self.job.active
        }

    def start_download(self, factor: float = 1.0) -> None:
        assert self.job is not None
        self._factor = factor
        self._download_and_queue(self.job, self._whole_grads)  # which stay for `undo_update`

    def _download_and_queue(self, job: Job, whole: dict[int, torch.Tensor]) -> None:
        if self.adam is not None:
            super()._download_and_queue(job, {i: grad for i, grad in whole.items() if i in job.active})

    # Undoing: [Note: undone updates]

    @torch.no_grad()
    def undo_update(self) -> None:
        """Leaves the averages in place of this rank's gradients. Averaging them again does not change them."""
        assert self._average_call is not None and self.job is not None
        self._average_call.wait()
        if self.adam is not None:
            self._undo_adam(self.adam, self.job)
        for i, (matrix, share) in enumerate(zip(self.matrices, self._flags.tolist(), strict=True)):
            matrix.has_total = share > 0
            if matrix.has_total and i in self._whole_grads:
                matrix.restore_gradient(self._whole_grads[i], device=matrix.parameter.device)
        self._whole_grads = {}
        self.job = None
        self.phase = GroupPhase.SUMMING

    def discard(self) -> None:
        super().discard()
        self._whole_grads = {}

    # Commit

    def commit(self, rates: list[Rate | None]) -> None:
        super().commit(rates)
        whole = {i: grad.dtype for i, grad in self._whole_grads.items()}
        self._whole_grads = {}
        if self.owner is not None:
            assert self.job is not None
            self._broadcast_call = self._ranks.submit(partial(self._broadcast_directions, self.job, whole))

    # Broadcast and application

    def _broadcast_directions(self, job: Job, whole: dict[int, torch.dtype]) -> None:
        """Runs in the collective thread, on all ranks: broadcasts norms and directions from the owner."""
        assert self.owner is not None
        try:
            whole_directions = {
                i: torch.empty(self.matrices[i].shape, dtype=dtype, device=self._device) for i, dtype in whole.items()
            }
            if self.adam is not None:
                norms = job.wait()
                self._norms_host.fill_(_NO_GRADIENT)
                self._norms_host[job.active] = norms
                self._flags.copy_(self._norms_host, non_blocking=True)
                layout, directions = self._layout, self.adam.directions
                layout.flat(self._sums_device).copy_(layout.flat(directions), non_blocking=True)
                for i, direction in whole_directions.items():
                    direction.copy_(layout.view(i, directions), non_blocking=True)
            self._ranks.broadcast_(self._sums_device, self.owner)
            for direction in whole_directions.values():
                self._ranks.broadcast_(direction, self.owner)
            self._whole_directions = whole_directions
            if isinstance(job, RemoteJob):
                self._norms_host.copy_(self._flags, non_blocking=True)
                job.set_ready(self._compute.recorded())
        except BaseException as error:
            job.fail(error)
            raise

    def _read_norms(self, job: Job) -> torch.Tensor:
        job.active = [i for i, norm in enumerate(self._norms_host.tolist()) if norm != _NO_GRADIENT]
        return self._norms_host[job.active]

    @torch.no_grad()
    def apply_pending_update(self) -> None:
        if self.owner is None or self.phase is not GroupPhase.UPDATE_PENDING:
            super().apply_pending_update()
            return
        assert self.job is not None and self._broadcast_call is not None
        self.job.wait()
        self._broadcast_call.wait()
        whole = self._whole_directions
        with interrupts.deferred(), without_interception():
            if self.job.is_finite:
                sums = self._sums_device
                self._apply({i: whole[i] if i in whole else self._layout.view(i, sums) for i in self.job.active})
            for direction in whole.values():
                self._compute.uses(direction)
            self._whole_directions = {}
            self.phase = GroupPhase.SUMMING


class SharedDeviceGroup(DeviceGroup):
    """A DeviceGroup whose gradients are averaged over ranks. Every rank keeps the moments.

    Matrices are averaged in place, one by one; vectors and flags are copied to one buffer and averaged together."""

    def __init__(self, matrices: list[MatrixState], *, ranks: CollectiveThread) -> None:
        super().__init__(matrices)
        self._ranks = ranks
        self._average_call: CollectiveCall | None = None
        self._vectors: list[MatrixState] = []
        self._reduced = torch.empty(0)
        """The vectors' gradients in float32, then by parameter the share of ranks that have a gradient."""
        self._lacks_gradients = False
        """This rank had no gradient of some trained parameter."""

    @torch.no_grad()
    def start(self, trained: Sequence[bool]) -> None:
        """Starts averaging. A trained parameter without a gradient on this rank counts as zero."""
        trained_matrices = []
        for matrix, trains in zip(self.matrices, trained, strict=True):
            if trains:
                trained_matrices.append(matrix)
            else:  # frozen after a direct `loss.backward()`: only some ranks may have a gradient
                matrix.clear()
        flags = [float(matrix.has_total) for matrix in self.matrices]
        self._lacks_gradients = not all(matrix.has_total for matrix in trained_matrices)
        for matrix in trained_matrices:
            if not matrix.has_total:
                if matrix.total is not None:
                    matrix.total.zero_()
                else:
                    matrix.parameter.grad = matrix.new_gradient()
        self._vectors = [matrix for matrix in trained_matrices if matrix.gradient.ndim < 2]
        matrix_grads = [matrix.gradient for matrix in trained_matrices if matrix.gradient.ndim >= 2]
        parts = [matrix.gradient.float().flatten() for matrix in self._vectors]
        device = self.matrices[0].parameter.device
        shares = torch.ones(len(flags), device=device) if all(flags) else torch.tensor(flags, device=device)
        self._reduced = torch.cat([*parts, shares])

        def average() -> None:
            for value in [*matrix_grads, self._reduced]:
                self._ranks.average_(value)

        self._average_call = self._ranks.submit(average)

    def finish(self) -> None:
        """Waits for the averages and puts them in place of this rank's gradients."""
        assert self._average_call is not None
        self._average_call.wait()
        sizes = [matrix.gradient.numel() for matrix in self._vectors]
        *parts, shares = self._reduced.split([*sizes, len(self.matrices)])
        for matrix, part in zip(self._vectors, parts, strict=True):
            matrix.gradient.copy_(part.view(matrix.gradient.shape))
        if self._lacks_gradients:
            for matrix, share in zip(self.matrices, shares.tolist(), strict=True):
                matrix.has_total = share > 0
                if not matrix.has_total:
                    matrix.clear()
