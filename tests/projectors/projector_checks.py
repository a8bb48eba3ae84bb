"""The projectors' kernels against the torch reference. Run by Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_zo.projectors import (
    Compression,
    MatrixUpdate,
    ProjectorRows,
    SparseProjector,
    VectorUpdate,
    apply_,
    apply_all_,
    compress,
    compress_all,
    products,
    relative_bias,
    update_vectors_,
)
from tests.projectors.projector_cases import matrix, pair

SHAPES = [(24, 40, 8, 2), (19, 131, 16, 3), (70, 9, 32, 4)]
"""Rows, columns, dim, non-zeros: whole lanes, odd columns with more slabs than one, more rows than a program's."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def moved(P: SparseProjector, device: str) -> SparseProjector:
    return SparseProjector.from_state(P.state_dict(), device)


def with_reference(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What torch makes of a call on CPU tensors, also under the interpreter."""
    interpreted, products._INTERPRETED = products._INTERPRETED, False
    try:
        return call()
    finally:
        products._INTERPRETED = interpreted


def updated(W: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    W = W.clone()
    apply_(W, *arguments, **options)
    return W


def compare_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The same dither: a last bit of the float32 sum may still tip a rounding, once in many."""
    if expected.dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        return
    assert (found != expected).sum().item() <= 1 + 0.002 * expected.numel()
    torch.testing.assert_close(found.float(), expected.float(), rtol=1e-2, atol=1e-3)


def check_compress(device: str) -> None:
    for (m, n, dim, nonzeros), dtype in zip(SHAPES, DTYPES, strict=True):
        P, Q = pair(m, n, dim, nonzeros)
        G = matrix(m, n, dtype)
        expected = with_reference(lambda G=G, P=P, Q=Q: compress(G, P, Q))  # type: ignore[misc]
        on_device = moved(P, device), moved(Q, device)
        found = compress(G.to(device), *on_device)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def check_compress_accumulates_into_a_transposed_matrix(device: str) -> None:
    m, n, dim, nonzeros = SHAPES[0]
    P, Q = (moved(x, device) for x in pair(m, n, dim, nonzeros))
    G = matrix(n, m).t().to(device)
    once = compress(G, P, Q)
    out = once.t().contiguous().t()
    compress(G, P, Q, out=out, accumulate=True)
    torch.testing.assert_close(out, 2 * once)


def check_apply(device: str) -> None:
    dithers: list[dict[str, Any]] = [
        {"rounding": "nearest"},
        {"seed": 2**40 + 3, "step": 2**31 + 5, "offset": 5 * 1024},
        {"seed": 1, "step": 2, "offset": 3},
    ]
    for (m, n, dim, nonzeros), dtype, options in zip(SHAPES, [*DTYPES[1:], DTYPES[1]], dithers[::-1], strict=True):
        P, Q = pair(m, n, dim, nonzeros)
        W, D = matrix(m, n, dtype), matrix(dim, dim, seed=1)
        given = {"lr": 0.03, "weight_decay": 0.1, **options}
        expected = with_reference(lambda a=(W, D, P, Q), b=given: updated(*a, **b))  # type: ignore[misc]
        found = updated(W.to(device), D.to(device), moved(P, device), moved(Q, device), **given)
        compare_rounded(found.cpu(), expected)


def check_apply_by_lanes(device: str) -> None:
    """Whole lanes of 8 and an aligned offset take another way to the same dither."""
    P, Q = pair(10, 72, 8, 2)
    for dtype in DTYPES:
        W, D = matrix(10, 72, dtype), matrix(8, 8, seed=1)
        given: dict[str, Any] = {"lr": 0.03, "seed": 2**40 + 3, "step": 2**31 + 5, "offset": 2**36 + 1024}
        expected = with_reference(lambda a=(W, D, P, Q), b=given: updated(*a, **b))  # type: ignore[misc]
        found = updated(W.to(device), D.to(device), moved(P, device), moved(Q, device), **given)
        compare_rounded(found.cpu(), expected)


BATCH = [(SHAPES[0], DTYPES[0]), *[((32, 48, 16, 2), DTYPES[1])] * 3, (SHAPES[1], DTYPES[1]), (SHAPES[2], DTYPES[1])]
"""Odd ones and aligned ones, the latter in a launch of their own."""


def check_batches_are_the_same_bits(device: str) -> None:
    from ds_zo.ops import triton_projector_batches

    one_by_one, together, largest = [], [], triton_projector_batches.MAX_BATCH
    triton_projector_batches.MAX_BATCH = 2
    try:
        for first in (True, False):
            calls = []
            for i, ((m, n, dim, nonzeros), dtype) in enumerate(BATCH):
                P, Q = (moved(x, device) for x in pair(m, n, dim, nonzeros, seed=i))
                G = (matrix(n, m, dtype, seed=i).t() if i == 0 else matrix(m, n, dtype, seed=i)).to(device)
                out = torch.ones(Q.dim, P.dim, device=device).t() if i % 2 else torch.ones(P.dim, Q.dim, device=device)
                calls.append(Compression(G, P, Q, out, accumulate=i % 3 == 0))
            if first:
                for one in calls:
                    compress(one.G_mn, one.P, one.Q, out=one.out, accumulate=one.accumulate)
            else:
                compress_all(calls)
            options = [(0.03, 0.1, "stochastic"), (0.03, 0.1, "nearest"), (0.02, 0.0, "stochastic")]
            rows = [ProjectorRows(one.Q.indices, (1 + i % 2) * one.Q.values, one.Q.dim) for i, one in enumerate(calls)]
            updates = [
                MatrixUpdate(one.G_mn, one.out, one.P, Q, *options[i % 3], offset=1024 * i + i // 6)  # type: ignore[arg-type]
                for i, (one, Q) in enumerate(zip(calls, rows, strict=True))
            ]
            if first:
                for u in updates:
                    given: dict[str, Any] = {"lr": u.lr, "weight_decay": u.weight_decay, "rounding": u.rounding}
                    apply_(u.W_mn, u.D_dd, u.P, u.Q, seed=3, step=5, offset=u.offset, **given)
            else:
                versions = [u.W_mn._version for u in updates]
                apply_all_(updates, seed=3, step=5)
                assert all(u.W_mn._version > version for u, version in zip(updates, versions, strict=True))
            (one_by_one if first else together).extend([x for one in calls for x in (one.out, one.G_mn)])
    finally:
        triton_projector_batches.MAX_BATCH = largest
    for expected, found in zip(one_by_one, together, strict=True):
        assert torch.equal(found, expected)


def check_strided_weight_and_version(device: str) -> None:
    """A graph that still needs the old weights must raise, not use the new ones."""
    P, Q = pair(10, 16, 8, 2)
    D = matrix(8, 8, seed=1)
    W = matrix(16, 10).t()
    expected = with_reference(lambda: updated(W.contiguous(), D, P, Q, lr=0.1))
    found = W.to(device)
    version = found._version
    apply_(found, D.to(device), moved(P, device), moved(Q, device), lr=0.1)
    assert found._version > version
    torch.testing.assert_close(found.cpu(), expected)


def check_strided_vectors(device: str) -> None:
    """The elements between those of a strided vector stay as they are."""

    def updated_vectors(where: str) -> list[torch.Tensor]:
        storages = [matrix(2, 21, dtype, seed=i).to(where) for i, dtype in enumerate(DTYPES)]
        vectors = [storages[0][0, ::2], storages[1][:, 0], storages[2][0, ::2], storages[2][1]]
        directions = [matrix(1, len(w), seed=9 + i)[0].to(where) for i, w in enumerate(vectors)]
        pairs = enumerate(zip(vectors, directions, strict=True))
        update_vectors_([VectorUpdate(w, d, 0.1, 0.1, offset=1024 * i) for i, (w, d) in pairs], seed=3, step=5)
        return storages

    expected = with_reference(lambda: torch.stack([x.float() for x in updated_vectors("cpu")]))
    for found, values in zip(updated_vectors(device), expected, strict=True):
        compare_rounded(found.cpu(), values.to(found.dtype))


def check_identity_round_trip(device: str) -> None:
    P, Q = SparseProjector.identity(12, device), SparseProjector.identity(20, device)
    G = matrix(12, 20, torch.bfloat16).to(device)
    assert torch.equal(compress(G, P, Q), G.float())
    assert float(relative_bias(G, P, Q)) == 0.0


def check_filled_up_columns_are_not_read(device: str) -> None:
    """What is not finite in a row reaches the columns that the row has entries in, and no others."""
    P = moved(pair(20, 8, 9, 2)[0], device)
    G = torch.ones(20, 9, device=device)
    G[0] = float("nan")
    P_t_G = products.transpose_product(P, G)
    assert set(P_t_G.isnan().any(dim=1).nonzero().flatten().tolist()) == set(P.indices[0].tolist())


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
