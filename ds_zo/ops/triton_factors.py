# mypy: disable-error-code="no-untyped-def"
"""The factors of rank-1 noise in Triton: a kernel that draws them, and functions by which other kernels read them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_zo.ops.factor_layout import BLOCK_NUMEL
from ds_zo.ops.formats import storage_format
from ds_zo.ops.schema import KernelCall, Noise, Pending
from ds_zo.ops.segments import SegmentTable
from ds_zo.ops.triton_formats import format_id, load_values, nearest_addend, round_to, store_values
from ds_zo.ops.triton_launch import as_int32, key_words, launch
from ds_zo.ops.triton_noise import NUM_PURPOSES, normal_lanes, philox

TILE = 256
"""Philox blocks that a program draws: one for each thread of 8 warps."""

BLOCK: tl.constexpr = tl.constexpr(BLOCK_NUMEL)


@triton.jit(do_not_specialize=["num_blocks", "first_entry", "capacity", "k0", "k1", "step", "direction"])
def _factors_kernel(
    blocks_ptr, out_ptr, log_ptr, num_blocks, first_entry, capacity, k0, k1, step, direction,
    LOG_WIDTH: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program draws some blocks of one row of the table. With a log (LOG_WIDTH > 0), rows are the Q members of each
    of its entries, else members from `direction` on."""
    row = tl.program_id(0)
    if LOG_WIDTH > 0:
        step = tl.load(log_ptr + (first_entry + row // Q) % capacity * LOG_WIDTH).to(tl.int32, bitcast=True)
        member = row % Q
    else:
        member = direction + row
    index = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = index < num_blocks
    block = tl.load(blocks_ptr + index, mask=mask, other=0)
    counter = block // NUM_PURPOSES
    purpose = member * NUM_PURPOSES + block % NUM_PURPOSES
    w0, w1, w2, w3 = philox(
        counter.to(tl.uint32), (counter >> 32).to(tl.uint32), step.to(tl.uint32), purpose.to(tl.uint32),
        k0.to(tl.uint32), k1.to(tl.uint32),
    )  # fmt: skip
    z = normal_lanes(w0, w1, w2, w3)
    if FORMAT > 0:
        z = round_to(z, nearest_addend(z, FORMAT), FORMAT)
    at = index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    store_values(out_ptr + row.to(tl.int64) * num_blocks * BLOCK, at, mask[:, None], z, FORMAT)


@triton.jit
def factor_places(
    matrices_ptr, chunk_matrix_ptr, offset, within, lane, mask, LANE_ROWS: tl.constexpr, LANE: tl.constexpr
):  # fmt: skip
    """(where u is, where v is, which elements have factors), for elements from global offset `offset` on.

    With LANE_ROWS every lane is in one row of its matrix: then there is one place of u for each lane.
    """
    index = tl.load(chunk_matrix_ptr)
    matrix = matrices_ptr + index * 4
    has_matrix = index >= 0
    first = offset - tl.load(matrix, mask=has_matrix, other=0)
    num_columns = tl.load(matrix + 1, mask=has_matrix, other=1)
    row = first // num_columns
    inside = lane[:, None] * LANE if LANE_ROWS else within
    column = (first - row * num_columns).to(tl.int32) + inside
    rows_below = column // num_columns.to(tl.int32)
    column -= rows_below * num_columns.to(tl.int32)
    u_at = tl.load(matrix + 2, mask=has_matrix, other=0).to(tl.int32) + row.to(tl.int32) + rows_below
    v_at = tl.load(matrix + 3, mask=has_matrix, other=0).to(tl.int32) + column
    if LANE_ROWS:
        v_at = v_at // LANE * LANE + tl.arange(0, LANE)[None, :]  # whole lanes, in terms that the compiler recognises
    return u_at, v_at, mask & has_matrix


@triton.jit
def outer_product(row_ptr, u_at, v_at, mask, FORMAT: tl.constexpr):
    """z of the member whose factors are in a row of the table."""
    return load_values(row_ptr, u_at, mask, FORMAT) * load_values(row_ptr, v_at, mask, FORMAT)


def factors_triton(table: SegmentTable, noise: Noise, out: torch.Tensor, *, pending: Pending | None = None) -> None:
    """Fills rows of factors; see `ops.factors`. With `pending`, the rows are for its members, entry by entry."""
    layout = table.factors
    num_blocks = layout.blocks.numel()
    if out.numel() == 0:
        return
    log = layout.blocks if pending is None else pending.log
    launch(
        _factors_kernel,
        (len(out), triton.cdiv(num_blocks, TILE)),
        (layout.blocks, out, log),
        (
            num_blocks,
            0 if pending is None else pending.first_entry % len(pending.log),
            1 if pending is None else len(pending.log),
            *key_words(noise.seed),
            as_int32(noise.step),
            noise.direction,
        ),
        {
            "LOG_WIDTH": 0 if pending is None else pending.log.shape[1],
            "Q": 1 if pending is None else pending.num_directions,
            "FORMAT": format_id(storage_format(out.dtype)),
            "TILE": TILE,
        },
        num_warps=8,
        enable_fp_fusion=False,
    )
    for at in layout.still:
        out[:, at].zero_()


def factors_of_call(call: KernelCall) -> torch.Tensor:
    """The factors that a call of `replay_perturb` needs: of its pending updates, then of its perturbation."""
    table, pending = call.table, call.pending
    num_pending = 0 if pending is None else pending.num_entries * pending.num_directions
    out = torch.empty(num_pending + call.perturbs, table.factors.numel, dtype=table.factor_dtype, device=table.device)
    if num_pending:
        factors_triton(table, call.noise, out[:num_pending], pending=pending)
    if call.perturbs:
        factors_triton(table, call.noise, out[num_pending:])
    return out
