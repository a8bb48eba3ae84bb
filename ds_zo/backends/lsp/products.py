"""Gradients into sums, directions into weights: many matrices at a time.

A layer of a small batch is computed in less time than the products of its matrices take to launch one by one. So a
gradient waits for the others of its layer, up to MAX_HELD_BYTES in all, and they are compressed together; the sums are
the same bits either way. What a launch needs to be told is worked out once for each set of addresses, which from some
step on come again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_zo.backends.lsp.matrices import MatrixState, Subspace
from ds_zo.ops import Rounding
from ds_zo.optim import Dither, sgd_update_
from ds_zo.projectors import Application, Compression, Prepared, Shift, apply_all_, compress_all, shift_all_

MAX_HELD_BYTES = 128 << 20
_MAX_PREPARED = 512


@dataclass(frozen=True)
class Rate:
    """What one step applies to one parameter."""

    lr: float
    weight_decay: float
    step: int
    """Chooses the rounding bits."""
    stochastic: bool


class PreparedProducts:
    """Launches by the addresses that they were prepared for. They serve as long as the projectors are the same."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], tuple[Prepared, list[Subspace | None]]] = {}

    def get(self, key: tuple[int, ...], slots: Sequence[MatrixState]) -> Prepared | None:
        found = self._found.get(key)
        if found is None:
            return None
        prepared, subspaces = found
        same = all(slot.subspace is subspace for slot, subspace in zip(slots, subspaces, strict=True))
        return prepared if same and prepared.holds() else None

    def put(self, key: tuple[int, ...], slots: Sequence[MatrixState], prepared: Prepared | None) -> None:
        if prepared is not None:
            if len(self._found) >= _MAX_PREPARED:
                self._found.clear()
            self._found[key] = prepared, [slot.subspace for slot in slots]

    def clear(self) -> None:
        self._found.clear()


def apply_prepared_(
    prepared: PreparedProducts, slots: Sequence[MatrixState], directions: Sequence[torch.Tensor], rate: Rate
) -> None:
    """`apply_directions_` at one rate, prepared once for all addresses."""
    key = *[slot.parameter.data_ptr() for slot in slots], *[direction.data_ptr() for direction in directions]
    found = prepared.get(key, slots)
    if found is not None:
        found.launch(lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, step=rate.step)
        return
    moves = [(slot, direction, rate) for slot, direction in zip(slots, directions, strict=True)]
    prepared.put(key, slots, apply_directions_(moves))


class HeldGradients:
    """Of projected matrices; each stays in its parameter's `.grad` until it is compressed."""

    def __init__(self) -> None:
        self._slots: dict[int, MatrixState] = {}
        self._num_bytes = 0
        self.prepared = PreparedProducts()

    def add(self, slot: MatrixState) -> None:
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
        if not self._slots:
            return
        slots = [slot for slot in self._slots.values() if slot.parameter.grad is not None]
        self.forget()
        if not slots:  # somebody has dropped them
            return
        found: list[int] = []
        for slot in slots:
            grad = slot.parameter.grad
            assert grad is not None
            found += (id(slot), grad.data_ptr(), grad.stride(0), slot.has_total)
        key = tuple(found)
        prepared = self.prepared.get(key, slots)
        if prepared is None:
            self.prepared.put(key, slots, compress_slots(slots))
            return
        prepared.launch()
        for slot in slots:
            slot.has_total = True
            slot.parameter.grad = None

    def forget(self) -> None:
        self._slots.clear()
        self._num_bytes = 0


def compress_slots(slots: Sequence[MatrixState]) -> Prepared | None:
    """Adds each one's gradient to its sum; the gradients are gone when this returns."""
    calls = []
    for slot in slots:
        subspace, grad = slot.subspace, slot.parameter.grad
        assert subspace is not None and slot.total is not None and grad is not None
        calls.append(Compression(grad, subspace.P, subspace.Q, slot.total.t(), slot.has_total))
        slot.has_total = True
        slot.parameter.grad = None
    return compress_all(calls)


def apply_directions_(moves: Iterable[tuple[MatrixState, torch.Tensor, Rate]]) -> Prepared | None:
    """W <- round(W (1 - lr wd) - lr P D Q^T), or without P and Q; all of one step. What it returns does the same again,
    at any rate that all of them have."""
    projected: list[Application] = []
    vectors: list[Shift] = []
    step, has_whole = 0, False
    for slot, direction, rate in moves:
        p, step = slot.parameter, rate.step
        stochastic = rate.stochastic and p.dtype is not torch.float32
        rounding: Rounding = "stochastic" if stochastic else "nearest"
        if slot.subspace is not None:
            P, Q = slot.subspace.P, slot.subspace.Q_update
            projected.append(Application(p, direction.t(), P, Q, rate.lr, rate.weight_decay, rounding, slot.offset))
        elif p.ndim < 2:
            vectors.append(Shift(p, direction, rate.lr, rate.weight_decay, rounding, slot.offset))
        else:
            dither = Dither(step=step, offset=slot.offset) if stochastic else None
            sgd_update_(p, direction, lr=rate.lr, decay=1.0 - rate.lr * rate.weight_decay, dither=dither)
            has_whole = True
    prepared = apply_all_(projected, step=step)
    shifted = shift_all_(vectors, step=step)
    if has_whole or (projected and vectors):
        return None
    return shifted if vectors else prepared
