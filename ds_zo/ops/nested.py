"""NF4 with scales in 8 bits, which bitsandbytes calls double quantisation.

[Note: nested scales]
In [Note: nf4] 64 values share `absmax`. Here it is `CODE[index] * largest + offset` in float32: the product is rounded,
then the sum. `offset` is the mean of a matrix's `absmax`. Blocks of 256 of them share `largest`, their largest distance
from `offset`. The last block may be short.

A matrix has one row of scales in bytes: `offset`, `largest` of each block, the indices, and zeros up to a multiple of
four bytes. A stack of experts has a row for each of its matrices, whose blocks begin anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ds_zo.ops import nf4
from ds_zo.ops.codecs import CHUNK_NUMEL
from ds_zo.ops.formats import Format

BLOCK_NUMEL = 256
"""Number of `absmax` in a block."""


def _code_book() -> torch.Tensor:
    """The 256 numbers of bitsandbytes' dynamic map: in seven decades, each in twice as many steps as the one below."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = _edges(2**decade)
        middles = (edges[:-1] + edges[1:]) / 2
        found += (10 ** (decade - 6) * middles).tolist() + (-(10 ** (decade - 6)) * middles).tolist()
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


def _edges(num_steps: int) -> torch.Tensor:
    """The float32 numbers from 0.1 to 1 in equal steps. Each sum is rounded once, counted from the nearer end, which
    gives bitsandbytes' bits. The last bit of those of `torch.linspace` depends on the CPU."""
    first, last = torch.tensor([0.1, 1.0], dtype=torch.float32, device="cpu")
    step = ((last - first) / num_steps).double()
    steps = torch.arange(num_steps + 1, dtype=torch.float64, device="cpu")
    from_last = last - step * steps.flip(0)
    return torch.where(steps < (num_steps + 1) // 2, first + step * steps, from_last).float()


CODE = _code_book()


@dataclass(frozen=True)
class _NestedFormat(Format):
    def num_scales(self, numel: int) -> int:
        """Bytes in the row of scales of a matrix."""
        num_groups = -(-numel // self.group_numel)
        return _num_float_bytes(num_groups) + -(-num_groups // 4) * 4


def _num_float_bytes(num_groups: int) -> int:
    """Bytes of `offset` and of `largest` of each block."""
    return 4 * (1 + -(-num_groups // BLOCK_NUMEL))


NF4_NESTED = _NestedFormat(
    "nf4_nested", torch.bits1x8, scale_dtype=torch.uint8, group_numel=nf4.GROUP_NUMEL, packed_numel=2
)
"""Not one of `FORMATS`: no update is ever stored in it."""


@dataclass(frozen=True)
class NestedValues(nf4.Quantised):
    """A tensor in NF4 with nested scales: `absmax` has a row for each matrix."""

    wire = NF4_NESTED.dtype

    def plain(self) -> nf4.Quantised:
        return nf4.Quantised(self.packed, expand(self.absmax, math.prod(self.shape)), self.shape)


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed bytes and the row of scales of one matrix, on its device. See [Note: nested scales]."""
    chunks = [nf4.quantise(chunk) for chunk in values.reshape(-1).split(CHUNK_NUMEL)]
    packed, absmax = (torch.cat(planes) for planes in zip(*chunks, strict=True))
    return packed, encode(absmax)


def encode(absmax: torch.Tensor) -> torch.Tensor:
    """The row of scales of one matrix."""
    offset = absmax.mean(dtype=torch.float64).float()  # devices add in other orders, which float64 hides
    blocks = F.pad(absmax - offset, (0, -absmax.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)
    largest = blocks.abs().amax(dim=1)
    scaled = blocks * (1.0 / largest.clamp(min=nf4.SMALLEST_ABSMAX))[:, None]
    code = CODE.to(absmax.device)
    index = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1)
    return row_of(offset, largest, index[: absmax.numel()])


def row_of(offset: torch.Tensor, largest: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The bytes of a row of scales."""
    return torch.cat([torch.cat([offset[None], largest]).view(torch.uint8), F.pad(index, (0, -index.numel() % 4))])


def expand(rows: torch.Tensor, numel: int) -> torch.Tensor:
    """The float32 `absmax` of a tensor of `numel` values, which has a row of scales for each of its matrices."""
    num_groups = -(-numel // (len(rows) * nf4.GROUP_NUMEL))
    end = _num_float_bytes(num_groups)
    floats, index = rows[:, :end].view(torch.float32), rows[:, end : end + num_groups]
    factors = floats[:, 1:].repeat_interleave(BLOCK_NUMEL, dim=1)[:, :num_groups]
    return (CODE.to(rows.device)[index.int()] * factors + floats[:, :1]).view(-1)
