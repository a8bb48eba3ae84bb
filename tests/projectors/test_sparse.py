"""Drawing and storing sparse projectors."""

from __future__ import annotations

import math

import pytest
import torch

from ds_zo.projectors import SparseProjector


@pytest.mark.parametrize(("num_rows", "dim", "nonzeros"), [(200, 32, 4), (100, 10, 3), (7, 64, 16), (50, 5, 5)])
def test_a_row_never_has_a_column_twice(num_rows: int, dim: int, nonzeros: int) -> None:
    P = SparseProjector.draw(num_rows, dim, nonzeros, seed=3, stream=1)
    assert P.indices.shape == P.values.shape == (num_rows, nonzeros)
    assert int(P.indices.min()) >= 0 and int(P.indices.max()) < dim
    assert all(len(set(row)) == nonzeros for row in P.indices.tolist())


def test_columns_are_used_equally_often() -> None:
    P = SparseProjector.draw(256, 64, 4, seed=0, stream=0)
    assert torch.bincount(P.indices.flatten().int()).tolist() == [16] * 64
    assert P.depth == 16


def test_values_are_normal_with_the_stated_spread() -> None:
    for nonzeros in (1, 4, 16):
        values = SparseProjector.draw(4000, 128, nonzeros, seed=1, stream=0).values * math.sqrt(nonzeros)
        assert abs(float(values.mean())) < 0.05
        assert abs(float(values.std()) - 1.0) < 0.05
        assert abs(float((values.abs() < 1).float().mean()) - 0.6827) < 0.03


def test_draws_are_a_pure_function_of_seed_and_stream() -> None:
    def draw(seed: int, stream: int) -> torch.Tensor:
        torch.manual_seed(stream + seed)  # global state must not matter
        return SparseProjector.draw(60, 16, 3, seed=seed, stream=stream).dense()

    assert torch.equal(draw(5, 1), draw(5, 1))
    assert not torch.equal(draw(5, 1) != 0, draw(5, 2) != 0)
    assert not torch.equal(draw(5, 1) != 0, draw(6, 1) != 0)
    assert not torch.equal(draw(0, 1), draw(1, 0))


def test_both_views_hold_the_same_matrix() -> None:
    P = SparseProjector.draw(90, 13, 3, seed=2, stream=0)  # 13 = 4 pieces of 3 columns and one column over
    dense = torch.zeros(90, 13)
    for rows, values in zip(P.column_rows.long(), P.column_values, strict=True):
        dense[rows, torch.arange(13)] += values
    assert torch.equal(dense, P.dense())
    P.set_values_(P.values * -3)
    assert torch.equal(P.dense(), -3 * dense)
    assert float(P.column_values.sum()) == pytest.approx(float(P.values.sum()), abs=1e-4)


def test_indices_are_as_short_as_they_can_be() -> None:
    P = SparseProjector.draw(40_000, 64, 2, seed=0, stream=0)
    assert (P.indices.dtype, P.column_rows.dtype) == (torch.int16, torch.int32)
    assert SparseProjector.draw(100, 64, 2, seed=0, stream=0).column_rows.dtype == torch.int16
    largest = SparseProjector(torch.tensor([[2**15 - 1]]), torch.ones(1, 1), 2**15)
    assert int(largest.indices) == 2**15 - 1


def test_state_round_trips_without_sharing_memory() -> None:
    P = SparseProjector.draw(30, 12, 4, seed=0, stream=7)
    copy = SparseProjector.from_state(P.state_dict())
    expected = P.dense()
    P.set_values_(P.values * 0)
    assert torch.equal(copy.dense(), expected)
    assert copy.dim == 12


def test_more_nonzeros_than_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"non-zeros <= its dimension 4, got 5.*nonzeros_per_row"):
        SparseProjector.draw(10, 4, 5, seed=0, stream=0)
    with pytest.raises(ValueError, match="one column index for each value"):
        SparseProjector(torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 1), 4)
