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
calls decides their cost. So they are contiguous and take one call together, as small whole matrices in 16 bits do.
Decisions on a few numbers are made in Python.

[Note: full SIMD vectors] On the CPU torch's fused Adam computes the last `numel % width` elements of a tensor by scalar
code. `width` is the processor's vector width. On x86-64 with AVX2 or AVX-512 that code rounds differently from the
vector code. So the bits of an element would depend on the number of elements behind it in the same tensor. Streamed and
resident runs, and groups that lack a gradient, pass the same elements in different tensors. So a tensor's last elements
are copied to a full vector of the widest kind, and the vector code computes every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        self._views: dict[tuple[torch.Size, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def get(self, shapes: tuple[torch.Size, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Two lists of tensors of these shapes. They are valid until the next call."""
        numels = [math.prod(shape) for shape in shapes]
        if self._buffer.shape[1] < sum(numels):
            self._buffer = torch.empty(2, sum(numels))
            self._views.clear()
        if shapes not in self._views:
            rows = (row.split(numels) for row in self._buffer[:, : sum(numels)])
            first, second = ([x.view(shape) for x, shape in zip(row, shapes, strict=True)] for row in rows)
            self._views[shapes] = first, second
        return self._views[shapes]


@dataclass
class FlatTensors:
    """Float32 gradients that are contiguous one behind the other, their directions and their moments."""

    out: torch.Tensor
    grad: torch.Tensor
    moments: FlatMoments


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
    flat: FlatTensors | None = None,
) -> torch.Tensor:
    """Does `clip_` and `directions_` on the CPU, of tensors with contiguous memory in float32 or 16 bits. Returns
    norms.

    A gradient and its output have the same dtype. `known`: norms by index, which tensors in 16 bits need. `flat`: the
    first tensors once more ([Note: few torch calls]). Gradients in float32 are clipped in place; gradients in 16 bits
    are not changed."""
    norms = _host_norms(grads, known, factor)
    found = norms.tolist()
    if not all(map(math.isfinite, found)):
        torch._foreach_zero_(out)
        return norms
    wide = [k for k, grad in enumerate(grads) if grad.dtype is torch.float32]
    coefs = [1.0] * len(grads)
    if factor != 1.0 or (max_norm > 0 and max(found) + NORM_FLOOR > max_norm):
        coefs = _times(clip_coefs(norms, max_norm), factor).tolist()
        if wide:
            torch._foreach_mul_([grads[k] for k in wide], [coefs[k] for k in wide])
    num_flat = 0
    if flat is not None and _flat_directions_(flat, betas=betas, eps=eps):
        num_flat = len(flat.moments.parts)
    if others := wide[num_flat:]:
        wide_out, wide_grads = ([side[k] for k in others] for side in (out, grads))
        directions_(wide_out, wide_grads, [moments[k] for k in others], betas=betas, eps=eps)
    narrow = [k for k in range(len(grads)) if k not in wide]
    if narrow:
        torch._foreach_add_([moments[k].num_steps for k in narrow], 1.0)
    tensors = (
        _Narrow((out[k], grads[k], moments[k].mean, moments[k].mean_square), moments[k].num_steps, coefs[k])
        for k in narrow
    )
    for batch in _narrow_batches(tensors):
        _narrow_directions_(batch, betas=betas, eps=eps, scratch=scratch)
    return norms


def _host_norms(grads: list[torch.Tensor], known: Mapping[int, float], factor: float) -> torch.Tensor:
    """Norms of the gradients times `factor`."""
    asked = [k for k in range(len(grads)) if k not in known]
    norms = torch.stack(torch._foreach_norm([grads[k] for k in asked])) if asked else torch.empty(0)
    if known:
        by_index = {**known, **dict(zip(asked, norms.tolist(), strict=True))}
        norms = torch.tensor([by_index[k] for k in range(len(grads))])
    return _times(norms, factor)


def _flat_directions_(flat: FlatTensors, *, betas: tuple[float, float], eps: float) -> bool:
    """`directions_` of all tensors in one call for each chunk. False, and nothing is changed: they have made different
    numbers of steps."""
    whole = flat.moments.whole
    counts = whole.num_steps.tolist()
    if any(count != counts[0] for count in counts):
        return False
    whole.num_steps.add_(1.0)
    steps = [flat.moments.parts[0].num_steps]
    sides = flat.out, flat.grad, whole.mean, whole.mean_square
    numel = _chunk_numel(flat.out.numel())
    chunks = (x.split(numel) for x in sides) if numel < flat.out.numel() else ((x,) for x in sides)
    for out, grad, mean, mean_square in zip(*chunks, strict=True):
        out.zero_()
        adam_([out], [grad], [mean], [mean_square], steps, overflow=None, betas=betas, eps=eps)
    return True


@dataclass
class _Narrow:
    """A tensor in 16 bits, or a part of one."""

    sides: tuple[torch.Tensor, ...]
    """Direction, gradient, mean and mean square."""
    num_steps: torch.Tensor
    coef: float
    """A factor of the gradient."""

    @property
    def numel(self) -> int:
        return self.sides[0].numel()


def _narrow_batches(tensors: Iterable[_Narrow]) -> list[list[_Narrow]]:
    """Small tensors together ([Note: few torch calls]), and large ones in chunks ([Note: Adam in chunks])."""
    batches: list[list[_Narrow]] = []
    room = 0
    for tensor in tensors:
        num_parts = -(-tensor.numel // max(1, _chunk_numel(tensor.numel)))
        if num_parts > 1:
            numel = -(-tensor.numel // (num_parts * _ALIGNMENT)) * _ALIGNMENT  # equal parts but for the last
            parts = zip(*(side.view(-1).split(numel) for side in tensor.sides), strict=True)
            batches += [[_Narrow(part, tensor.num_steps, tensor.coef)] for part in parts]
            room = 0
        elif tensor.numel <= room:
            batches[-1].append(tensor)
            room -= tensor.numel
        else:
            batches.append([tensor])
            room = _CHUNK_NUMEL * torch.get_num_threads() - tensor.numel
    return batches


def _narrow_directions_(batch: list[_Narrow], *, betas: tuple[float, float], eps: float, scratch: HostScratch) -> None:
    """`directions_` of tensors in 16 bits, whose steps have been counted."""
    outs, grads, means, mean_squares = map(list, zip(*(tensor.sides for tensor in batch), strict=True))
    steps, coefs = [tensor.num_steps for tensor in batch], [tensor.coef for tensor in batch]
    wide, directions = scratch.get(tuple(grad.shape for grad in grads))
    torch._foreach_copy_(wide, grads)
    torch._foreach_zero_(directions)
    if any(coef != 1.0 for coef in coefs):
        torch._foreach_mul_(wide, coefs)
    adam_(directions, wide, means, mean_squares, steps, overflow=None, betas=betas, eps=eps)
    torch._foreach_copy_(outs, directions)


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
