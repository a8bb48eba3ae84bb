"""Gradients into sums, directions into weights: many matrices at a time.

[Note: held gradients] A layer of a small batch is computed in less time than the products of its matrices take to
launch one by one. So a gradient waits for the others of its layer, up to MAX_HELD_BYTES in all, and they are
compressed together; the sums are the same bits either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ds_zo.engines.lsp_matrices import Slot
from ds_zo.ops import Rounding
from ds_zo.optim import Dither, sgd_update_
from ds_zo.projectors import Application, Compression, Shift, apply_all_, compress_all, shift_all_

MAX_HELD_BYTES = 128 << 20


@dataclass(frozen=True)
class Rate:
    """What one step applies to one parameter."""

    lr: float
    weight_decay: float
    step: int
    """Chooses the rounding bits."""
    stochastic: bool


class HeldGradients:
    """Of projected matrices; each stays in its parameter's `.grad` until it is compressed."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._num_bytes = 0

    def add(self, slot: Slot) -> None:
        """A gradient that comes again has been added to the one that waits."""
        if id(slot) in self._slots:
            return
        grad = slot.parameter.grad
        assert grad is not None
        self._slots[id(slot)] = slot
        self._num_bytes += grad.nbytes
        if self._num_bytes >= MAX_HELD_BYTES:
            self.compress()

    def compress(self) -> None:
        slots = list(self._slots.values())
        self.forget()
        compress_slots(slots)

    def forget(self) -> None:
        self._slots.clear()
        self._num_bytes = 0


def compress_slots(slots: Iterable[Slot]) -> None:
    """Adds each one's gradient to its sum; the gradients are gone when this returns."""
    calls = []
    for slot in slots:
        subspace, grad = slot.subspace, slot.parameter.grad
        assert subspace is not None and slot.total is not None and grad is not None
        calls.append(Compression(grad, subspace.P, subspace.Q, slot.total.t(), slot.has_total))
        slot.has_total = True
        slot.parameter.grad = None
    compress_all(calls)


def apply_directions_(moves: Iterable[tuple[Slot, torch.Tensor, Rate]]) -> None:
    """W <- round(W (1 - lr wd) - lr P D Q^T), or without P and Q; all of one step."""
    projected: list[Application] = []
    vectors: list[Shift] = []
    step = 0
    for slot, direction, rate in moves:
        p, step = slot.parameter, rate.step
        stochastic = rate.stochastic and p.dtype is not torch.float32
        rounding: Rounding = "stochastic" if stochastic else "nearest"
        if slot.subspace is not None:
            P, Q = slot.subspace.P, slot.subspace.Q
            projected.append(Application(p, direction.t(), P, Q, rate.lr, rate.weight_decay, rounding, slot.offset))
        elif p.ndim < 2:
            vectors.append(Shift(p, direction, rate.lr, rate.weight_decay, rounding, slot.offset))
        else:
            dither = Dither(step=step, offset=slot.offset) if stochastic else None
            sgd_update_(p, direction, lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, dither=dither)
    apply_all_(projected, step=step)
    shift_all_(vectors, step=step)
