"""Adam on the CPU in chunks is Adam over whole tensors."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

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
from tests.helpers.torch_threads import threads

ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}


Shapes = list[tuple[int, int]]


def views(shapes: Shapes, flat: torch.Tensor) -> list[torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def flat_moments_of(shapes: Shapes) -> FlatMoments:
    numel = sum(math.prod(shape) for shape in shapes)
    return FlatMoments.zeros(numel, len(shapes), lambda i, flat: views(shapes, flat)[i])


def train_group(
    flat_shapes: Shapes, others: list[tuple[tuple[int, int], torch.dtype]], *, max_norm: float, factor: float, seed: int
) -> bool:
    """Makes five steps of a group together and tensor by tensor, and compares all bits. One step is skipped, and one
    tensor loses its moments. Returns whether a gradient was clipped."""
    generator = torch.Generator().manual_seed(seed)
    flat_moments = flat_moments_of(flat_shapes)
    moments = [*flat_moments.parts, *(Moments.zeros(shape, "cpu") for shape, _ in others)]
    reference = [Moments.zeros(shape, "cpu") for shape in (*flat_shapes, *(shape for shape, _ in others))]
    scratch, clipped = HostScratch(), False
    for step in range(5):
        flat_grad = torch.randn(flat_moments.whole.mean.numel(), generator=generator)
        grads = views(flat_shapes, flat_grad)
        grads += [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in others]
        if step == 2:
            grads[seed % len(grads)].view(-1)[0] = math.nan
        if step == 4:
            moments[seed % len(grads)].reset()
            reference[seed % len(grads)].reset()
        wide = [grad.float().clone() for grad in grads]
        in_16_bits = [k for k, grad in enumerate(grads) if grad.dtype is not torch.float32]
        found_norms = torch._foreach_norm(wide)
        norms = clip_(wide, max_norm, factor=factor)
        clipped |= 0 < max_norm < float(norms.nan_to_num().max())
        expected = [torch.empty_like(grad) for grad in wide]
        directions_(expected, wide, reference, norms=norms, **ADAM)
        flat_out = torch.full_like(flat_grad, 7.0)
        out = [*views(flat_shapes, flat_out), *(torch.full_like(grad, 7.0) for grad in grads[len(flat_shapes) :])]
        found = host_directions_(
            out,
            grads,
            moments,
            max_norm=max_norm,
            factor=factor,
            scratch=scratch,
            known={k: float(found_norms[k]) for k in in_16_bits},
            flat=FlatTensors(flat_out, flat_grad, flat_moments) if flat_shapes else None,
            **ADAM,
        )
        states = [list(vars(m).values()) for m in (*moments, *reference)]
        expected_states = states[len(moments) :]
        pairs = [(found, norms), *zip(out, (x.to(o.dtype) for x, o in zip(expected, out, strict=True)), strict=True)]
        for own, other in zip(states[: len(moments)], expected_states, strict=True):
            pairs += zip(own, other, strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}, step {step}")
    assert [int(m.num_steps) for m in moments] == [1 if k == seed % len(moments) else 4 for k in range(len(moments))]
    return clipped


@pytest.mark.parametrize("num_threads", [1, 2])
def test_groups_of_all_kinds_are_updated_as_one_by_one(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random groups of contiguous float32 tensors, other float32 tensors and tensors in 16 bits, in chunks or whole."""
    clipped = False
    for index in range(20):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        monkeypatch.setattr(subspace_adam, "_CHUNK_NUMEL", rng.choice([64, 320, 4096]))
        monkeypatch.setattr(subspace_adam, "MIN_THREADS_FOR_CHUNKS", rng.choice([1, 8]))
        flat_shapes = [(9, 16), *((rng.randint(1, 9), 16) for _ in range(rng.randint(0, 3)))] if index % 4 else []
        dtypes = [rng.choice([torch.float32, torch.bfloat16, torch.float16]) for _ in range(rng.randint(1, 5))]
        others = [((rng.randint(1, 30), rng.randint(1, 30)), dtype) for dtype in dtypes]
        with threads(num_threads):
            limits = {"max_norm": 8.0 * (index % 2), "factor": rng.choice([1.0, 0.5, 2.0])}
            clipped |= train_group(flat_shapes, others, **limits, seed=seed)
    assert clipped


def test_a_group_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the contiguous tensors as one tensor, and one for the small tensors in 16 bits."""
    sizes: list[list[int]] = []
    adam_ = subspace_adam.adam_

    def counted(zeros: list[torch.Tensor], *args: Any, **options: Any) -> None:
        sizes.append([zero.numel() for zero in zeros])
        adam_(zeros, *args, **options)

    monkeypatch.setattr(subspace_adam, "adam_", counted)
    shapes, whole_shapes = [(8, 16), (16, 16)], [(4, 16), (2, 16)]
    flat_moments, flat_grad = flat_moments_of(shapes), torch.ones(384)
    flat = FlatTensors(torch.empty_like(flat_grad), flat_grad, flat_moments)
    whole = [torch.ones(shape, dtype=torch.bfloat16) for shape in whole_shapes]
    host_directions_(
        [*views(shapes, flat.out), *map(torch.empty_like, whole)],
        [*views(shapes, flat.grad), *whole],
        [*flat_moments.parts, *(Moments.zeros(shape, "cpu") for shape in whole_shapes)],
        max_norm=0.0,
        scratch=HostScratch(),
        known={2: 8.0, 3: 32**0.5},
        flat=flat,
        **ADAM,
    )
    assert sizes == [[384], [64, 32]]


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
