"""Flat tensors with awkward segments, shared by the tests of the reference and of the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_zo import ops
from ds_zo.ops.schema import KernelCall

FP8 = torch.float8_e4m3fn
BF12 = torch.uint8
STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8, BF12)
CANARY = 72
"""In the padding; fp8 holds it exactly, and bf12's bytes do."""

# Whole lanes over two kernel chunks, a ragged tail, odd offsets, frozen ones, offsets beyond 2**33 and across 2**35.
SEGMENTS = (
    ops.Segment(start=0, numel=9216, offset=64, group=0),
    ops.Segment(start=9216, numel=1001, offset=9280, group=1),
    ops.Segment(start=10240, numel=301, offset=10281, group=0),
    ops.Segment(start=10752, numel=264, offset=10582, group=1, trainable=False),
    ops.Segment(start=11264, numel=3, offset=10846, group=0, trainable=False),
    ops.Segment(start=11520, numel=512, offset=2**33 + 8, group=1),
    ops.Segment(start=12032, numel=600, offset=2**35 - 304, group=0),
)
SMALL_SEGMENTS = (
    ops.Segment(start=0, numel=1032, offset=64, group=0),
    ops.Segment(start=1280, numel=301, offset=1097, group=1),
    ops.Segment(start=1792, numel=264, offset=1398, group=1, trainable=False),
)

# A matrix of odd sizes and offset, a vector, whole lanes, a row without noise, parts of matrices, a frozen one.
MATRIX_SEGMENTS = (
    ops.Segment(start=0, numel=1591, offset=67, group=0, matrix=ops.Matrix(67, 37, 43)),
    ops.Segment(start=1792, numel=40, offset=1658, group=1),
    ops.Segment(start=2048, numel=1536, offset=2000, group=1, matrix=ops.Matrix(2000, 24, 64)),
    ops.Segment(start=3584, numel=610, offset=3536, still=(3576, 3596), matrix=ops.Matrix(3536, 61, 10)),
    ops.Segment(start=4352, numel=512, offset=5008, matrix=ops.Matrix(5004, 20, 32)),
    ops.Segment(start=4864, numel=520, offset=2**35 + 32, group=0, matrix=ops.Matrix(2**35 - 16, 30, 24)),
    ops.Segment(start=5632, numel=64, offset=2**35 + 552, trainable=False, matrix=ops.Matrix(2**35 + 552, 8, 8)),
)
# Matrices of whole lanes: one in two pieces, the second from the middle of a row, and one beyond 2**33.
LANE_MATRIX_SEGMENTS = (
    ops.Segment(start=0, numel=536, offset=64, group=0, matrix=ops.Matrix(64, 16, 72)),
    ops.Segment(start=768, numel=616, offset=600, group=0, matrix=ops.Matrix(64, 16, 72)),
    ops.Segment(start=1536, numel=24, offset=1216, group=1),
    ops.Segment(start=1792, numel=4608, offset=2**33 + 8, group=1, matrix=ops.Matrix(2**33 + 8, 2, 2304)),
)


def make_log(
    rows: list[tuple[int, list[float], list[float]]], capacity: int | None = None, first: int = 0
) -> torch.Tensor:
    """A ring whose rows from `first` on hold (step, decays, coefficients group by group)."""
    width = 1 + len(rows[0][1]) + len(rows[0][2])
    log = torch.full((capacity or len(rows), width), float("nan"))
    for i, (step, decays, coefficients) in enumerate(rows):
        row = log[(first + i) % len(log)]
        row.view(torch.int32)[0] = step
        row[1:] = torch.tensor(decays + coefficients)
    return log


def scales_for(dtype: torch.dtype, numel: int) -> torch.Tensor | None:
    """A plane of scales for so many elements, where the format has one."""
    fmt = ops.storage_format(dtype)
    if fmt.scale_dtype is None:
        return None
    return torch.full((fmt.scales_of(0, numel).stop,), CANARY, dtype=fmt.scale_dtype)


@dataclass
class Flat:
    """Parameters in one storage dtype, with a canary in the padding."""

    storage: torch.Tensor
    low: torch.Tensor | None
    scales: torch.Tensor | None
    table: ops.SegmentTable

    @classmethod
    def make(
        cls,
        dtype: torch.dtype,
        *,
        master: bool = False,
        device: str = "cpu",
        segments: tuple[ops.Segment, ...] = SEGMENTS,
        factor_dtype: torch.dtype = torch.float32,
    ) -> Flat:
        table = ops.build_table(segments, device, factor_dtype=factor_dtype)
        numel = -(-table.numel // 256) * 256
        storage = torch.full((numel,), CANARY, dtype=torch.float32).to(dtype)
        low = torch.full((numel,), CANARY, dtype=torch.int16) if master and dtype != torch.float32 else None
        scales = scales_for(dtype, numel)
        generator = torch.Generator().manual_seed(0)
        for s in segments:
            at = slice(s.start, s.start + s.numel)
            values = torch.randn(s.numel, generator=generator) * 0.02
            values[: s.numel // 8] *= 1e-5  # subnormal in the narrow formats
            own = None if scales is None else scales[ops.storage_format(dtype).scales_of(at.start, at.stop)]
            ops.encode_(storage[at], values, low=None if low is None else low[at], scales=own)
        flat = cls(storage, low, scales, table)
        return flat if device == "cpu" else flat.to(device)

    @classmethod
    def of(cls, values: torch.Tensor, dtype: torch.dtype, *, offset: int = 0) -> Flat:
        """These values in one segment."""
        numel = -(-len(values) // 256) * 256
        storage, scales = torch.zeros(numel, dtype=dtype), scales_for(dtype, numel)
        ops.encode_(storage[: len(values)], values, scales=scales)
        table = ops.build_table([ops.Segment(start=0, numel=len(values), offset=offset)], "cpu")
        return cls(storage, None, scales, table)

    def to(self, device: str) -> Flat:
        def move(t: torch.Tensor | None) -> Any:
            return None if t is None else t.to(device)

        table = self.table
        if table.device.type != device:
            table = ops.build_table(table.segments, device, factor_dtype=table.factor_dtype)
        return Flat(move(self.storage), move(self.low), move(self.scales), table)

    def clone(self) -> Flat:
        low = None if self.low is None else self.low.clone()
        scales = None if self.scales is None else self.scales.clone()
        return replace(self, storage=self.storage.clone(), low=low, scales=scales)

    def values(self, segment: ops.Segment, *, with_low: bool = False) -> torch.Tensor:
        at = slice(segment.start, segment.start + segment.numel)
        fmt = ops.storage_format(self.storage.dtype)
        scales = None if self.scales is None else self.scales[fmt.scales_of(at.start, at.stop)]
        low = self.low[at] if with_low and self.low is not None else None
        return ops.decode(self.storage[at], low, scales)

    @property
    def planes(self) -> ops.Planes:
        return ops.Planes(self.storage, self.scales, self.low)

    def call(
        self,
        to: Flat | None = None,
        *,
        pending: ops.Pending | None = None,
        copies: ops.Copies | None = None,
        fold: bool = False,
        **noise: Any,
    ) -> KernelCall:
        """A call that reads this and stores to another (None: nothing). `noise`: fields of `ops.Noise`."""
        store = None if to is None else ops.Store(to.planes, fold=fold)
        return KernelCall(self.planes, self.table, ops.Noise(**noise), pending, store, copies)


def covered(segments: tuple[ops.Segment, ...] = SEGMENTS) -> torch.Tensor:
    """True where a segment lies; False in the padding."""
    end = max(s.start + s.numel for s in segments)
    mask = torch.zeros(-(-end // 256) * 256, dtype=torch.bool)
    for s in segments:
        mask[s.start : s.start + s.numel] = True
    return mask
