"""The fused operation in numpy. CPU training uses it, and tests compare the Triton kernel with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds_zo.ops import rng
from ds_zo.ops.formats import (
    Floats,
    Format,
    dither_addend,
    exponents_of,
    fit_exponents,
    join,
    load,
    round_to,
    scale_by,
    split,
    storage_format,
    store_,
)
from ds_zo.ops.schema import KernelCall, Noise, Planes
from ds_zo.ops.segments import Segment, SegmentTable

RUN_NUMEL = 65536
"""Elements processed at a time: a multiple of the scale group's size, with temporaries that fit a core's cache."""

JOINED_NUMEL = 8192
"""Largest total size of small segments that are processed as one. Beyond it, the number of numpy calls does not
matter."""

Dither = NDArray[np.uint32]


@dataclass(frozen=True)
class Entry:
    """One pending update, as read from the log."""

    step: int
    decay: Floats
    """[group]"""
    coefficient: Floats
    """[group, direction]"""


def replay_perturb_reference(call: KernelCall) -> None:
    """Processes every run independently. Elements depend on one another only within a scale group, and no run splits a
    group."""
    entries = _read_entries(call)
    outer = _OuterProducts(call, entries) if call.noise.distribution == "rank1" else None
    work = partial(_process_run, call, entries, outer)
    runs = list(_runs(call.table.segments))
    num_threads = torch.get_num_threads()
    if num_threads > 1 and len(runs) > 1:
        list(_pool(num_threads).map(work, runs))
    else:
        for run in runs:
            work(run)


@cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Threads scale here because numpy uses one thread for each call and releases the GIL in long loops."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="ds_zo_ops")


def _runs(segments: tuple[Segment, ...]) -> Iterator[list[Segment]]:
    """Lists of segments with consecutive offsets, at most RUN_NUMEL elements each. Longer segments are cut. Many small
    parameters thus share one draw of noise."""
    run: list[Segment] = []
    numel = 0
    for s in segments:
        for skip in range(0, s.numel, RUN_NUMEL):
            numel_here = min(RUN_NUMEL, s.numel - skip)
            segment = replace(s, start=s.start + skip, numel=numel_here, offset=s.offset + skip)
            follows_on = run and run[-1].offset + run[-1].numel == segment.offset
            if run and (not follows_on or numel + segment.numel > RUN_NUMEL):
                yield run
                run, numel = [], 0
            run.append(segment)
            numel += segment.numel
    if run:
        yield run


def _read_entries(call: KernelCall) -> list[Entry]:
    pending = call.pending
    if pending is None:
        return []
    rows = pending.log.detach().numpy()
    groups = pending.num_groups
    entries = []
    for i in range(pending.first_entry, pending.first_entry + pending.num_entries):
        row = rows[i % len(rows)]
        entries.append(
            Entry(
                step=int(row[:1].view(np.int32)[0]),
                decay=row[1 : 1 + groups],
                coefficient=row[1 + groups :].reshape(groups, pending.num_directions),
            )
        )
    return entries


def factors_reference(table: SegmentTable, noise: Noise, out: torch.Tensor) -> None:
    """Fills rows of factors, several members at a time; see `ops.factors`."""
    layout = table.factors
    blocks = layout.blocks.cpu().numpy()
    at_a_time = max(1, RUN_NUMEL // max(1, layout.numel))
    for first in range(0, len(out), at_a_time):
        rows = out[first : first + at_a_time]
        z = rng.draw_blocks(
            seed=noise.seed,
            step=noise.step,
            first_member=noise.direction + first,
            num_members=len(rows),
            blocks=blocks,
        )
        for at in layout.still:
            z[:, at] = 0.0
        store_(rows.view(-1), round_to(storage_format(out.dtype), z.reshape(-1)))


class _OuterProducts:
    """The rank-1 noise of a call. The factors of all its steps and members are drawn at once."""

    def __init__(self, call: KernelCall, entries: list[Entry]) -> None:
        self.layout = call.table.factors
        self._factors: dict[tuple[int, int], Floats] = {}
        num_members = 0 if call.pending is None else call.pending.num_directions
        for entry in entries:
            self._draw(call, step=entry.step, first=0, num_members=num_members)
        if call.perturbs:
            self._draw(call, step=call.noise.step, first=call.noise.direction, num_members=1)

    def _draw(self, call: KernelCall, *, step: int, first: int, num_members: int) -> None:
        out = torch.empty(num_members, self.layout.numel, dtype=call.table.factor_dtype)
        factors_reference(call.table, replace(call.noise, step=step, direction=first), out)
        for i, row in enumerate(out.float().numpy()):
            self._factors[step, first + i] = row

    def draw(self, run: list[Segment], *, step: int, direction: int) -> rng.NoiseDraw:
        factors = self._factors[step, direction]
        return rng.NoiseDraw(np.concatenate([self._z(factors, segment) for segment in run]), dither=None)

    def _z(self, factors: Floats, segment: Segment) -> Floats:
        matrix = segment.matrix
        if matrix is None or not segment.trainable:
            return np.zeros(segment.numel, dtype=np.float32)
        u_at, v_at = self.layout.places[matrix]
        first, skip = divmod(segment.offset - matrix.offset, matrix.num_columns)
        end = first - (-(skip + segment.numel) // matrix.num_columns)
        u, v = factors[u_at][first:end], factors[v_at]
        return np.outer(u, v).reshape(-1)[skip : skip + segment.numel]


class _Draws:
    """The random draws for all offsets of a run. Each is made on first use and cached."""

    def __init__(self, call: KernelCall, outer: _OuterProducts | None, run: list[Segment]) -> None:
        self.offset = run[0].offset
        numel = run[-1].offset + run[-1].numel - self.offset
        noise = call.noise
        draw = partial(rng.draw, seed=noise.seed, offset=self.offset, numel=numel, distribution=noise.distribution)
        here = partial(draw, step=noise.step, direction=noise.direction)
        self.copy_dither = cache(partial(rng.copy_dither, **here.keywords))
        self._with_dither = call.rounds_copies or call.rounds_store_by_copy
        if outer is None:
            self.noise = cache(draw)
            self.noise_here = cache(partial(here, with_dither=self._with_dither))
        else:
            self.noise = cache(partial(outer.draw, run))
            self.noise_here = cache(partial(self._rank1_here, step=noise.step, direction=noise.direction))
        self.fold_dither = cache(
            partial(rng.fold_dither, seed=noise.seed, step=noise.step, offset=self.offset, numel=numel)
        )

    def _rank1_here(self, *, step: int, direction: int) -> rng.NoiseDraw:
        dither = self.copy_dither() if self._with_dither else None
        return self.noise(step=step, direction=direction)._replace(dither=dither)


def _process_run(call: KernelCall, entries: list[Entry], outer: _OuterProducts | None, run: list[Segment]) -> None:
    draws = _Draws(call, outer, run)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity pass through as they do on a GPU
        for segments in _joined(run, call.format):
            if len(segments) > 1:
                _process_as_one(call, entries, draws, segments)
            elif segments[0].trainable:
                _process(call, entries, draws, segments[0])
            else:
                _copy_frozen(call, segments[0])


def _joined(run: list[Segment], fmt: Format) -> Iterator[list[Segment]]:
    """Splits a run into lists of neighbours that are processed as one. Scaled formats have one segment in each list,
    because scales depend on positions in the flat tensor."""
    segments: list[Segment] = []
    numel = 0
    for segment in run:
        alike = segments and segment.trainable and segments[0].trainable and segment.group == segments[0].group
        alike = alike and segment.still == segments[0].still == (0, 0)
        if segments and (not alike or fmt.scaled or numel + segment.numel > JOINED_NUMEL):
            yield segments
            segments, numel = [], 0
        segments.append(segment)
        numel += segment.numel
    yield segments


def _process_as_one(call: KernelCall, entries: list[Entry], draws: _Draws, segments: list[Segment]) -> None:
    """Processes many small segments with the numpy calls of one: concatenates their elements, and copies the results
    back to each segment."""
    places = [slice(segment.start, segment.start + segment.numel) for segment in segments]
    numel = sum(segment.numel for segment in segments)

    results: list[tuple[torch.Tensor, torch.Tensor]] = []

    def gathered(plane: torch.Tensor) -> torch.Tensor:
        bits = _raw(plane)
        return torch.from_numpy(np.concatenate([bits[at] for at in places])).view(plane.dtype)

    def result_for(plane: torch.Tensor) -> torch.Tensor:
        result = torch.empty(numel, dtype=plane.dtype)
        results.append((plane, result))
        return result

    store, copies = call.store, call.copies
    low = None if call.source.low is None else gathered(call.source.low)
    source = Planes(gathered(call.source.storage), low=low)
    if store is not None and store.to is not None:
        low = None if store.to.low is None else result_for(store.to.low)
        store = replace(store, to=Planes(result_for(store.to.storage), low=low))
    if copies is not None:
        pair = None if copies.pair is None else result_for(copies.pair)
        copies = replace(copies, out=result_for(copies.out), pair=pair)
    one = replace(call, source=source, store=store, copies=copies)
    _process(one, entries, draws, Segment(0, numel, segments[0].offset, segments[0].group))
    for plane, result in results:
        to, bits, first = _raw(plane), _raw(result), 0
        for at in places:
            to[at] = bits[first : first + at.stop - at.start]
            first += at.stop - at.start


def _raw(plane: torch.Tensor) -> NDArray[Any]:
    """The tensor as a numpy array; bfloat16, which numpy does not have, as int16 bits."""
    return (plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane).numpy()


def _process(call: KernelCall, entries: list[Entry], draws: _Draws, segment: Segment) -> None:
    at = slice(segment.start, segment.start + segment.numel)
    cut = slice(segment.offset - draws.offset, segment.offset - draws.offset + segment.numel)
    x = _decode(call, at, with_low=True)
    for entry in entries:
        # Each product is rounded before it is subtracted, so a call with k entries gives the bits of k calls with one.
        x = x * entry.decay[segment.group]
        for direction in range(entry.coefficient.shape[1]):
            z = _without_still(draws.noise(step=entry.step, direction=direction).z[cut], segment)
            x -= z * entry.coefficient[segment.group, direction]

    if call.store is not None:
        x = _store(call, at, x, _store_addend(call, draws, cut))
    copies = call.copies
    if copies is None:
        return
    fmt = storage_format(copies.out.dtype)
    if not call.perturbs:
        store_(copies.out[at], round_to(fmt, x))
        return
    z, dither = draws.noise_here()
    move = _without_still(z[cut], segment) * np.float32(copies.scale)
    addend = None
    if call.rounds_copies:
        assert dither is not None
        addend = _copy_addend(call, dither[cut], fmt)
    store_(copies.out[at], round_to(fmt, x + move, addend))
    if copies.pair is not None:
        store_(copies.pair[at], round_to(fmt, x - move, addend))


def _without_still(z: Floats, segment: Segment) -> Floats:
    first, end = (min(max(offset - segment.offset, 0), segment.numel) for offset in segment.still)
    if first < end:
        z = z.copy()  # the draw is cached for other segments
        z[first:end] = 0.0
    return z


def _copy_frozen(call: KernelCall, segment: Segment) -> None:
    at = slice(segment.start, segment.start + segment.numel)
    source, to, copies = call.source, call.written, call.copies
    if copies is not None:
        clean = _decode(call, at, with_low=to is None)
        for copy in (copies.out, copies.pair):
            if copy is not None:
                store_(copy[at], round_to(storage_format(copy.dtype), clean))
    if to is None:
        return
    for plane, its_source, where in (
        (to.storage, source.storage, at),
        (to.low, source.low, at),
        (to.scales, source.scales, call.format.scales_of(at.start, at.stop)),
    ):
        if plane is None or plane is its_source:
            continue
        if its_source is None:
            plane[where].zero_()
        else:
            plane[where].copy_(its_source[where])


def _decode(call: KernelCall, at: slice, *, with_low: bool) -> Floats:
    fmt, source = call.format, call.source
    scales = None if source.scales is None else source.scales[fmt.scales_of(at.start, at.stop)]
    x = load(source.storage[at], scales)
    if with_low and source.low is not None:
        x = join(fmt, x, source.low[at].numpy())
    if scales is not None:
        x = scale_by(x, exponents_of(fmt, scales).numpy(), 1)
    return x


def _store(call: KernelCall, at: slice, x: Floats, addend: Dither | None) -> Floats:
    """Write x to the stored planes and return the values that they hold without the low plane."""
    fmt, to = call.format, call.written
    exponents, scales = None, None
    if call.source.scales is not None:
        groups = fmt.scales_of(at.start, at.stop)
        exponents = np.maximum(exponents_of(fmt, call.source.scales[groups]).numpy(), fit_exponents(fmt, x))
        if to is not None:
            assert to.scales is not None
            scales = to.scales[groups]
            exponents_of(fmt, scales).numpy()[:] = exponents
        x = scale_by(x, exponents, -1)
    if to is not None and to.low is not None:
        x, low = split(fmt, x)
        to.low[at].numpy()[:] = low
    else:
        x = round_to(fmt, x, addend)
    if to is not None:
        store_(to.storage[at], x, scales)
    return x if exponents is None else scale_by(x, exponents, 1)


def _store_addend(call: KernelCall, draws: _Draws, cut: slice) -> Dither | None:
    if call.rounds_store_by_fold:
        dropped_bits = call.format.dropped_bits
        return dither_addend(draws.fold_dither()[cut], num_bits=rng.FOLD_DITHER_BITS, dropped_bits=dropped_bits)
    if not call.rounds_store_by_copy:
        return None
    dither = draws.noise_here().dither if call.perturbs else draws.copy_dither()
    assert dither is not None
    # The complement of the copy's dither: where this rounding goes up, the rounding of the copy tends to go down.
    flip = np.uint32((1 << rng.COPY_DITHER_BITS[call.noise.distribution]) - 1)
    return _copy_addend(call, dither[cut] ^ flip, call.format)


def _copy_addend(call: KernelCall, dither: Dither, fmt: Format) -> Dither:
    return dither_addend(dither, num_bits=rng.COPY_DITHER_BITS[call.noise.distribution], dropped_bits=fmt.dropped_bits)
