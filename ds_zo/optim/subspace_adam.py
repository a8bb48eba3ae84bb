"""Adam without weights: it turns gradients into directions, and the caller moves the weights.

One fused torch kernel serves a list of tensors, on the CPU (with all threads of the caller) and on CUDA. It needs no
compilation, and the host reads no value from the device.

[Note: Adam in chunks] On many cores, memory bandwidth limits Adam. Gradients in 16 bits are converted to float32;
directions start as zeros and are converted back. Over whole matrices each of these is a pass through memory, 52 bytes a
parameter in all. In chunks that fit the cores' caches, only gradients, directions and moments are read and written
once: 22 bytes. The norm, which Adam needs first, takes 2 bytes more if the device has not computed it. Elements are
independent, so chunks change no bit of a direction. They change the order in which norms are summed.

[Note: few torch calls] Every torch call releases Python's interpreter lock. It then has to wait for the lock, which the
thread that launches the model's kernels holds most of the time. The d x d sums of a layer are small, so the number of
calls decides their cost. So they are contiguous and take one call together, and decisions on a few numbers are made in
Python.

[Note: full SIMD vectors] On the CPU torch's fused Adam computes the last `numel % width` elements of a tensor by scalar
code. `width` is the processor's vector width. On x86-64 with AVX2 or AVX-512 that code rounds differently from the
vector code. So the bits of an element would depend on the number of elements behind it in the same tensor. Streamed and
resident runs, and groups that lack a gradient, pass the same elements in different tensors. So a tensor's last elements
are copied to a full vector of the widest kind, and the vector code computes every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NORM_FLOOR = 1e-6
"""Added to norms that clipping divides by."""

_CHUNK_NUMEL = 1 << 17
"""Elements of a chunk per core. Its gradients and directions in float32 take 1 MiB, which fits the core's own cache.
Smaller chunks would make the threads synchronise too often."""
_ALIGNMENT = 64
"""Elements that the size of a chunk is a multiple of."""
_VECTOR_NUMEL = 16
"""Float32 elements of an AVX-512 vector, the widest that torch's CPU kernels use. Narrower widths divide it."""
MIN_THREADS_FOR_CHUNKS = 8
"""Threads from which memory bandwidth limits Adam, by a count of bytes. One or two threads are limited by arithmetic:
there, chunks cost a third of the speed (measured)."""


@dataclass
class Moments:
    """Adam's moments of one tensor, in float32."""

    mean: torch.Tensor
    mean_square: torch.Tensor
    num_steps: torch.Tensor
    """A float32 scalar on the same device, so that a step that is skipped on the device need not be counted."""

    @classmethod
    def zeros(cls, shape: Sequence[int], device: torch.device | str) -> Moments:
        sizes = tuple(shape), tuple(shape), ()
        return cls(*(torch.zeros(size, device=device) for size in sizes))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in vars(self).items():
            value.copy_(state[name])

    def reset(self) -> None:
        for value in vars(self).values():
            value.zero_()

    @property
    def num_bytes(self) -> int:
        return self.mean.nbytes + self.mean_square.nbytes


@dataclass
class FlatMoments:
    """Moments of contiguous tensors. `whole` has the moments of all of them, and one count of steps for each."""

    whole: Moments
    parts: list[Moments]
    """Views of `whole`, one for each tensor."""

    @classmethod
    def zeros(
        cls,
        numel: int,
        num_parts: int,
        view: Callable[[int, torch.Tensor], torch.Tensor],
        *,
        device: torch.device | str = "cpu",
    ) -> FlatMoments:
        """`view(i, flat)` returns the i-th tensor's part of a flat tensor."""
        whole = Moments(*(torch.zeros(n, device=device) for n in (numel, numel, num_parts)))
        parts = [
            Moments(view(i, whole.mean), view(i, whole.mean_square), num_steps)
            for i, num_steps in enumerate(whole.num_steps.unbind())
        ]
        return cls(whole, parts)


@torch.no_grad()
def clip_(grads: list[torch.Tensor], max_norm: float, *, factor: float = 1.0) -> torch.Tensor:
    """Multiplies all tensors by `factor`, and scales each to a norm of at most `max_norm` (0: no limit). Returns the
    norms in between."""
    norms = _times(torch.stack(torch._foreach_norm(grads)), factor)
    if max_norm > 0 or factor != 1.0:
        coefs = _times(clip_coefs(norms, max_norm), factor)
        if norms.is_cuda or bool((coefs != 1.0).any()):  # on the CPU the test is free, and most steps clip nothing
            torch._foreach_mul_(grads, list(coefs.unbind()))
    return norms


def _times(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1.0 else values * factor


def clip_coefs(norms: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Factors that scale tensors to norms of at most `max_norm` (0: no limit)."""
    return (max_norm / (norms + NORM_FLOOR)).clamp_(max=1.0) if max_norm > 0 else torch.ones_like(norms)


def _chunk_numel(numel: int) -> int:
    """Elements that Adam of this thread updates at a time, of a tensor of `numel` ([Note: Adam in chunks])."""
    num_threads = torch.get_num_threads()
    return min(numel, _CHUNK_NUMEL * num_threads) if num_threads >= MIN_THREADS_FOR_CHUNKS else numel


class HostScratch:
    """Float32 memory in which one thread converts gradients and directions in 16 bits. It grows on demand."""

    def __init__(self) -> None:
        self._buffer = torch.empty(2, 0)

    def get(self, numel: int) -> torch.Tensor:
        """Two rows of `numel` elements."""
        if self._buffer.shape[1] < numel:
            self._buffer = torch.empty(2, numel)
        return self._buffer[:, :numel]


@torch.no_grad()
def flat_directions_(
    out: torch.Tensor,
    grad: torch.Tensor,
    moments: FlatMoments,
    *,
    parts: tuple[list[torch.Tensor], list[torch.Tensor]],
    max_norm: float,
    factor: float = 1.0,
    betas: tuple[float, float],
    eps: float,
) -> torch.Tensor:
    """Does `clip_` and `directions_` of contiguous float32 tensors on the CPU. Returns their norms.

    `parts`: the single tensors as views of `out` and of `grad`. See [Note: few torch calls]."""
    outs, grads = parts
    norms = _times(torch.stack(torch._foreach_norm(grads)), factor)
    found = norms.tolist()
    if not all(map(math.isfinite, found)):
        out.zero_()
        return norms
    if factor != 1.0 or (max_norm > 0 and max(found) + NORM_FLOOR > max_norm):
        torch._foreach_mul_(grads, list(_times(clip_coefs(norms, max_norm), factor).unbind()))
    whole = moments.whole
    counts = whole.num_steps.add_(1.0).tolist()
    options: dict[str, Any] = {"overflow": None, "betas": betas, "eps": eps}
    if any(count != counts[0] for count in counts):
        out.zero_()
        states = zip(*((m.mean, m.mean_square, m.num_steps) for m in moments.parts), strict=True)
        adam_(outs, grads, *map(list, states), **options)
        return norms
    steps = [moments.parts[0].num_steps]
    chunks = (x.split(_chunk_numel(out.numel())) for x in (out, grad, whole.mean, whole.mean_square))
    for o, g, m, v in zip(*chunks, strict=True):
        o.zero_()
        adam_([o], [g], [m], [v], steps, **options)
    return norms


@torch.no_grad()
def host_directions_(
    out: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: Sequence[Moments],
    *,
    max_norm: float,
    factor: float = 1.0,
    betas: tuple[float, float],
    eps: float,
    scratch: HostScratch,
    known: Mapping[int, float],
) -> torch.Tensor:
    """Does `clip_` and `directions_` on the CPU, of tensors with contiguous memory in float32 or 16 bits. Returns
    norms.

    A gradient and its output have the same dtype. `known`: norms by index, which tensors in 16 bits need. Gradients in
    float32 are clipped in place; gradients in 16 bits are not changed."""
    wide = [k for k, grad in enumerate(grads) if grad.dtype is torch.float32]
    asked = [k for k in wide if k not in known]
    values = torch.stack(torch._foreach_norm([grads[k] for k in asked])).tolist() if asked else []
    by_index = {**known, **dict(zip(asked, values, strict=True))}
    found = [by_index[k] * factor for k in range(len(grads))]
    norms = torch.tensor(found)
    if not all(map(math.isfinite, found)):
        torch._foreach_zero_(out)
        return norms
    clips = factor != 1.0 or (max_norm > 0 and max(found) + NORM_FLOOR > max_norm)
    coefs = _times(clip_coefs(norms, max_norm), factor).tolist() if clips else [1.0] * len(grads)
    for k in wide:
        if coefs[k] != 1.0:
            grads[k].mul_(coefs[k])
    if wide:
        wide_out, wide_grads = ([side[k] for k in wide] for side in (out, grads))
        directions_(wide_out, wide_grads, [moments[k] for k in wide], betas=betas, eps=eps)
    for k in (k for k in range(len(grads)) if k not in wide):
        _narrow_directions_(out[k], grads[k], moments[k], coef=coefs[k], betas=betas, eps=eps, scratch=scratch)
    return norms


def _narrow_directions_(
    out: torch.Tensor,
    grad: torch.Tensor,
    moments: Moments,
    *,
    coef: float,
    betas: tuple[float, float],
    eps: float,
    scratch: HostScratch,
) -> None:
    """`directions_` of one 16-bit tensor, with its gradient scaled by `coef`, in chunks ([Note: Adam in chunks])."""
    moments.num_steps.add_(1.0)
    num_parts = -(-grad.numel() // max(1, _chunk_numel(grad.numel())))
    numel = -(-grad.numel() // (num_parts * _ALIGNMENT)) * _ALIGNMENT  # equal parts but for the last
    sides = (side.view(-1).split(numel) for side in (out, grad, moments.mean, moments.mean_square))
    for o, g, mean, mean_square in zip(*sides, strict=True):
        wide, direction = scratch.get(g.numel())
        wide.copy_(g)
        direction.zero_()
        if coef != 1.0:
            wide.mul_(coef)
        states = [mean], [mean_square], [moments.num_steps]
        adam_([direction], [wide], *states, overflow=None, betas=betas, eps=eps)
        o.copy_(direction)


@torch.no_grad()
def directions_(
    out: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: Sequence[Moments],
    *,
    betas: tuple[float, float],
    eps: float,
    norms: torch.Tensor | None = None,
) -> None:
    """out <- m / (sqrt(v) + eps), bias-corrected, after the moments have taken in `grads`; all float32.

    If one of `norms` is not finite, the moments stay and the directions are zero. Without `norms`, all must be finite.
    """
    steps = [m.num_steps for m in moments]
    overflow = None
    if norms is None:
        torch._foreach_add_(steps, 1.0)
    else:
        overflow = _count_step(steps, norms)
    torch._foreach_zero_(out)
    means, mean_squares = [m.mean for m in moments], [m.mean_square for m in moments]
    adam_(out, grads, means, mean_squares, steps, overflow=overflow, betas=betas, eps=eps)


def _count_step(steps: list[torch.Tensor], norms: torch.Tensor) -> torch.Tensor:
    """Counts the step if all norms are finite. Returns 0 then, and 1 for a skipped step, as a float32 scalar."""
    overflow = (~norms.isfinite().all()).to(torch.float32)
    torch._foreach_add_(steps, 1.0 - overflow)
    return overflow


def adam_(
    zeros: list[torch.Tensor],
    grads: list[torch.Tensor],
    means: list[torch.Tensor],
    mean_squares: list[torch.Tensor],
    steps: list[torch.Tensor],
    *,
    overflow: torch.Tensor | None,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Runs the fused kernel. `zeros`: the outputs, which must be zero. `overflow` 1: it does nothing. See
    [Note: full SIMD vectors]."""
    sides = zeros, grads, means, mean_squares
    tails: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    if not zeros[0].is_cuda and any(zero.numel() % _VECTOR_NUMEL for zero in zeros):
        sides, steps, tails = _in_full_vectors(sides, steps)
    torch._fused_adamw_(
        *sides,
        [],
        steps,
        lr=-1.0,  # so that the kernel adds the direction to zero
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=overflow,
    )
    for (zero, _, mean, mean_square), vectors in tails:
        for target, vector in zip((zero, mean, mean_square), vectors[[0, 2, 3]].unbind(), strict=True):
            target.copy_(vector[: target.numel()])


AdamTensors = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]
"""Lists of directions, gradients, means and mean squares."""


def _in_full_vectors(
    sides: AdamTensors, steps: list[torch.Tensor]
) -> tuple[AdamTensors, list[torch.Tensor], list[tuple[list[torch.Tensor], torch.Tensor]]]:
    """The same elements in tensors of full vectors. The last result pairs the elements that were copied with the
    copies."""
    found: AdamTensors = [], [], [], []
    found_steps: list[torch.Tensor] = []
    tails = []
    for *tensors, step in zip(*sides, steps, strict=True):
        flat = [tensor.view(-1) for tensor in tensors]
        cut = flat[0].numel() // _VECTOR_NUMEL * _VECTOR_NUMEL
        parts = [tuple(x[:cut] for x in flat)] if cut else []
        if cut < flat[0].numel():
            vectors = flat[0].new_zeros(len(flat), _VECTOR_NUMEL)
            for vector, x in zip(vectors, flat, strict=True):
                vector[: x.numel() - cut].copy_(x[cut:])
            parts.append(vectors.unbind())
            tails.append(([x[cut:] for x in flat], vectors))
        for part in parts:
            found_steps.append(step)
            for side, tensor in zip(found, part, strict=True):
                side.append(tensor)
    return found, found_steps, tails


@torch.no_grad()
def undo_moments_(grads: list[torch.Tensor], moments: Sequence[Moments], *, betas: tuple[float, float]) -> None:
    """Restores the moments before an update by finite `grads` (after clipping), exactly but for rounding."""
    for grad, m in zip(grads, moments, strict=True):
        m.mean.sub_(grad, alpha=1 - betas[0]).div_(betas[0] or 1.0)
        m.mean_square.addcmul_(grad, grad, value=betas[1] - 1).div_(betas[1] or 1.0).clamp_(min=0.0)
        m.num_steps.sub_(1.0)
        if float(m.num_steps) == 0:
            m.reset()
