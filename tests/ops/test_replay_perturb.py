"""The fused operation: what it means, and that it means the same however it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_zo import ops
from ds_zo.ops.formats import exponents_of
from tests.ops.flat_cases import BF12, CANARY, FP8, SEGMENTS, STORAGE_DTYPES, Flat, covered, make_log

SEED = 2**62 + 5
TRAINABLE = [s for s in SEGMENTS if s.trainable]
BF16, F32 = torch.zeros(256, dtype=torch.bfloat16), torch.zeros(256)
FROZEN = [s for s in SEGMENTS if not s.trainable]


def part(segment: ops.Segment) -> slice:
    return slice(segment.start, segment.start + segment.numel)


def z_of(
    segment: ops.Segment, step: int, direction: int = 0, distribution: ops.Distribution = "normal"
) -> torch.Tensor:
    return ops.noise(SEED, step, direction, segment.offset, segment.numel, distribution)


def replay(flat: Flat, to: Flat | None = None, **arguments: Any) -> None:
    """Reads `flat`, and writes `to` where it is given."""
    call = flat.call(to, seed=SEED, **arguments)
    ops.replay_perturb(
        call.source, table=call.table, noise=call.noise, pending=call.pending, store=call.store, copies=call.copies
    )


def entries_of(rows: list[tuple[int, list[float], list[float]]], directions: int = 1) -> ops.Pending:
    return ops.Pending(make_log(rows), first_entry=0, num_entries=len(rows), num_directions=directions)


def rows_of(num_entries: int, directions: int = 1) -> list[tuple[int, list[float], list[float]]]:
    """Entries for two groups, each with its own decay and coefficients."""
    return [
        (i + 3, [1 - 1e-3 * (i + 1), 1 - 2e-2], [1e-3 * (i + d + 1) for d in range(2 * directions)])
        for i in range(num_entries)
    ]


@pytest.mark.parametrize("distribution", ["normal", "rademacher"])
@pytest.mark.parametrize("directions", [1, 3])
def test_float32_replay_and_perturb_are_the_formula(directions: int, distribution: ops.Distribution) -> None:
    flat = Flat.make(torch.float32)
    before = flat.clone()
    rows = rows_of(2, directions)
    out = torch.full_like(flat.storage, CANARY)
    replay(
        flat,
        flat,
        pending=ops.Pending(make_log(rows, capacity=5, first=4), 4, num_entries=2, num_directions=directions),
        copies=ops.Copies(out, scale=-1e-3),
        step=9,
        direction=directions - 1,
        distribution=distribution,
    )
    for s in TRAINABLE:
        x = before.values(s)
        for step, decays, coefficients in rows:
            x = x * decays[s.group]
            for d in range(directions):
                x = x - coefficients[s.group * directions + d] * z_of(s, step, d, distribution)
        torch.testing.assert_close(flat.storage[part(s)], x, rtol=2e-6, atol=1e-8)
        y = x - 1e-3 * z_of(s, 9, directions - 1, distribution)
        torch.testing.assert_close(out[part(s)], y, rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("directions", [1, 3])
def test_replaying_k_entries_equals_k_folds_bit_for_bit(directions: int) -> None:
    pending = entries_of(rows_of(5, directions), directions)
    at_once, one_by_one = Flat.make(torch.float32), Flat.make(torch.float32)
    replay(at_once, at_once, pending=pending, step=20)
    for i in range(5):
        replay(one_by_one, one_by_one, pending=replace(pending, first_entry=i, num_entries=1), step=i, fold=True)
    assert torch.equal(at_once.storage, one_by_one.storage)


def test_result_does_not_depend_on_how_the_flat_is_cut_into_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_zo.ops import reference

    results = []
    for run_numel in (256, 1024, 65536):
        monkeypatch.setattr(reference, "RUN_NUMEL", run_numel)
        flat = Flat.make(torch.bfloat16)
        replay(flat, flat, pending=entries_of(rows_of(1)), step=4, fold=True)
        results.append(flat.storage.view(torch.int16))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_result_does_not_depend_on_the_number_of_threads() -> None:
    flat = Flat.make(torch.float32)
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            out = torch.zeros_like(flat.storage)
            replay(flat, copies=ops.Copies(out, scale=1e-3), step=1)
            outs.append(out)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_a_skipped_step_changes_nothing(dtype: torch.dtype) -> None:
    flat = Flat.make(dtype)
    before = flat.clone()
    replay(flat, flat, pending=entries_of([(5, [1.0, 1.0], [0.0, 0.0])]), step=6, fold=True)
    for segment in SEGMENTS:
        assert torch.equal(flat.values(segment), before.values(segment))
    if flat.scales is not None and before.scales is not None:
        assert torch.equal(flat.scales, before.scales)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
@pytest.mark.parametrize("master", [False, True])
def test_frozen_segments_are_copied_and_padding_is_untouched(dtype: torch.dtype, master: bool) -> None:
    source = Flat.make(dtype, master=master)
    target = source.clone()
    for plane in (target.storage, target.low, target.scales):
        if plane is not None:
            plane.fill_(CANARY)
    out = torch.full_like(source.storage, CANARY, dtype=torch.float32)
    pending = entries_of(rows_of(2))
    replay(source, target, pending=pending, copies=ops.Copies(out, scale=1.0), step=9, fold=True)
    for s in FROZEN:
        assert torch.equal(target.values(s, with_low=True), source.values(s, with_low=True))
        assert torch.equal(out[part(s)], source.values(s))
    for s in TRAINABLE:
        assert not torch.equal(target.values(s), source.values(s))
    padding = ~covered()
    assert torch.all(target.storage.float()[padding] == CANARY)
    assert torch.all(out[padding] == CANARY)
    if target.low is not None:
        assert torch.all(target.low[padding] == CANARY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, BF12])
def test_split_master_follows_float32_bit_for_bit(dtype: torch.dtype) -> None:
    """Fold after fold, where updates are far below the storage's own spacing."""
    flat, exact = Flat.make(dtype, master=True), Flat.make(torch.float32)
    for s in SEGMENTS:
        exact.storage[part(s)] = flat.values(s, with_low=True)
    for i in range(6):
        pending = entries_of([(i, [1 - 1e-5, 1.0], [1e-5, 2e-5])])
        for target in (flat, exact):
            replay(target, target, pending=pending, step=i, fold=True)
    for s in SEGMENTS:
        if dtype == torch.bfloat16:
            assert torch.equal(flat.values(s, with_low=True), exact.values(s))
        else:  # float16's subnormals are 2**-40 apart, bf12's less here
            torch.testing.assert_close(flat.values(s, with_low=True), exact.values(s), rtol=3e-7, atol=6 * 2.0**-40)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8, BF12])
def test_stochastic_folds_follow_small_updates_in_the_mean_and_nearest_does_not(dtype: torch.dtype, fold: bool) -> None:
    """A constant drift of a tenth of an ulp a fold: nearest rounding never moves."""
    numel, folds = 4096, 60
    ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, FP8: 2.0**-3, BF12: 2.0**-7}[dtype]
    decay = 1 - 0.1 * ulp / 1.25
    drift = {}
    for rounding in ("stochastic", "nearest"):
        flat = Flat.of(torch.full((numel,), 1.25), dtype)
        for i in range(folds):
            replay(flat, flat, pending=entries_of([(i, [decay], [0.0])]), step=i, fold=fold, rounding=rounding)
        drift[rounding] = (ops.decode(flat.storage, None, flat.scales) - 1.25).mean().item()
    expected = 1.25 * (decay**folds - 1)
    spread = ulp * (folds * 0.25 / numel) ** 0.5
    assert drift["nearest"] == 0.0
    assert abs(drift["stochastic"] - expected) < 5 * spread + abs(expected) / 50


@pytest.mark.parametrize("distribution", ["normal", "rademacher"])
def test_perturbed_bf16_copies_are_unbiased_and_both_twins_round_alike(distribution: ops.Distribution) -> None:
    """At weights near 1 and zo_eps 1e-3 nearest rounding loses most of z; the dither keeps 2 zo_eps z in the mean."""
    numel, eps = 1 << 18, 1e-3
    theta = Flat.of(torch.ones(numel), torch.bfloat16)
    z = ops.noise(SEED, 3, 0, 0, numel, distribution)

    def copies(rounding: Any) -> torch.Tensor:
        twins = []
        for scale in (eps, -eps):
            out = torch.empty(numel, dtype=torch.bfloat16)
            copies = ops.Copies(out, scale=scale)
            replay(theta, copies=copies, step=3, distribution=distribution, rounding=rounding)
            twins.append(out.float())
        return twins[0] - twins[1]

    def response(difference: torch.Tensor) -> float:
        return float((difference * z).mean() / (2 * eps * (z * z).mean()))

    assert abs(response(copies("stochastic")) - 1) < 0.05
    assert abs(response(copies("nearest")) - 1) > 0.2
    # One draw for both: the difference has the sign of z or is nothing.
    assert torch.all(copies("stochastic") * z >= 0)


def test_dst_and_copy_use_what_was_stored() -> None:
    """A later call on the stored base gives the copy that the first call gave: q directions share one base."""
    flat = Flat.make(torch.bfloat16)
    slot = flat.clone()
    first, second = (torch.zeros_like(flat.storage) for _ in range(2))
    replay(flat, slot, pending=entries_of(rows_of(2)), copies=ops.Copies(first, scale=1e-3), step=9)
    replay(slot, copies=ops.Copies(second, scale=1e-3), step=9)
    assert torch.equal(first, second)
    assert not torch.equal(flat.storage, slot.storage)


def test_master_is_not_what_gets_perturbed() -> None:
    flat = Flat.make(torch.bfloat16, master=True)
    out = torch.zeros_like(flat.storage, dtype=torch.float32)
    replay(flat, flat, pending=entries_of(rows_of(1)), copies=ops.Copies(out), step=9, fold=True)
    for s in TRAINABLE:
        assert torch.equal(out[part(s)], flat.values(s))
        assert not torch.equal(out[part(s)], flat.values(s, with_low=True))


@pytest.mark.parametrize("fold", [True, False])
def test_bf12_rounds_and_perturbs_as_bfloat16_does(fold: bool) -> None:
    """Bit for bit, but for values more than 13 binades below their group's largest."""
    x = (torch.randn(5000, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16().float()
    found = []
    for dtype in (torch.bfloat16, BF12):
        flat = Flat.of(x, dtype, offset=8)
        out, pair = (torch.zeros(len(flat.storage), dtype=torch.bfloat16) for _ in range(2))
        pending = entries_of([(4, [0.999], [1e-3])])
        replay(flat, flat, pending=pending, copies=ops.Copies(out, pair, scale=1e-3), step=9, fold=fold)
        found.append([plane[:5000] for plane in (out, pair, ops.decode(flat.storage, None, flat.scales))])
    same = found[0][2].abs() > 0.1 * 2.0**-13
    assert same.float().mean() > 0.99
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(ours[same], theirs[same])


@pytest.mark.parametrize("dtype", [FP8, BF12])
def test_exponents_grow_on_overflow_and_never_shrink(dtype: torch.dtype) -> None:
    x = torch.cat([torch.full((256,), 1.0), torch.full((256,), 2.0**-12), torch.zeros(256)])
    flat = Flat.of(x, dtype)
    assert flat.scales is not None
    exponents = exponents_of(ops.storage_format(dtype), flat.scales)
    first = exponents.clone()

    def fold(decay: float, coefficient: float, step: int) -> None:
        replay(flat, flat, pending=entries_of([(step, [decay], [coefficient])]), step=step, fold=True)

    fold(0.25, 0.0, 1)
    assert torch.equal(exponents, first)
    fold(16.0, 0.0, 2)
    assert exponents.tolist() == [first[0] + 2, first[1] + 2, first[2]]
    assert torch.equal(ops.decode(flat.storage, None, flat.scales), x * 4)
    fold(1.0, 1e-3, 3)
    z = ops.noise(SEED, 3, 0, 512, 256)
    assert exponents[2] > first[2]  # the group of zeros took the scale of its first update
    torch.testing.assert_close(ops.decode(flat.storage, None, flat.scales)[512:], -1e-3 * z, rtol=0.13, atol=1e-5)


def pending_of(log: torch.Tensor, num_entries: int, **more: int) -> dict[str, Any]:
    return {"pending": ops.Pending(log, 0, num_entries, **more)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store": ops.Store(ops.Planes(F32))}, "store.to.storage must be a contiguous 1-D torch.bfloat16"),
        ({"store": ops.Store(ops.Planes(BF16, low=F32))}, "store.to.low must be a contiguous 1-D torch.int16"),
        ({"store": ops.Store(ops.Planes(BF16, scales=F32))}, "scales must be passed with float8"),
        ({"source": ops.Planes(F32, low=BF16.view(torch.int16))}, "float32 storage drops no bits"),
        ({"copies": ops.Copies(F32[:100])}, "copies.out must have at least 256 elements"),
        ({"copies": ops.Copies(F32.double())}, "out must be float32, bfloat16 or float16"),
        ({"copies": ops.Copies(F32, F32)}, "pass a scale with it"),
        (pending_of(torch.zeros(2, 3), 3), r"num_entries must be in \[0, 2\]"),
        (pending_of(torch.zeros(2, 5), 1, num_directions=2), "pass the log's own num_directions"),
        (pending_of(torch.zeros(2, 4), 1), "a log row must have"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    table = ops.build_table([ops.Segment(start=0, numel=256, offset=0)], "cpu")
    with pytest.raises(ValueError, match=message):
        ops.replay_perturb(**{"source": ops.Planes(BF16), "table": table, "noise": ops.Noise(seed=0, step=0), **change})
