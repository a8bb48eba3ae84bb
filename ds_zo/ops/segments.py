"""The positions of parameters in a flat tensor, and the table of chunks that kernel programs process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from ds_zo.ops.factor_layout import FactorLayout, Matrix, lay_out

SEGMENT_ALIGNMENT = 256
"""In elements. Every parameter starts at a multiple of it in its flat tensor. It is also the size of a scale group."""

CHUNK_NUMEL = 8192
"""Smallest number of elements for one kernel program. The table then has under 0.3% of the bytes that it describes."""

_MOST_CHUNKS = 1 << 15
"""Approximate limit of a flat tensor's chunks. More programs do not improve a GPU's load balance, and tables take
device memory."""

LANE_NUMEL = 8
"""Elements that one GPU thread loads, draws noise for and stores together."""

CARRY_NUMEL = 1 << 35
"""Number of offsets after which the second counter word changes (block = offset // 8 fills 32 bits)."""


@dataclass(frozen=True)
class Segment:
    """One parameter: elements [start, start + numel) of the flat tensor are global offsets [offset, offset + numel)."""

    start: int
    numel: int
    offset: int
    group: int = 0
    trainable: bool = True
    still: tuple[int, int] = (0, 0)
    """Global offsets [first, end) for which z is 0: only weight decay changes these elements. (0, 0): none."""
    matrix: Matrix | None = None
    """The matrix that the elements belong to, for rank-1 noise. It may be larger than the segment. None: rank-1 noise
    is 0 here."""


@dataclass(frozen=True)
class ChunkRange:
    """Rows [first, first + count) of the chunk table, which one kernel launch processes.

    Rows of a `vector` range are whole lanes: their offsets are multiples of LANE_NUMEL and share the high counter word.
    Other rows (tails, parameters after one of odd size) draw noise element by element.
    """

    first: int
    count: int
    trainable: bool
    vector: bool


@dataclass(frozen=True)
class SegmentTable:
    """Segments of one flat tensor; `chunks` has rows (flat start, global offset, numel, group), sorted into ranges."""

    segments: tuple[Segment, ...]
    chunks: torch.Tensor
    ranges: tuple[ChunkRange, ...]
    numel: int
    """Smallest number of elements that the flat tensor must have."""
    num_groups: int
    still: torch.Tensor | None = None
    """For each chunk, offsets [first, end) for which z is 0. None if no segment has any."""
    factor_dtype: torch.dtype = torch.float32
    """Dtype to which the factors of rank-1 noise are rounded: that of the forward, which multiplies by them."""

    @cached_property
    def factors(self) -> FactorLayout:
        """Where a member's factors of rank-1 noise lie, for the matrices of all trainable segments."""
        matrices = [(s.matrix, s.still) for s in self.segments if s.trainable and s.matrix is not None]
        return lay_out(matrices, self.chunks[:, 1])

    @property
    def device(self) -> torch.device:
        return self.chunks.device


def chunk_numel(numel: int) -> int:
    """Number of elements for one kernel program, for a flat tensor of `numel` elements."""
    chunk = CHUNK_NUMEL
    while chunk * _MOST_CHUNKS < numel:
        chunk *= 2
    return chunk


def build_table(
    segments: Sequence[Segment], device: torch.device | str, *, factor_dtype: torch.dtype = torch.float32
) -> SegmentTable:
    """Check the segments and make the chunk table on the device. Call it once for a flat tensor, not in every step."""
    ordered = tuple(sorted((s for s in segments if s.numel > 0), key=lambda s: s.start))
    _check(ordered)
    parts = [part for segment in ordered for part in _split(segment)]
    chunk = chunk_numel(sum(segment.numel for segment in ordered))
    rows: list[torch.Tensor] = []
    still: list[tuple[int, int]] = []
    ranges: list[ChunkRange] = []
    first = 0
    for trainable, vector in ((True, True), (True, False), (False, True), (False, False)):
        chosen = [s for s, is_vector in parts if s.trainable is trainable and is_vector is vector]
        of_kind = [_chunk_rows(s, chunk) for s in chosen]
        if of_kind:
            for s, its_rows in zip(chosen, of_kind, strict=True):
                still += [s.still] * len(its_rows)
            count = sum(len(r) for r in of_kind)
            ranges.append(ChunkRange(first, count, trainable, vector))
            first += count
            rows += of_kind
    chunks = torch.cat(rows) if rows else torch.empty(0, 4, dtype=torch.int64)
    return SegmentTable(
        segments=ordered,
        chunks=chunks.to(device),
        ranges=tuple(ranges),
        numel=max((s.start + s.numel for s in ordered), default=0),
        num_groups=1 + max((s.group for s in ordered), default=-1),
        still=torch.tensor(still, dtype=torch.int64).to(device) if any(first < end for first, end in still) else None,
        factor_dtype=factor_dtype,
    )


def _check(ordered: tuple[Segment, ...]) -> None:
    for s in ordered:
        if s.start % SEGMENT_ALIGNMENT or s.start < 0:
            raise ValueError(
                f"a segment must start at a multiple of {SEGMENT_ALIGNMENT} elements, got {s.start}: "
                f"pad the one before it ({s})"
            )
        if s.offset < 0 or s.group < 0:
            raise ValueError(f"offset and group must be >= 0, got {s.offset} and {s.group} ({s})")
    for a, b in pairwise(ordered):
        if a.start + a.numel > b.start:
            end = a.start + a.numel
            raise ValueError(f"segments must not overlap, got one at {b.start}: move it to {end} or later ({a}, {b})")


def _split(segment: Segment) -> list[tuple[Segment, bool]]:
    """Split a segment into whole lanes and the rest, each with whether it is vectorised. The cut is between scale
    groups."""
    same_high_word = segment.offset // CARRY_NUMEL == (segment.offset + segment.numel - 1) // CARRY_NUMEL
    if not segment.trainable or (segment.offset % LANE_NUMEL == 0 and same_high_word):
        ragged = segment.numel % LANE_NUMEL
        body = segment.numel // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT if ragged else segment.numel
        tail = segment.numel - body
        parts = [(body, 0, True), (tail, body, False)]
    else:
        parts = [(segment.numel, 0, False)]
    return [
        (replace(segment, start=segment.start + skip, numel=numel, offset=segment.offset + skip), vector)
        for numel, skip, vector in parts
        if numel
    ]


def _chunk_rows(segment: Segment, chunk: int) -> torch.Tensor:
    skip = torch.arange(0, segment.numel, chunk, dtype=torch.int64)
    return torch.stack(
        [
            segment.start + skip,
            segment.offset + skip,
            (segment.numel - skip).clamp(max=chunk),
            torch.full_like(skip, segment.group),
        ],
        dim=1,
    )
