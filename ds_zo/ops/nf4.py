"""NF4, the four-bit format of bitsandbytes, for parameters that are not trained.

[Note: nf4]
A value is `CODE[index] * absmax`, computed in float32 and then rounded to the parameter's dtype. Groups of 64 values of
the flat tensor share `absmax`, the largest magnitude in the group. The last group may be short. A byte holds two
indices, the first value's in the upper four bits. Packed bytes and `absmax` equal those of bitsandbytes' CPU quantiser.
[Note: nested scales] in `ops.nested` has `absmax` in 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zo.ops.formats import Format

CODE = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=torch.float32,
    device="cpu",
)
"""Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero."""
GROUP_NUMEL = 64
NF4 = Format("nf4", torch.bits4x2, scale_dtype=torch.float32, scale_numel=1, group_numel=GROUP_NUMEL, packed_numel=2)
"""Not one of `FORMATS`: no update is ever stored in it."""

SMALLEST_ABSMAX = 1e-38
_CHUNK_NUMEL = 1 << 20
"""Elements decoded at a time on a CPU, so that temporaries stay small."""


@dataclass(frozen=True)
class Quantised:
    """A tensor in NF4, for example one of a checkpoint."""

    packed: torch.Tensor
    absmax: torch.Tensor
    shape: tuple[int, ...]

    wire = NF4.dtype
    """The dtype that stands for the format."""

    def plain(self) -> Quantised:
        """The same values with float32 scales."""
        return self

    def values(self) -> torch.Tensor:
        """The values in float32."""
        out = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        dequantise_(out.view(-1), self.packed, self.plain().absmax)
        return out


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed bytes and the groups' `absmax` of a tensor, on its device. See [Note: nf4].

    bitsandbytes multiplies a whole group by the reciprocal of `absmax`, and divides a short one. Both are kept, because
    they round differently.
    """
    x = values.detach().reshape(-1).float()
    num_whole = x.numel() // GROUP_NUMEL * GROUP_NUMEL
    whole, short = x[:num_whole].view(-1, GROUP_NUMEL), x[num_whole:]
    absmax = whole.abs().amax(dim=1)
    scaled = (whole * (1.0 / absmax.clamp(min=SMALLEST_ABSMAX))[:, None]).view(-1)
    if short.numel():
        largest = short.abs().amax().clamp(min=SMALLEST_ABSMAX)
        absmax = torch.cat([absmax, largest[None]])
        scaled = torch.cat([scaled, short / largest])
    if scaled.numel() % 2:
        scaled = torch.cat([scaled, scaled.new_zeros(1)])
    code = CODE.to(x.device)
    index = torch.bucketize(scaled, (code[1:] + code[:-1]) / 2, out_int32=True).to(torch.uint8).view(-1, 2)
    return (index[:, 0] << 4) | index[:, 1], absmax


def dequantise_(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> None:
    """Writes the values of `packed` to `out`, in its dtype. All tensors are flat and on the CPU."""
    index = torch.arange(256, device="cpu")
    pairs = CODE[torch.stack([index >> 4, index & 15], dim=1)]
    for start in range(0, out.numel(), _CHUNK_NUMEL):
        chunk = out[start : start + _CHUNK_NUMEL]
        end = start + chunk.numel()
        code = pairs.index_select(0, packed[start // 2 : -(-end // 2)].int()).view(-1)[: chunk.numel()]
        factors = absmax[start // GROUP_NUMEL : -(-end // GROUP_NUMEL)].repeat_interleave(GROUP_NUMEL)
        chunk.copy_(code.mul_(factors[: chunk.numel()]))


def check(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, *, form: Format) -> None:
    """Raises if the tensors do not fit together. `out` has a row for each matrix."""
    numel = out.numel()
    for name, tensor, dtypes, least in (
        ("out", out.view(-1), (torch.float32, torch.bfloat16, torch.float16), numel),
        ("packed", packed, (torch.uint8,), -(-numel // 2)),
        ("scales", scales, (form.scale_dtype,), len(out) * form.num_scales(out.shape[1])),
    ):
        if tensor.dtype not in dtypes or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() < least:
            raise ValueError(
                f"{name} must be a contiguous 1-D tensor of {' or '.join(map(str, dtypes))} with {least} elements, got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)} ({name})"
            )
