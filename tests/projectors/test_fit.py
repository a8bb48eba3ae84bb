"""Fitting projectors, what they capture, and matrices carried between subspaces."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from ds_zo.projectors import (
    SparseProjector,
    apply_,
    captured_share,
    choose_dims,
    compress,
    fit,
    flatten_spectrum,
    relative_bias,
)
from ds_zo.projectors.fit import NUM_FLATTENINGS, _ProjectorFit
from tests.projectors.projector_cases import gradient, matrix, pair


@pytest.mark.parametrize("nonzeros", [2, 8])
def test_gradient_equals_autograd(nonzeros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By few and by many non-zeros, which take different ways to the same dot products, some rows at a time."""
    monkeypatch.setattr(sys.modules[fit.__module__], "TEMPORARY_NUMEL", 1000)
    G = matrix(24, 40).double()
    P, Q = pair(24, 40, 64 if nonzeros == 2 else 12, nonzeros)
    p, q = (x.dense().double().requires_grad_() for x in (P, Q))
    objective = (p @ p.t() @ G @ q @ q.t() - G).norm() / G.norm()
    objective.backward()
    projector_fit = _ProjectorFit(G.float(), P, Q, norm=G.norm().float(), lr=0.1, bias=1e9)
    for found, dense, projector in zip(projector_fit._evaluate(), (p, q), (P, Q), strict=True):
        assert dense.grad is not None
        expected = dense.grad.gather(1, projector.indices.long()).float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert float(projector_fit.best_bias) == pytest.approx(float(objective.detach()), rel=1e-5)


def test_fit_lowers_the_bias_on_a_held_out_gradient_too() -> None:
    G, held_out = gradient(128, 96, batch=1), gradient(128, 96, batch=2)
    P, Q = pair(128, 96, 48, 4)
    positions = [x.indices.clone() for x in (P, Q)]
    before = float(relative_bias(held_out, P, Q))
    report = fit(G, P, Q, steps=60, lr=0.2)
    assert report.reason == "steps" and report.steps == 60
    assert report.bias_after == pytest.approx(float(relative_bias(G, P, Q)))
    assert report.bias_after < 0.45 < 1.0 < report.bias_before
    # The best that a common scale alone could do: the rest is learned.
    scaled = _best_scale_bias(held_out, *pair(128, 96, 48, 4))
    assert float(relative_bias(held_out, P, Q)) < 0.75 * scaled < before
    assert all(torch.equal(x.indices, old) for x, old in zip((P, Q), positions, strict=True))


def _best_scale_bias(G: torch.Tensor, P: SparseProjector, Q: SparseProjector) -> float:
    p, q = P.dense(), Q.dense()
    A = p @ p.t() @ G @ q @ q.t()
    return float(((A * G).sum() / A.square().sum() * A - G).norm() / G.norm())


def test_half_precision_gradients_are_fitted_as_they_are() -> None:
    G = gradient(64, 64, batch=1)
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        P, Q = pair(64, 64, 24, 4)
        ends.append(fit((G * 1e-4).to(dtype), P, Q, steps=20, lr=0.2).bias_after)
    assert ends[1] == pytest.approx(ends[0], abs=0.02)


def test_fit_keeps_the_best_when_it_diverges() -> None:
    G = gradient(64, 64, batch=1)
    P, Q = pair(64, 64, 24, 4)
    report = fit(G, P, Q, steps=10, lr=100.0)
    assert report.bias_after < 1.0 < report.bias_before


def test_fit_stops_at_the_threshold() -> None:
    G = gradient(64, 64, batch=1)
    P, Q = pair(64, 64, 24, 4)
    report = fit(G, P, Q, steps=1000, lr=0.2, threshold=0.7)
    assert report.reason == "threshold" and 0 < report.steps < 200 and report.bias_after <= 0.7
    values = P.values.clone()
    assert fit(G, P, Q, steps=1000, lr=0.2, threshold=0.7).steps == 0
    assert torch.equal(P.values, values)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_degenerate_gradients_change_nothing(value: float) -> None:
    P, Q = pair(32, 32, 8, 2)
    expected = P.dense()
    assert fit(torch.full((32, 32), value), P, Q, steps=5, lr=0.1).reason == "degenerate"
    assert torch.equal(P.dense(), expected)


def test_the_captured_share_is_that_of_the_best_multiple() -> None:
    G, (P, Q) = gradient(40, 56, batch=1), pair(40, 56, 12, 3)
    projected = P.dense() @ P.dense().t() @ G @ Q.dense() @ Q.dense().t()
    share = captured_share(G, P, Q)
    assert share == pytest.approx(float(torch.cosine_similarity(projected.view(-1), G.view(-1), dim=0)) ** 2, rel=1e-3)
    P.set_values_(P.values * 3.0)
    assert captured_share(G, P, Q) == pytest.approx(share, rel=1e-3)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)])
def test_flattening_leaves_directions_and_brings_singular_values_together(shape: tuple[int, int]) -> None:
    U, _, Vh = torch.linalg.svd(gradient(*shape, batch=1), full_matrices=False)
    s = 1e-3 * 0.7 ** torch.arange(24)
    expected = s / s.norm()
    for _ in range(NUM_FLATTENINGS):
        expected = 1.5 * expected - 0.5 * expected**3
    torch.testing.assert_close(flatten_spectrum(U * s @ Vh), U * expected @ Vh, rtol=1e-3, atol=1e-4)
    assert float(s[0] / s[8]) > 15.0 and float(expected[0] / expected[8]) < 3.0
    assert torch.equal(flatten_spectrum(torch.zeros(shape)), torch.zeros(shape))
    assert flatten_spectrum(torch.full(shape, float("nan"))).isnan().all()


def test_dims_are_clamped_and_small_matrices_stay_dense() -> None:
    assert choose_dims(2048, 5504, 512) == (512, 512)
    assert choose_dims(192, 576, 512) is None  # SmolLM2's keys and values
    assert choose_dims(192, 2048, 512) == (192, 192)
    assert choose_dims(512, 512, 512) is None


def test_one_rate_does_for_all_sizes_of_values() -> None:
    """Values are the smaller, the more non-zeros there are and the smaller d is; a rate that ignores that diverges."""
    G = gradient(256, 192, batch=1)
    for dim, nonzeros in ((8, 4), (16, 16), (128, 2)):
        scaled = _best_scale_bias(G, *pair(256, 192, dim, nonzeros))
        assert fit(G, *pair(256, 192, dim, nonzeros), steps=20, lr=0.3).bias_after < 0.63 * scaled, (dim, nonzeros)


def test_an_update_is_as_large_as_the_rule_for_the_rate_says() -> None:
    """At lr 1, where AdamW's is 1: Adam's first direction is the gradient's sign."""
    G = matrix(96, 3) @ matrix(3, 64, seed=1)

    def update_rms() -> float:
        W = torch.zeros(G.shape)
        apply_(W, compress(G, P, Q).sign_(), P, Q, lr=1.0, rounding="nearest")
        return float(W.square().mean().sqrt())

    for dim in (16, 32):
        P, Q = (SparseProjector.draw(size, dim, 4, seed=0, stream=side) for side, size in enumerate(G.shape))
        assert update_rms() == pytest.approx(1.0, rel=0.2)
        fit(G, P, Q, steps=30, lr=0.1)
        assert update_rms() == pytest.approx(dim / math.sqrt(96 * 64), rel=0.25)
