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
class Planes:
    """Stored weights: views of a buffer, one element each for every element of a flat tensor."""

    storage: torch.Tensor
    """The elements in their storage format."""
    scales: torch.Tensor | None = None
    """The scales of groups; None for formats without scales. See [Note: group scales]."""
    low: torch.Tensor | None = None
    """The low plane: the bits that `storage` drops, int16; None without one. See [Note: split masters]."""


@dataclass(frozen=True)
class Noise:
    """What the random numbers of a call depend on, besides an element's offset."""

    seed: int
    step: int
    direction: int = 0
    distribution: Distribution = "normal"
    rounding: Rounding = "stochastic"
    """"nearest" turns off all stochastic rounding."""


@dataclass(frozen=True)
class Pending:
    """Updates that the stored weights do not include yet: consecutive entries of a log that is a ring buffer.

    A row of the log is [step as int32 bits, decay of each group, coefficients of group 0 by direction, of group 1,
    ...]. The host does not read it.
    """

    log: torch.Tensor
    first_entry: int
    """Row of the oldest entry, taken modulo the number of rows."""
    num_entries: int
    num_directions: int = 1

    @property
    def num_groups(self) -> int:
        return (self.log.shape[1] - 1) // (1 + self.num_directions)


@dataclass(frozen=True)
class Store:
    """A store of the updated weights, rounded to their format.

    With a low plane in `to`, the store rounds to nearest, and the low plane gets the exact residual. Without one, it
    rounds stochastically.
    """

    to: Planes | None
    """Where the weights are written. None: copies are made from weights rounded as this store would, and nothing is
    written."""
    fold: bool = False
    """Whether the dither is 16 bits drawn for the fold, instead of the bits of this step's draw that the noise does not
    use."""


AS_STORED = Store(to=None)


@dataclass(frozen=True)
class Copies:
    """Copies of the weights to be written: `out` = x + scale * z, and `pair` = x - scale * z.

    Perturbed copies are rounded with the bits of the draw that the noise does not use, both with the same bits.
    Unperturbed copies are rounded to nearest.
    """

    out: torch.Tensor
    pair: torch.Tensor | None = None
    scale: float = 0.0


@dataclass(frozen=True)
class KernelCall:
    """The arguments of one call of `replay_perturb`, whose docstring explains them."""

    source: Planes
    table: SegmentTable
    noise: Noise
    pending: Pending | None = None
    store: Store | None = None
    copies: Copies | None = None

    @property
    def format(self) -> Format:
        return storage_format(self.source.storage.dtype)

    @property
    def num_entries(self) -> int:
        return 0 if self.pending is None else self.pending.num_entries

    @property
    def written(self) -> Planes | None:
        """The planes that the call stores to."""
        return None if self.store is None else self.store.to

    @property
    def splits(self) -> bool:
        """Whether the store keeps the bits that it drops in a low plane."""
        return self.written is not None and self.written.low is not None

    @property
    def perturbs(self) -> bool:
        return self.copies is not None and self.copies.scale != 0.0

    @property
    def rounds_store_by_fold(self) -> bool:
        return self.store is not None and self.store.fold and self._rounds_store

    @property
    def rounds_store_by_copy(self) -> bool:
        return self.store is not None and not self.store.fold and self._rounds_store

    @property
    def rounds_copies(self) -> bool:
        """Whether copies are rounded stochastically. Unperturbed ones are rounded to nearest."""
        if self.copies is None or not self.perturbs or self.noise.rounding == "nearest":
            return False
        return storage_format(self.copies.out.dtype).dropped_bits > 0

    @property
    def _rounds_store(self) -> bool:
        return not self.splits and self.format.dropped_bits > 0 and self.noise.rounding == "stochastic"

    @property
    def leaves_frozen_alone(self) -> bool:
        """Whether the call copies no frozen segment."""
        planes = zip(vars(self.written or self.source).values(), vars(self.source).values(), strict=True)
        return self.copies is None and all(to is None or to is source for to, source in planes)

    def check(self) -> None:
        self._check_planes("source", self.source)
        if self.written is not None:
            self._check_planes("store.to", self.written)
        if self.copies is not None:
            self._check_copies(self.copies)
        if self.pending is not None and self.pending.num_entries:
            self._check_pending(self.pending)

    def _check_planes(self, name: str, planes: Planes) -> None:
        fmt = self.format
        self._check_tensor(f"{name}.storage", planes.storage, fmt.dtype, self.table.numel)
        if planes.low is not None:
            if fmt.dropped_bits == 0:
                raise ValueError(f"float32 storage drops no bits: pass no low plane ({name}.low)")
            self._check_tensor(f"{name}.low", planes.low, torch.int16, self.table.numel)
        if fmt.scaled != (planes.scales is not None):
            raise ValueError(
                "scales must be passed with float8_e4m3fn and bf12 storage and with no other, "
                f"got {fmt.name} ({name}.scales)"
            )
        if planes.scales is not None:
            assert fmt.scale_dtype is not None
            numel = fmt.scales_of(0, self.table.numel).stop
            self._check_tensor(f"{name}.scales", planes.scales, fmt.scale_dtype, numel)

    def _check_copies(self, copies: Copies) -> None:
        if copies.out.dtype not in OUT_DTYPES:
            raise ValueError(f"out must be float32, bfloat16 or float16, got {copies.out.dtype} (copies.out)")
        self._check_tensor("copies.out", copies.out, copies.out.dtype, self.table.numel)
        if copies.pair is not None:
            if copies.scale == 0.0:
                raise ValueError("pair is the copy perturbed by -scale * z: pass a scale with it (copies.pair)")
            self._check_tensor("copies.pair", copies.pair, copies.out.dtype, self.table.numel)

    def _check_pending(self, pending: Pending) -> None:
        log, num_entries, groups = pending.log, pending.num_entries, pending.num_groups
        capacity, width = log.shape
        if log.dtype != torch.float32 or log.device != self._device or not log.is_contiguous():
            raise ValueError(
                f"log must be a contiguous float32 tensor on {self._device}, "
                f"got {log.dtype} on {log.device} (pending.log)"
            )
        if not 0 <= num_entries <= capacity or pending.first_entry < 0:
            raise ValueError(
                f"num_entries must be in [0, {capacity}], the log's capacity, and first_entry >= 0, "
                f"got {num_entries} and {pending.first_entry}: fold earlier (pending)"
            )
        if width != 1 + groups * (1 + pending.num_directions) or groups < self.table.num_groups:
            raise ValueError(
                f"a log row must have 1 + groups * (1 + {pending.num_directions} directions) columns for at least "
                f"{self.table.num_groups} groups, got {width}: pass the log's own num_directions (pending)"
            )

    @property
    def _device(self) -> torch.device:
        return self.source.storage.device

    def _check_tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int) -> None:
        if tensor.dtype != dtype or tensor.device != self._device or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous 1-D {dtype} tensor on {self._device}, "
                f"got {tensor.dim()}-D {tensor.dtype} on {tensor.device} ({name})"
            )
        if tensor.numel() < numel:
            raise ValueError(
                f"{name} must have at least {numel} elements for its segment table, got {tensor.numel()} ({name})"
            )
