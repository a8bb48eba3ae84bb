"""What the Triton kernel must have in common with the reference, for any device.

Run by `test_kernels_gpu.py` on CUDA, and by `test_kernels_interpreted.py` under Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from ds_zo import ops
from ds_zo.ops import mxfp4, nested, nf4, triton_mxfp4, triton_nf4, triton_ops
from ds_zo.ops.formats import exponents_of, storage_format
from ds_zo.ops.reference import factors_reference, replay_perturb_reference
from ds_zo.ops.rng import copy_dither, fold_dither
from ds_zo.ops.schema import KernelCall
from ds_zo.ops.triton_factors import factors_triton
from ds_zo.ops.triton_noise import draw_elements, draw_lanes, fold_elements, fold_lanes, philox
from ds_zo.ops.triton_ops import replay_perturb_triton
from tests.ops.flat_cases import (
    BF12,
    CANARY,
    FP8,
    LANE_MATRIX_SEGMENTS,
    MATRIX_SEGMENTS,
    SEGMENTS,
    SMALL_SEGMENTS,
    STORAGE_DTYPES,
    Flat,
    covered,
    make_log,
)

FORMATS = STORAGE_DTYPES
"""For checks of what does not depend on how a format rounds."""
if os.environ.get("TRITON_INTERPRET") == "1":
    triton_ops.LANES = 512  # the interpreter takes as long for a long block as for a short one
    # float16 differs from bfloat16 in its rounding alone, which the checks against the reference show.
    FORMATS = tuple(dtype for dtype in STORAGE_DTYPES if dtype != torch.float16)

SEED = 2**63 - 12345
DISTRIBUTIONS = ("normal", "rademacher")
FACTOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LOG = make_log([(2**31 - 5, [0.999, 1.0], [1e-4, 2e-3]), (7, [0.99, 0.5], [-3e-3, 1e-4])], capacity=3, first=2)
Run = Callable[[KernelCall], None]


def implementations(device: str) -> list[tuple[Run, str]]:
    return [(replay_perturb_reference, "cpu"), (replay_perturb_triton, device)]


def apply(run: Run, flat: Flat, to: Flat | None = None, **arguments: Any) -> None:
    """Reads `flat`, and stores to `to` where it is given."""
    checked(run, flat.call(to, **({"seed": SEED, "step": 9} | arguments)))


def checked(run: Run, call: KernelCall) -> None:
    call.check()
    run(call)


def pending_on(where: str) -> ops.Pending:
    return ops.Pending(LOG.to(where), first_entry=2, num_entries=2)


def both(
    dtype: torch.dtype,
    device: str,
    *,
    out: torch.dtype,
    segments: tuple[ops.Segment, ...] = SMALL_SEGMENTS,
    factor_dtype: torch.dtype = torch.float32,
    master: bool = False,
    replays: bool = True,
    scale: float,
    **arguments: Any,
) -> tuple[tuple[Flat, torch.Tensor], tuple[Flat, torch.Tensor]]:
    """(flat, out) of the reference and of the kernel for the same call in place."""
    results = []
    for run, where in implementations(device):
        flat = Flat.make(dtype, master=master, device=where, segments=segments, factor_dtype=factor_dtype)
        copy = torch.full_like(flat.storage, CANARY, dtype=out)
        pending = pending_on(where) if replays else None
        apply(run, flat, flat, pending=pending, copies=ops.Copies(copy, scale=scale), **arguments)
        results.append((flat.to("cpu"), copy.cpu()))
    return results[0], results[1]


def assert_rounded_alike(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Equal but where values a float32 rounding apart fall on two sides of a dither: rare, and one step of the grid."""
    different = a != b
    assert different.float().mean() < 2e-3, f"{what}: {int(different.sum())} of {a.numel()} differ"
    fmt = storage_format(dtype)
    step = 2.0 ** (fmt.dropped_bits - 23)
    largest = (a - b).abs().max()
    limit = (a.abs() * step).clamp(min=max(fmt.tiny, 1e-30) * step)
    assert torch.all((a - b).abs() <= limit * 1.01 + 1e-6 * a.abs()), f"{what}: largest difference {largest}"


@triton.jit
def words_kernel(out_ptr, offset, step, k0, k1, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    index = lane[:, None] * 8 + tl.arange(0, 8)[None, :]
    step = step.to(tl.uint32)
    k0 = k0.to(tl.uint32)
    k1 = k1.to(tl.uint32)
    zero = step * 0
    offset = offset.to(tl.int64)
    size: tl.constexpr = LANES * 8
    tl.store(out_ptr + index, fold_lanes(offset, step, k0, k1, LANES).to(tl.int64))
    tl.store(out_ptr + size + index, fold_elements(offset + index, step, k0, k1).to(tl.int64))
    _, dither = draw_lanes(offset, step, zero, k0, k1, LANES, True)
    tl.store(out_ptr + 2 * size + index, dither.to(tl.int64))
    _, dither = draw_elements(offset + index, step, zero, k0, k1, True)
    tl.store(out_ptr + 3 * size + index, dither.to(tl.int64))
    _, dither = draw_lanes(offset, step, zero, k0, k1, LANES, False)
    tl.store(out_ptr + 4 * size + index, dither.to(tl.int64))
    _, dither = draw_elements(offset + index, step, zero, k0, k1, False)
    tl.store(out_ptr + 5 * size + index, dither.to(tl.int64))
    w0, w1, w2, w3 = philox(lane.to(tl.uint32), zero + 11, zero + 12, zero + 13, k0, k1)
    tl.store(out_ptr + 6 * size + lane, w0.to(tl.int64))
    tl.store(out_ptr + 6 * size + LANES + lane, w1.to(tl.int64))
    tl.store(out_ptr + 6 * size + 2 * LANES + lane, w2.to(tl.int64))
    tl.store(out_ptr + 6 * size + 3 * LANES + lane, w3.to(tl.int64))


def check_words(device: str) -> None:
    lanes = 64
    for offset in (0, 8, 40, 2**33 + 24):
        got = torch.zeros(6 * lanes * 8 + 4 * lanes, dtype=torch.int64, device=device)
        words_kernel[(1,)](got, offset, 3, -5, 6, lanes)
        seed = (6 << 32) | (2**32 - 5)
        at = {"seed": seed, "step": 3, "offset": offset, "numel": lanes * 8}
        fold = torch.from_numpy(fold_dither(**at).astype("int64"))
        normal = torch.from_numpy(copy_dither(**at, direction=0, distribution="normal").astype("int64"))
        byte = torch.from_numpy(copy_dither(**at, direction=0, distribution="rademacher").astype("int64"))
        words = ops.philox4x32((torch.arange(lanes).numpy(), 11, 12, 13), (2**32 - 5, 6))
        raw = [torch.from_numpy(w.astype("int64")) for w in words]
        expected = torch.cat([fold, fold, normal, normal, byte, byte, *raw])
        assert torch.equal(got.cpu(), expected), f"words differ from offset {offset}"


def check_noise(device: str) -> None:
    for distribution in DISTRIBUTIONS:
        (_, expected), (_, got) = both(
            torch.float32,
            device,
            out=torch.float32,
            segments=SEGMENTS,
            replays=False,
            scale=1.0,
            direction=2,
            distribution=distribution,
        )
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6), f"{distribution}: {(got - expected).abs().max()}"
        assert torch.equal(got[~covered()], expected[~covered()])


def check_all_formats(device: str) -> None:
    roundings = ((True, "stochastic"), (False, "stochastic"), (False, "nearest"))
    cases = [(*pair, *rounding) for pair in product(STORAGE_DTYPES, ("normal",)) for rounding in roundings]
    cases += [
        (dtype, "rademacher", fold, "stochastic") for dtype in (torch.bfloat16, FP8, BF12) for fold in (True, False)
    ]
    for dtype, distribution, fold, rounding in cases:
        out = torch.float32 if dtype == torch.float32 else torch.float16 if fold else torch.bfloat16
        a, b = both(
            dtype,
            device,
            out=out,
            scale=1e-3,
            distribution=distribution,
            fold=fold,
            rounding=rounding,
        )
        what = f"{dtype} {distribution} fold={fold} {rounding}"
        _compare(a, b, dtype, out, what)


def _compare(
    a: tuple[Flat, torch.Tensor],
    b: tuple[Flat, torch.Tensor],
    dtype: torch.dtype,
    out: torch.dtype,
    what: str,
    segments: tuple[ops.Segment, ...] = SMALL_SEGMENTS,
) -> None:
    (flat_a, out_a), (flat_b, out_b) = a, b
    if flat_a.scales is not None:
        assert flat_b.scales is not None
        fmt = storage_format(dtype)
        assert torch.equal(exponents_of(fmt, flat_a.scales), exponents_of(fmt, flat_b.scales)), what
    for s in segments:
        at = slice(s.start, s.start + s.numel)
        raw_a, raw_b = flat_a.values(s), flat_b.values(s)
        if not s.trainable:  # copied as they are
            assert torch.equal(raw_a, raw_b) and torch.equal(out_a[at], out_b[at]), f"{what} {s}"
        if dtype == torch.float32:
            assert torch.allclose(raw_a, raw_b, rtol=1e-6, atol=1e-8), what
            assert torch.allclose(out_a[at], out_b[at], rtol=1e-6, atol=1e-8), what
            continue
        assert_rounded_alike(raw_a, raw_b, dtype, f"{what} dst {s}")
        same = raw_a == raw_b
        if out == torch.float32:  # no grid hides that devices round noise differently
            assert torch.allclose(out_a[at][same], out_b[at][same], rtol=1e-6, atol=1e-7), f"{what} out {s}"
        else:
            assert_rounded_alike(out_a[at].float()[same], out_b[at].float()[same], out, f"{what} out {s}")
    padding = ~covered(segments)
    if dtype == BF12:  # lanes of nothing but padding: zeros in a group that was written, untouched in others
        lanes_a, lanes_b = (f.scales.view(-1, 33)[:, 1:].reshape(-1) for f in (flat_a, flat_b))  # type: ignore[union-attr]
        unused = padding.view(-1, 8).all(dim=1)
        assert torch.equal(lanes_a[unused], lanes_b[unused]), what
    assert torch.equal(flat_a.storage.float()[padding], flat_b.storage.float()[padding]), what
    assert torch.equal(out_a[padding], out_b[padding]), what


def check_rounding_is_the_reference_bit_for_bit(device: str) -> None:
    """Masters of every binade, subnormals among them, stored without their low planes: no noise that could differ."""
    roundings: tuple[dict[str, Any], ...] = ({"fold": True}, {}, {"rounding": "nearest"})
    for dtype, options in product((torch.bfloat16, torch.float16, FP8, BF12), roundings):
        found = []
        for run, where in implementations(device):
            flat = Flat.make(dtype, master=True, device=where, segments=SMALL_SEGMENTS)
            assert flat.low is not None
            flat.low.copy_(torch.randint(-(2**15), 2**15, flat.low.shape, generator=torch.Generator().manual_seed(5)))
            flat.low[(flat.storage.view(torch.uint8).view(len(flat.low), -1)[:, -1] & 0x7F) == 0] = 0  # near zero
            to = flat.clone()
            apply(run, flat, replace(to, low=None), **options)
            found.append(to.to("cpu"))
        expected, got = found
        for s in SMALL_SEGMENTS:
            same = torch.equal(expected.values(s).view(torch.int32), got.values(s).view(torch.int32))
            assert same, f"{dtype} {options} {s}"
        assert expected.scales is None or torch.equal(expected.scales, got.scales), f"{dtype} {options}"


def check_split(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, FP8, BF12):
        (flat_a, out_a), (flat_b, out_b) = both(dtype, device, master=True, out=torch.bfloat16, scale=1e-3, fold=True)
        for s in SMALL_SEGMENTS:
            masters = flat_a.values(s, with_low=True), flat_b.values(s, with_low=True)
            assert torch.allclose(*masters, rtol=1e-5 if dtype == FP8 else 1e-6, atol=1e-8), f"{dtype} {s}"
            if not s.trainable:
                assert torch.equal(*masters), f"{dtype} {s}"
        assert flat_a.low is not None
        assert flat_b.low is not None
        assert torch.equal(flat_a.low[~covered(SMALL_SEGMENTS)], flat_b.low[~covered(SMALL_SEGMENTS)])
        assert (out_a != out_b).float().mean() < 2e-3


def check_split_is_exact(device: str) -> None:
    """bf16 with a low plane follows float32 storage bit for bit."""
    start = Flat.make(torch.bfloat16, master=True, segments=SMALL_SEGMENTS)
    exact = Flat.make(torch.float32, segments=SMALL_SEGMENTS)
    for s in SMALL_SEGMENTS:
        exact.storage[s.start : s.start + s.numel] = start.values(s, with_low=True)
    flat, exact = start.to(device), exact.to(device)
    for target in (flat, exact):
        apply(replay_perturb_triton, target, target, pending=pending_on(device), fold=True)
    flat, exact = flat.to("cpu"), exact.to("cpu")
    for s in SMALL_SEGMENTS:
        assert torch.equal(flat.values(s, with_low=True), exact.values(s))


def check_replay_equals_folds(device: str) -> None:
    """k entries at once, with a perturbed copy, are k folds of one entry, bit for bit."""
    for distribution, segments in (("normal", SMALL_SEGMENTS), ("rank1", MATRIX_SEGMENTS)):
        _check_replay_equals_folds(device, distribution, segments)


def _check_replay_equals_folds(device: str, distribution: str, segments: tuple[ops.Segment, ...]) -> None:
    directions = 2
    rows = [(i + 5, [1 - 1e-3 * i, 1.0], [1e-3 * (d - i) for d in range(2 * directions)]) for i in range(3)]
    pending = ops.Pending(make_log(rows).to(device), first_entry=0, num_entries=3, num_directions=directions)
    at_once, one_by_one = (Flat.make(torch.float32, device=device, segments=segments) for _ in range(2))
    copy = torch.zeros_like(at_once.storage)
    of: dict[str, Any] = {"distribution": distribution}
    copies = ops.Copies(copy, scale=1e-3)
    apply(replay_perturb_triton, at_once, at_once, pending=pending, copies=copies, step=20, **of)
    for i in range(3):
        one = replace(pending, first_entry=i, num_entries=1)
        apply(replay_perturb_triton, one_by_one, one_by_one, pending=one, fold=True, step=i, **of)
    assert torch.equal(at_once.storage, one_by_one.storage)
    only_copy = torch.zeros_like(copy)
    apply(replay_perturb_triton, one_by_one, copies=ops.Copies(only_copy, scale=1e-3), step=20, **of)
    assert torch.equal(copy, only_copy)


def check_pair(device: str) -> None:
    """Both copies at once, stored or as if stored, are a store and two perturbing calls on it, bit for bit."""
    for run, where in implementations(device):
        for dtype, distribution in (*product(FORMATS, ("normal",)), (FP8, "rademacher"), (FP8, "rank1")):
            segments = MATRIX_SEGMENTS if distribution == "rank1" else SMALL_SEGMENTS
            flat = Flat.make(dtype, device=where, segments=segments)
            out = torch.float32 if dtype == torch.float32 else torch.bfloat16
            copies = [torch.full_like(flat.storage, CANARY, dtype=out) for _ in range(6)]
            pending: dict[str, Any] = {"pending": pending_on(where), "distribution": distribution}
            unstored = flat.call(seed=SEED, step=9, copies=ops.Copies(copies[0], copies[1], scale=1e-3), **pending)
            checked(run, replace(unstored, store=ops.AS_STORED))
            apart, at_once = flat.clone(), flat.clone()
            apply(run, at_once, at_once, **pending, copies=ops.Copies(copies[2], copies[3], scale=1e-3))
            apply(run, apart, apart, **pending, copies=ops.Copies(copies[4], scale=1e-3))
            apply(run, apart, copies=ops.Copies(copies[5], scale=-1e-3), distribution=distribution)
            assert torch.equal(at_once.storage.float(), apart.storage.float()), f"{dtype} {where}"
            assert at_once.scales is None or torch.equal(at_once.scales, apart.scales), f"{dtype} {where}"
            for first, second in ((0, 4), (1, 5), (2, 4), (3, 5)):
                assert torch.equal(copies[first], copies[second]), f"{dtype} {distribution} {where} {first} {second}"


def check_still(device: str) -> None:
    """A row without noise, across lanes, in a segment of whole lanes and in a ragged one; the rest as without it."""
    still = tuple(replace(s, still=(s.offset + 37, s.offset + 141)) for s in SMALL_SEGMENTS)
    for dtype in FORMATS:
        moving: dict[str, Any] = {"scale": 1e-2, "master": True, "fold": True}
        a, b = both(dtype, device, out=torch.float32, segments=still, **moving)
        _compare(a, b, dtype, torch.float32, f"{dtype} still")
        _, free = both(dtype, device, out=torch.float32, **moving)
        before = Flat.make(dtype, master=True, segments=still)
        for s in (s for s in still if s.trainable):
            row = slice(s.still[0] - s.offset, s.still[1] - s.offset)
            decayed = (
                before.values(s, with_low=True) * (0.999 if s.group == 0 else 1.0) * (0.99 if s.group == 0 else 0.5)
            )
            stored, copied = b[0].values(s, with_low=True), b[1][s.start : s.start + s.numel]
            torch.testing.assert_close(stored[row], decayed[row], rtol=1e-6, atol=1e-8)
            assert torch.equal(copied[row], b[0].values(s)[row]), dtype
            if storage_format(dtype).scaled:
                continue  # a group's exponent may depend on its neighbours
            rest = torch.ones(s.numel, dtype=torch.bool)
            rest[row] = False
            assert torch.equal(stored[rest], free[0].values(s, with_low=True)[rest]), dtype
            assert torch.equal(copied[rest], free[1][s.start : s.start + s.numel][rest]), dtype


def check_factors(device: str) -> None:
    noise = ops.Noise(SEED, step=7, direction=300, distribution="rank1")
    for dtype in FACTOR_DTYPES:
        found = []
        for fill, where in ((factors_reference, "cpu"), (factors_triton, device)):
            table = ops.build_table(MATRIX_SEGMENTS, where, factor_dtype=dtype)
            out = torch.full((3, table.factors.numel), CANARY, dtype=dtype, device=where)
            fill(table, noise, out)
            found.append(out.cpu())
        expected, got = (out.float() for out in found)
        assert torch.equal(expected == 0, got == 0)
        assert all(bool((got[:, at] == 0).all()) for at in table.factors.still)
        torch.testing.assert_close(got, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
        assert (got != expected).float().mean() < (1 if dtype == torch.float32 else 2e-3)
        # The rows of pending updates are those of their steps, which the host does not read.
        pending = replace(pending_on(device), first_entry=5)
        of_log = torch.empty(2, table.factors.numel, dtype=dtype, device=device)
        factors_triton(table, noise, of_log, pending=pending)
        for i, step in enumerate((2**31 - 5, 7)):
            row = torch.empty_like(of_log[:1])
            factors_triton(table, replace(noise, step=step, direction=0), row)
            assert torch.equal(row, of_log[i : i + 1])


def check_rank1(device: str) -> None:
    """The kernel and the reference, for matrices of odd sizes, and for matrices whose rows are whole lanes."""
    f32, bf16, f16 = FACTOR_DTYPES
    cases = [(MATRIX_SEGMENTS, f32, dtype, f32) for dtype in FACTOR_DTYPES]
    cases += [(MATRIX_SEGMENTS, dtype, bf16, bf16) for dtype in (FP8, BF12)]
    cases += [(LANE_MATRIX_SEGMENTS, bf16, bf16, bf16), (LANE_MATRIX_SEGMENTS, f32, f16, f32)]
    for segments, dtype, factor_dtype, out in cases:
        arguments: dict[str, Any] = {"segments": segments, "factor_dtype": factor_dtype, "distribution": "rank1"}
        a, b = both(dtype, device, out=out, scale=1e-3, direction=3, **arguments)
        _compare(a, b, dtype, out, f"{dtype} {factor_dtype} {segments[0]}", segments)


def check_rank1_is_the_product_of_its_factors(device: str) -> None:
    """Bit for bit: a forward that adds the noise by its factors has the noise of the update."""
    for segments, dtype in product((MATRIX_SEGMENTS, LANE_MATRIX_SEGMENTS), FACTOR_DTYPES):
        table = ops.build_table(segments, device, factor_dtype=dtype)
        zeros = torch.zeros(-(-table.numel // 256) * 256, device=device)
        out, factors = torch.empty_like(zeros), torch.empty(1, table.factors.numel, dtype=dtype, device=device)
        noise = ops.Noise(SEED, step=7, direction=4, distribution="rank1")
        checked(replay_perturb_triton, KernelCall(ops.Planes(zeros), table, noise, copies=ops.Copies(out, scale=1.0)))
        factors_triton(table, noise, factors)
        views = table.factors.views(factors.float())
        for s in segments:
            z = torch.zeros(s.numel, device=device)
            if s.matrix is not None and s.trainable:
                u, v = views[s.matrix.offset]
                z = (u[0][:, None] * v[0]).reshape(-1)[s.offset - s.matrix.offset :][: s.numel]
            assert torch.equal(out[s.start : s.start + s.numel], z), f"{dtype} {s}"


def check_special_values(device: str) -> None:
    """NaN stays NaN and infinity infinity through stochastic rounding, whatever NaN's bits are."""
    bits = torch.tensor(
        [0x7FFFFFFF, 0x7F800001, 0x7F800000, -0x800000, 0x7F7FFFFF, -1, 0, -0x80000000], dtype=torch.int64
    )
    special = bits.to(torch.int32).view(torch.float32).repeat(32)
    table = ops.build_table([ops.Segment(start=0, numel=256, offset=0)], device)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.zeros(256, dtype=dtype, device=device)
        apply(replay_perturb_triton, Flat(special.to(device), None, None, table), copies=ops.Copies(out, scale=1e-30))
        got = out.cpu().view(32, 8)[:, [0, 1, 2, 3, 5]].float()
        assert got[:, [0, 1, 4]].isnan().all()
        assert torch.all(got[:, 2] == float("inf"))
        assert torch.all(got[:, 3] == -float("inf"))


def check_nf4(device: str) -> None:
    """All bytes, subnormal and infinite results, NaN, and a last program that is not full."""
    generator = torch.Generator().manual_seed(0)
    numel = 3 * 8 * triton_nf4.WORDS // 2
    packed = torch.arange(numel // 2).to(torch.uint8)
    absmax = torch.ldexp(torch.rand(numel // 64, generator=generator), torch.arange(numel // 64) % 60 - 30)
    absmax[:5] = torch.tensor([0.0, 1e-40, 7e4, float("inf"), float("nan")])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected, found = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device=device)
        nf4.dequantise_(expected, packed, absmax)
        triton_nf4.dequantise_triton_(found[None], packed.to(device), absmax.to(device))
        number = ~expected.isnan()
        bits = torch.int32 if dtype is torch.float32 else torch.int16
        assert torch.equal(found.cpu().isnan(), ~number), dtype
        assert torch.equal(found.cpu().view(bits)[number], expected.view(bits)[number]), dtype
        part = torch.zeros_like(found[512:1280])  # one matrix of a plane
        triton_nf4.dequantise_triton_(part[None], packed.to(device)[256:640], absmax.to(device)[8:20])
        assert torch.equal(part.cpu().view(bits), expected[512:1280].view(bits)), dtype


def check_nf4_nested(device: str) -> None:
    """Encoded and decoded. Sizes that are not of whole words, groups, blocks or programs, and stacks of matrices."""
    for num_matrices, numel in ((1, 70_003), (1, 9), (3, 64 * 257), (2, 64)):
        values = torch.randn(num_matrices, numel, generator=torch.Generator().manual_seed(numel)) ** 3
        coded = [nested.quantise(matrix) for matrix in values]
        packed, scales = (torch.cat(planes) for planes in zip(*coded, strict=True))
        if device != "cpu":
            on_device = [nested.quantise(matrix.to(device)) for matrix in values]
            assert torch.equal(packed, torch.cat([each for each, _ in on_device]).cpu())
            assert torch.equal(scales, torch.cat([row for _, row in on_device]).cpu())
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected, found = torch.empty_like(values, dtype=dtype), torch.full_like(values, CANARY, dtype=dtype)
            ops.dequantise_nf4_(expected, packed, scales)
            memory = torch.cat([found.view(-1), torch.full((8,), CANARY, dtype=dtype)]).to(device)
            found = memory[: values.numel()].view_as(values)
            triton_nf4.dequantise_triton_(found, packed.to(device), scales.to(device))
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            assert torch.equal(found.cpu().view(bits), expected.view(bits)), (num_matrices, numel, dtype)
            assert bool((memory[values.numel() :] == CANARY).all())


def check_mxfp4(device: str) -> None:
    """All bytes and all scales, with tiles that are not full. Smaller than a tile, and larger."""
    for num_experts, num_rows, num_columns in ((2, 32, 24), (3, 160, 72)):
        numel = num_experts * num_rows * num_columns
        packed, scales = torch.arange(numel // 2).to(torch.uint8), torch.arange(numel // 32).to(torch.uint8)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected = torch.empty(num_experts, num_rows, num_columns, dtype=dtype)
            found = torch.empty_like(expected, device=device)
            mxfp4.dequantise_(expected, packed, scales)
            triton_mxfp4.dequantise_triton_(found, packed.to(device), scales.to(device))
            number = ~expected.isnan()
            bits = torch.int32 if dtype is torch.float32 else torch.int16
            assert torch.equal(found.cpu().isnan(), ~number), dtype
            assert torch.equal(found.cpu().view(bits)[number], expected.view(bits)[number]), dtype


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
