# mypy: disable-error-code="no-untyped-def"
"""The fused operation as one Triton kernel, for CUDA tensors and, in tests, CPU tensors under Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.rng import COPY_DITHER_BITS, FOLD_DITHER_BITS
from ds_zo.ops.schema import KernelCall
from ds_zo.ops.segments import LANE_NUMEL
from ds_zo.ops.triton_factors import BLOCK, factor_places, factors_of_call, outer_product
from ds_zo.ops.triton_formats import (
    BF12,
    FP8,
    bias,
    bits_float,
    dither_addend,
    fit_exponents,
    float_bits,
    format_id,
    group_word,
    join,
    load_lanes,
    load_values,
    nearest_addend,
    power_of_two,
    round_pattern,
    round_sum,
    round_to,
    split,
    split_pattern,
    store_codes,
    store_lanes,
    store_values,
    unbias,
)
from ds_zo.ops.triton_launch import as_int32, key_words, launch
from ds_zo.ops.triton_noise import draw_elements, draw_lanes, fold_elements, fold_lanes

LANES = 256
"""Lanes of 8 elements that a program processes at a time: one for each thread of 8 warps."""
NUM_WARPS = 8

_LANE: tl.constexpr = tl.constexpr(LANE_NUMEL)
_NOT_RANK1: tl.constexpr = tl.constexpr(-1)
"""In place of the format's id of factors, for noise that has none."""
_GROUP_LANES: tl.constexpr = tl.constexpr(32)
_FOLD_BITS: tl.constexpr = tl.constexpr(FOLD_DITHER_BITS)
_KEEP, _NEAREST, _COPY, _FOLD, _SPLIT = (tl.constexpr(i) for i in range(5))
"""Kinds of store: none, rounded to nearest, by the copy dither, by the fold dither, or split with a low plane."""


@triton.jit(
    do_not_specialize=[
        "first_chunk", "num_entries", "first_entry", "capacity", "k0", "k1", "step", "direction", "scale",
        "num_blocks",
    ]
)  # fmt: skip
def _replay_perturb_kernel(
    chunks_ptr, still_ptr, src_ptr, dst_ptr, out_ptr, pair_ptr, low_in_ptr, low_out_ptr, scales_in_ptr, scales_out_ptr,
    log_ptr, factors_ptr, matrices_ptr, chunk_matrices_ptr,
    first_chunk, num_entries, first_entry, capacity, k0, k1, step, direction, scale, num_blocks,
    NUM_GROUPS: tl.constexpr, Q: tl.constexpr, FORMAT: tl.constexpr, OUT_FORMAT: tl.constexpr, NORMAL: tl.constexpr,
    COPY_BITS: tl.constexpr, TRAINABLE: tl.constexpr, VECTOR: tl.constexpr, REPLAY: tl.constexpr,
    HAS_LOW_IN: tl.constexpr, STORE: tl.constexpr, WRITE: tl.constexpr, HAS_OUT: tl.constexpr, HAS_PAIR: tl.constexpr,
    PERTURB: tl.constexpr, DITHER_OUT: tl.constexpr, HAS_STILL: tl.constexpr, FACTORS: tl.constexpr,
    LANE_ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program loads one chunk of stored weights, replays pending updates, stores the result and writes copies of
    it."""
    row = chunks_ptr + (first_chunk + tl.program_id(0)) * 4
    start = tl.multiple_of(tl.load(row), 256)
    first_offset = tl.load(row + 1)
    numel = tl.load(row + 2).to(tl.int32)
    group = tl.load(row + 3).to(tl.int32) if NUM_GROUPS > 1 else 0
    first_still, end_still = 0, 0
    if HAS_STILL:
        still = still_ptr + (first_chunk + tl.program_id(0)) * 2
        first_still = tl.load(still)
        end_still = tl.load(still + 1)
    k0 = k0.to(tl.uint32)
    k1 = k1.to(tl.uint32)
    step = step.to(tl.uint32)
    direction = direction.to(tl.uint32)

    lane = tl.arange(0, LANES)
    within = lane[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    for skip in range(0, numel, LANES * _LANE):
        at = start + skip
        left = numel - skip
        if VECTOR:
            mask = (lane * _LANE < left)[:, None]
        else:
            mask = within < left
        offset = first_offset + skip
        lane_mask = lane * _LANE < left

        x, exponent = _load_stored(
            src_ptr, low_in_ptr, scales_in_ptr, at, within, mask, lane, lane_mask, FORMAT, HAS_LOW_IN
        )
        u_at, v_at, in_matrix = within, within, mask  # not used unless noise has rank 1
        if TRAINABLE and FACTORS != _NOT_RANK1:
            chunk_matrix = chunk_matrices_ptr + first_chunk + tl.program_id(0)
            u_at, v_at, in_matrix = factor_places(
                matrices_ptr, chunk_matrix, offset, within, lane, mask, LANE_ROWS, _LANE
            )  # fmt: skip
        if TRAINABLE and REPLAY:
            x = _replay(
                x, log_ptr, num_entries, first_entry, capacity, group, offset, within, k0, k1, first_still, end_still,
                factors_ptr, num_blocks, u_at, v_at, in_matrix,
                NUM_GROUPS, Q, NORMAL, VECTOR, HAS_STILL, FACTORS, LANES,
            )  # fmt: skip
        z, dither = x, x  # not used unless they are drawn
        if TRAINABLE and (PERTURB or STORE == _COPY):
            z, dither = _draw(
                offset, within, step, direction, k0, k1, first_still, end_still, NORMAL, VECTOR, HAS_STILL, LANES
            )
            if PERTURB and FACTORS != _NOT_RANK1:
                its_row = factors_ptr + (num_entries * Q).to(tl.int64) * num_blocks * BLOCK
                z = outer_product(its_row, u_at, v_at, in_matrix, FACTORS)
        if STORE != _KEEP:
            x = _store_weights(
                dst_ptr, low_out_ptr, scales_out_ptr, x, exponent, dither, at, offset, within, mask, lane, lane_mask,
                left, step, k0, k1,
                FORMAT, STORE, WRITE, COPY_BITS, TRAINABLE, VECTOR, LANES,
            )  # fmt: skip
        if HAS_OUT:
            _store_copies(
                out_ptr, pair_ptr, at, within, mask, x, z, dither, scale,
                OUT_FORMAT, COPY_BITS, HAS_PAIR, TRAINABLE and PERTURB, TRAINABLE and DITHER_OUT,
            )  # fmt: skip


@triton.jit
def _load_stored(
    ptr, low_ptr, scales_ptr, at, within, mask, lane, lane_mask, FORMAT: tl.constexpr, HAS_LOW: tl.constexpr
):  # fmt: skip
    """(stored weights as float32, each lane's exponent). The exponent has no meaning in formats without scales."""
    scales_at = group_word(at // 256, FORMAT)
    if FORMAT == BF12:
        pattern = load_lanes(ptr + at, scales_ptr + scales_at, within, mask, lane, lane_mask)
        if HAS_LOW:
            low = tl.load(low_ptr + at + within, mask=mask, other=0)
            pattern = pattern + low.to(tl.int32).to(tl.uint32, bitcast=True)
        x = unbias(pattern, FORMAT)
    else:
        x = load_values(ptr + at, within, mask, FORMAT)
        if HAS_LOW:
            x = join(x, tl.load(low_ptr + at + within, mask=mask, other=0), FORMAT)
    exponent = lane
    if FORMAT >= FP8:
        group_lane = group_word(lane // _GROUP_LANES, FORMAT)
        exponent = tl.load(scales_ptr + scales_at + group_lane, mask=lane_mask, other=0).to(tl.int32)
        x = x * power_of_two(exponent)[:, None]
    return x, exponent


@triton.jit
def _replay(
    x, log_ptr, num_entries, first_entry, capacity, group, offset, within, k0, k1, first_still, end_still,
    factors_ptr, num_blocks, u_at, v_at, in_matrix,
    NUM_GROUPS: tl.constexpr, Q: tl.constexpr, NORMAL: tl.constexpr, VECTOR: tl.constexpr, HAS_STILL: tl.constexpr,
    FACTORS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The weights after the pending updates of the log's entries."""
    index = first_entry
    for _ in range(num_entries):
        entry = log_ptr + index * (1 + NUM_GROUPS * (1 + Q))
        index = tl.where(index + 1 == capacity, 0, index + 1)
        then = tl.load(entry).to(tl.uint32, bitcast=True)
        x = x * tl.load(entry + 1 + group)
        coefficients = entry + 1 + NUM_GROUPS + group * Q
        if FACTORS == _NOT_RANK1:
            for d in tl.static_range(Q):
                coefficient = tl.load(coefficients + d)
                z, _ = _draw(
                    offset, within, then, tl.full((), d, tl.uint32), k0, k1, first_still, end_still,
                    NORMAL, VECTOR, HAS_STILL, LANES,
                )  # fmt: skip
                x = tl.fma(tl.broadcast_to(-coefficient, x.shape), z, x)
        else:
            for d in range(Q):
                coefficient = tl.load(coefficients + d)
                z = outer_product(factors_ptr, u_at, v_at, in_matrix, FACTORS)
                factors_ptr += num_blocks * BLOCK
                x = tl.fma(tl.broadcast_to(-coefficient, x.shape), z, x)
    return x


@triton.jit
def _draw(
    offset, within, step, direction, k0, k1, first_still, end_still,
    NORMAL: tl.constexpr, VECTOR: tl.constexpr, HAS_STILL: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """(z, dither) for elements from `offset` on. z is 0 for offsets [first_still, end_still)."""
    if VECTOR:
        z, dither = draw_lanes(offset, step, direction, k0, k1, LANES, NORMAL)
    else:
        z, dither = draw_elements(offset + within, step, direction, k0, k1, NORMAL)
    if HAS_STILL:
        z = tl.where((offset + within >= first_still) & (offset + within < end_still), 0.0, z)
    return z, dither


@triton.jit
def _store_weights(
    ptr, low_ptr, scales_ptr, x, exponent, dither, at, offset, within, mask, lane, lane_mask, left, step, k0, k1,
    FORMAT: tl.constexpr, STORE: tl.constexpr, WRITE: tl.constexpr, COPY_BITS: tl.constexpr, TRAINABLE: tl.constexpr,
    VECTOR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Rounds x to its format, and writes it if WRITE. Returns the rounded weights, without the low plane."""
    scales_at = group_word(at // 256, FORMAT)
    if FORMAT >= FP8:
        if TRAINABLE:
            exponent = tl.maximum(exponent, _group_exponents(x, mask, FORMAT, LANES))
        if WRITE:
            _store_exponents(scales_ptr + scales_at, exponent, lane, lane_mask, FORMAT)
        x = x * power_of_two(-exponent)[:, None]
    if STORE == _SPLIT:
        x, low = _split_stored(x, FORMAT)
        tl.store(low_ptr + at + within, low.to(tl.int16), mask=mask)
    elif FORMAT > 0:
        addend = _store_addend(x, dither, offset, within, step, k0, k1, FORMAT, STORE, COPY_BITS, VECTOR, LANES)
        x = _round_stored(x, addend, FORMAT)
    if WRITE:
        group_mask = lane // _GROUP_LANES * 256 < left
        _store_rounded(ptr + at, scales_ptr + scales_at, within, mask, lane, group_mask, x, FORMAT)
    if FORMAT >= FP8:
        x = unbias(x, FORMAT) * power_of_two(exponent)[:, None]
    return x


@triton.jit
def _store_addend(
    x, dither, offset, within, step, k0, k1,
    FORMAT: tl.constexpr, STORE: tl.constexpr, COPY_BITS: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The addend with which truncation rounds as this kind of store does."""
    if STORE == _FOLD:
        if VECTOR:
            bits = fold_lanes(offset, step, k0, k1, LANES)
        else:
            bits = fold_elements(offset + within, step, k0, k1)
        addend = dither_addend(bits, _FOLD_BITS, FORMAT)
    elif STORE == _COPY:
        # The copy dither's complement: where this rounding goes up, the copy's tends to go down.
        addend = dither_addend(dither ^ ((1 << COPY_BITS) - 1), COPY_BITS, FORMAT)
    else:
        addend = nearest_addend(x, FORMAT)
    return addend


@triton.jit
def _group_exponents(x, mask, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """For each lane, the exponent that its group of 256 elements needs."""
    magnitude = float_bits(x) & 0x7FFFFFFF
    magnitude = tl.where(mask & (magnitude < 0x7F800000), magnitude, 0)
    largest = tl.max(tl.reshape(tl.max(bits_float(magnitude), axis=1), (LANES // 32, 32)), axis=1)
    fitted = fit_exponents(largest, FORMAT)
    return tl.reshape(tl.broadcast_to(fitted[:, None], (LANES // 32, 32)), (LANES,))


@triton.jit
def _store_exponents(scales_ptr, exponent, lane, lane_mask, FORMAT: tl.constexpr):
    tl.store(
        scales_ptr + group_word(lane // _GROUP_LANES, FORMAT),
        exponent.to(scales_ptr.dtype.element_ty),
        mask=lane_mask & (lane % _GROUP_LANES == 0),
    )


@triton.jit
def _split_stored(x, FORMAT: tl.constexpr):
    """(x rounded as `_round_stored` returns it, low plane as int32); see [Note: split masters]."""
    if FORMAT == BF12:
        stored, low = split_pattern(x, FORMAT)
    else:
        stored, low = split(x, FORMAT)
        if FORMAT >= FP8:
            stored = round_pattern(stored, bias(stored), 0, FORMAT)
    return stored, low


@triton.jit
def _round_stored(x, addend, FORMAT: tl.constexpr):
    """x rounded to the format: as a pattern ([Note: patterns]) in the scaled formats, as float32 in the others."""
    if FORMAT >= FP8:
        stored = round_pattern(x, bias(x), addend, FORMAT)
    else:
        stored = round_to(x, addend, FORMAT)
    return stored


@triton.jit
def _store_rounded(ptr, scales_ptr, within, mask, lane, group_mask, stored, FORMAT: tl.constexpr):
    """Writes what `_round_stored` or `_split_stored` returned."""
    if FORMAT == BF12:
        store_lanes(ptr, scales_ptr, within, mask, lane, group_mask, stored)
    elif FORMAT >= FP8:
        store_codes(ptr, within, mask, stored, FORMAT)
    else:
        store_values(ptr, within, mask, stored, FORMAT)


@triton.jit
def _store_copies(
    out_ptr, pair_ptr, at, within, mask, x, z, dither, scale,
    FORMAT: tl.constexpr, COPY_BITS: tl.constexpr, HAS_PAIR: tl.constexpr, PERTURB: tl.constexpr, DITHER: tl.constexpr,
):  # fmt: skip
    """Writes x + scale * z, and x - scale * z where there is a pair. Without PERTURB both are x."""
    number = x == x  # not NaN; then x + scale * z and x - scale * z are not NaN either
    y = x
    if PERTURB:
        y = tl.fma(tl.full(x.shape, scale, tl.float32), z, x)
    y = _round_copy(y, dither, number, FORMAT, COPY_BITS, PERTURB, DITHER)
    store_values(out_ptr + at, within, mask, y, FORMAT)
    if HAS_PAIR:
        y = x
        if PERTURB:
            y = tl.fma(tl.full(x.shape, -scale, tl.float32), z, x)
        y = _round_copy(y, dither, number, FORMAT, COPY_BITS, PERTURB, DITHER)
        store_values(pair_ptr + at, within, mask, y, FORMAT)


@triton.jit
def _round_copy(
    y, dither, number, FORMAT: tl.constexpr, COPY_BITS: tl.constexpr, PERTURB: tl.constexpr, DITHER: tl.constexpr
):  # fmt: skip
    """A copy rounded to its format, by the copy dither or to nearest."""
    if FORMAT > 0:
        if DITHER:
            addend = dither_addend(dither, COPY_BITS, FORMAT)
        else:
            addend = nearest_addend(y, FORMAT)
        if PERTURB:
            y = round_sum(y, addend, number, FORMAT)
        else:
            y = round_to(y, addend, FORMAT)
    return y


def replay_perturb_triton(call: KernelCall) -> None:
    """Launch the kernel once for each chunk range of the table. There is one range if all segments are trainable and
    have sizes that are multiples of 8."""
    source, noise, pending, copies = call.source, call.noise, call.pending, call.copies
    to = call.written
    factors = factors_of_call(call) if noise.distribution == "rank1" else None
    layout = None if factors is None else call.table.factors
    tensors = (
        call.table.still,
        source.storage,
        None if to is None else to.storage,
        None if copies is None else copies.out,
        None if copies is None else copies.pair,
        source.low,
        None if to is None else to.low,
        source.scales,
        None if to is None else to.scales,
        None if pending is None else pending.log,
        factors,
        None if layout is None else layout.matrices,
        None if layout is None else layout.chunk_matrices,
    )
    unused = call.table.chunks
    given = [unused if tensor is None else tensor for tensor in tensors]
    num_entries = call.num_entries
    capacity = 1 if pending is None else pending.log.shape[0]
    first_entry = 0 if pending is None else pending.first_entry % capacity
    for chunks in call.table.ranges:
        if not chunks.trainable and call.leaves_frozen_alone:
            continue
        store = _store_kind(call, chunks.trainable)
        numbers = (
            *(chunks.first, num_entries, first_entry, capacity, *key_words(noise.seed), as_int32(noise.step)),
            noise.direction,
            0.0 if copies is None else float(copies.scale),
            0 if layout is None else layout.blocks.numel(),
        )
        constants = {
            "NUM_GROUPS": 0 if pending is None or not num_entries else pending.num_groups,
            "Q": 1 if pending is None else pending.num_directions,
            "FORMAT": format_id(call.format),
            "OUT_FORMAT": 0 if copies is None else format_id(storage_format(copies.out.dtype)),
            "NORMAL": noise.distribution != "rademacher",
            "COPY_BITS": COPY_DITHER_BITS[noise.distribution],
            "TRAINABLE": chunks.trainable,
            "VECTOR": chunks.vector,
            "REPLAY": num_entries > 0,
            "HAS_LOW_IN": source.low is not None and (chunks.trainable or store in (_KEEP.value, _SPLIT.value)),
            "STORE": store,
            "WRITE": to is not None,
            "HAS_OUT": copies is not None,
            "HAS_PAIR": copies is not None and copies.pair is not None,
            "PERTURB": call.perturbs,
            "DITHER_OUT": call.rounds_copies,
            "HAS_STILL": call.table.still is not None,
            "FACTORS": _NOT_RANK1.value if factors is None else format_id(storage_format(factors.dtype)),
            "LANE_ROWS": layout is not None and layout.lanes_in_rows and chunks.vector,
            "LANES": LANES,
        }
        launch(
            *(_replay_perturb_kernel, (chunks.count,), (call.table.chunks, *given), numbers, constants),
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _store_kind(call: KernelCall, trainable: bool) -> int:
    if call.store is None or (not trainable and call.written is None):
        kind = _KEEP
    elif call.splits:
        kind = _SPLIT
    elif trainable and call.rounds_store_by_fold:
        kind = _FOLD
    elif trainable and call.rounds_store_by_copy:
        kind = _COPY
    else:
        kind = _NEAREST
    return kind.value
