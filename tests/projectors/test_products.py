"""Products with sparse projectors against dense algebra, on the CPU."""

from __future__ import annotations

import pytest
import torch

from ds_zo.optim import Dither, sgd_update_
from ds_zo.projectors import Compression, SparseProjector, apply_, batches, compress, relative_bias, workspace
from ds_zo.projectors.products import product, transpose_product
from tests.projectors.projector_cases import matrix, pair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(48, 80, 16, 4), (31, 17, 8, 3), (20, 64, 20, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_compress_equals_dense_algebra(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    P, Q = pair(*shape)
    G = matrix(*shape[:2], dtype)
    S = compress(G, P, Q)
    assert S.dtype is torch.float32
    torch.testing.assert_close(S, P.dense().t() @ G.float() @ Q.dense(), rtol=1e-5, atol=1e-5)


def test_compress_accumulates_into_any_strides() -> None:
    P, Q = pair(*SHAPES[0])
    G1, G2 = (matrix(*SHAPES[0][:2], seed=s) for s in (1, 2))
    out = torch.empty(16, 16).t()
    compress(G1.t().contiguous().t(), P, Q, out=out)
    compress(G2, P, Q, out=out, accumulate=True)
    torch.testing.assert_close(out, compress(G1 + G2, P, Q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_apply_equals_dense_algebra(shape: tuple[int, int, int, int]) -> None:
    P, Q = pair(*shape)
    W, D = matrix(*shape[:2], seed=1), matrix(P.dim, Q.dim, seed=2)
    expected = 0.98 * W - 0.1 * P.dense() @ D @ Q.dense().t()
    for delta in (D, D.t().contiguous().t()):
        found = W.clone()
        apply_(found, delta, P, Q, lr=0.1, weight_decay=0.2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_products_equal_dense_algebra() -> None:
    P, _ = pair(*SHAPES[1])
    X, Y = matrix(8, 5), matrix(31, 5)
    torch.testing.assert_close(product(P, X), P.dense() @ X)
    torch.testing.assert_close(transpose_product(P, Y), P.dense().t() @ Y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_projectors_change_nothing(dtype: torch.dtype) -> None:
    """A gradient makes the round trip exactly, and the update is that of plain SGD, rounding included."""
    P, Q = SparseProjector.identity(24), SparseProjector.identity(40)
    G, W = matrix(24, 40, dtype, seed=1), matrix(24, 40, dtype, seed=2)
    S = compress(G, P, Q)
    assert torch.equal(S, G.float())
    assert float(relative_bias(G, P, Q)) == 0.0
    expected = W.clone()
    sgd_update_(expected, S.clone(), lr=0.03, decay=1 - 0.03 * 0.1, dither=Dither(step=5, offset=2048, seed=9))
    apply_(W, S, P, Q, lr=0.03, weight_decay=0.1, seed=9, step=5, offset=2048)
    torch.testing.assert_close(W, expected, rtol=0, atol=1e-6 if dtype is torch.float32 else 0)


def test_stochastic_rounding_keeps_the_mean_of_updates_below_a_step() -> None:
    P, Q = pair(64, 64, 16, 4)
    D = matrix(16, 16).sign()
    W = torch.ones(64, 64, dtype=torch.bfloat16)
    updates = P.dense() @ D @ Q.dense().t()
    lr = 1e-4  # bfloat16's steps beside 1 are 2**-8 and 2**-7
    nearest = W.clone()
    apply_(nearest, D, P, Q, lr=lr, rounding="nearest")
    assert torch.equal(nearest, W)
    moved = torch.zeros(64, 64)
    for step in range(400):
        once = W.clone()
        apply_(once, D, P, Q, lr=lr, seed=1, step=step)
        moved += (W.float() - once.float()) / 400
    along = float((moved * updates).sum() / updates.square().sum())
    assert along == pytest.approx(lr, rel=0.1)


def test_relative_bias_is_the_lost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    P, Q = pair(*SHAPES[0])
    G = matrix(*SHAPES[0][:2])
    p, q = P.dense(), Q.dense()
    expected = float((p @ p.t() @ G @ q @ q.t() - G).norm() / G.norm())
    assert float(relative_bias(G, P, Q)) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("ds_zo.projectors.products.RESIDUAL_NUMEL", 7 * 80)  # rows 7 at a time, 6 at last
    assert float(relative_bias(G, P, Q)) == pytest.approx(expected, rel=1e-5)
    assert float(relative_bias(torch.zeros_like(G), P, Q)) == 0.0


def test_wrong_shapes_are_refused() -> None:
    P, Q = pair(*SHAPES[0])
    G = matrix(80, 48)
    with pytest.raises(ValueError, match=r"gradient must have .* \(48, 80\), got \(80, 48\)"):
        compress(G, P, Q)
    with pytest.raises(ValueError, match=r"weight must have"):
        apply_(G, torch.zeros(16, 16), P, Q, lr=0.1)
    with pytest.raises(ValueError, match=r"out must be float32 of shape \(16, 16\)"):
        compress(G.t(), P, Q, out=torch.zeros(16, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="pass out"):
        compress(G.t(), P, Q, accumulate=True)


def test_batches_that_are_launched_together_share_scratch_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second needs more than the first, which is launched after both were given addresses."""
    monkeypatch.setattr(batches, "BATCH_NUMEL", 1024)
    workspace.release()
    calls = [Compression(matrix(32, n), *pair(32, n, 16, 2), torch.empty(16, 16)) for n in (32, 32, 4096)]
    found = list(batches._batches(calls, torch.device("cpu")))
    assert [len(batch) for batch, _ in found] == [2, 1]
    assert found[0][1][0] == found[1][1][0]
    workspace.release()
