"""Sparse projectors: P is num_rows x dim with the same small number of non-zeros in every row, never stored densely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_zo.ops import noise, philox4x32
from ds_zo.ops.philox import split_seed

POSITIONS = 3
"""Counter word of the random numbers for positions. Noise and rounding bits of the same seed use other words."""


class ProjectorRows:
    """Positions and values of P by row, which is all that a product P X reads."""

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, dim: int) -> None:
        if indices.shape != values.shape or indices.ndim != 2:
            raise ValueError(
                "a projector's indices and values must both be (rows, non-zeros), "
                f"got {tuple(indices.shape)} and {tuple(values.shape)}: pass one column index for each value"
            )
        self.dim = dim
        self.num_rows, self.nonzeros = indices.shape
        self.indices = indices.to(_index_dtype(dim)).contiguous()
        self.values = values.to(torch.float32).contiguous()
        self.row_entries = self.indices.t(), self.values.t()
        """Transposed views, which every product uses."""
        self.row_table = _table(*self.row_entries)


class SparseProjector(ProjectorRows):
    """Positions and values of P, by row and by column.

    P X gathers rows of X by `indices` and `values`, both (num_rows, nonzeros). P^T Y gathers rows of Y by the same
    entries sorted by column: `column_rows` and `column_values`, both (depth, dim). Column c's entries are at [:, c] in
    order of rows; shorter columns are padded with value 0 at row 0. Either product gathers in a fixed order, without
    atomics, and gives the same bits every time. Drawn positions are balanced, so that little padding is needed.
    """

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, dim: int) -> None:
        super().__init__(indices, values, dim)
        entries = _entries_by_column(self.indices.cpu().numpy(), dim)
        self._column_entries = torch.from_numpy(entries).to(values.device)
        rows = np.where(entries < indices.numel(), entries // self.nonzeros, 0)
        self.column_rows = torch.from_numpy(rows).to(values.device, _index_dtype(self.num_rows))
        self.column_values = torch.empty(rows.shape, dtype=torch.float32, device=values.device)
        self._refresh_columns()
        self.column_table = _table(self.column_rows, self.column_values)

    @classmethod
    def draw(
        cls, num_rows: int, dim: int, nonzeros: int, *, seed: int, stream: int, device: torch.device | str = "cpu"
    ) -> SparseProjector:
        """Random positions without repetition in a row, normal values of standard deviation 1 / sqrt(nonzeros).

        They are drawn on the CPU, so that they are the same on every device and rank. P and Q of a matrix, and every
        refit, must use different streams.
        """
        if not 1 <= nonzeros <= dim:
            raise ValueError(
                f"a projector row needs 1 <= non-zeros <= its dimension {dim}, got {nonzeros}: "
                "lower nonzeros_per_row or raise subspace_dim (optimizer.params.nonzeros_per_row)"
            )
        positions = _draw_positions(num_rows, dim, nonzeros, seed=seed, stream=stream)
        values = noise(seed, stream, 0, 0, num_rows * nonzeros).view(num_rows, nonzeros) / math.sqrt(nonzeros)
        return cls(torch.from_numpy(positions).to(device), values.to(device), dim)

    @classmethod
    def identity(cls, n: int, device: torch.device | str = "cpu") -> SparseProjector:
        """P = I: nothing is projected."""
        return cls(torch.arange(n, device=device)[:, None], torch.ones(n, 1, device=device), n)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def depth(self) -> int:
        """Number of entries of the fullest column."""
        return self.column_rows.shape[0]

    @property
    def num_bytes(self) -> int:
        tensors = (self.indices, self.values, self.column_rows, self.column_values, self._column_entries)
        return sum(t.numel() * t.element_size() for t in tensors)

    def set_values_(self, values: torch.Tensor) -> None:
        """Replaces the values; the positions stay."""
        self.values.copy_(values)
        self._refresh_columns()

    def dense(self) -> torch.Tensor:
        """P as a dense matrix, for tests."""
        dense = torch.zeros(self.num_rows, self.dim, device=self.device)
        return dense.scatter_(1, self.indices.long(), self.values)

    def state_dict(self) -> dict[str, Any]:
        return {"dim": self.dim, "indices": self.indices, "values": self.values}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str = "cpu") -> SparseProjector:
        """A projector that shares no memory with `state`."""
        return cls(state["indices"].to(device, copy=True), state["values"].to(device, copy=True), state["dim"])

    def _refresh_columns(self) -> None:
        flat = torch.cat([self.values.view(-1), self.values.new_zeros(1)])
        torch.index_select(flat, 0, self._column_entries.view(-1), out=self.column_values.view(-1))


def _table(rows: torch.Tensor, values: torch.Tensor) -> tuple[int, int, int, int, bool]:
    """Addresses and sizes of a gather's entries. The tensors never move, so this is computed once."""
    return rows.data_ptr(), values.data_ptr(), rows.shape[0], rows.shape[1], rows.dtype is torch.int32


def _index_dtype(size: int) -> torch.dtype:
    return torch.int16 if size <= 2**15 else torch.int32


def _draw_positions(num_rows: int, dim: int, nonzeros: int, *, seed: int, stream: int) -> NDArray[np.int32]:
    """Cuts random permutations of all columns into runs of `nonzeros` columns, one run for each row.

    So no row has a column twice. Each permutation uses every column once, except the few columns at its end that do not
    fill a run.
    """
    rows_per_permutation = dim // nonzeros
    num_permutations = -(-num_rows // rows_per_permutation)
    num_blocks = -(-num_permutations * dim // 4)
    words = philox4x32((np.arange(num_blocks), 0, stream, POSITIONS), split_seed(seed))
    keys = np.stack(words, axis=1).reshape(-1)[: num_permutations * dim].reshape(num_permutations, dim)
    permutations = np.argsort(keys, axis=1, kind="stable").astype(np.int32)
    return permutations[:, : rows_per_permutation * nonzeros].reshape(-1, nonzeros)[:num_rows].copy()


def _entries_by_column(indices: NDArray[Any], dim: int) -> NDArray[np.int32]:
    """(depth, dim): flat positions of each column's entries in order, padded with the total number of entries."""
    columns = indices.reshape(-1).astype(np.int64)
    order = np.argsort(columns, kind="stable")
    counts = np.bincount(columns, minlength=dim)
    starts = np.cumsum(counts) - counts
    sorted_columns = columns[order]
    entries = np.full((int(counts.max(initial=1)), dim), len(columns), dtype=np.int32)
    entries[np.arange(len(columns)) - starts[sorted_columns], sorted_columns] = order
    return entries
