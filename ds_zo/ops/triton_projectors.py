# mypy: disable-error-code="no-untyped-def"
"""Products with sparse projectors as Triton kernels: gathers in a fixed order, so results are deterministic.

Both kernels read a matrix several times (once for each non-zero of a row), so their speed depends on the caches. In the
sum of gathered rows, programs with consecutive numbers work on one slab of columns: together they read the slab once
from memory and then from L2. In the update of a weight, each program works on SLAB_COLUMNS columns of many rows. The
slab of U that it gathers from (dim x SLAB_COLUMNS float32, 128 KB at dim 512) stays in the multiprocessor's L1.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.rng import FOLD_DITHER_BITS
from ds_zo.ops.triton_formats import dither_addend, load_values, nearest_addend, round_to, store_values
from ds_zo.ops.triton_launch import as_int32, as_integers, key_words
from ds_zo.ops.triton_noise import _FOLD, _interleave4, fold_elements, philox

MAX_UNROLL = 4
"""Most gathers that a thread has in flight."""
GATHER_COLUMNS = 128
MAX_GATHER_ROWS = 16
GATHER_ELEMENTS_PER_WARP = 256
SLAB_COLUMNS = 64
SLAB_ROWS = 64
"""Rows of a slab that a program updates at a time: 8 elements for each thread of 16 warps."""
PROGRAMS_PER_MULTIPROCESSOR = 2
INTERPRETED_MULTIPROCESSORS = 1

_FOLD_BITS: tl.constexpr = tl.constexpr(FOLD_DITHER_BITS)


@triton.jit
def gather_tile(
    out_ptr,
    source_ptr,
    rows_ptr,
    values_ptr,
    c,
    col,
    depth,
    count,
    num_cols,
    out_stride,
    out_col_stride,
    source_stride,
    entry_stride,
    table_stride,
    DROPPED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """out[c, col] (+)= sum over e of values[e, c] * source[rows[e, c], col]."""
    exists = c < count
    inside = col[None, :] < num_cols
    table = c.to(tl.int64) * table_stride
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, depth, UNROLL):
        for i in tl.static_range(UNROLL):
            e = first + i
            at = table + e * entry_stride
            held = exists & (tl.zeros_like(c) + e < depth)
            value = tl.load(values_ptr + at, mask=held, other=0.0)
            row = tl.load(rows_ptr + at, mask=held, other=0).to(tl.int64) * source_stride
            # Entries with value 0 are padding: their row is not read.
            x = load_values(source_ptr, row[:, None] + col[None, :], (value != 0.0)[:, None] & inside, DROPPED)
            total += value[:, None] * x
    target = out_ptr + c.to(tl.int64)[:, None] * out_stride + col.to(tl.int64)[None, :] * out_col_stride
    mask = exists[:, None] & inside
    if ACCUMULATE:
        total += tl.load(target, mask=mask, other=0.0)
    tl.store(target, total, mask=mask)


@triton.jit(do_not_specialize=["depth", "count"])
def _gather_sum_kernel(
    out_ptr,
    source_ptr,
    rows_ptr,
    values_ptr,
    depth,
    count,
    num_cols,
    out_stride,
    out_col_stride,
    source_stride,
    entry_stride,
    table_stride,
    DROPPED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    gather_tile(
        out_ptr,
        source_ptr,
        rows_ptr,
        values_ptr,
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        tl.program_id(1) * COLS + tl.arange(0, COLS),
        depth,
        count,
        num_cols,
        out_stride,
        out_col_stride,
        source_stride,
        entry_stride,
        table_stride,
        DROPPED,
        ACCUMULATE,
        UNROLL,
        ROWS,
        COLS,
    )


@triton.jit
def update_rows(
    w_ptr,
    u_ptr,
    indices_ptr,
    values_ptr,
    begin,
    end,
    first_col,
    num_cols,
    lr,
    decay,
    offset,
    k0,
    k1,
    step,
    NONZEROS: tl.constexpr,
    UNROLL: tl.constexpr,
    DROPPED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """w[i, :] <- round(decay * w[i, :] - lr * sum over s of values[i, s] * u[indices[i, s], :]), a slab of columns."""
    LANES: tl.constexpr = ROWS * COLS // 8
    lane = tl.arange(0, LANES)
    start = first_col + (lane % (COLS // 8)) * 8
    col = start[:, None] + tl.arange(0, 8)[None, :]
    inside = col < num_cols
    for first in range(begin, end, ROWS):
        row = first + lane // (COLS // 8)
        exists = row < end
        mask = exists[:, None] & inside
        w_row = row.to(tl.int64) * num_cols
        x = load_values(w_ptr, w_row[:, None] + col, mask, DROPPED) * decay
        update = tl.zeros((LANES, 8), tl.float32)
        for skip in range(0, NONZEROS, UNROLL):
            for i in tl.static_range(UNROLL):
                s = skip + i
                held = exists & (tl.zeros_like(row) + s < NONZEROS)
                value = tl.load(values_ptr + row * NONZEROS + s, mask=held, other=0.0)
                index = tl.load(indices_ptr + row * NONZEROS + s, mask=held, other=0).to(tl.int64) * num_cols
                u = tl.load(u_ptr + index[:, None] + col, mask=held[:, None] & inside, other=0.0)
                update += value[:, None] * u
        x = tl.fma(tl.full(x.shape, -lr, tl.float32), update, x)
        if DROPPED > 0:
            if STOCHASTIC:
                if VECTOR:
                    bits = _fold_rows(offset + w_row + start, step.to(tl.uint32), k0, k1, LANES)
                else:
                    element = offset + w_row[:, None] + col
                    bits = fold_elements(element, step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32))
                addend = dither_addend(bits, _FOLD_BITS, DROPPED)
            else:
                addend = nearest_addend(x, DROPPED)
            x = round_to(x, addend, DROPPED)
        store_values(w_ptr, w_row[:, None] + col, mask, x, DROPPED)


@triton.jit(do_not_specialize=["num_rows", "rows_per_program", "lr", "decay", "offset", "k0", "k1", "step"])
def _apply_kernel(
    w_ptr,
    u_ptr,
    indices_ptr,
    values_ptr,
    num_rows,
    num_cols,
    rows_per_program,
    lr,
    decay,
    offset,
    k0,
    k1,
    step,
    NONZEROS: tl.constexpr,
    UNROLL: tl.constexpr,
    DROPPED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    begin = tl.program_id(0) * rows_per_program
    update_rows(
        w_ptr,
        u_ptr,
        indices_ptr,
        values_ptr,
        begin,
        tl.minimum(begin + rows_per_program, num_rows),
        tl.program_id(1) * COLS,
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


@triton.jit
def _fold_rows(offset, step, k0, k1, LANES: tl.constexpr):
    """16 bits of dither as [LANES, 8]. `offset` is the first offset of each lane, a multiple of 8."""
    block = offset >> 3
    low, high = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    w0, w1, w2, w3 = philox(low, high, step, step * 0 + _FOLD, k0.to(tl.uint32), k1.to(tl.uint32))
    words = _interleave4(w0, w1, w2, w3)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (LANES, 8))


def gather_sum_triton(
    out: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, *, accumulate: bool = False
) -> None:
    """out[c] (+)= sum over e of values[e, c] * source[rows[e, c]], in float32 and in the order of e.

    `rows` and `values` have shape (depth, count) and equal strides. `out` may have any strides. A `source` whose rows
    are not contiguous is copied.
    """
    assert rows.stride() == values.stride() and out.dtype is torch.float32
    if source.stride(1) != 1:
        source = source.contiguous()
    depth, count = rows.shape
    num_cols = source.shape[1]
    grid, rows_per_program = _gather_grid(count, num_cols, source.device)
    _gather_sum_kernel[grid](
        out,
        as_integers(source),
        rows,
        values,
        depth,
        count,
        num_cols,
        *out.stride(),
        source.stride(0),
        *rows.stride(),
        DROPPED=storage_format(source.dtype).dropped_bits,
        ACCUMULATE=accumulate,
        UNROLL=unroll(depth),
        ROWS=rows_per_program,
        COLS=GATHER_COLUMNS,
        num_warps=max(1, rows_per_program * GATHER_COLUMNS // GATHER_ELEMENTS_PER_WARP),
        enable_fp_fusion=False,
    )


def apply_triton(
    W: torch.Tensor,
    U: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    lr: float,
    decay: float,
    dither: tuple[int, int, int] | None,
) -> None:
    """W <- round(decay * W - lr * P U), with P's indices and values by row.

    `dither` is (seed, step, offset) of the stochastic rounding (None: to nearest). W is read once and written once. A W
    that is not contiguous is updated through a copy.
    """
    weight = W.detach().contiguous()
    num_rows, num_cols = weight.shape
    seed, step, offset = (0, 0, 0) if dither is None else dither
    low, high = key_words(seed)
    grid, rows_per_program = _apply_grid(num_rows, num_cols, W.device)
    _apply_kernel[grid](
        as_integers(weight),
        U,
        indices,
        values,
        num_rows,
        num_cols,
        rows_per_program,
        float(lr),
        float(decay),
        offset,
        low,
        high,
        as_int32(step),
        NONZEROS=indices.shape[1],
        UNROLL=unroll(indices.shape[1]),
        DROPPED=storage_format(W.dtype).dropped_bits,
        STOCHASTIC=dither is not None,
        VECTOR=num_cols % 8 == 0 and offset % 8 == 0,
        ROWS=SLAB_ROWS,
        COLS=SLAB_COLUMNS,
        num_warps=SLAB_ROWS * SLAB_COLUMNS // 256,
        enable_fp_fusion=False,
    )
    if weight.data_ptr() != W.data_ptr():
        W.detach().copy_(weight)
    torch.autograd.graph.increment_version(W)  # so that autograd detects a graph that needs the old values


# For small batches a layer's kernels take less time than the host needs to prepare their launches. So values that
# depend on shapes alone are cached. (Triton's own `cdiv` takes microseconds on the host.)


@cache
def _gather_grid(count: int, num_cols: int, device: torch.device) -> tuple[tuple[int, int], int]:
    """The grid of programs, and the number of rows for each program."""
    num_col_blocks = ceil_div(num_cols, GATHER_COLUMNS)
    rows_per_program = MAX_GATHER_ROWS
    enough = 4 * num_multiprocessors(device)
    while rows_per_program > 4 and ceil_div(count, rows_per_program) * num_col_blocks < enough:
        rows_per_program //= 2
    return (ceil_div(count, rows_per_program), num_col_blocks), rows_per_program


@cache
def _apply_grid(num_rows: int, num_cols: int, device: torch.device) -> tuple[tuple[int, int], int]:
    """The grid of programs, and the number of rows for each program."""
    num_slabs = ceil_div(num_cols, SLAB_COLUMNS)
    chunks = max(1, PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // num_slabs)
    rows_per_program = ceil_div(ceil_div(num_rows, chunks), SLAB_ROWS) * SLAB_ROWS
    return (ceil_div(num_rows, rows_per_program), num_slabs), rows_per_program


@cache
def unroll(depth: int) -> int:
    return min(MAX_UNROLL, 1 << (depth - 1).bit_length())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
