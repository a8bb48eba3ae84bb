"""Adam on the CPU in chunks is Adam over whole tensors."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch_threads import threads

from ds_zo.optim import subspace_adam
from ds_zo.optim.subspace_adam import (
    FlatMoments,
    FlatTensors,
    HostScratch,
    Moments,
    clip_,
    directions_,
    host_directions_,
)

SHAPES = [(37, 29), (5,), (64, 10), (1, 700)]
DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}


def some_gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=generator).to(d) for s, d in zip(SHAPES, DTYPES, strict=True)]


def whole(grads: list[torch.Tensor], moments: list[Moments], norms: torch.Tensor) -> list[torch.Tensor]:
    wide = [grad.float() for grad in grads]
    out = [torch.empty_like(grad) for grad in wide]
    directions_(out, wide, moments, norms=norms, **ADAM)
    return [direction.to(grad.dtype) for direction, grad in zip(out, grads, strict=True)]


@pytest.mark.parametrize("chunk_numel", [64, 448, 4096])
def test_chunks_change_no_bit(chunk_numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked, reference = ([Moments.zeros(shape, "cpu") for shape in SHAPES] for _ in range(2))
    monkeypatch.setattr(subspace_adam, "MIN_THREADS_FOR_CHUNKS", 1)
    monkeypatch.setattr(subspace_adam, "_CHUNK_NUMEL", chunk_numel // torch.get_num_threads())
    for step in range(4):
        grads = some_gradients(step)
        if step == 2:  # skipped, and not counted
            grads[2][3, 3] = math.inf
        norms = clip_([grad.float() for grad in grads], 0.0)
        expected = whole(grads, reference, norms)
        out = [torch.full_like(grad, 7.0) for grad in grads]
        known = {k: float(norms[k]) for k in (0, 2, 3)}
        found = host_directions_(out, grads, chunked, max_norm=0.0, scratch=HostScratch(), known=known, **ADAM)
        assert torch.equal(found, norms)
        for a, b in zip(chunked, reference, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    assert float(chunked[0].num_steps) == 3


def test_each_is_clipped_to_its_own_norm() -> None:
    moments = [Moments.zeros(shape, "cpu") for shape in SHAPES]
    grads = some_gradients(0)
    before = [grad.float() for grad in grads]
    out = [torch.empty_like(grad) for grad in grads]
    norms = clip_(before, 0.5)
    host_directions_(
        out, grads, moments, max_norm=0.5, scratch=HostScratch(), known=dict(enumerate(norms.tolist())), **ADAM
    )
    for m, grad in zip(moments, before, strict=True):
        torch.testing.assert_close(m.mean, grad * (1 - ADAM["betas"][0]))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_groups_of_all_kinds_are_updated_as_one_by_one(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random groups of contiguous float32 tensors, vectors and tensors in 16 bits: in chunks or whole, clipped, with
    a step that is skipped, and with a tensor that has made fewer steps than others."""
    seed = random.randrange(2**32)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(20):
        monkeypatch.setattr(subspace_adam, "_CHUNK_NUMEL", rng.choice([64, 320, 4096]))
        monkeypatch.setattr(subspace_adam, "MIN_THREADS_FOR_CHUNKS", rng.choice([1, 8]))
        flat_shapes = [(rng.randint(1, 9), 16) for _ in range(rng.randint(0, 4))]
        other_shapes = [(rng.randint(1, 30), rng.randint(1, 30)) for _ in range(rng.randint(0, 5))]
        shapes = [*flat_shapes, *other_shapes] or [(3, 5)]
        dtypes = [
            torch.float32 if k < len(flat_shapes) else rng.choice([torch.float32, torch.bfloat16, torch.float16])
            for k in range(len(shapes))
        ]
        sizes = [math.prod(shape) for shape in flat_shapes]

        def view(i: int, buffer: torch.Tensor, sizes=sizes, shapes=shapes) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return buffer.split(sizes)[i].view(shapes[i])

        flat_moments = FlatMoments.zeros(sum(sizes), len(sizes), view)
        others = [Moments.zeros(shape, "cpu") for shape in shapes[len(sizes) :]]
        moments, reference = [*flat_moments.parts, *others], [Moments.zeros(shape, "cpu") for shape in shapes]
        scratch, max_norm, factor = HostScratch(), rng.choice([0.0, 8.0]), rng.choice([1.0, 0.5])
        with threads(num_threads):
            for step in range(5):
                buffer = torch.randn(sum(sizes), generator=generator)
                grads = [view(k, buffer) for k in range(len(sizes))]
                grads += [
                    torch.randn(shape, generator=generator).to(dtype)
                    for shape, dtype in list(zip(shapes, dtypes, strict=True))[len(sizes) :]
                ]
                if step == 2:
                    rng.choice(grads).view(-1)[0] = math.nan
                if step == 4:
                    k = rng.randrange(len(shapes))
                    moments[k].reset()
                    reference[k].reset()
                expected_grads = [grad.float().clone() for grad in grads]
                known = {
                    k: float(norm)
                    for k, norm in enumerate(torch._foreach_norm(expected_grads))
                    if dtypes[k] is not torch.float32
                }
                norms = clip_(expected_grads, max_norm, factor=factor)
                expected = [torch.empty(shape) for shape in shapes]
                directions_(expected, expected_grads, reference, norms=norms, **ADAM)
                out_buffer = torch.full_like(buffer, 7.0)
                out = [view(k, out_buffer) for k in range(len(sizes))]
                out += [torch.full_like(grad, 7.0) for grad in grads[len(sizes) :]]
                flat = FlatTensors(out_buffer, buffer, flat_moments) if sizes else None
                options = {"max_norm": max_norm, "factor": factor, "scratch": scratch, "known": known, "flat": flat}
                found = host_directions_(out, grads, moments, **options, **ADAM)  # type: ignore[arg-type]
                torch.testing.assert_close(found, norms, rtol=1e-6, atol=0, equal_nan=True)
                for a, b in zip(out, expected, strict=True):
                    torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=0, msg=f"seed {seed}")
                for m, n in zip(moments, reference, strict=True):
                    for x, y in zip(vars(m).values(), vars(n).values(), strict=True):
                        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=f"seed {seed}")


def test_the_bits_of_an_element_do_not_depend_on_its_place() -> None:
    """Neither on how many elements stand before or behind it; see [Note: full SIMD vectors]."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    numel = 997
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(3, numel, generator=generator)
    for num_threads in (1, 2):
        with threads(num_threads):
            together = Moments.zeros((numel,), "cpu")
            expected = torch.empty(numel)
            cuts = sorted({0, numel, *(rng.randrange(numel) for _ in range(40))})
            pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
            apart = [Moments.zeros((piece.stop - piece.start,), "cpu") for piece in pieces]
            for grad in grads:
                directions_([expected], [grad], [together], **ADAM)
                found = [torch.empty(piece.stop - piece.start) for piece in pieces]
                directions_(found, [grad[piece] for piece in pieces], apart, **ADAM)
                assert torch.equal(torch.cat(found), expected), f"seed {seed}"
            assert torch.equal(torch.cat([m.mean for m in apart]), together.mean), f"seed {seed}"
            assert torch.equal(torch.cat([m.mean_square for m in apart]), together.mean_square), f"seed {seed}"
