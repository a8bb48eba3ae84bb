"""Host updates: a layer's summed gradients are copied to the host, Adam runs there, and its directions are copied back.

- Download: as soon as the layer's last gradient has come, inside the backward pass, if the engine says that a step
  follows; otherwise in `step`.
- Commit: in `step`, which fixes learning rate and weight decay.
- Upload and application: shortly before the layer's next forward, with a few layers uploaded ahead. Until then the
  update is pending, and the weights are those of the step before. `apply_pending_update` applies it.

So weights never change inside a backward pass. The synchronous schedule does the same work without overlap and gives
the same bits.

[Note: undone updates] A host update that started inside a backward pass must be undone if `zero_grad` or a checkpoint
comes before `step`. Adam's moments are then restored by subtracting the gradient's part, exactly but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.lsp.buffer_layout import BufferLayout
from ds_zo.backends.lsp.matrices import MatrixGroup, MatrixState
from ds_zo.backends.lsp.products import LaunchCache, Rate, apply_directions_, apply_directions_cached_
from ds_zo.backends.lsp.scheduler import Job, UpdateQueue
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import (
    NORM_FLOOR,
    FlatMoments,
    FlatVectors,
    Moments,
    chunk_scratch,
    clip_,
    directions_,
    flat_directions_,
    host_directions_,
    undo_moments_,
    uses_chunks,
)
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.units import Unit

NUM_UPLOAD_BUFFERS = 3
"""Layers whose directions can be on the device ahead of their application."""


class GroupPhase(Enum):
    """How far the present step of a group is."""

    SUMMING = "gradients are added up on the device"
    UPDATING = "gradients are being downloaded, or Adam runs; the device keeps the sums until the step is committed"
    UPDATE_PENDING = "the step is committed; its directions, which are or will be on the host, are not applied yet"


@dataclass(eq=False)
class UploadBuffer:
    """Device memory for one layer's directions."""

    buffer: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    group: HostGroup | None = None
    """The group whose directions are in the buffer or being copied there; None: the buffer is free."""


class TransferStreams:
    """The two copy streams between a CUDA device and the host, and the device buffers for uploads."""

    def __init__(self, device: torch.device, *, buffer_bytes: int) -> None:
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)
        self._upload_buffers = [
            UploadBuffer(torch.empty(buffer_bytes, dtype=torch.uint8, device=device)) for _ in range(NUM_UPLOAD_BUFFERS)
        ]
        self.num_bytes = NUM_UPLOAD_BUFFERS * buffer_bytes

    def buffer_of(self, group: HostGroup) -> UploadBuffer | None:
        return next((upload_buffer for upload_buffer in self._upload_buffers if upload_buffer.group is group), None)

    def has_free_buffer(self) -> bool:
        return any(upload_buffer.group is None for upload_buffer in self._upload_buffers)

    def upload(self, group: HostGroup, source: torch.Tensor) -> UploadBuffer:
        """Starts an upload. If no buffer is free, the first one is overwritten, and its group has to upload again."""
        upload_buffer = next((free for free in self._upload_buffers if free.group is None), self._upload_buffers[0])
        upload_buffer.group = group
        self.up.wait_event(upload_buffer.drained)
        with torch.cuda.stream(self.up):
            upload_buffer.buffer[: source.numel()].copy_(source, non_blocking=True)
        upload_buffer.filled.record(self.up)
        return upload_buffer


class HostScratch:
    """Float32 memory of the Adam thread for gradients and directions of whole parameters in another dtype."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def chunk(self) -> torch.Tensor:
        if "chunk" not in self._buffers:
            self._buffers["chunk"] = chunk_scratch()
        return self._buffers["chunk"]

    def get(self, name: str, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        if not shapes:
            return []
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if name not in self._buffers or self._buffers[name].numel() < sum(sizes):
            self._buffers[name] = torch.empty(sum(sizes))
        parts = self._buffers[name][: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class HostGroup:
    """Parameters whose Adam runs on the CPU together: their buffers, moments and current phase."""

    uploads_in_place = False
    """The group uploads directions to its own device memory, not to a buffer of `TransferStreams`."""

    def __init__(
        self,
        group: MatrixGroup,
        settings: LSPParams,
        *,
        device: torch.device,
        store: HostStore,
        queue: UpdateQueue,
        scratch: HostScratch,
        max_norm: float,
        num_extra: int = 0,
        keeps_states: bool = True,
    ) -> None:
        """`num_extra`: float32 numbers that a subclass uses behind the sums.
        `keeps_states`: this rank keeps the moments and runs Adam."""
        self.name, self.is_block = group.name, group.is_block
        self.matrices = sorted(group.matrices, key=lambda matrix: matrix.subspace is None)
        """Projected matrices come first: their sums are contiguous and are downloaded in one copy."""
        self.phase = GroupPhase.SUMMING
        self.job: Job | None = None
        self.num_expected = self.num_arrived = 0
        """Numbers of gradients that the present backward pass will make, and has made."""
        self.streams: TransferStreams | None = None
        """None on a CPU: copies are synchronous."""
        self.unit: Unit | None = None
        """The streamed block that the parameters belong to; None if the weights stay on the device."""
        self._settings = settings
        self._queue, self._scratch = queue, scratch
        self._max_norm = max_norm
        self._active: list[int] = []
        """Indices, in `matrices`, of the parameters that have a gradient in this step."""
        self._launch_cache = LaunchCache()
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """Views of single matrices, by index and buffer address. There are few buffers, so the views are made once."""
        self._rates: list[Rate | None] = []
        self._num_projected = sum(matrix.subspace is not None for matrix in self.matrices)
        shapes = [matrix.shape for matrix in self.matrices]
        num_projected = self._num_projected
        self._layout = BufferLayout(shapes[:num_projected], [torch.float32] * num_projected)
        """The places of projected matrices in the flat float32 buffers of sums, moments and directions."""
        self._projected_bytes = self._layout.end
        whole = [_whole_payload_dtype(matrix.parameter) for matrix in self.matrices[num_projected:]]
        self._whole_layout = BufferLayout(shapes[num_projected:], whole, start=self._projected_bytes)
        self._sums_device = torch.zeros(self._projected_bytes // 4 + num_extra, device=device)
        for i, matrix in enumerate(self.matrices[:num_projected]):
            matrix.total = self._matrix_in(i, self._sums_device)
        self.keeps_states = keeps_states
        self.gradients_host, self.directions_host = (
            store.take(self._whole_layout.end) if keeps_states else torch.empty(0, dtype=torch.uint8) for _ in range(2)
        )
        self.moments: list[Moments] = []
        if keeps_states:
            self._flat = FlatMoments.zeros(self._projected_bytes // 4, num_projected, self._matrix_in)
            self.moments = [*self._flat.parts, *(Moments.zeros(shape, "cpu") for shape in shapes[num_projected:])]
        num_whole = len(shapes) - num_projected if keeps_states else 0
        self._whole_norms_host = store.take(4 * num_whole).view(torch.float32) if num_whole else torch.empty(0)
        """Norms of whole gradients. The device computes them, which saves a pass through host memory."""
        self._device = device
        self.download_events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Recorded before and after the last download; None: nothing was downloaded, or the device is a CPU."""

    # Download

    @torch.no_grad()
    def start(self) -> None:
        """Starts the download of this step's gradients and queues the Adam job that waits for it."""
        assert self.phase is GroupPhase.SUMMING
        self._active = [i for i, matrix in enumerate(self.matrices) if matrix.has_total]
        ready = self._download()
        self.job = Job(self._update, ready=ready)
        self._queue.put(self.job)
        self.phase = GroupPhase.UPDATING

    def _download(self) -> torch.cuda.Event | None:
        """Starts the copies to the host. Returns the event that they end with; None: they have ended."""
        projected = [i for i in self._active if i < self._num_projected]
        copies = (
            [(self._flat_view(self.gradients_host), self._sums_device[: self._projected_bytes // 4])]
            if projected
            else []
        )
        whole = self._whole_gradients_to_download()
        copies += [(self._view(i, self.gradients_host), grad) for i, grad in whole]
        if whole:
            norms = torch._foreach_norm([grad for _, grad in whole], dtype=torch.float32)
            copies.append((self._whole_norms_host[: len(whole)], torch.stack(norms)))
        if self.streams is None:
            for target, source in copies:
                target.copy_(source)
            ready = None
        else:
            down = self.streams.down
            begin, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            down.wait_stream(torch.cuda.current_stream(self._device))
            begin.record(down)
            with torch.cuda.stream(down):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(down)
            ready.record(down)
            self.download_events = begin, ready
        self._drop_whole_gradients()
        return ready

    def _whole_gradients_to_download(self) -> list[tuple[int, torch.Tensor]]:
        found = [(i, self.matrices[i].whole_gradient) for i in self._active if i >= self._num_projected]
        return [(i, grad) for i, grad in found if grad is not None]

    def _drop_whole_gradients(self) -> None:
        for i in self._active:
            if i >= self._num_projected:
                self.matrices[i].drop_gradient()

    def _update(self) -> torch.Tensor:
        """Runs Adam from `gradients_host` to `directions_host`, in the Adam thread. Returns the gradients' norms."""
        active = self._active
        if not active:
            return torch.zeros(0)
        if len(active) == self._num_projected == len(self.matrices):
            return self._update_flat()
        return self._update_parts()

    def _update_flat(self) -> torch.Tensor:
        """Runs Adam where all parameters are projected and all have a gradient, which is the usual case."""
        outs, grads = (
            [self._view(i, side) for i in self._active] for side in (self.directions_host, self.gradients_host)
        )
        return flat_directions_(
            self._flat_view(self.directions_host),
            self._flat_view(self.gradients_host),
            self._flat,
            parts=(outs, grads),
            max_norm=self._max_norm,
            betas=self._settings.betas,
            eps=self._settings.eps,
        )

    def _update_parts(self) -> torch.Tensor:
        """Runs Adam on the parameters that have a gradient."""
        active = self._active
        whole = [k for k, i in enumerate(active) if i >= self._num_projected]
        sources, targets = (
            [self._view(i, side) for i in active] for side in (self.gradients_host, self.directions_host)
        )
        narrow = [k for k in whole if sources[k].dtype is not torch.float32]
        if uses_chunks():  # then Adam converts them chunk by chunk
            narrow = []
        shapes = [tuple(sources[k].shape) for k in narrow]
        decoded, to_encode = (dict(zip(narrow, self._scratch.get(n, shapes), strict=True)) for n in ("in", "out"))
        for k in narrow:
            decoded[k].copy_(sources[k])
        norms = host_directions_(
            [to_encode.get(k, target) for k, target in enumerate(targets)],
            [decoded.get(k, source) for k, source in enumerate(sources)],
            [self.moments[i] for i in active],
            max_norm=self._max_norm,
            betas=self._settings.betas,
            eps=self._settings.eps,
            scratch=self._scratch.chunk,
            known=dict(zip(whole, self._whole_norms_host[: len(whole)].tolist(), strict=True)),
        )
        for k in narrow:
            targets[k].copy_(to_encode[k])
        return norms

    def _matrix_in(self, i: int, flat: torch.Tensor) -> torch.Tensor:
        """The i-th projected matrix in a flat buffer."""
        return self._layout.view(i, flat.view(torch.uint8))

    # Undoing: [Note: undone updates]

    @torch.no_grad()
    def undo_update(self) -> None:
        """Undoes `start`: gradients and moments are as before it, and the group is SUMMING again."""
        assert self.phase is GroupPhase.UPDATING and self.job is not None
        norms = self.job.wait()
        grads = [self._view(i, self.gradients_host).float() for i in self._active]
        coefs = torch.ones_like(norms)
        if self._max_norm > 0:
            coefs = (self._max_norm / (norms + NORM_FLOOR)).clamp_(max=1.0)
        for k, i in enumerate(self._active):
            is_whole = i >= self._num_projected
            # Adam has clipped a float32 gradient in `gradients_host` itself.
            in_place = not is_whole or self._whole_layout.dtypes[i - self._num_projected] is torch.float32
            if is_whole:
                self._restore_whole_gradient(i, grads[k] / coefs[k] if in_place else grads[k])
            if not in_place:
                grads[k] = grads[k] * coefs[k]
        if bool(norms.isfinite().all()):
            undo_moments_(grads, [self.moments[i] for i in self._active], betas=self._settings.betas)
        self.job = None
        self.phase = GroupPhase.SUMMING

    def _restore_whole_gradient(self, i: int, grad: torch.Tensor) -> None:
        self.matrices[i].restore_gradient(grad, device=self._device)

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
        """Starts the upload of a committed update. False: Adam has not finished, or no upload buffer is free."""
        streams, job = self.streams, self.job
        assert self.phase is GroupPhase.UPDATE_PENDING and job is not None
        if streams is None or not job.is_finished:
            return False
        if streams.buffer_of(self) is None:
            if not streams.has_free_buffer():
                return False
            streams.upload(self, self.directions_host)
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
        upload_buffer = None
        if job.is_finite:
            source = self.directions_host
            if self.streams is not None:
                upload_buffer = self.streams.buffer_of(self) or self.streams.upload(self, self.directions_host)
                torch.cuda.current_stream(self._device).wait_event(upload_buffer.filled)
                source = upload_buffer.buffer
            self._apply(source)
        elif self.streams is not None:
            upload_buffer = self.streams.buffer_of(self)
        if upload_buffer is not None:
            upload_buffer.drained.record(torch.cuda.current_stream(self._device))
            upload_buffer.group = None
        self.phase = GroupPhase.SUMMING

    def _apply(self, source: torch.Tensor) -> None:
        """Moves the weights by the directions in `source`, a buffer laid out as `directions_host`."""
        rates = [self._rates[i] for i in self._active]
        matrices = [self.matrices[i] for i in self._active]
        directions = [self._direction(i, source) for i in self._active]
        rate = rates[0] if rates else None
        if rate is not None and all(other is rate for other in rates):
            apply_directions_cached_(self._launch_cache, matrices, directions, rate)
            return
        triples = zip(matrices, directions, rates, strict=True)
        apply_directions_((matrix, direction, rate) for matrix, direction, rate in triples if rate is not None)

    def _direction(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        return self._view(i, buffer)

    def _view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        """The i-th matrix in a buffer laid out as `gradients_host`."""
        key = i, buffer.data_ptr()
        view = self._views.get(key)
        if view is None:
            num_projected = self._num_projected
            is_whole = i >= num_projected
            view = self._whole_layout.view(i - num_projected, buffer) if is_whole else self._layout.view(i, buffer)
            self._views[key] = view
        return view

    def _flat_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The projected matrices in a buffer laid out as `gradients_host`, as one vector."""
        key = -1, buffer.data_ptr()
        if key not in self._views:
            self._views[key] = buffer[: self._layout.end].view(torch.float32)
        return self._views[key]


def _whole_payload_dtype(p: torch.Tensor) -> torch.dtype:
    """The dtype in which a whole parameter's gradients and directions are copied: vectors, being small, in float32."""
    return p.dtype if p.ndim >= 2 else torch.float32


class DeviceGroup:
    """Parameters whose Adam runs on the device of the weights, in `step`."""

    def __init__(
        self, matrices: list[MatrixState], settings: LSPParams, *, device: torch.device, max_norm: float
    ) -> None:
        self.matrices = matrices
        self._settings = settings
        self._max_norm = max_norm
        self._flat_vectors: FlatVectors | None = None
        """Memory for all parameters in one vector; None if one of them is a matrix."""
        self._launch_cache = LaunchCache()
        if all(matrix.parameter.ndim < 2 for matrix in matrices):
            self._flat_vectors = FlatVectors([matrix.shape for matrix in matrices], device)
            self.moments = self._flat_vectors.moments.parts
        else:
            self.moments = [Moments.zeros(matrix.shape, device) for matrix in matrices]
        for matrix in matrices:
            if matrix.subspace is not None:
                matrix.total = torch.empty(matrix.shape, device=device)

    @torch.no_grad()
    def step(self, rates: list[Rate | None]) -> torch.Tensor | None:
        """Runs Adam and moves the weights. Returns the gradients' norms; None: no parameter has a gradient."""
        active = [i for i, matrix in enumerate(self.matrices) if matrix.has_total]
        if not active:
            return None
        grads = [self.matrices[i].gradient for i in active]
        settings = self._settings
        vectors = self._flat_vectors
        if vectors is not None and len(active) == len(self.matrices) and vectors.have_equal_steps():
            norms = vectors.step_(grads, max_norm=self._max_norm, betas=settings.betas, eps=settings.eps)
            out = vectors.outs
        else:
            grads = [grad.float() for grad in grads]
            out = [torch.empty_like(grad) for grad in grads]
            norms = clip_(grads, self._max_norm)
            moments = [self.moments[i] for i in active]
            directions_(out, grads, moments, norms=norms, betas=settings.betas, eps=settings.eps)
        self._apply(active, out, [rates[i] for i in active])
        for i in active:
            self.matrices[i].clear()
        return norms

    def _apply(self, active: list[int], out: list[torch.Tensor], rates: list[Rate | None]) -> None:
        matrices, rate = [self.matrices[i] for i in active], rates[0]
        is_flat = self._flat_vectors is not None and out is self._flat_vectors.outs
        if is_flat and rate is not None and all(other is rate for other in rates):
            apply_directions_cached_(self._launch_cache, matrices, out, rate)
            return
        triples = zip(matrices, out, rates, strict=True)
        apply_directions_((matrix, direction, rate) for matrix, direction, rate in triples if rate is not None)
