# mypy: disable-error-code="no-untyped-def"
"""The products of `triton_projectors` for several matrices in one launch.

[Note: a table of addresses] A program finds its matrix in a small table on the device. The table has one row of int64
for each matrix: its first program, addresses and sizes. A table's contents depend only on these numbers, so it is made
once and cached by them. A cached table stays valid when memory is freed and reused: it holds the numbers of the
request, not references to tensors.

[Note: alignment hints] The compiler makes wide loads only if it knows that addresses and row lengths are multiples of
16. `tl.multiple_of` marks the operation that produced a value. So the kernel must call it on the value that it loads
itself: a value that a helper function returns has lost the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ds_zo.ops import triton_projectors as single
from ds_zo.ops.formats import storage_format
from ds_zo.ops.triton_launch import as_int32, key_words, launch
from ds_zo.ops.triton_projectors import gather_tile, update_rows

MAX_BATCH = 16
"""Most matrices in one launch. A program searches its own matrix among them."""
PROGRAMS_PER_MULTIPROCESSOR = 8
"""Programs of an update: enough that matrices of different sizes finish at the same time, and few enough that each
program reads its slab often from L1."""
ALIGNMENT = 16
MAX_TABLES = 2048

_ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.int16,
    torch.float8_e4m3fn: tl.uint8,
}
"""The Triton type as which `triton_formats` reads each dtype."""
_GATHER_FIELDS: tl.constexpr = tl.constexpr(10)
_UPDATE_FIELDS: tl.constexpr = tl.constexpr(9)
_MAX_BATCH: tl.constexpr = tl.constexpr(MAX_BATCH)
_NEVER: tl.constexpr = tl.constexpr(1 << 62)


Table = tuple[int, int, int, int, bool]
"""A projector's entries: addresses of indices and of values, depth and count of the gather, whether indices are
int32."""


@triton.jit
def _own_row(table_ptr, num, FIELDS: tl.constexpr):
    """Pointer to the table row of the matrix that this program works on."""
    each = tl.arange(0, _MAX_BATCH)
    starts = tl.load(table_ptr + each * FIELDS, mask=each < num, other=_NEVER)
    return table_ptr + (tl.sum((tl.program_id(0) >= starts).to(tl.int32), 0) - 1) * FIELDS


@triton.jit(do_not_specialize=["num"])
def _gather_batch_kernel(
    table_ptr,
    num,
    ELEMENT: tl.constexpr,
    INDEX: tl.constexpr,
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
    out = tl.load(at + 1).to(tl.pointer_type(tl.float32))
    source = tl.load(at + 2).to(tl.pointer_type(ELEMENT))
    rows = tl.load(at + 3).to(tl.pointer_type(INDEX))
    values = tl.load(at + 4).to(tl.pointer_type(tl.float32))
    depth, count = tl.load(at + 5).to(tl.int32), tl.load(at + 6).to(tl.int32)
    num_cols, out_pitch, source_pitch = tl.load(at + 7).to(tl.int32), tl.load(at + 8), tl.load(at + 9)
    if ALIGNED:  # see [Note: alignment hints]
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
    ELEMENT: tl.constexpr,
    INDEX: tl.constexpr,
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
    W = tl.load(at + 1).to(tl.pointer_type(ELEMENT))
    U = tl.load(at + 2).to(tl.pointer_type(tl.float32))
    indices = tl.load(at + 3).to(tl.pointer_type(INDEX))
    values = tl.load(at + 4).to(tl.pointer_type(tl.float32))
    num_rows = tl.load(at + 5).to(tl.int32)
    num_cols = tl.load(at + 6).to(tl.int32)
    if ALIGNED:  # see [Note: alignment hints]
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


class Gathers:
    """Collects sums of gathered rows, out[c] (+)= sum over e of values[e, c] * source[rows[e, c]], into few
    launches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[_GatherKind, list[tuple[int, ...]]] = {}

    def add(
        self,
        source: int,
        source_pitch: int,
        num_cols: int,
        table: Table,
        out: int,
        out_pitch: int,
        *,
        dtype: torch.dtype = torch.float32,
        by_row: bool = False,
        out_by_column: bool = False,
        accumulate: bool = False,
    ) -> None:
        """Adds one sum. `source` and `out` are addresses. A pitch is the distance from one row to the next, in
        elements; for `out` it is from one column to the next if `out_by_column`. `by_row`: the entries of one c are
        adjacent."""
        is_aligned = not (source | source_pitch | num_cols | out | out_pitch) % ALIGNMENT
        kind = dtype, table[4], by_row, out_by_column, accumulate, is_aligned
        self._found.setdefault(kind, []).append((out, source, *table[:4], num_cols, out_pitch, source_pitch))

    def launches(self) -> list[Callable[[], object]]:
        """The launches, to be called in this order. They can be repeated as long as the addresses are valid."""
        return [
            _gathers_launch(kind, rows[first : first + MAX_BATCH], self._device)
            for kind, rows in self._found.items()
            for first in range(0, len(rows), MAX_BATCH)
        ]


class Updates:
    """Collects updates W <- round(decay * W - lr * P U) into few launches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[_UpdateKind, list[tuple[int, ...]]] = {}

    def add(self, W: torch.Tensor, U: int, table: Table, *, lr: float, decay: float, offset: int | None) -> None:
        """Adds one update. W, a matrix or a single row, is contiguous. U is an address; `table` has P's entries by row.
        `offset` is the first offset of W's dither (None: round to nearest)."""
        num_rows, num_cols = W.shape if W.ndim == 2 else (1, W.numel())
        address = W.data_ptr()
        is_aligned = not (address | U | num_cols) % ALIGNMENT
        by_lanes = not (num_cols | (offset or 0)) % 8
        kind = W.dtype, table[4], table[2], float(lr), float(decay), offset is not None, by_lanes, is_aligned
        self._found.setdefault(kind, []).append((address, U, *table[:2], num_rows, num_cols, offset or 0))

    def launches(self) -> list[tuple[float, float, Callable[..., object]]]:
        """(lr, decay, launch) for each launch: the values with which its updates were added. The launch is called with
        these or other values of lr and decay, and with `dither_words`."""
        return [
            (kind[3], kind[4], _updates_launch(kind, rows[first : first + MAX_BATCH], self._device))
            for kind, rows in self._found.items()
            for first in range(0, len(rows), MAX_BATCH)
        ]


def dither_words(seed: int, step: int) -> tuple[int, int, int]:
    return (*key_words(seed), as_int32(step))


_GatherKind = tuple[torch.dtype, bool, bool, bool, bool, bool]
_UpdateKind = tuple[torch.dtype, bool, int, float, float, bool, bool, bool]
"""The properties that all matrices of one launch have in common."""


def _gathers_launch(kind: _GatherKind, rows: Sequence[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    dtype, wide, by_row, out_by_column, accumulate, is_aligned = kind
    height, width = single.MAX_GATHER_ROWS, single.GATHER_COLUMNS
    fields: list[int] = []
    num_programs = max_depth = 0
    for row in rows:
        depth, count, num_cols = row[4], row[5], row[6]
        fields.append(num_programs)
        fields += row
        num_programs += -(-count // height) * -(-num_cols // width)
        max_depth = max(max_depth, depth)
    constants = {
        "ELEMENT": _ELEMENTS[dtype],
        "INDEX": tl.int32 if wide else tl.int16,
        "BY_ROW": by_row,
        "OUT_BY_COLUMN": out_by_column,
        "ALIGNED": is_aligned,
        "DROPPED": storage_format(dtype).dropped_bits,
        "ACCUMULATE": accumulate,
        "UNROLL": single.unroll(max_depth),
        "ROWS": height,
        "COLS": width,
    }
    num_warps = height * width // single.GATHER_ELEMENTS_PER_WARP
    return _launch(_gather_batch_kernel, num_programs, (fields, len(rows)), constants, num_warps, device)


def _updates_launch(kind: _UpdateKind, rows: Sequence[tuple[int, ...]], device: torch.device) -> Callable[..., object]:
    """A launch that is called with lr, decay and `dither_words`."""
    dtype, wide, nonzeros, _, _, stochastic, by_lanes, is_aligned = kind
    height, width = single.SLAB_ROWS, single.SLAB_COLUMNS
    numel = sum(row[4] * row[5] for row in rows)
    num_wanted = PROGRAMS_PER_MULTIPROCESSOR * single.num_multiprocessors(device)
    fields: list[int] = []
    num_programs = 0
    for W, U, indices, values, num_rows, num_cols, offset in rows:
        num_slabs = -(-num_cols // width)
        num_chunks = max(1, num_wanted * num_rows * num_cols // (numel * num_slabs))
        rows_per_program = single.ceil_div(single.ceil_div(num_rows, num_chunks), height) * height
        fields += (num_programs, W, U, indices, values, num_rows, num_cols, rows_per_program, offset)
        num_programs += -(-num_rows // rows_per_program) * num_slabs
    constants = {
        "ELEMENT": _ELEMENTS[dtype],
        "INDEX": tl.int32 if wide else tl.int16,
        "ALIGNED": is_aligned,
        "NONZEROS": nonzeros,
        "UNROLL": single.unroll(nonzeros),
        "DROPPED": storage_format(dtype).dropped_bits,
        "STOCHASTIC": stochastic,
        "VECTOR": by_lanes,
        "ROWS": height,
        "COLS": width,
    }
    return _launch(_update_batch_kernel, num_programs, (fields, len(rows)), constants, height * width // 256, device)


def _launch(
    kernel: Any,
    num_programs: int,
    matrices: tuple[list[int], int],
    constants: Mapping[str, Any],
    num_warps: int,
    device: torch.device,
) -> Callable[..., None]:
    """A launch that can be repeated. It is called with the kernel's parameters between the number of matrices and the
    constants. `matrices`: the fields of the table, and the number of its rows."""
    fields, num = matrices
    table = _table(tuple(fields), device)

    def repeated(*values: float) -> None:
        numbers = (num, *values)
        launch(kernel, (num_programs,), (table,), numbers, constants, num_warps=num_warps, enable_fp_fusion=False)

    return repeated


def _table(fields: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A cached device table with these fields; see [Note: a table of addresses]."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _uploaded(fields, device, stream)


@lru_cache(maxsize=MAX_TABLES)
def _uploaded(fields: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """One table for each stream: launches on that stream follow the upload without waiting on the host."""
    return torch.tensor(fields, dtype=torch.int64).to(device, non_blocking=True)
