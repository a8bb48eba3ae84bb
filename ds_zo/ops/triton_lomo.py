# mypy: disable-error-code="no-untyped-def"
"""LOMO's and AdaLOMO's update of one parameter as one Triton kernel, with rounding to the parameter's dtype.

[Note: vector loads] A thread loads eight neighbours by one instruction only if the compiler can see that a mask is the
same for all of them and that their address is aligned. Sizes are not compile-time constants here. So where rows have a
multiple of 8 elements (`WHOLE_LANES`), a kernel divides sizes by 8 and multiplies them again: the values are the same,
and the compiler knows that 8 divides them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.rng import FOLD_DITHER_BITS
from ds_zo.ops.triton_formats import dither_addend, load_values, nearest_addend, round_to, store_values
from ds_zo.ops.triton_launch import as_int32, key_words, launch
from ds_zo.ops.triton_noise import fold_lanes

LANES = 256
PROGRAM_NUMEL = LANES * 8
NUM_WARPS = 8

_FOLD_BITS: tl.constexpr = tl.constexpr(FOLD_DITHER_BITS)
_SCALARS = ["numel", "matrix_numel", "num_cols"]


@triton.jit
def _direction(
    u_ptr,
    coef_ptr,
    rows_ptr,
    cols_ptr,
    start,
    within,
    mask,
    numel,
    matrix_numel,
    num_cols,
    clip,
    U_DROPPED: tl.constexpr,
    HAS_COEF: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLS: tl.constexpr,
    WHOLE_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    """clamp(coef * u) * rows * cols for the elements from `start` on. `WHOLE_LANES`: row lengths are multiples of 8, so
    each lane is within one row, and the slow divisions are made once for each lane."""
    u = load_values(u_ptr + start, within, mask, U_DROPPED)
    if HAS_COEF:
        u = u * tl.load(coef_ptr)
    if HAS_CLIP:
        u = tl.where(u > clip, clip, tl.where(u < -clip, -clip, u))  # keeps NaN
    if HAS_ROWS or HAS_COLS:
        if WHOLE_LANES:
            index = start + tl.arange(0, LANES)[:, None] * 8
        else:
            index = start + within
        row = index // num_cols
        if HAS_ROWS:
            u = u * tl.load(rows_ptr + row, mask=(index < numel), other=0.0)
        if HAS_COLS:
            col = index // matrix_numel * num_cols + (index - row * num_cols)
            if WHOLE_LANES:
                col = col + tl.arange(0, 8)[None, :]
            u = u * tl.load(cols_ptr + col, mask=mask, other=0.0)
    return u


@triton.jit(
    do_not_specialize=[*_SCALARS, "offset", "lr", "decay", "clip", "k0", "k1", "step"],
    do_not_specialize_on_alignment=["guard_ptr", "other_guard_ptr"],
)
def _update_kernel(
    p_ptr,
    u_ptr,
    coef_ptr,
    scale_ptr,
    rows_ptr,
    cols_ptr,
    residue_ptr,
    guard_ptr,
    other_guard_ptr,
    numel,
    matrix_numel,
    num_cols,
    offset,
    lr,
    decay,
    clip,
    k0,
    k1,
    step,
    DROPPED: tl.constexpr,
    U_DROPPED: tl.constexpr,
    HAS_COEF: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_COLS: tl.constexpr,
    HAS_RESIDUE: tl.constexpr,
    HAS_GUARDS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    if WHOLE_LANES:
        numel, num_cols = numel // 8 * 8, num_cols // 8 * 8  # see [Note: vector loads]
    start = tl.program_id(0).to(tl.int64) * (LANES * 8)
    within = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = start + within < numel
    is_stored = mask
    if HAS_GUARDS:  # for NaN the comparison is false; only stores depend on guards, so that loads do not wait for them
        is_stored = start + within < tl.where(tl.load(guard_ptr) + tl.load(other_guard_ptr) < float("inf"), numel, 0)
    u = _direction(
        u_ptr, coef_ptr, rows_ptr, cols_ptr, start, within, mask, numel, matrix_numel, num_cols, clip,
        U_DROPPED, HAS_COEF, HAS_CLIP, HAS_ROWS, HAS_COLS, WHOLE_LANES, LANES,
    )  # fmt: skip
    if HAS_SCALE:
        u = u * tl.load(scale_ptr)
    x = load_values(p_ptr + start, within, mask, DROPPED) * decay
    x = tl.fma(tl.full(u.shape, -lr, tl.float32), u, x)
    if HAS_RESIDUE:
        x = x + load_values(residue_ptr + start, within, mask, DROPPED)
    exact = x
    if DROPPED > 0:
        if STOCHASTIC:
            bits = fold_lanes(offset + start, step.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32), LANES)
            addend = dither_addend(bits, _FOLD_BITS, DROPPED)
        else:
            addend = nearest_addend(x, DROPPED)
        x = round_to(x, addend, DROPPED)
    store_values(p_ptr + start, within, is_stored, x, DROPPED)
    if HAS_RESIDUE:
        dropped = exact - x
        dropped = round_to(dropped, nearest_addend(dropped, DROPPED), DROPPED)
        store_values(residue_ptr + start, within, is_stored, dropped, DROPPED)


@triton.jit(do_not_specialize=_SCALARS)
def _square_sum_kernel(
    partial_ptr,
    u_ptr,
    coef_ptr,
    rows_ptr,
    cols_ptr,
    numel,
    matrix_numel,
    num_cols,
    U_DROPPED: tl.constexpr,
    HAS_COEF: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WHOLE_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    if WHOLE_LANES:
        numel, num_cols = numel // 8 * 8, num_cols // 8 * 8  # see [Note: vector loads]
    start = tl.program_id(0).to(tl.int64) * (LANES * 8)
    within = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    mask = start + within < numel
    u = _direction(
        u_ptr, coef_ptr, rows_ptr, cols_ptr, start, within, mask, numel, matrix_numel, num_cols, 0.0,
        U_DROPPED, HAS_COEF, False, HAS_ROWS, True, WHOLE_LANES, LANES,
    )  # fmt: skip
    u = tl.where(mask, u, 0.0)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.sum(u * u, axis=1), axis=0))


TILE_ROWS, TILE_COLS = 64, 128


@triton.jit(do_not_specialize=["num_rows", "num_cols", "num_col_tiles"])
def _row_and_col_kernel(
    row_partial_ptr,
    col_partial_ptr,
    g_ptr,
    num_rows,
    num_cols,
    num_col_tiles,
    DROPPED: tl.constexpr,
    WHOLE_LANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    if WHOLE_LANES:
        num_cols = num_cols // 8 * 8  # see [Note: vector loads]
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (row < num_rows)[:, None] & (col < num_cols)[None, :]
    g = load_values(g_ptr, row[:, None] * num_cols + col[None, :], mask, DROPPED)
    square = tl.where(mask, g * g, 0.0)
    tl.store(row_partial_ptr + row * num_col_tiles + tl.program_id(1), tl.sum(square, axis=1), mask=row < num_rows)
    tl.store(col_partial_ptr + tl.program_id(0) * num_cols + col, tl.sum(square, axis=0), mask=col < num_cols)


def update_triton(
    p: torch.Tensor,
    direction: torch.Tensor,
    *,
    lr: float,
    decay: float,
    coef: torch.Tensor | None = None,
    clip_value: float | None = None,
    factors: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    dither: tuple[int, int, int] | None = None,
    residue: torch.Tensor | None = None,
    guards: Sequence[torch.Tensor] = (),
) -> None:
    """p <- round(decay * p - lr * scale * clamp(coef * direction) * rows * cols).

    `factors` are scale, rows and cols; None stands for ones. `dither` is (seed, step, offset) of the stochastic
    rounding (None: to nearest). `residue` is a contiguous tensor of p's dtype that receives the bits that rounding
    drops. `guards` are up to two non-negative float32 scalars: unless all are finite, the kernel writes nothing. A
    parameter that is not contiguous is updated through a copy.
    """
    flat = p if p.is_contiguous() else p.detach().contiguous()
    direction = direction.contiguous()
    seed, step, offset = (0, 0, 0) if dither is None else dither
    scale, rows, cols = factors
    shape = _shape(p)
    given = [flat if tensor is None else tensor for tensor in (coef, scale, rows, cols, residue)]
    clip = 0.0 if clip_value is None else float(clip_value)
    launch(
        _update_kernel,
        (-(-p.numel() // PROGRAM_NUMEL),),
        (flat, direction, *given, guards[0] if guards else flat, guards[-1] if guards else flat),
        (p.numel(), *shape, offset, float(lr), float(decay), clip, *key_words(seed), as_int32(step)),
        {
            "DROPPED": storage_format(p.dtype).dropped_bits,
            "U_DROPPED": storage_format(direction.dtype).dropped_bits,
            "HAS_COEF": coef is not None,
            "HAS_CLIP": clip_value is not None,
            "HAS_SCALE": scale is not None,
            "HAS_ROWS": rows is not None,
            "HAS_COLS": cols is not None,
            "HAS_RESIDUE": residue is not None,
            "HAS_GUARDS": bool(guards),
            "STOCHASTIC": dither is not None,
            "WHOLE_LANES": shape[1] % 8 == 0,
            "LANES": LANES,
        },
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    if flat is not p:
        p.detach().copy_(flat)
    torch.autograd.graph.increment_version(p)  # so that autograd detects a graph that needs the old values


def factored_square_sum_triton(
    direction: torch.Tensor, *, rows: torch.Tensor | None, cols: torch.Tensor, coef: torch.Tensor | None
) -> torch.Tensor:
    """Sum of (coef * direction * rows * cols)^2, in a fixed order."""
    num_programs = -(-direction.numel() // PROGRAM_NUMEL)
    partial = torch.empty(num_programs, dtype=torch.float32, device=direction.device)
    launch(
        _square_sum_kernel,
        (num_programs,),
        (partial, direction, partial if coef is None else coef, partial if rows is None else rows, cols),
        (direction.numel(), *_shape(direction)),
        {
            "U_DROPPED": storage_format(direction.dtype).dropped_bits,
            "HAS_COEF": coef is not None,
            "HAS_ROWS": rows is not None,
            "WHOLE_LANES": _shape(direction)[1] % 8 == 0,
            "LANES": LANES,
        },
        num_warps=NUM_WARPS,
    )
    return partial.sum()


def _shape(p: torch.Tensor) -> tuple[int, int]:
    """Number of elements of one matrix of a stack, and of one of its rows. A vector is one row."""
    num_cols = p.shape[-1] if p.ndim else 1
    return (p.shape[-2] if p.ndim > 1 else 1) * num_cols, num_cols


def row_and_col_square_sums_triton(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares of a contiguous matrix's rows and columns, in one read of the matrix and in a fixed order."""
    num_rows, num_cols = g.shape
    tiles = -(-num_rows // TILE_ROWS), -(-num_cols // TILE_COLS)
    row_partial = torch.empty(num_rows, tiles[1], dtype=torch.float32, device=g.device)
    col_partial = torch.empty(tiles[0], num_cols, dtype=torch.float32, device=g.device)
    launch(
        _row_and_col_kernel,
        tiles,
        (row_partial, col_partial, g),
        (num_rows, num_cols, tiles[1]),
        {
            "DROPPED": storage_format(g.dtype).dropped_bits,
            "WHOLE_LANES": num_cols % 8 == 0,
            "ROWS": TILE_ROWS,
            "COLS": TILE_COLS,
        },
        num_warps=NUM_WARPS,
    )
    return row_partial.sum(dim=1), col_partial.sum(dim=0)
