# mypy: disable-error-code="no-untyped-def"
"""The products of `triton_projectors` for several matrices in one launch.

[Note: a table of addresses] A program finds its matrix in a small table on the device: one row of int64 for each, with
addresses, sizes and the first program that is its own. A table is a pure function of the numbers in it, so it is made
once and found again by them; whatever memory an address meant before or will mean later, the table says what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from ds_zo.ops import triton_projectors as single
from ds_zo.ops.formats import storage_format
from ds_zo.ops.triton_formats import BF16, FP8, FP16
from ds_zo.ops.triton_ops import _as_int32
from ds_zo.ops.triton_projectors import gather_tile, update_rows

MAX_BATCH = 16
"""Matrices of one launch: a program looks for its own among so many."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Of an update: so many that matrices of unlike sizes end together, so few that a slab is read often from L1."""
ALIGNMENT = 16
MAX_TABLES = 2048

_GATHER_FIELDS: tl.constexpr = tl.constexpr(10)
_UPDATE_FIELDS: tl.constexpr = tl.constexpr(9)
_MAX_BATCH: tl.constexpr = tl.constexpr(MAX_BATCH)
_NEVER: tl.constexpr = tl.constexpr(1 << 62)


class Gather(NamedTuple):
    """out[c] (+)= sum over e of values[e, c] * source[rows[e, c]], as in `gather_sum_triton`."""

    out: torch.Tensor
    source: torch.Tensor
    rows: torch.Tensor
    values: torch.Tensor
    accumulate: bool = False


class GatherKind(NamedTuple):
    """What a launch of gathers has in common."""

    dtype: torch.dtype
    index_dtype: torch.dtype
    by_row: bool
    out_by_column: bool
    accumulate: bool
    is_aligned: bool


class Update(NamedTuple):
    """W <- round(decay * W - lr * P U), as in `apply_triton`."""

    W: torch.Tensor
    U: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor
    lr: float
    decay: float
    offset: int | None
    """None: rounded to nearest."""


class UpdateKind(NamedTuple):
    """What a launch of updates has in common."""

    dtype: torch.dtype
    index_dtype: torch.dtype
    nonzeros: int
    lr: float
    decay: float
    stochastic: bool
    by_lanes: bool
    is_aligned: bool


Call = TypeVar("Call", Gather, Update)
Kind = TypeVar("Kind", bound=Hashable)


@triton.jit
def _stored(address, DROPPED: tl.constexpr):
    if DROPPED == BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif DROPPED == FP16:
        pointer = address.to(tl.pointer_type(tl.float16))
    elif DROPPED == FP8:
        pointer = address.to(tl.pointer_type(tl.uint8))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    return pointer


@triton.jit
def _indices(address, WIDE: tl.constexpr):
    if WIDE:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    return pointer


@triton.jit
def _own_row(table_ptr, num, FIELDS: tl.constexpr):
    """Of the matrix whose programs this one is among."""
    each = tl.arange(0, _MAX_BATCH)
    starts = tl.load(table_ptr + each * FIELDS, mask=each < num, other=_NEVER)
    return table_ptr + (tl.sum((tl.program_id(0) >= starts).to(tl.int32), 0) - 1) * FIELDS


@triton.jit(do_not_specialize=["num"])
def _gather_batch_kernel(
    table_ptr,
    num,
    WIDE: tl.constexpr,
    BY_ROW: tl.constexpr,
    OUT_BY_COLUMN: tl.constexpr,
    ALIGNED: tl.constexpr,
    DROPPED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    at = _own_row(table_ptr, num, _GATHER_FIELDS)
    own = tl.program_id(0) - tl.load(at).to(tl.int32)
    out, source = _stored(tl.load(at + 1), 0), _stored(tl.load(at + 2), DROPPED)
    rows = _indices(tl.load(at + 3), WIDE)
    values = _stored(tl.load(at + 4), 0)
    depth, count = tl.load(at + 5).to(tl.int32), tl.load(at + 6).to(tl.int32)
    num_cols, out_pitch, source_pitch = tl.load(at + 7).to(tl.int32), tl.load(at + 8), tl.load(at + 9)
    if ALIGNED:  # said here, since a hint on a function's argument is lost
        out, source = tl.multiple_of(out, 16), tl.multiple_of(source, 16)
        num_cols = tl.multiple_of(num_cols, 16)
        out_pitch, source_pitch = tl.multiple_of(out_pitch, 16), tl.multiple_of(source_pitch, 16)
    num_row_blocks = (count + ROWS - 1) // ROWS
    c = (own % num_row_blocks) * ROWS + tl.arange(0, ROWS)
    col = (own // num_row_blocks) * COLS + tl.arange(0, COLS)
    if OUT_BY_COLUMN:
        out_stride, out_col_stride = 1, out_pitch
    else:
        out_stride, out_col_stride = out_pitch, 1
    if BY_ROW:
        entry_stride, table_stride = 1, depth
    else:
        entry_stride, table_stride = count, 1
    gather_tile(
        out,
        source,
        rows,
        values,
        c,
        col,
        depth,
        count,
        num_cols,
        out_stride,
        out_col_stride,
        source_pitch,
        entry_stride,
        table_stride,
        DROPPED,
        ACCUMULATE,
        UNROLL,
        ROWS,
        COLS,
    )


@triton.jit(do_not_specialize=["num", "lr", "decay", "k0", "k1", "step"])
def _update_batch_kernel(
    table_ptr,
    num,
    lr,
    decay,
    k0,
    k1,
    step,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    NONZEROS: tl.constexpr,
    UNROLL: tl.constexpr,
    DROPPED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    at = _own_row(table_ptr, num, _UPDATE_FIELDS)
    own = tl.program_id(0) - tl.load(at).to(tl.int32)
    W, U = _stored(tl.load(at + 1), DROPPED), _stored(tl.load(at + 2), 0)
    indices = _indices(tl.load(at + 3), WIDE)
    values = _stored(tl.load(at + 4), 0)
    num_rows = tl.load(at + 5).to(tl.int32)
    num_cols = tl.load(at + 6).to(tl.int32)
    if ALIGNED:
        W, U, num_cols = tl.multiple_of(W, 16), tl.multiple_of(U, 16), tl.multiple_of(num_cols, 16)
    rows_per_program = tl.load(at + 7).to(tl.int32)
    offset = tl.load(at + 8)
    num_chunks = (num_rows + rows_per_program - 1) // rows_per_program
    begin = (own % num_chunks) * rows_per_program
    update_rows(
        W,
        U,
        indices,
        values,
        begin,
        tl.minimum(begin + rows_per_program, num_rows),
        (own // num_chunks) * COLS,
        num_cols,
        lr,
        decay,
        offset,
        k0,
        k1,
        step,
        NONZEROS,
        UNROLL,
        DROPPED,
        STOCHASTIC,
        VECTOR,
        ROWS,
        COLS,
    )


def gather_sums_triton(gathers: Sequence[Gather]) -> None:
    """Sources have contiguous rows; outs have one stride of 1."""
    for kind, found in _alike(gathers, _gather_kind):
        _launch_gathers(kind, found)


def apply_all_triton(updates: Sequence[Update], *, seed: int, step: int) -> None:
    """Weights are contiguous; dithers differ by their offsets alone."""
    for kind, found in _alike(updates, _update_kind):
        _launch_updates(kind, found, seed=seed, step=step)
    for update in updates:
        torch.autograd.graph.increment_version(update.W)  # a graph that still needs the old values must notice


def _alike(calls: Sequence[Call], kind_of: Callable[[Call], Kind]) -> Iterator[tuple[Kind, list[Call]]]:
    """Those that one launch can serve."""
    found: dict[Kind, list[Call]] = {}
    for call in calls:
        found.setdefault(kind_of(call), []).append(call)
    for kind, alike in found.items():
        for first in range(0, len(alike), MAX_BATCH):
            yield kind, alike[first : first + MAX_BATCH]


def _gather_kind(gather: Gather) -> GatherKind:
    out, source, rows, _, accumulate = gather
    is_aligned = not (
        (out.data_ptr() | source.data_ptr() | source.shape[1] | source.stride(0) | _pitch(out)) % ALIGNMENT
    )
    return GatherKind(source.dtype, rows.dtype, rows.stride(0) == 1, out.stride(0) == 1, accumulate, is_aligned)


def _pitch(out: torch.Tensor) -> int:
    return out.stride(1) if out.stride(0) == 1 else out.stride(0)


def _launch_gathers(kind: GatherKind, gathers: Sequence[Gather]) -> None:
    fields: list[int] = []
    num_programs = 0
    for out, source, rows, values, _ in gathers:
        assert rows.stride() == values.stride() and source.stride(1) == 1 and out.dtype is torch.float32
        depth, count = rows.shape
        num_cols = source.shape[1]
        fields += (num_programs, out.data_ptr(), source.data_ptr(), rows.data_ptr(), values.data_ptr())
        fields += (depth, count, num_cols, _pitch(out), source.stride(0))
        num_programs += single.ceil_div(count, single.MAX_GATHER_ROWS) * single.ceil_div(
            num_cols, single.GATHER_COLUMNS
        )
    _gather_batch_kernel[(num_programs,)](
        _table(tuple(fields), gathers[0].source.device),
        len(gathers),
        WIDE=kind.index_dtype is torch.int32,
        BY_ROW=kind.by_row,
        OUT_BY_COLUMN=kind.out_by_column,
        ALIGNED=kind.is_aligned,
        DROPPED=storage_format(kind.dtype).dropped_bits,
        ACCUMULATE=kind.accumulate,
        UNROLL=single.unroll(max(gather.rows.shape[0] for gather in gathers)),
        ROWS=single.MAX_GATHER_ROWS,
        COLS=single.GATHER_COLUMNS,
        num_warps=single.MAX_GATHER_ROWS * single.GATHER_COLUMNS // single.GATHER_ELEMENTS_PER_WARP,
        enable_fp_fusion=False,
    )


def _update_kind(update: Update) -> UpdateKind:
    W, U, indices, _, lr, decay, offset = update
    num_cols = W.shape[1]
    is_aligned = not (W.data_ptr() | U.data_ptr() | num_cols) % ALIGNMENT
    by_lanes = num_cols % 8 == 0 and (offset or 0) % 8 == 0
    return UpdateKind(W.dtype, indices.dtype, indices.shape[1], lr, decay, offset is not None, by_lanes, is_aligned)


def _launch_updates(kind: UpdateKind, updates: Sequence[Update], *, seed: int, step: int) -> None:
    device = updates[0].W.device
    numel = sum(update.W.numel() for update in updates)
    num_wanted = PROGRAMS_PER_MULTIPROCESSOR * single.num_multiprocessors(device)
    fields: list[int] = []
    num_programs = 0
    for W, U, indices, values, _, _, offset in updates:
        assert W.is_contiguous() and indices.is_contiguous() and values.is_contiguous()
        num_rows, num_cols = W.shape
        num_slabs = single.ceil_div(num_cols, single.SLAB_COLUMNS)
        num_chunks = max(1, num_wanted * W.numel() // (numel * num_slabs))
        rows_per_program = single.ceil_div(single.ceil_div(num_rows, num_chunks), single.SLAB_ROWS) * single.SLAB_ROWS
        fields += (num_programs, W.data_ptr(), U.data_ptr(), indices.data_ptr(), values.data_ptr())
        fields += (num_rows, num_cols, rows_per_program, offset or 0)
        num_programs += single.ceil_div(num_rows, rows_per_program) * num_slabs
    low, high = single.key_words(seed)
    _update_batch_kernel[(num_programs,)](
        _table(tuple(fields), device),
        len(updates),
        kind.lr,
        kind.decay,
        low,
        high,
        _as_int32(step),
        WIDE=kind.index_dtype is torch.int32,
        ALIGNED=kind.is_aligned,
        NONZEROS=kind.nonzeros,
        UNROLL=single.unroll(kind.nonzeros),
        DROPPED=storage_format(kind.dtype).dropped_bits,
        STOCHASTIC=kind.stochastic,
        VECTOR=kind.by_lanes,
        ROWS=single.SLAB_ROWS,
        COLS=single.SLAB_COLUMNS,
        num_warps=single.SLAB_ROWS * single.SLAB_COLUMNS // 256,
        enable_fp_fusion=False,
    )


def _table(fields: tuple[int, ...], device: torch.device) -> torch.Tensor:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded(fields, device, stream)


@lru_cache(maxsize=MAX_TABLES)
def _uploaded(fields: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """Of the stream that it was uploaded in: nobody waits."""
    return torch.tensor(fields, dtype=torch.int64).to(device, non_blocking=True)
