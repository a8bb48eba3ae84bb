"""Rank-1 noise: z of a matrix is the outer product of two factors, however the matrix is cut and stored."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from ds_zo import ops
from ds_zo.ops import rng
from tests.ops.flat_cases import MATRIX_SEGMENTS, Flat, make_log

SEED = 2**62 + 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MATRICES = [s for s in MATRIX_SEGMENTS if s.trainable and s.matrix is not None]


def number(step: int, member: int, purpose: int, offset: int) -> float:
    """One draw of [Note: one definition of the noise]."""
    counter = (offset // 8 & 0xFFFFFFFF, offset // 8 >> 32, step, member * 4 + purpose)
    word = ops.philox4x32(counter, (SEED & 0xFFFFFFFF, SEED >> 32))[offset % 8 // 2]
    pair = np.empty((2, 1), dtype=np.float32)
    rng.box_muller(np.array([word], dtype=np.uint32), out_even=pair[0], out_odd=pair[1])
    return float(pair[offset % 2, 0])


def factors_of(matrix: ops.Matrix, step: int, member: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    u = [number(step, member, 2, matrix.offset + i) for i in range(matrix.num_rows)]
    v = [number(step, member, 3, matrix.offset + j) for j in range(matrix.num_columns)]
    return torch.tensor(u).to(dtype), torch.tensor(v).to(dtype)


def z_of(segment: ops.Segment, step: int, member: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if segment.matrix is None:
        return torch.zeros(segment.numel)
    u, v = factors_of(segment.matrix, step, member, dtype)
    z = (u.float()[:, None] * v.float()).reshape(-1)
    first = segment.matrix.offset
    z[segment.still[0] - first : segment.still[1] - first] = 0.0
    return z[segment.offset - first : segment.offset - first + segment.numel]


def run(flat: Flat, to: Flat | None = None, **arguments: Any) -> None:
    call = flat.call(to, seed=SEED, distribution="rank1", **arguments)
    ops.replay_perturb(
        call.source, table=call.table, noise=call.noise, pending=call.pending, store=call.store, copies=call.copies
    )


def pending_of(num_entries: int, num_members: int) -> ops.Pending:
    rows = [(i + 3, [0.99, 1.0], [1e-3 * (i + m + 1) for m in range(2 * num_members)]) for i in range(num_entries)]
    log = make_log(rows, capacity=num_entries + 1, first=2)
    return ops.Pending(log, first_entry=2, num_entries=num_entries, num_directions=num_members)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_are_the_documented_draws(dtype: torch.dtype) -> None:
    table = ops.build_table(MATRIX_SEGMENTS, "cpu", factor_dtype=dtype)
    out = torch.empty(3, table.factors.numel, dtype=dtype)
    ops.factors(table, noise=ops.Noise(SEED, step=9, direction=5, distribution="rank1"), out=out)
    views = table.factors.views(out)
    assert views.keys() == {s.matrix.offset for s in MATRICES if s.matrix is not None}
    for s in MATRICES:
        assert s.matrix is not None
        for m in range(3):
            u, v = factors_of(s.matrix, 9, 5 + m, dtype)
            first, end = ((offset - s.matrix.offset) // s.matrix.num_columns for offset in s.still)
            u[max(first, 0) : max(end, 0)] = 0.0
            assert torch.equal(views[s.matrix.offset][0][m], u)
            assert torch.equal(views[s.matrix.offset][1][m], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_replay_and_perturb_are_the_loop_over_members(dtype: torch.dtype) -> None:
    flat = Flat.make(torch.float32, segments=MATRIX_SEGMENTS, factor_dtype=dtype)
    before, out = flat.clone(), torch.zeros_like(flat.storage)
    run(flat, flat, pending=pending_of(2, 3), copies=ops.Copies(out, scale=-1e-3), step=9, direction=2)
    for s in MATRIX_SEGMENTS:
        x = before.values(s)
        if not s.trainable:
            assert torch.equal(flat.values(s), x)
            continue
        for i in range(2):
            x = x * np.float32(0.99 if s.group == 0 else 1.0)
            for m in range(3):
                x = x - z_of(s, i + 3, m, dtype) * np.float32(1e-3 * (i + m + 3 * s.group + 1))
        assert torch.equal(flat.values(s), x)
        assert torch.equal(out[s.start : s.start + s.numel], x + z_of(s, 9, 2, dtype) * np.float32(-1e-3))


def test_a_matrix_can_be_cut_anywhere() -> None:
    """Shards of a matrix have the noise that the whole matrix has."""
    whole = next(s for s in MATRICES if s.numel > 1000)
    cuts = (0, 1, 64, 100, 517, whole.numel)
    shards = tuple(
        replace(whole, start=1024 * i, numel=end - begin, offset=whole.offset + begin)
        for i, (begin, end) in enumerate(pairwise(cuts))
    )
    found = []
    for segments in ((replace(whole, start=0),), shards):
        table = ops.build_table(segments, "cpu")
        zeros, out = torch.zeros(8192), torch.empty(8192)
        noise = ops.Noise(SEED, step=1, direction=3, distribution="rank1")
        ops.replay_perturb(ops.Planes(zeros), table=table, noise=noise, copies=ops.Copies(out, scale=1.0))
        found.append(torch.cat([out[s.start : s.start + s.numel] for s in segments]))
    assert torch.equal(*found)
    assert torch.equal(found[0], z_of(whole, 1, 3))


@pytest.mark.parametrize("run_numel", [256, 1024])
def test_result_does_not_depend_on_how_the_flat_is_cut_into_runs(
    monkeypatch: pytest.MonkeyPatch, run_numel: int
) -> None:
    from ds_zo.ops import reference

    found = []
    for _ in range(2):
        flat = Flat.make(torch.bfloat16, segments=MATRIX_SEGMENTS)
        out = torch.zeros_like(flat.storage)
        run(flat, flat, pending=pending_of(2, 2), copies=ops.Copies(out, scale=1e-3), step=9)
        found.append(torch.cat([flat.storage, out]))
        monkeypatch.setattr(reference, "RUN_NUMEL", run_numel)
    assert torch.equal(*found)


def test_replaying_k_entries_equals_k_folds_bit_for_bit() -> None:
    pending = pending_of(4, 3)
    at_once, one_by_one = (Flat.make(torch.float32, segments=MATRIX_SEGMENTS) for _ in range(2))
    run(at_once, at_once, pending=pending, step=20)
    for i in range(4):
        run(one_by_one, one_by_one, pending=replace(pending, first_entry=2 + i, num_entries=1), step=i, fold=True)
    assert torch.equal(at_once.storage, one_by_one.storage)


def test_copies_are_rounded_by_the_dither_of_normal_noise() -> None:
    vector = ops.Segment(start=0, numel=1001, offset=3)
    found = []
    for segment, distribution in ((vector, "rank1"), (replace(vector, still=(3, 1004)), "normal")):
        flat = Flat.make(torch.float32, segments=(segment,))
        out = torch.zeros_like(flat.storage, dtype=torch.bfloat16)
        call = flat.call(copies=ops.Copies(out, scale=1e-3), seed=SEED, step=9, distribution=distribution)
        ops.replay_perturb(call.source, table=call.table, noise=call.noise, copies=call.copies)
        found.append(out)
    assert torch.equal(*found)
    assert not torch.equal(found[0].float(), Flat.make(torch.float32, segments=(vector,)).storage.bfloat16().float())


def test_members_are_uncorrelated() -> None:
    table = ops.build_table([ops.Segment(0, 200 * 300, 8, matrix=ops.Matrix(8, 200, 300))], "cpu")
    out = torch.empty(64, table.factors.numel)
    ops.factors(table, noise=ops.Noise(1, step=2, distribution="rank1"), out=out)
    u, v = table.factors.views(out)[8]
    z = torch.cat([u, v], dim=1).double()
    assert abs(float(z.mean())) < 0.02
    assert abs(float(z.var()) - 1) < 0.03
    among = torch.corrcoef(torch.cat([u[:, :200], v[:, :200]]).double())
    assert float((among - torch.eye(len(among))).abs().max()) < 0.4


def test_a_table_of_other_size_is_refused() -> None:
    table = ops.build_table(MATRIX_SEGMENTS, "cpu", factor_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be a contiguous torch\.bfloat16 tensor of \d+ columns on cpu"):
        ops.factors(table, noise=ops.Noise(1, 1), out=torch.empty(2, table.factors.numel))
