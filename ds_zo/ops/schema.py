"""The arguments of the fused operation and their checks, for both implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ds_zo.ops.formats import Format, storage_format
from ds_zo.ops.rng import Distribution
from ds_zo.ops.segments import SegmentTable

Rounding = Literal["stochastic", "nearest"]

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelCall:
    """The arguments of one call of `replay_perturb`, whose docstring explains them."""

    src: torch.Tensor
    table: SegmentTable
    log: torch.Tensor | None
    num_entries: int
    first_entry: int
    num_directions: int
    dst: torch.Tensor | None
    out: torch.Tensor | None
    pair: torch.Tensor | None
    low_in: torch.Tensor | None
    low_out: torch.Tensor | None
    scales_in: torch.Tensor | None
    scales_out: torch.Tensor | None
    seed: int
    step: int
    direction: int
    scale: float
    distribution: Distribution
    fold: bool
    rounding: Rounding
    as_stored: bool

    @property
    def format(self) -> Format:
        return storage_format(self.src.dtype)

    @property
    def num_log_groups(self) -> int:
        return 0 if self.log is None else (self.log.shape[1] - 1) // (1 + self.num_directions)

    @property
    def stores(self) -> bool:
        """Whether x is rounded to src's format before copies are made from it. It is also written if there is a dst."""
        return self.dst is not None or self.as_stored

    @property
    def rounds_dst_by_fold(self) -> bool:
        return self._rounds_dst and self.fold

    @property
    def rounds_dst_by_copy(self) -> bool:
        return self._rounds_dst and not self.fold

    @property
    def rounds_out(self) -> bool:
        """Whether perturbed copies are rounded stochastically. An unperturbed copy is rounded to nearest."""
        if self.out is None or self.scale == 0.0 or self.rounding == "nearest":
            return False
        return storage_format(self.out.dtype).dropped_bits > 0

    @property
    def _rounds_dst(self) -> bool:
        inexact = self.stores and self.low_out is None and self.format.dropped_bits > 0
        return inexact and self.rounding == "stochastic"

    @property
    def leaves_frozen_alone(self) -> bool:
        """Whether the call copies no frozen segment."""
        pairs = ((self.dst, self.src), (self.low_out, self.low_in), (self.scales_out, self.scales_in))
        return self.out is None and all(to is None or to is source for to, source in pairs)

    def check(self) -> None:
        fmt = self.format
        self._check_flat("src", self.src, None)
        self._check_flat("dst", self.dst, fmt.dtype)
        self._check_flat("out", self.out, None)
        self._check_flat("pair", self.pair, None if self.out is None else self.out.dtype)
        self._check_flat("low_in", self.low_in, torch.int16)
        self._check_flat("low_out", self.low_out, torch.int16)
        if self.out is not None and self.out.dtype not in OUT_DTYPES:
            raise ValueError(f"out must be float32, bfloat16 or float16, got {self.out.dtype} (out)")
        if self.pair is not None and (self.out is None or self.scale == 0.0):
            raise ValueError("pair is the copy perturbed by -scale * z: pass out and a scale with it (pair)")
        if fmt.dropped_bits == 0 and (self.low_in is not None or self.low_out is not None):
            raise ValueError("float32 storage drops no bits: pass no low plane (low_in, low_out)")
        if fmt.scaled != (self.scales_in is not None):
            raise ValueError(
                "scales_in must be passed with float8_e4m3fn and bf12 storage and with no other, "
                f"got {fmt.name} (scales_in)"
            )
        if (fmt.scaled and self.dst is not None) != (self.scales_out is not None):
            raise ValueError("scales_out belongs to a dst that has scales: pass both or neither (scales_out)")
        if self.low_out is not None and self.dst is None:
            raise ValueError("low_out holds the bits that dst drops: pass dst with it (low_out)")
        for name, scales in (("scales_in", self.scales_in), ("scales_out", self.scales_out)):
            if scales is not None:
                assert fmt.scale_dtype is not None
                self._check_tensor(name, scales, fmt.scale_dtype, fmt.scales_of(0, self.table.numel).stop)
        self._check_entries()

    def _check_entries(self) -> None:
        if self.num_entries == 0:
            return
        if self.log is None:
            raise ValueError(f"num_entries is {self.num_entries} but no log was passed: pass the log (log)")
        capacity, width = self.log.shape
        if self.log.dtype != torch.float32 or self.log.device != self.src.device or not self.log.is_contiguous():
            raise ValueError(
                f"log must be a contiguous float32 tensor on {self.src.device}, "
                f"got {self.log.dtype} on {self.log.device} (log)"
            )
        if not 0 <= self.num_entries <= capacity or self.first_entry < 0:
            raise ValueError(
                f"num_entries must be in [0, {capacity}], the log's capacity, and first_entry >= 0, "
                f"got {self.num_entries} and {self.first_entry}: fold earlier (num_entries)"
            )
        groups = self.num_log_groups
        if width != 1 + groups * (1 + self.num_directions) or groups < self.table.num_groups:
            raise ValueError(
                f"a log row must have 1 + groups * (1 + {self.num_directions} directions) columns for at least "
                f"{self.table.num_groups} groups, got {width}: pass the log's own num_directions (log)"
            )

    def _check_flat(self, name: str, tensor: torch.Tensor | None, dtype: torch.dtype | None) -> None:
        if tensor is not None:
            self._check_tensor(name, tensor, dtype or tensor.dtype, self.table.numel)

    def _check_tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
        if tensor.dtype != dtype or tensor.device != self.src.device or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous 1-D {dtype} tensor on {self.src.device}, "
                f"got {tensor.dim()}-D {tensor.dtype} on {tensor.device} ({name})"
            )
        if tensor.numel() < numel:
            raise ValueError(
                f"{name} must have at least {numel} elements for its segment table, got {tensor.numel()} ({name})"
            )
