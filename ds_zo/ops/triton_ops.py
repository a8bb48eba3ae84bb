# mypy: disable-error-code="no-untyped-def"
"""The fused operation as one Triton kernel, for CUDA tensors and, in tests, CPU tensors under Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ds_zo.ops.formats import storage_format
from ds_zo.ops.philox import MASK32, split_seed
from ds_zo.ops.rng import COPY_DITHER_BITS, FOLD_DITHER_BITS
from ds_zo.ops.schema import KernelCall
from ds_zo.ops.segments import LANE_NUMEL
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
from ds_zo.ops.triton_noise import draw_elements, draw_lanes, fold_elements, fold_lanes

LANES = 256
"""Lanes of 8 elements that a program processes at a time: one for each thread of 8 warps."""
NUM_WARPS = 8

_LANE: tl.constexpr = tl.constexpr(LANE_NUMEL)
_GROUP_LANES: tl.constexpr = tl.constexpr(32)
_FOLD_BITS: tl.constexpr = tl.constexpr(FOLD_DITHER_BITS)
_KEEP, _NEAREST, _COPY, _FOLD, _SPLIT = (tl.constexpr(i) for i in range(5))
"""Kinds of store: none, rounded to nearest, by the copy dither, by the fold dither, or split with a low plane."""


@triton.jit(
    do_not_specialize=[
        "first_chunk", "num_entries", "first_entry", "capacity", "k0", "k1", "step", "direction", "scale",
    ]
)  # fmt: skip
def _replay_perturb_kernel(
    chunks_ptr,
    still_ptr,
    src_ptr,
    dst_ptr,
    out_ptr,
    pair_ptr,
    low_in_ptr,
    low_out_ptr,
    scales_in_ptr,
    scales_out_ptr,
    log_ptr,
    first_chunk,
    num_entries,
    first_entry,
    capacity,
    k0,
    k1,
    step,
    direction,
    scale,
    NUM_GROUPS: tl.constexpr,
    Q: tl.constexpr,
    FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    NORMAL: tl.constexpr,
    COPY_BITS: tl.constexpr,
    TRAINABLE: tl.constexpr,
    VECTOR: tl.constexpr,
    REPLAY: tl.constexpr,
    HAS_LOW_IN: tl.constexpr,
    STORE: tl.constexpr,
    WRITE: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    PERTURB: tl.constexpr,
    DITHER_OUT: tl.constexpr,
    HAS_STILL: tl.constexpr,
    LANES: tl.constexpr,
):
    row = chunks_ptr + (first_chunk + tl.program_id(0)) * 4
    start = tl.multiple_of(tl.load(row), 256)
    first_offset = tl.load(row + 1)
    numel = tl.load(row + 2).to(tl.int32)
    group = tl.load(row + 3).to(tl.int32) if NUM_GROUPS > 1 else 0
    if HAS_STILL:
        still = still_ptr + (first_chunk + tl.program_id(0)) * 2
        first_still = tl.load(still)
        end_still = tl.load(still + 1)
    k0 = k0.to(tl.uint32)
    k1 = k1.to(tl.uint32)
    step = step.to(tl.uint32)
    direction = direction.to(tl.uint32)
    SCALED: tl.constexpr = FORMAT >= FP8

    lane = tl.arange(0, LANES)
    within = lane[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    for skip in range(0, numel, LANES * _LANE):
        at = start + skip
        if VECTOR:
            mask = (lane * _LANE < numel - skip)[:, None]
        else:
            mask = within < numel - skip
        offset = first_offset + skip

        lane_mask = lane * _LANE < numel - skip
        scales_at = group_word(at // 256, FORMAT)
        if FORMAT == BF12:
            pattern = load_lanes(src_ptr + at, scales_in_ptr + scales_at, within, mask, lane, lane_mask)
            if HAS_LOW_IN:
                low = tl.load(low_in_ptr + at + within, mask=mask, other=0)
                pattern = pattern + low.to(tl.int32).to(tl.uint32, bitcast=True)
            x = unbias(pattern, FORMAT)
        else:
            x = load_values(src_ptr + at, within, mask, FORMAT)
            if HAS_LOW_IN:
                x = join(x, tl.load(low_in_ptr + at + within, mask=mask, other=0), FORMAT)
        if SCALED:
            group_lane = group_word(lane // _GROUP_LANES, FORMAT)
            exponent = tl.load(scales_in_ptr + scales_at + group_lane, mask=lane_mask, other=0).to(tl.int32)
            x = x * power_of_two(exponent)[:, None]

        if TRAINABLE and REPLAY:
            index = first_entry
            for _ in range(num_entries):
                entry = log_ptr + index * (1 + NUM_GROUPS * (1 + Q))
                index = tl.where(index + 1 == capacity, 0, index + 1)
                then = tl.load(entry).to(tl.uint32, bitcast=True)
                x = x * tl.load(entry + 1 + group)
                for d in tl.static_range(Q):
                    coefficient = tl.load(entry + 1 + NUM_GROUPS + group * Q + d)
                    if VECTOR:
                        z, _ = draw_lanes(offset, then, tl.full((), d, tl.uint32), k0, k1, LANES, NORMAL)
                    else:
                        z, _ = draw_elements(offset + within, then, tl.full((), d, tl.uint32), k0, k1, NORMAL)
                    if HAS_STILL:
                        z = _without_still(z, offset + within, first_still, end_still)
                    x = tl.fma(tl.broadcast_to(-coefficient, x.shape), z, x)

        if TRAINABLE and (PERTURB or STORE == _COPY):
            if VECTOR:
                z, dither = draw_lanes(offset, step, direction, k0, k1, LANES, NORMAL)
            else:
                z, dither = draw_elements(offset + within, step, direction, k0, k1, NORMAL)
            if HAS_STILL:
                z = _without_still(z, offset + within, first_still, end_still)

        if STORE != _KEEP:
            if SCALED:
                if TRAINABLE:
                    exponent = tl.maximum(exponent, _group_exponents(x, mask, FORMAT, LANES))
                if WRITE:
                    tl.store(
                        scales_out_ptr + scales_at + group_lane,
                        exponent.to(scales_out_ptr.dtype.element_ty),
                        mask=lane_mask & (lane % _GROUP_LANES == 0),
                    )
                x = x * power_of_two(-exponent)[:, None]
            if STORE == _SPLIT:
                if FORMAT == BF12:
                    pattern, low = split_pattern(x, FORMAT)
                else:
                    x, low = split(x, FORMAT)
                    if SCALED:
                        pattern = round_pattern(x, bias(x), 0, FORMAT)
                tl.store(low_out_ptr + at + within, low.to(tl.int16), mask=mask)
            elif FORMAT > 0:
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
                if SCALED:
                    pattern = round_pattern(x, bias(x), addend, FORMAT)
                else:
                    x = round_to(x, addend, FORMAT)
            if WRITE:
                if FORMAT == BF12:
                    group_mask = lane // _GROUP_LANES * 256 < numel - skip
                    store_lanes(dst_ptr + at, scales_out_ptr + scales_at, within, mask, lane, group_mask, pattern)
                elif SCALED:
                    store_codes(dst_ptr + at, within, mask, pattern, FORMAT)
                else:
                    store_values(dst_ptr + at, within, mask, x, FORMAT)
            if SCALED:
                x = unbias(pattern, FORMAT) * power_of_two(exponent)[:, None]

        if HAS_OUT:
            y = x
            number = x == x  # not NaN; then x + scale * z and x - scale * z are not NaN either
            if TRAINABLE and PERTURB:
                y = tl.fma(tl.full(x.shape, scale, tl.float32), z, x)
            if OUT_FORMAT > 0:
                if TRAINABLE and DITHER_OUT:
                    addend = dither_addend(dither, COPY_BITS, OUT_FORMAT)
                else:
                    addend = nearest_addend(y, OUT_FORMAT)
                if TRAINABLE and PERTURB:
                    y = round_sum(y, addend, number, OUT_FORMAT)
                else:
                    y = round_to(y, addend, OUT_FORMAT)
            store_values(out_ptr + at, within, mask, y, OUT_FORMAT)
            if HAS_PAIR:
                y = x
                if TRAINABLE:
                    y = tl.fma(tl.full(x.shape, -scale, tl.float32), z, x)
                if OUT_FORMAT > 0:
                    if not (TRAINABLE and DITHER_OUT):
                        addend = nearest_addend(y, OUT_FORMAT)
                    if TRAINABLE:
                        y = round_sum(y, addend, number, OUT_FORMAT)
                    else:
                        y = round_to(y, addend, OUT_FORMAT)
                store_values(pair_ptr + at, within, mask, y, OUT_FORMAT)


@triton.jit
def _without_still(z, offset, first_still, end_still):
    return tl.where((offset >= first_still) & (offset < end_still), 0.0, z)


@triton.jit
def _group_exponents(x, mask, FORMAT: tl.constexpr, LANES: tl.constexpr):
    """For each lane, the exponent that its group of 256 elements needs."""
    magnitude = float_bits(x) & 0x7FFFFFFF
    magnitude = tl.where(mask & (magnitude < 0x7F800000), magnitude, 0)
    largest = tl.max(tl.reshape(tl.max(bits_float(magnitude), axis=1), (LANES // 32, 32)), axis=1)
    fitted = fit_exponents(largest, FORMAT)
    return tl.reshape(tl.broadcast_to(fitted[:, None], (LANES // 32, 32)), (LANES,))


def replay_perturb_triton(call: KernelCall) -> None:
    """Launch the kernel once for each chunk range of the table. There is one range if all segments are trainable and
    have sizes that are multiples of 8."""
    low, high = (_as_int32(k) for k in split_seed(call.seed))
    unused = call.table.chunks
    for chunks in call.table.ranges:
        if not chunks.trainable and call.leaves_frozen_alone:
            continue
        store = _store_kind(call, chunks.trainable)
        _replay_perturb_kernel[(chunks.count,)](
            call.table.chunks,
            unused if call.table.still is None else call.table.still,
            _raw(call.src),
            unused if call.dst is None else _raw(call.dst),
            unused if call.out is None else _raw(call.out),
            unused if call.pair is None else _raw(call.pair),
            unused if call.low_in is None else call.low_in,
            unused if call.low_out is None else call.low_out,
            unused if call.scales_in is None else call.scales_in,
            unused if call.scales_out is None else call.scales_out,
            unused if call.log is None else call.log,
            chunks.first,
            call.num_entries,
            0 if call.log is None else call.first_entry % call.log.shape[0],
            1 if call.log is None else call.log.shape[0],
            low,
            high,
            _as_int32(call.step),
            call.direction,
            float(call.scale),
            NUM_GROUPS=call.num_log_groups if call.num_entries else 0,
            Q=call.num_directions,
            FORMAT=format_id(call.format),
            OUT_FORMAT=0 if call.out is None else format_id(storage_format(call.out.dtype)),
            NORMAL=call.distribution == "normal",
            COPY_BITS=COPY_DITHER_BITS[call.distribution],
            TRAINABLE=chunks.trainable,
            VECTOR=chunks.vector,
            REPLAY=call.num_entries > 0,
            HAS_LOW_IN=call.low_in is not None and (chunks.trainable or store in (_KEEP.value, _SPLIT.value)),
            STORE=store,
            WRITE=call.dst is not None,
            HAS_OUT=call.out is not None,
            HAS_PAIR=call.pair is not None,
            PERTURB=call.out is not None and call.scale != 0.0,
            DITHER_OUT=call.rounds_out,
            HAS_STILL=call.table.still is not None,
            LANES=LANES,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _store_kind(call: KernelCall, trainable: bool) -> int:
    if not call.stores or (not trainable and call.dst is None):
        kind = _KEEP
    elif call.low_out is not None:
        kind = _SPLIT
    elif trainable and call.rounds_dst_by_fold:
        kind = _FOLD
    elif trainable and call.rounds_dst_by_copy:
        kind = _COPY
    else:
        kind = _NEAREST
    return kind.value


def _as_int32(value: int) -> int:
    """The same 32 bits as a signed number, so that Triton compiles the kernel for one argument type only."""
    value &= MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; bfloat16 and fp8 as integers of the same bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8)
    return tensor
