"""The chunk table covers every element of every segment once, and sorts out what lanes cannot take whole."""

from __future__ import annotations

import pytest
import torch

from ds_zo import ops
from ds_zo.ops.segments import CARRY_NUMEL, CHUNK_NUMEL, LANE_NUMEL
from tests.ops.flat_cases import SEGMENTS, covered


def test_chunks_cover_each_element_once_with_its_own_offset() -> None:
    table = ops.build_table(SEGMENTS, "cpu")
    seen = torch.zeros(len(covered()), dtype=torch.int32)
    offsets = torch.full((len(covered()),), -1)
    for start, offset, numel, _ in table.chunks.tolist():
        assert start % ops.SEGMENT_ALIGNMENT == 0
        assert 0 < numel <= CHUNK_NUMEL
        seen[start : start + numel] += 1
        offsets[start : start + numel] = torch.arange(offset, offset + numel)
    assert torch.equal(seen == 1, covered())
    assert seen.max() == 1
    for s in SEGMENTS:
        assert torch.equal(offsets[s.start : s.start + s.numel], torch.arange(s.offset, s.offset + s.numel))


def test_vector_chunks_are_whole_aligned_lanes_within_one_high_word() -> None:
    table = ops.build_table(SEGMENTS, "cpu")
    assert sum(r.count for r in table.ranges) == len(table.chunks)
    for chunks in table.ranges:
        for start, offset, numel, group in table.chunks[chunks.first : chunks.first + chunks.count].tolist():
            (owner,) = [s for s in SEGMENTS if s.start <= start < s.start + s.numel]
            assert (owner.trainable, owner.group) == (chunks.trainable, group)
            if chunks.vector:
                assert numel % LANE_NUMEL == 0
                assert not chunks.trainable or offset % LANE_NUMEL == 0
                assert not chunks.trainable or offset // CARRY_NUMEL == (offset + numel - 1) // CARRY_NUMEL


def test_the_table_of_a_large_block_stays_small() -> None:
    numel = 6 * 10**8  # a block of OPT-30B
    chunks = ops.build_table([ops.Segment(0, numel, 0)], "cpu").chunks
    assert 2**14 <= len(chunks) <= 2**15
    assert torch.equal(chunks[:-1, 0] + chunks[:-1, 2], chunks[1:, 0])
    assert int(chunks[:, 2].sum()) == numel


def test_a_regular_model_takes_one_launch() -> None:
    table = ops.build_table([ops.Segment(0, 4096 * 11, 0), ops.Segment(4096 * 11, 768, 4096 * 11)], "cpu")
    assert [(r.trainable, r.vector) for r in table.ranges] == [(True, True)]


def test_empty_segments_are_dropped() -> None:
    assert ops.build_table([ops.Segment(0, 0, 0)], "cpu").numel == 0


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([ops.Segment(128, 10, 0)], "must start at a multiple of 256 elements, got 128"),
        ([ops.Segment(0, 300, 0), ops.Segment(256, 10, 300)], "must not overlap, got one at 256: move it to 300"),
        ([ops.Segment(0, 10, -1)], "offset and group must be >= 0"),
    ],
)
def test_wrong_segments_are_refused(segments: list[ops.Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.build_table(segments, "cpu")
