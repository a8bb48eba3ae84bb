"""Where the factors of rank-1 noise lie in a table with one row for each member."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ds_zo.ops.rng import FACTOR_COLUMNS, FACTOR_ROWS, NUM_PURPOSES

BLOCK_NUMEL = 8
"""Normal numbers that one Philox block gives."""


class Matrix(NamedTuple):
    """A parameter as a matrix: its last dimension is the columns, the others together are the rows."""

    offset: int
    """Global offset of its first element."""
    num_rows: int
    num_columns: int


@dataclass(frozen=True)
class FactorLayout:
    """The factors u and v of some matrices, one after the other, in whole Philox blocks."""

    numel: int
    """Numbers in the row of one member."""
    places: dict[Matrix, tuple[slice, slice]]
    """Where u and v of each matrix lie in a row."""
    still: tuple[slice, ...]
    """Numbers that are 0: those of matrix rows without noise."""
    blocks: torch.Tensor
    """For each Philox block of a row, NUM_PURPOSES * counter block + purpose."""
    matrices: torch.Tensor
    """For each matrix, its offset, its number of columns, and where its u and its v begin in a row."""
    chunk_matrices: torch.Tensor
    """For each chunk of the segment table, the index of its matrix; -1 for a chunk without one."""

    @property
    def lanes_in_rows(self) -> bool:
        """Whether elements from a multiple of BLOCK_NUMEL to the next one always are in one row of a matrix."""
        return all(m.offset % BLOCK_NUMEL == m.num_columns % BLOCK_NUMEL == 0 for m in self.places)

    def views(self, factors: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """(u [member, row], v [member, column]) of each matrix, by its offset, as views of a filled table."""
        return {
            matrix.offset: (factors[:, rows], factors[:, columns]) for matrix, (rows, columns) in self.places.items()
        }


def lay_out(matrices: Iterable[tuple[Matrix, tuple[int, int]]], chunk_offsets: torch.Tensor) -> FactorLayout:
    """The layout for matrices and their ranges of offsets without noise, which are whole rows of the matrix."""
    device = chunk_offsets.device
    places: dict[Matrix, tuple[slice, slice]] = {}
    blocks: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    still = []
    numel = 0

    def place(first: int, length: int, purpose: int) -> slice:
        nonlocal numel
        counters = np.arange(first // BLOCK_NUMEL, (first + length - 1) // BLOCK_NUMEL + 1)
        blocks.append(NUM_PURPOSES * counters + purpose)
        at = numel + first % BLOCK_NUMEL
        numel += BLOCK_NUMEL * len(counters)
        return slice(at, at + length)

    for matrix, (first_still, end_still) in sorted(matrices):
        if matrix not in places:
            places[matrix] = (
                place(matrix.offset, matrix.num_rows, FACTOR_ROWS),
                place(matrix.offset, matrix.num_columns, FACTOR_COLUMNS),
            )
        if first_still < end_still:
            first, end = (offset - matrix.offset for offset in (first_still, end_still))
            assert first % matrix.num_columns == end % matrix.num_columns == 0, f"{matrix}: part of a row has no noise"
            at = places[matrix][0].start
            still.append(slice(at + first // matrix.num_columns, at + end // matrix.num_columns))
    rows = [(m.offset, m.num_columns, u.start, v.start) for m, (u, v) in places.items()]
    return FactorLayout(
        numel=numel,
        places=places,
        still=tuple(still),
        blocks=torch.from_numpy(np.concatenate(blocks)).to(device),
        matrices=torch.tensor(rows, dtype=torch.int64).view(-1, 4).to(device),
        chunk_matrices=_matrix_of_each(chunk_offsets.cpu(), list(places)).to(device),
    )


def _matrix_of_each(offsets: torch.Tensor, matrices: list[Matrix]) -> torch.Tensor:
    """The index of the matrix that has the element at each offset, or -1."""
    first = torch.tensor([m.offset for m in matrices], dtype=torch.int64)
    end = torch.tensor([-1, *(m.offset + m.num_rows * m.num_columns for m in matrices)])
    index = torch.searchsorted(first, offsets.contiguous(), right=True) - 1
    return torch.where(offsets < end[index + 1], index, -1).to(torch.int32)
