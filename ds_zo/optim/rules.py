"""Update rules of one parameter by its gradient: float32 arithmetic, then one rounding to the parameter's dtype.

On the CPU they are torch operations. On CUDA each rule ends in one Triton kernel (`ops.triton_lomo`, imported on first
use). The host reads no value from the device. An update does not change the gradient's memory. Autograd may pass one
gradient to both terms of an addition, so the backward pass may read that memory again.

[Note: guards] An update takes guards, float32 scalars on the parameter's device. Unless all guards are finite, it
changes nothing: no weights, residue or moments. The decision stays on the device. So `num_updates` counts every call,
and the caller subtracts skipped updates when it reads the guards. The guard of a gradient is its largest magnitude, or
a sum of squares if the rule computes one anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import Self

from ds_zo.config import AdaLOMOParams, LOMOParams
from ds_zo.ops import formats, rng

OFFSET_ALIGNMENT = 1024
"""Offsets of parameters are multiples of this number. Then all elements of one kernel program share the counter words
of their rounding bits, except the lowest."""
_ADAMW_EPS = 1e-8


class Dither(NamedTuple):
    """Position of an update in the stream of rounding bits. It is the same on every rank in the same step."""

    step: int
    offset: int
    """Position of the first updated element among the model's elements, with each parameter padded to a multiple of
    OFFSET_ALIGNMENT. A whole parameter starts at a multiple of OFFSET_ALIGNMENT, a rank's shard at a multiple of 8."""
    seed: int = 0


class Factors(NamedTuple):
    """Factors of an update: AdaLOMO's normalisation of a gradient."""

    scale: torch.Tensor | None = None
    """A scalar."""
    rows: torch.Tensor | None = None
    """One for each row. None for vectors and scalars."""
    cols: torch.Tensor | None = None
    """One for each column, or for each element of a vector."""


NO_FACTORS = Factors()


class _SavedMoments:
    """Saves and loads dataclasses of tensors and numbers."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], *, device: torch.device) -> Self:
        return cls(**{k: v.to(device, copy=True) if isinstance(v, torch.Tensor) else v for k, v in state.items()})


@dataclass
class FactoredMoments(_SavedMoments):
    """AdaLOMO's second moments: mean squares of a gradient's rows and columns, or of each element of a vector."""

    rows: torch.Tensor | None
    """Has the shape p.shape[:-1]; None for vectors and scalars."""
    cols: torch.Tensor
    """Has the shape p.shape[:-2] + p.shape[-1:]."""
    num_updates: int = 0

    @classmethod
    def zeros(cls, p: torch.Tensor) -> FactoredMoments:
        new = p.new_zeros
        if p.ndim < 2:
            return cls(None, new(p.shape, dtype=torch.float32))
        cols = new((*p.shape[:-2], p.shape[-1]), dtype=torch.float32)
        return cls(new(p.shape[:-1], dtype=torch.float32), cols)


@dataclass
class AdamMoments(_SavedMoments):
    """AdamW's moments of a parameter."""

    mean: torch.Tensor
    mean_square: torch.Tensor
    num_updates: int = 0

    @classmethod
    def zeros(cls, p: torch.Tensor) -> AdamMoments:
        return cls(p.new_zeros(p.shape, dtype=torch.float32), p.new_zeros(p.shape, dtype=torch.float32))


def sgd_update_(
    p: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    decay: float = 1.0,
    coef: torch.Tensor | None = None,
    clip_value: float | None = None,
    dither: Dither | None = None,
    residue: torch.Tensor | None = None,
    guards: Sequence[torch.Tensor] = (),
) -> None:
    """p <- round(decay * p - lr * clamp(coef * grad, -clip_value, clip_value)).

    `coef` is a float32 scalar on p's device. Without `dither`, rounding is to nearest. `residue` has p's shape and
    dtype and starts as zeros: it keeps the rounding error and adds it to the next update (Kahan). `guards`: at most
    two, see [Note: guards].
    """
    _apply_(
        p, grad, lr=lr, decay=decay, coef=coef, clip_value=clip_value, dither=dither, residue=residue, guards=guards
    )


def gradient_guard(grad: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a gradient. It is finite if all elements are ([Note: guards])."""
    return torch.linalg.vector_norm(grad, ord=math.inf, dtype=torch.float32)


@torch.no_grad()
def adalomo_update_(
    p: torch.Tensor,
    grad: torch.Tensor,
    moments: FactoredMoments,
    settings: AdaLOMOParams,
    *,
    lr: float,
    decay: float,
    coef: torch.Tensor | None = None,
    dither: Dither | None = None,
    residue: torch.Tensor | None = None,
    guards: Sequence[torch.Tensor] = (),
) -> torch.Tensor | None:
    """AdaLOMO's update (arXiv 2310.10195) of one parameter, which is normalised by itself.

    With g = clamp(coef * grad) and eps = `settings.adalomo_eps`: moving averages of mean(g^2) + eps[0] over rows and
    over columns make v, their outer product; u = g / sqrt(v), scaled down where its root mean square exceeds
    `settings.clip_threshold`; then p <- round(decay * p - lr * max(eps[1], rms(p)) * u).

    With `guards` the gradient is checked too. Returns the scalar that combines all guards, or None without `guards`;
    see [Note: guards].
    """
    eps, clip_value = settings.adalomo_eps, settings.clip_grad_value
    guard = gradient_guard(grad) if guards and clip_value is not None else None  # clamping would hide infinities
    if clip_value is not None:
        if coef is None:
            grad = grad.clamp(-clip_value, clip_value)
        else:
            grad = grad.clamp(-clip_value / coef, clip_value / coef)
    moments.num_updates += 1
    beta = 1.0 - moments.num_updates**settings.decay_rate
    square = 1.0 if coef is None else coef.square()
    if moments.rows is None:
        squares = grad.float().square()
        guard, is_applied = _combined_guard(guards, squares if guard is None else guard)
        _average_(moments.cols, squares * square + eps[0], beta, is_applied)
        rows, cols = None, moments.cols.rsqrt()
    else:
        row_sums, col_sums = _row_and_col_square_sums(grad)
        guard, is_applied = _combined_guard(guards, row_sums if guard is None else guard)
        _average_(moments.rows, row_sums.div_(grad.shape[-1]) * square + eps[0], beta, is_applied)
        _average_(moments.cols, col_sums.div_(grad.shape[-2]) * square + eps[0], beta, is_applied)
        rows = (moments.rows / moments.rows.mean(dim=-1, keepdim=True)).rsqrt_()
        cols = moments.cols.rsqrt()
    root_numel = math.sqrt(p.numel())
    update_rms = _factored_square_sum(grad, rows=rows, cols=cols, coef=coef).sqrt() / root_numel
    weight_rms = torch.linalg.vector_norm(p, dtype=torch.float32) / root_numel
    scale = weight_rms.clamp_(min=eps[1]) / (update_rms / settings.clip_threshold).clamp_(min=1.0)
    _apply_(
        p,
        grad,
        lr=lr,
        decay=decay,
        coef=coef,
        factors=Factors(scale, rows, cols),
        dither=dither,
        residue=residue,
        guards=() if guard is None else (guard,),
    )
    return guard


@torch.no_grad()
def adamw_update_(
    p: torch.Tensor,
    grad: torch.Tensor,
    moments: AdamMoments,
    settings: LOMOParams,
    *,
    lr: float,
    decay: float,
    coef: torch.Tensor | None = None,
    dither: Dither | None = None,
    residue: torch.Tensor | None = None,
    guards: Sequence[torch.Tensor] = (),
) -> torch.Tensor | None:
    """AdamW of `settings.adapter`, for the few parameters that get two full moments. Guards and result are as in
    `adalomo_update_`."""
    assert settings.adapter is not None
    betas = settings.adapter.betas
    guard, is_applied = _combined_guard(guards, gradient_guard(grad)) if guards else (None, None)
    g = _clipped(grad.float(), coef, settings.clip_grad_value)
    moments.num_updates += 1
    _set_(moments.mean, moments.mean.lerp(g, 1 - betas[0]), is_applied)
    _set_(moments.mean_square, (moments.mean_square * betas[1]).addcmul_(g, g, value=1 - betas[1]), is_applied)
    bias, bias_square = (1 - beta**moments.num_updates for beta in betas)
    denominator = (moments.mean_square / bias_square).sqrt_().add_(_ADAMW_EPS)
    direction = (moments.mean / bias).div_(denominator)
    held = () if guard is None else (guard,)
    _apply_(p, direction, lr=lr, decay=decay, dither=dither, residue=residue, guards=held)
    return guard


def _combined_guard(
    guards: Sequence[torch.Tensor], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """One scalar that is finite if all guards and all `values` (none negative) are, and whether it is finite."""
    if not guards:
        return None, None
    guard = sum(guards, values.sum())
    return guard, guard < math.inf


def _average_(average: torch.Tensor, value: torch.Tensor, beta: float, is_applied: torch.Tensor | None) -> None:
    if is_applied is None:
        average.mul_(beta).add_(value, alpha=1.0 - beta)
    else:
        _set_(average, (average * beta).add_(value, alpha=1.0 - beta), is_applied)


def _set_(target: torch.Tensor, value: torch.Tensor, is_applied: torch.Tensor | None) -> None:
    """Copies `value` to `target` if `is_applied` is None or true on the device ([Note: guards])."""
    if is_applied is None:
        target.copy_(value)
    else:
        torch.where(is_applied, value, target, out=target)


def _clipped(g: torch.Tensor, coef: torch.Tensor | None, clip_value: float | None) -> torch.Tensor:
    """coef * g, clamped; g itself without `coef` and `clip_value`."""
    if coef is not None:
        g = g * coef
    return g if clip_value is None else g.clamp(-clip_value, clip_value)


def _factored(g: torch.Tensor, rows: torch.Tensor | None, cols: torch.Tensor | None) -> torch.Tensor:
    """g[..., i, j] * rows[..., i] * cols[..., j]."""
    if rows is not None:
        g = g * rows.unsqueeze(-1)
    if cols is not None:
        g = g * (cols if g.ndim < 2 else cols.unsqueeze(-2))
    return g


def _row_and_col_square_sums(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if grad.is_cuda and grad.ndim == 2:
        from ds_zo.ops.triton_lomo import row_and_col_square_sums_triton

        return row_and_col_square_sums_triton(grad.contiguous())
    rows, cols = (torch.linalg.vector_norm(grad, dim=dim, dtype=torch.float32).square_() for dim in (-1, -2))
    return rows, cols


def _factored_square_sum(
    grad: torch.Tensor, *, rows: torch.Tensor | None, cols: torch.Tensor, coef: torch.Tensor | None
) -> torch.Tensor:
    if grad.is_cuda:
        from ds_zo.ops.triton_lomo import factored_square_sum_triton

        return factored_square_sum_triton(grad.contiguous(), rows=rows, cols=cols, coef=coef)
    g = grad.float() if coef is None else grad.float() * coef
    return _factored(g, rows, cols).square().sum()


def _apply_(
    p: torch.Tensor,
    direction: torch.Tensor,
    *,
    lr: float,
    decay: float,
    coef: torch.Tensor | None = None,
    clip_value: float | None = None,
    factors: Factors = NO_FACTORS,
    dither: Dither | None,
    residue: torch.Tensor | None = None,
    guards: Sequence[torch.Tensor] = (),
) -> None:
    """p <- round(decay * p - lr * factored(clamp(coef * direction)) + residue); residue <- the rounding error."""
    assert dither is None or residue is None
    assert len(guards) <= 2
    if p.is_cuda:
        from ds_zo.ops.triton_lomo import update_triton

        update_triton(
            p,
            direction,
            lr=lr,
            decay=decay,
            coef=coef,
            clip_value=clip_value,
            factors=factors,
            dither=None if dither is None else (dither.seed, dither.step, dither.offset),
            residue=residue,
            guards=guards,
        )
        return
    if not all(map(torch.isfinite, guards)):
        return
    with torch.no_grad():
        u = _factored(_clipped(direction.float(), coef, clip_value), factors.rows, factors.cols)
        if factors.scale is not None:
            u.mul_(factors.scale)
        x = p.float()  # p itself if p is float32
        if decay != 1.0:
            x.mul_(decay)
        x.add_(u, alpha=-lr)
        if residue is not None:
            x.add_(residue)
        if x is not p:
            _round_into(p, x, dither)
        if residue is not None:
            residue.copy_(x.sub_(p))


def _round_into(p: torch.Tensor, x: torch.Tensor, dither: Dither | None) -> None:
    if dither is None:
        p.copy_(x)
        return
    fmt = formats.storage_format(p.dtype)
    bits = rng.fold_dither(seed=dither.seed, step=dither.step, offset=dither.offset, numel=p.numel())
    addend = formats.dither_addend(bits, num_bits=rng.FOLD_DITHER_BITS, dropped_bits=fmt.dropped_bits)
    rounded = formats.round_to(fmt, np.ascontiguousarray(x.numpy()).reshape(-1), addend)
    p.copy_(torch.from_numpy(rounded).view(p.shape))  # exact: the values are representable in p's dtype
