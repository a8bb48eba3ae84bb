"""Update rules by themselves."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from ds_zo.config import AdaLOMOParams, LOMOParams, LossScale
from ds_zo.optim import (
    AdamMoments,
    Dither,
    FactoredMoments,
    LossScaler,
    adalomo_update_,
    adamw_update_,
    gradient_guard,
    sgd_update_,
)


def test_float32_is_torchs_sgd_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(1000, generator=generator) for _ in range(2))
    expected = torch.nn.Parameter(p.clone())
    expected.grad = g.clone()
    torch.optim.SGD([expected], lr=0.0371).step()
    sgd_update_(p, g, lr=0.0371)
    assert torch.equal(p, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_unbiased_and_lands_on_neighbours(dtype: torch.dtype) -> None:
    start, step = 1.0, 0.3 * (2**-8 if dtype is torch.bfloat16 else 2**-11)
    sums = torch.zeros(4096, dtype=torch.float64)
    for number in range(40):
        p = torch.full((4096,), start, dtype=dtype)
        sgd_update_(p, torch.ones(4096, dtype=dtype), lr=step, dither=Dither(step=number, offset=1024))
        assert set(p.tolist()) == {1.0, 1.0 - step / 0.3}
        sums += p.double()
    moved = start - sums / 40
    assert moved.mean().item() == pytest.approx(step, rel=0.02)
    assert 0.05 < (moved / step).std() < 1  # each element has draws of its own every step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residue_keeps_what_nearest_rounding_loses(dtype: torch.dtype) -> None:
    p, lost = (torch.ones(100, dtype=dtype) for _ in range(2))
    residue = torch.zeros_like(p)
    step = 2.0**-14
    for _ in range(300):
        sgd_update_(p, torch.ones(100, dtype=dtype), lr=step, residue=residue)
        sgd_update_(lost, torch.ones(100, dtype=dtype), lr=step)
    assert (lost == 1.0).all()
    torch.testing.assert_close(
        p.double() + residue.double(), torch.full((100,), 1 - 300 * step).double(), rtol=0, atol=step
    )
    assert residue.abs().max() <= 2.0**-9


def test_dither_depends_on_step_and_offset_alone() -> None:
    def rounded(**where: int) -> torch.Tensor:
        p = torch.ones(2048, dtype=torch.bfloat16)
        sgd_update_(p, torch.full_like(p, 0.5), lr=2**-9, dither=Dither(**where))
        return p

    assert torch.equal(rounded(step=3, offset=0), rounded(step=3, offset=0))
    assert not torch.equal(rounded(step=3, offset=0), rounded(step=4, offset=0))
    assert torch.equal(rounded(step=3, offset=0)[1024:], rounded(step=3, offset=1024)[:1024])


def test_adamw_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(50, generator=generator)
    expected = torch.nn.Parameter(p.clone())
    theirs = torch.optim.AdamW([expected], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    moments, settings = AdamMoments.zeros(p), LOMOParams.model_validate({"adapter": {"betas": (0.8, 0.9)}})
    for _ in range(10):
        g = torch.randn(50, generator=generator)
        expected.grad = g.clone()
        theirs.step()
        adamw_update_(p, g, moments, settings, lr=0.01, decay=1 - 0.01 * 0.1)
    torch.testing.assert_close(p, expected.detach(), rtol=1e-6, atol=1e-6)


def update(
    rule: str, p: torch.Tensor, g: torch.Tensor, moments: Any, *, clip_value: float | None, **given: Any
) -> None:
    given |= {"lr": 0.1, "decay": 0.9}
    if rule == "adalomo":
        adalomo_update_(p, g, moments, AdaLOMOParams(clip_grad_value=clip_value), **given)
    elif rule == "adamw":
        settings = LOMOParams.model_validate({"adapter": {}, "clip_grad_value": clip_value})
        adamw_update_(p, g, moments, settings, **given)
    else:
        guards = [*given.pop("guards", []), gradient_guard(g)]
        sgd_update_(p, g, guards=guards, clip_value=clip_value, **given)


@pytest.mark.parametrize("clip_value", [None, 0.5])
@pytest.mark.parametrize("rule", ["sgd", "adalomo", "adamw"])
@pytest.mark.parametrize("shape", [(40,), (6, 7), (2, 3, 5)])
def test_a_guard_that_is_not_finite_keeps_weights_and_moments(
    shape: tuple[int, ...], rule: str, clip_value: float | None
) -> None:
    """Whether it is the loss's or the gradient's; and finite ones change no bit of what is made without."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(shape, generator=generator)
    moments: Any = {"adalomo": FactoredMoments, "adamw": AdamMoments}.get(rule, AdamMoments).zeros(p)
    plain, of_plain = p.clone(), copy.deepcopy(moments)
    for step in range(4):
        g = torch.randn(shape, generator=generator)
        for loss, spoilt in ((math.nan, 0.0), (0.0, math.nan), (0.0, -math.inf)):
            bad = g.clone()
            bad.view(-1)[-1] += spoilt
            before = p.clone()
            tensors = {name: v.clone() for name, v in vars(moments).items() if isinstance(v, torch.Tensor)}
            update(rule, p, bad, moments, clip_value=clip_value, guards=[torch.tensor(loss)])
            assert torch.equal(p, before)
            assert all(torch.equal(getattr(moments, name), value) for name, value in tensors.items())
            moments.num_updates = step  # which the caller counts
        update(rule, p, g, moments, clip_value=clip_value, guards=[torch.tensor(0.0)])
        update(rule, plain, g, of_plain, clip_value=clip_value)
        assert torch.equal(p, plain)


def test_the_loss_scale_resumes() -> None:
    settings = LossScale(0.0, 4, 3, 2, 1, ("hysteresis",))
    whole, resumed = LossScaler(settings), LossScaler(settings)
    overflows = [True, False, False, True, True, False, False, False, False, True]
    for overflow in overflows[:5]:
        whole.update(overflow=overflow)
    resumed.load_state_dict(whole.state_dict())
    scales = []
    for scaler in (whole, resumed):
        for overflow in overflows[5:]:
            scaler.update(overflow=overflow)
        scales.append(scaler.scale)
    assert scales[0] == scales[1] == 8.0
