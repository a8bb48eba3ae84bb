"""A layer's trip where several ranks train together: its sums are averaged over them on the way down.

[Note: who steps] At ZeRO stage 0 every rank keeps every state and makes the same step. From stage 1 on each layer has
an owner, layers dealt to ranks in turn: only it downloads the averages, keeps Adam's moments and steps; the directions
go from it to all ranks, itself included, as bytes of the payload, and land where the sums were. Either way what a rank
applies are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ds_zo.backends.common.interrupts import interrupts
from ds_zo.backends.lsp.host_group import DeviceGroup, GroupPhase, HostGroup, Rate
from ds_zo.backends.lsp.matrices import Group, MatrixState
from ds_zo.backends.lsp.ranks import CollectiveCall, CollectiveThread
from ds_zo.backends.lsp.scheduler import Job, ToldJob
from ds_zo.config import LSPParams
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.watched import told_to_nobody

_UNUSED = -1.0
"""In the place of a gradient's norm: no rank had one."""


class SharedHostGroup(HostGroup):
    def __init__(
        self,
        group: Group,
        settings: LSPParams,
        *,
        ranks: CollectiveThread,
        owner: int | None,
        device: torch.device,
        store: HostStore,
        **places: Any,
    ) -> None:
        """`owner`: the rank that keeps its states; None: all do."""
        num_slots = len(group.slots)
        keeps = owner is None or owner == ranks.index
        super().__init__(group, settings, device=device, store=store, num_tail=num_slots, keeps_states=keeps, **places)
        self.owner = owner
        self.lands_in_place = owner is not None
        self._ranks = ranks
        self._flags = self._sums[-num_slots:]
        """Which parameters this rank had a gradient of; then the share of ranks that had."""
        self._tail = self.sent[self._payload_bytes :].view(torch.float32)
        """Norms, from the owner."""
        self._h_tail = store.take(4 * num_slots).view(torch.float32)
        self._whole: dict[int, torch.Tensor] = {}
        """Gradients of whole parameters, kept on the device until the step is certain."""
        self._sending: dict[int, torch.Tensor] = {}
        self._landed: dict[int, torch.Tensor] = {}
        """Directions of whole parameters, from the owner."""
        self._averaged: CollectiveCall | None = None
        self._shared: CollectiveCall | None = None

    # Down

    @torch.no_grad()
    def start(self, *, trained: Sequence[bool] = (), goes_on: bool = True) -> None:
        """Has the sums averaged over ranks; what this one lacks of what is `trained` counts as zero. Then they go down,
        unless the caller means to change them first (and calls `update`)."""
        assert self.moment is GroupPhase.SUMMING
        present = [slot.has_total and trains for slot, trains in zip(self.slots, trained, strict=True)]
        for slot, has in zip(self.slots, present, strict=True):
            if slot.total is not None and not has:
                slot.total.zero_()
        if all(present):
            self._flags.fill_(1.0)
        else:
            self._flags.copy_(torch.tensor([float(has) for has in present]))
        self._whole = {}
        for i, slot in enumerate(self.slots):
            p = slot.parameter
            if slot.total is None and trained[i]:
                self._whole[i] = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                p.grad = None
        job = Job(self._update) if self.keeps_states else ToldJob(self._read_norms)
        active = [i for i, has in enumerate(present) if has] if present == list(trained) else None
        self._averaged = self._ranks.ask(partial(self._average, job, self._whole, active, goes_on))
        self.job = job
        self.moment = GroupPhase.UPDATING

    def _average(self, job: Job, whole: dict[int, torch.Tensor], active: list[int] | None, goes_on: bool) -> None:
        """`active`: what this rank knows to be used; None: only the others know."""
        try:
            self._ranks.average_(self._sums)
            for grad in whole.values():
                self._ranks.average_(grad)
            if active is None:
                active = [i for i, share in enumerate(self._flags.tolist()) if share > 0]
            self._active, self._sending = active, whole
            if goes_on:
                self._send_down(job)
        except BaseException as error:
            job.fail(error)
            raise

    def averages(self) -> dict[int, torch.Tensor]:
        """Of all ranks' gradients, by slot, to be changed in place before `update`; those that some rank had."""
        assert self._averaged is not None
        self._averaged.wait()
        return {id(self.slots[i]): self._whole[i] if i in self._whole else self.slots[i].gradient for i in self._active}

    def update(self) -> None:
        assert self.job is not None
        self._send_down(self.job)

    def _send_down(self, job: Job) -> None:
        if self.keeps_states:
            job.ready = self._download()
            self._queue.put(job)
        self._sending = {}

    def _whole_gradients(self) -> list[tuple[int, torch.Tensor]]:
        return [(i, grad) for i, grad in self._sending.items() if i in self._active]

    def _drop_whole_gradients(self) -> None:
        pass

    # [Note: taken back]

    @torch.no_grad()
    def take_back(self) -> None:
        """What is left are averages over ranks, whose average is themselves."""
        assert self._averaged is not None
        self._averaged.wait()
        if self.keeps_states:
            super().take_back()
        for i, (slot, share) in enumerate(zip(self.slots, self._flags.tolist(), strict=True)):
            slot.has_total = share > 0
            if slot.has_total and i in self._whole:
                slot.parameter.grad = self._whole[i]
        self._whole = {}
        self.job = None
        self.moment = GroupPhase.SUMMING

    def _give_back(self, i: int, grad: torch.Tensor) -> None:
        pass

    # Commit

    def commit(self, rates: list[Rate | None]) -> None:
        super().commit(rates)
        whole = {i: grad.dtype for i, grad in self._whole.items()}
        self._whole = {}
        if self.owner is not None:
            assert self.job is not None
            self._shared = self._ranks.ask(partial(self._share, self.job, whole))

    # Up, and applied

    def _share(self, job: Job, whole: dict[int, torch.dtype]) -> None:
        """See [Note: who steps]."""
        assert self.owner is not None
        try:
            landed = {
                i: torch.empty(self.slots[i].shape, dtype=dtype, device=self._device) for i, dtype in whole.items()
            }
            if self.keeps_states:
                norms = job.wait()
                self._h_tail.fill_(_UNUSED)
                self._h_tail[self._active] = norms
                self._tail.copy_(self._h_tail, non_blocking=True)
                self.sent[: self._payload_bytes].copy_(self.h_up[: self._payload_bytes], non_blocking=True)
                for i, direction in landed.items():
                    direction.copy_(self._view(i, self.h_up), non_blocking=True)
            self._ranks.broadcast_(self.sent, self.owner)
            for direction in landed.values():
                self._ranks.broadcast_(direction, self.owner)
            self._landed = landed
            if isinstance(job, ToldJob):
                self._h_tail.copy_(self._tail, non_blocking=True)
                job.told(_recorded(self._device))
        except BaseException as error:
            job.fail(error)
            raise

    def _read_norms(self) -> torch.Tensor:
        self._active = [i for i, norm in enumerate(self._h_tail.tolist()) if norm != _UNUSED]
        return self._h_tail[self._active]

    def prefetch(self) -> bool:
        return True if self.owner is not None else super().prefetch()

    @torch.no_grad()
    def settle(self) -> None:
        if self.owner is None or self.moment is not GroupPhase.DUE:
            super().settle()
            return
        assert self.job is not None and self._shared is not None
        norms = self.job.wait()
        self._shared.wait()
        is_finite = bool(norms.isfinite().all())
        with interrupts.deferred(), told_to_nobody():
            if is_finite:
                self._apply(self.sent)
            if self._device.type == "cuda":
                for direction in self._landed.values():
                    direction.record_stream(torch.cuda.current_stream(self._device))
            self._landed = {}
            self._end_payloads(is_used=is_finite)
            self.moment = GroupPhase.SUMMING

    def _direction(self, i: int, buffer: torch.Tensor) -> torch.Tensor:
        return self._landed[i] if i in self._landed else super()._direction(i, buffer)


class SharedDeviceGroup(DeviceGroup):
    """Every rank keeps the states; matrices are averaged where they are, vectors and flags side by side."""

    def __init__(
        self, slots: list[MatrixState], settings: LSPParams, *, ranks: CollectiveThread, **places: Any
    ) -> None:
        super().__init__(slots, settings, **places)
        self._ranks = ranks
        self._averaged: CollectiveCall | None = None
        self._vectors: list[MatrixState] = []
        self._flat = torch.empty(0)
        self._lacks = False

    @torch.no_grad()
    def start(self, *, trained: Sequence[bool]) -> None:
        sent = [slot for slot, trains in zip(self.slots, trained, strict=True) if trains]
        flags = [float(slot.has_total) for slot in self.slots]
        self._lacks = not all(slot.has_total for slot in sent)
        for slot in sent:
            if not slot.has_total:
                if slot.total is not None:
                    slot.total.zero_()
                else:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
        self._vectors = [slot for slot in sent if slot.gradient.ndim < 2]
        matrices = [slot.gradient for slot in sent if slot.gradient.ndim >= 2]
        parts = [slot.gradient.float().flatten() for slot in self._vectors]
        device = self.slots[0].parameter.device
        shares = torch.ones(len(flags), device=device) if all(flags) else torch.tensor(flags, device=device)
        self._flat = torch.cat([*parts, shares])

        def average() -> None:
            for value in [*matrices, self._flat]:
                self._ranks.average_(value)

        self._averaged = self._ranks.ask(average)

    def finish(self) -> None:
        """The gradients are averages from here on."""
        assert self._averaged is not None
        self._averaged.wait()
        sizes = [slot.gradient.numel() for slot in self._vectors]
        *parts, shares = self._flat.split([*sizes, len(self.slots)])
        for slot, part in zip(self._vectors, parts, strict=True):
            slot.gradient.copy_(part.view(slot.gradient.shape))
        if self._lacks:
            for slot, share in zip(self.slots, shares.tolist(), strict=True):
                slot.has_total = share > 0
                if not slot.has_total:
                    slot.forget()


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
