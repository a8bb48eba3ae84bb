"""The outcome of a step, parts of which are known later, the times of its parts, and descriptions for the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ds_zo.backends.common.backend import StepOutcome
from ds_zo.backends.common.deferred_scalar import DeferredScalar
from ds_zo.backends.lsp.host_group import HostGroup
from ds_zo.backends.lsp.matrices import MatrixState
from ds_zo.backends.lsp.scheduler import Job, transition_layer
from ds_zo.config import LSPParams
from ds_zo.streaming.streams import Event, Streams


class StepReport:
    """Gradient norms of a step, on the device or from Adam jobs. Reading them waits for the step's last job."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self.on_device: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The results of `DeviceAdam.step`."""

    def add_job(self, job: Job) -> None:
        self._jobs.append(job)

    def outcome(self, global_norm: torch.Tensor | None) -> StepOutcome:
        """The outcome. A layer with a non-finite gradient is not updated; a step in which all layers are such is
        skipped. `global_norm`: the norm that gradients were clipped by; None: clipping is not global."""
        if not self._jobs and not self.on_device:
            return StepOutcome(applied=True)
        squares, finite = None, None
        if self.on_device:
            norms, are_finite = (torch.cat(found) for found in zip(*self.on_device, strict=True))
            squares, finite = DeferredScalar(norms.square().sum()), DeferredScalar(are_finite.any())
        norm = _DeferredNorm(self._jobs, squares) if global_norm is None else DeferredScalar(global_norm)
        return StepOutcome(applied=_DeferredApplied(self._jobs, finite), grad_norm=norm)


class _DeferredNorm(DeferredScalar):
    """The norm of all projected and whole gradients of a step."""

    def __init__(self, jobs: Sequence[Job], squares: DeferredScalar | None) -> None:
        self._jobs, self._squares = jobs, squares

    def get(self) -> float:
        total = 0.0 if self._squares is None else self._squares.get()
        return math.sqrt(total + sum(float(job.wait().double().square().sum()) for job in self._jobs))


class _DeferredApplied(DeferredScalar):
    def __init__(self, jobs: Sequence[Job], finite: DeferredScalar | None) -> None:
        self._jobs, self._finite = jobs, finite

    def get(self) -> float:
        norms = [job.wait() for job in self._jobs]
        used = [bool(n.isfinite().all()) for n in norms if n.numel()]
        if self._finite is not None:
            used.append(bool(self._finite.get()))
        return float(any(used) or not used)


class BackwardTimer:
    """Measures the backward pass and computes the transition layer. It uses the last complete measurement and never
    waits for one."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._events: tuple[Event, Event] | None = None
        """Recorded before and after the last complete backward pass; None before the first."""
        self._begin = streams.event(timing=True)
        self._backward_s: float | None = None
        self._transition: int | None = None

    def begin(self) -> None:
        if self._events is not None and self._events[1].query():
            self._backward_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        self._transition = None
        self._begin = self._recorded()

    def end(self) -> None:
        self._events = self._begin, self._recorded()

    def _recorded(self) -> Event:
        event = self._streams.event(timing=True)
        self._streams.compute.record(event)
        return event

    def transition(self, groups: Sequence[HostGroup]) -> int:
        """The transition layer, computed once a backward pass. 0 before there are measurements: then jobs are served
        first come, first served."""
        if self._transition is None:
            self._transition = self._compute(groups)
        return self._transition

    def _compute(self, groups: Sequence[HostGroup]) -> int:
        updates = [g.job.seconds for g in groups if g.job is not None and g.job.is_finished and g.job.seconds]
        if self._backward_s is None or not updates:
            return 0
        downloads = [g.download for g in groups if g.download is not None and g.download.is_issued]
        copies = [copy.begin.elapsed_time(copy.end) / 1e3 for copy in downloads if copy.end.query()]
        copy_s = sum(copies) / len(copies) if copies else 0.0
        return transition_layer(
            len(groups),
            backward_s=self._backward_s,
            download_s=copy_s,
            update_s=sum(updates) / len(updates),
            upload_s=copy_s,
        )


def settings_text(matrices: Sequence[MatrixState], settings: LSPParams, *, on_host: bool) -> str:
    """The method's main settings, for the start-up table and the debug log."""
    projected = [matrix.shape for matrix in matrices if matrix.subspace is not None]
    largest = max(projected, default=None)
    subspaces = "no subspace"
    if largest is not None:
        subspaces = f"{len(projected)} subspaces of at most {largest[0]} x {largest[1]}"
    return (
        f"{subspaces}, {settings.projector} projectors, {len(matrices) - len(projected)} tensors whole, Adam on the "
        f"{'CPU' if on_host else 'device'}"
    )


def ranks_text(matrices: Sequence[MatrixState], num_ranks: int, *, owned: bool) -> str:
    subspace_bytes = sum(matrix.total.nbytes for matrix in matrices if matrix.total is not None)
    whole = [matrix.parameter for matrix in matrices if matrix.total is None]
    whole_bytes = sum(p.nbytes if p.ndim >= 2 else 4 * p.numel() for p in whole)
    return f"{num_ranks} ranks average {(subspace_bytes + whole_bytes) / 2**20:.1f} MiB a step; " + (
        "each layer's states are on one of them" if owned else "each keeps all states"
    )
