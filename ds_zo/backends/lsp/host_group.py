"""A layer's trip: its gradient goes down to the host, Adam turns it into a direction there, the direction comes up, and
the weights take it before their next use.

Down: as soon as the layer's last gradient has come, inside the backward pass, where the engine says that a step
follows; else in `step`. Commit: in `step`, which fixes learning rate and decay. Up and applied: when the layer's next
forward is about to begin, a few layers ahead; until then the weights lag, which `settle` ends. So weights never move
inside a backward pass, and the synchronous schedule is the same work without the overlap: the same bits.

[Note: taken back] A trip that began inside a backward pass may turn out premature: a second backward, or `zero_grad`,
comes before `step`. Adam's moments are then put back by subtracting what was added, exact but for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

import torch

from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.lsp.matrices import Group, MatrixState
from ds_zo.backends.lsp.payload import ALIGNMENT, Carry, Places, Span, Wire
from ds_zo.backends.lsp.products import PreparedProducts, Rate, apply_directions_, apply_prepared_
from ds_zo.backends.lsp.scheduler import Job, UpdateQueue
from ds_zo.config import LSPParams
from ds_zo.optim.subspace_adam import (
    NORM_FLOOR,
    FlatMoments,
    FlatVectors,
    Moments,
    chunk_scratch,
    chunks_pay,
    clip_,
    directions_,
    flat_directions_,
    host_directions_,
    take_back_,
)
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.units import Unit
from ds_zo.streaming.watched import told_to_nobody

NUM_LANDINGS = 3
_PAYLOADS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class GroupPhase(Enum):
    SUMMING = "gradients add up on the device"
    UPDATING = "they are on their way down, or Adam is at work; the sums are kept until the step is certain"
    DUE = "the step was made, but the weights have yet to take its direction, which the host has or will have"


@dataclass(eq=False)
class Landing:
    """Device memory for one layer's directions."""

    buffer: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    holder: HostGroup | None = None
    """Whose directions are in it, or on their way."""


class Links:
    """The two streams between a CUDA device and the host, and where uploads land."""

    def __init__(self, device: torch.device, *, landing_bytes: int) -> None:
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)
        self._landings = [
            Landing(torch.empty(landing_bytes, dtype=torch.uint8, device=device)) for _ in range(NUM_LANDINGS)
        ]
        self.num_bytes = NUM_LANDINGS * landing_bytes

    def landing_of(self, group: HostGroup) -> Landing | None:
        return next((landing for landing in self._landings if landing.holder is group), None)

    def has_room(self) -> bool:
        return any(landing.holder is None for landing in self._landings)

    def fill(self, group: HostGroup, source: torch.Tensor) -> Landing:
        """Starts an upload. Where all landings are taken, one of those that wait loses its place and comes again."""
        landing = next((one for one in self._landings if one.holder is None), self._landings[0])
        landing.holder = group
        self.up.wait_event(landing.drained)
        with torch.cuda.stream(self.up):
            landing.buffer[: source.numel()].copy_(source, non_blocking=True)
        landing.filled.record(self.up)
        return landing


class Scratch:
    """The Adam thread's own float32 memory: what it decodes and what it is about to encode."""

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
    """A group whose Adam runs on the CPU."""

    lands_in_place = False
    """Directions come up to memory of its own, not to one of `Links`."""

    def __init__(
        self,
        group: Group,
        settings: LSPParams,
        *,
        device: torch.device,
        store: HostStore,
        queue: UpdateQueue,
        scratch: Scratch,
        max_norm: float,
        num_tail: int = 0,
        keeps_states: bool = True,
    ) -> None:
        """`num_tail`: float32 numbers for a subclass's use, behind the sums and behind what is sent."""
        self.name, self.is_block = group.name, group.is_block
        self.slots = sorted(group.slots, key=lambda slot: slot.subspace is None)
        """Projected ones first: their sums stand side by side and go down in one copy."""
        self.moment = GroupPhase.SUMMING
        self.job: Job | None = None
        self.num_expected = self.num_arrived = 0
        """Gradients that a backward pass is to bring, and has brought."""
        self.links: Links | None = None
        self.unit: Unit | None = None
        """Of a block that comes and goes."""
        self._settings = settings
        self._queue, self._scratch = queue, scratch
        self._max_norm = max_norm
        self._active: list[int] = []
        self._prepared = PreparedProducts()
        self._views: dict[tuple[int, int], torch.Tensor] = {}
        """In each of the few buffers that gradients go down to and directions come up in."""
        self._rates: list[Rate | None] = []
        self._num_projected = sum(slot.subspace is not None for slot in self.slots)
        shapes = [slot.shape for slot in self.slots]
        num_projected = self._num_projected
        payload = _PAYLOADS[settings.payload_dtype]
        self._is_lossy = payload is not torch.float32
        float32 = [torch.float32] * num_projected
        self._places = Places(shapes[:num_projected], float32, alignment=Wire.alignment(payload))
        """Of the sums, and of their moments and directions in float32."""
        self._wire = Wire(self._places.end // 4, payload)
        self._payload_bytes = -(-self._wire.num_bytes // ALIGNMENT) * ALIGNMENT
        whole = [_whole_payload(slot.parameter) for slot in self.slots[num_projected:]]
        self._whole_places = Places(shapes[num_projected:], whole, start=self._payload_bytes)
        self.sent = torch.zeros(self._payload_bytes + 4 * num_tail, dtype=torch.uint8, device=device)
        """What leaves the device; where that is float32, the sums themselves."""
        sums = self.sent
        if self._is_lossy:
            sums = torch.zeros(self._places.end + 4 * num_tail, dtype=torch.uint8, device=device)
        self._sums = sums.view(torch.float32)
        for i, slot in enumerate(self.slots[:num_projected]):
            slot.total = self._places.view(i, sums)
        self.keeps_states = keeps_states
        self.h_down, self.h_up = (
            store.take(self._whole_places.end) if keeps_states else torch.empty(0, dtype=torch.uint8) for _ in range(2)
        )
        self.moments: list[Moments] = []
        if keeps_states:
            self._flat = FlatMoments.zeros(self._wire.numel, num_projected, self._place)
            self.moments = [*self._flat.parts, *(Moments.zeros(shape, "cpu") for shape in shapes[num_projected:])]
        num_whole = len(shapes) - num_projected if keeps_states else 0
        self._h_norms = store.take(4 * num_whole).view(torch.float32) if num_whole else torch.empty(0)
        """Of whole gradients, taken where these are: one pass less through the host's memory."""
        self.carry_down, self.carry_up = (
            Carry(self._wire, self._places, where) for where in (device, torch.device("cpu"))
        )
        self._device = device
        self.timed: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Around the last download."""

    @property
    def payload_bytes(self) -> dict[str, int]:
        """What payloads of fewer bits take besides the sums: themselves and their errors, twice on the host."""
        errors = 4 * self._wire.numel if self._is_lossy else 0
        return {"device": errors + self.sent.nbytes if errors else 0, "host": 2 * errors if self.keeps_states else 0}

    # Down

    @torch.no_grad()
    def start(self) -> None:
        """Sends the sums of this step down, to be worked on as soon as they have arrived."""
        assert self.moment is GroupPhase.SUMMING
        self._active = [i for i, slot in enumerate(self.slots) if slot.has_total]
        ready = self._download()
        self.job = Job(self._update, ready=ready)
        self._queue.put(self.job)
        self.moment = GroupPhase.UPDATING

    def _download(self) -> torch.cuda.Event | None:
        projected = [i for i in self._active if i < self._num_projected]
        if self._is_lossy and projected:
            self.carry_down.encode(self._sums, self.sent, self._places.spans(projected))
        copies = [(self.h_down[: self._payload_bytes], self.sent[: self._payload_bytes])] if projected else []
        whole = self._whole_gradients()
        copies += [(self._view(i, self.h_down), grad) for i, grad in whole]
        if whole:
            norms = torch._foreach_norm([grad for _, grad in whole], dtype=torch.float32)
            copies.append((self._h_norms[: len(whole)], torch.stack(norms)))
        if self.links is None:
            for target, source in copies:
                target.copy_(source)
            ready = None
        else:
            down = self.links.down
            begin, ready = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            down.wait_stream(torch.cuda.current_stream(self._device))
            begin.record(down)
            with torch.cuda.stream(down):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(down)
            ready.record(down)
            self.timed = begin, ready
        self._drop_whole_gradients()  # the host has them
        return ready

    def _whole_gradients(self) -> list[tuple[int, torch.Tensor]]:
        found = [(i, self.slots[i].whole_gradient) for i in self._active if i >= self._num_projected]
        return [(i, grad) for i, grad in found if grad is not None]

    def _drop_whole_gradients(self) -> None:
        for i in self._active:
            if i >= self._num_projected:
                self.slots[i].drop_gradient()

    def _update(self) -> torch.Tensor:
        """In the Adam thread: h_down to h_up."""
        active = self._active
        if not active:
            return torch.zeros(0)
        projected = [i for i in active if i < self._num_projected]
        flat_in, flat_out = self._flat_sides(projected)
        if len(active) == self._num_projected == len(self.slots):
            norms = self._update_flat(flat_out, flat_in)
        else:
            norms = self._update_parts(flat_out, flat_in)
        if self._is_lossy and projected and all(map(math.isfinite, norms.tolist())):
            self.carry_up.encode(flat_out, self.h_up, self._places.spans(projected))
        return norms

    def _flat_sides(self, projected: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """What Adam reads and writes of projected matrices, in float32: the payloads themselves, or what they become
        and come from."""
        if not self._is_lossy:
            return self._flat_view(self.h_down), self._flat_view(self.h_up)
        numel = (self._wire.numel,)
        [down], [up] = (self._scratch.get(f"flat {side}", [numel]) for side in ("in", "out"))
        self._decode(down, self.h_down, self._places.spans(projected))
        return down, up

    def _decode(self, out: torch.Tensor, buffer: torch.Tensor, spans: list[Span]) -> None:
        for span in spans:
            self._wire.decode_(out[slice(*span)], buffer, span)

    def _update_flat(self, out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Where all is projected and all is there, as nearly always."""
        if self._is_lossy:
            outs, grads = ([self._place(i, side) for i in self._active] for side in (out, grad))
        else:
            outs, grads = ([self._view(i, side) for i in self._active] for side in (self.h_up, self.h_down))
        return flat_directions_(
            out,
            grad,
            self._flat,
            parts=(outs, grads),
            max_norm=self._max_norm,
            betas=self._settings.betas,
            eps=self._settings.eps,
        )

    def _update_parts(self, out: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """`out` and `grad`: of what is projected."""
        active, first_whole = self._active, self._num_projected
        whole = [k for k, i in enumerate(active) if i >= first_whole]
        sources, targets = (
            [self._place(i, flat) if self._is_lossy and i < first_whole else self._view(i, side) for i in active]
            for flat, side in ((grad, self.h_down), (out, self.h_up))
        )
        narrow = [k for k in whole if sources[k].dtype is not torch.float32]
        if chunks_pay():  # then they are converted on their way through Adam
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
            known=dict(zip(whole, self._h_norms[: len(whole)].tolist(), strict=True)),
        )
        for k in narrow:
            targets[k].copy_(to_encode[k])
        if self._is_lossy:  # padding shares a scale with a matrix's last numbers, and may be another group's
            for i in active[: len(active) - len(whole)]:
                [(first, last)] = self._places.spans([i])
                out[first + self.moments[i].mean.numel() : last].zero_()
        return norms

    def _place(self, i: int, flat: torch.Tensor) -> torch.Tensor:
        return self._places.view(i, flat.view(torch.uint8))

    # [Note: taken back]

    @torch.no_grad()
    def take_back(self) -> None:
        """As if it had not been started: sums and moments are those of before."""
        assert self.moment is GroupPhase.UPDATING and self.job is not None
        norms = self.job.wait()
        grads = self._received()
        coefs = torch.ones_like(norms)
        if self._max_norm > 0:
            coefs = (self._max_norm / (norms + NORM_FLOOR)).clamp_(max=1.0)
        for k, i in enumerate(self._active):
            is_whole = i >= self._num_projected
            dtype = self._whole_places.dtypes[i - self._num_projected] if is_whole else self._wire.dtype
            in_place = dtype is torch.float32  # then clipped where it stands
            if is_whole:
                self._give_back(i, grads[k] / coefs[k] if in_place else grads[k])
            if not in_place:
                grads[k] = grads[k] * coefs[k]
        self.carry_down.take_back()
        self.carry_up.take_back()
        if bool(norms.isfinite().all()):
            take_back_(grads, [self.moments[i] for i in self._active], betas=self._settings.betas)
        self.job = None
        self.moment = GroupPhase.SUMMING

    def _received(self) -> list[torch.Tensor]:
        """What the host has of each gradient, in float32."""
        if not self._is_lossy:
            return [self._view(i, self.h_down).float() for i in self._active]
        projected = [i for i in self._active if i < self._num_projected]
        flat = torch.zeros(self._wire.numel)
        self._decode(flat, self.h_down, self._places.spans(projected))
        whole = [self._view(i, self.h_down).float() for i in self._active[len(projected) :]]
        return [*(self._place(i, flat) for i in projected), *whole]

    def _give_back(self, i: int, grad: torch.Tensor) -> None:
        self.slots[i].put_back(grad, device=self._device)

    # Commit

    def commit(self, rates: list[Rate | None]) -> None:
        """The step is made; None: a parameter that is not trained at the moment."""
        assert self.moment is GroupPhase.UPDATING
        self._rates = rates
        for slot in self.slots:
            slot.forget()
        self.moment = GroupPhase.DUE

    # Up, and applied

    def prefetch(self) -> bool:
        """Starts the upload of a step that was made. False: it is not there yet, or there is no room for it."""
        links, job = self.links, self.job
        assert self.moment is GroupPhase.DUE and job is not None
        if links is None or not job.is_finished:
            return False
        if links.landing_of(self) is None:
            if not links.has_room():
                return False
            links.fill(self, self.h_up)
        return True

    @torch.no_grad()
    def settle(self) -> None:
        """The weights are those of the last step when this returns (on CUDA: for what is issued from here on)."""
        if self.moment is not GroupPhase.DUE:
            return
        assert self.job is not None
        self.job.wait()
        with interrupts.deferred(), told_to_nobody():
            self._settle(self.job)

    def _settle(self, job: Job) -> None:
        landing = None
        if job.is_finite:
            source = self.h_up
            if self.links is not None:
                landing = self.links.landing_of(self) or self.links.fill(self, self.h_up)
                torch.cuda.current_stream(self._device).wait_event(landing.filled)
                source = landing.buffer
            self._apply(source)
        elif self.links is not None:
            landing = self.links.landing_of(self)
        if landing is not None:
            landing.drained.record(torch.cuda.current_stream(self._device))
            landing.holder = None
        self._end_payloads(is_used=job.is_finite)
        self.moment = GroupPhase.SUMMING

    def _end_payloads(self, *, is_used: bool) -> None:
        """What a step that is skipped had sent leaves nothing to carry."""
        for carry in (self.carry_down, self.carry_up):
            if is_used:
                carry.keep()
            else:
                carry.take_back()

    def _apply(self, source: torch.Tensor) -> None:
        rates = [self._rates[i] for i in self._active]
        slots = [self.slots[i] for i in self._active]
        if self._is_lossy:  # to where the sums were, which the step has used
            spans = self._places.spans([i for i in self._active if i < self._num_projected])
            self._decode(self._sums, source, spans)
        directions = [self._direction(i, source) for i in self._active]
        rate = rates[0] if rates else None
        if rate is not None and all(other is rate for other in rates):
            apply_prepared_(self._prepared, slots, directions, rate)
            return
        triples = zip(slots, directions, rates, strict=True)
        apply_directions_((slot, direction, rate) for slot, direction, rate in triples if rate is not None)

    def _direction(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        total = self.slots[i].total
        return total if self._is_lossy and total is not None else self._view(i, buffer)

    def _view(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        """What stands in the buffer as it is: whole gradients, and projected ones in float32."""
        key = i, buffer.data_ptr()
        view = self._views.get(key)
        if view is None:
            num_projected = self._num_projected
            is_whole = i >= num_projected
            view = self._whole_places.view(i - num_projected, buffer) if is_whole else self._places.view(i, buffer)
            self._views[key] = view
        return view

    def _flat_view(self, buffer: torch.Tensor) -> torch.Tensor:
        """All that is projected, in float32."""
        key = -1, buffer.data_ptr()
        if key not in self._views:
            self._views[key] = buffer[: self._places.end].view(torch.float32)
        return self._views[key]


def _whole_payload(p: torch.Tensor) -> torch.dtype:
    """Vectors are few enough to travel as Adam sees them."""
    return p.dtype if p.ndim >= 2 else torch.float32


class DeviceGroup:
    """A group whose Adam runs where the weights are, in `step`."""

    def __init__(self, slots: list[MatrixState], settings: LSPParams, *, device: torch.device, max_norm: float) -> None:
        self.slots = slots
        self._settings = settings
        self._max_norm = max_norm
        self._side_by_side: FlatVectors | None = None
        """Where there is nothing else."""
        self._prepared = PreparedProducts()
        if all(slot.parameter.ndim < 2 for slot in slots):
            self._side_by_side = FlatVectors([slot.shape for slot in slots], device)
            self.moments = self._side_by_side.moments.parts
        else:
            self.moments = [Moments.zeros(slot.shape, device) for slot in slots]
        for slot in slots:
            if slot.subspace is not None:
                slot.total = torch.empty(slot.shape, device=device)

    @torch.no_grad()
    def step(self, rates: list[Rate | None]) -> torch.Tensor | None:
        """Norms of the gradients; None where there was none."""
        active = [i for i, slot in enumerate(self.slots) if slot.has_total]
        if not active:
            return None
        grads = [self.slots[i].gradient for i in active]
        settings = self._settings
        vectors = self._side_by_side
        if vectors is not None and len(active) == len(self.slots) and vectors.are_alike():
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
            self.slots[i].forget()
        return norms

    def _apply(self, active: list[int], out: list[torch.Tensor], rates: list[Rate | None]) -> None:
        slots, rate = [self.slots[i] for i in active], rates[0]
        stays = self._side_by_side is not None and out is self._side_by_side.outs
        if stays and rate is not None and all(other is rate for other in rates):
            apply_prepared_(self._prepared, slots, out, rate)
            return
        triples = zip(slots, out, rates, strict=True)
        apply_directions_((slot, direction, rate) for slot, direction, rate in triples if rate is not None)
