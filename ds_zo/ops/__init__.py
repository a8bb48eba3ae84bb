"""Counter-based noise, storage formats and the fused operation of the ZO backend.

`replay_perturb` dispatches on the device: numpy on the CPU (`reference`), one Triton kernel on CUDA (`triton_ops`,
which the first CUDA call imports).
"""

from __future__ import annotations

import torch

from ds_zo.ops import mxfp4, nf4
from ds_zo.ops.bit_sums import bit_sum, sum_in_form, value_sum
from ds_zo.ops.codecs import CHUNK_NUMEL, copy_staged_, decode, encode_
from ds_zo.ops.formats import FORMATS, Format, rounding_std, storage_format
from ds_zo.ops.mxfp4 import MXFP4
from ds_zo.ops.nf4 import NF4
from ds_zo.ops.philox import philox4x32
from ds_zo.ops.reference import replay_perturb_reference
from ds_zo.ops.rng import NOISE_VERSION, Distribution
from ds_zo.ops.rng import draw as _draw
from ds_zo.ops.schema import KernelCall, Rounding
from ds_zo.ops.segments import SEGMENT_ALIGNMENT, Segment, SegmentTable, build_table

__all__ = [
    "CHUNK_NUMEL",
    "MXFP4",
    "NF4",
    "NOISE_VERSION",
    "PACKED",
    "SEGMENT_ALIGNMENT",
    "Distribution",
    "Format",
    "Rounding",
    "Segment",
    "SegmentTable",
    "bit_sum",
    "build_table",
    "copy_staged_",
    "decode",
    "dequantise_mxfp4_",
    "dequantise_nf4_",
    "encode_",
    "format_of",
    "noise",
    "philox4x32",
    "replay_perturb",
    "rounding_std",
    "storage_format",
    "sum_in_form",
    "value_sum",
]

PACKED: dict[torch.dtype, Format] = {f.dtype: f for f in (NF4, MXFP4)}
"""Four-bit formats of frozen parameters, by the dtype that stands for each."""


def replay_perturb(
    src: torch.Tensor,
    *,
    table: SegmentTable,
    log: torch.Tensor | None = None,
    num_entries: int = 0,
    first_entry: int = 0,
    num_directions: int = 1,
    dst: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pair: torch.Tensor | None = None,
    low_in: torch.Tensor | None = None,
    low_out: torch.Tensor | None = None,
    scales_in: torch.Tensor | None = None,
    scales_out: torch.Tensor | None = None,
    seed: int,
    step: int,
    direction: int = 0,
    scale: float = 0.0,
    distribution: Distribution = "normal",
    fold: bool = False,
    rounding: Rounding = "stochastic",
    as_stored: bool = False,
) -> None:
    """Replay pending updates onto stored parameters, store the result and write a perturbed copy, in one pass.

    For every element of a trainable segment, in float32:

    1. x = decode(src, low_in, scales_in).
    2. For each entry: x = x * decay[group], then for each direction d x = x - coefficient[group, d] * z(its step, d).
    3. With dst: dst, low_out, scales_out = encode(x). Then x = decode(dst) without low, for out and pair.
    4. With out: out = x + scale * z(step, direction).
    5. With pair: pair = x - scale * z(step, direction).

    `log` is a ring buffer of rows [step as int32 bits, decay of each group, coefficients of group 0 by direction, of
    group 1, ...]. Entries first_entry .. first_entry + num_entries - 1 are taken modulo its length. The host does not
    read it.

    A store with `low_out` rounds to nearest and keeps the exact residual there. A store without `low_out` rounds
    stochastically. Its dither is 16 bits drawn for the fold if `fold`, else the bits of this step's draw that the noise
    does not use. Perturbed copies round with these unused bits too, equal for +scale and -scale. Unperturbed copies
    round to nearest. `rounding="nearest"` turns off all stochastic rounding.

    `as_stored` rounds x as a store would, without writing it. A call with `as_stored`, `out` and `pair` then gives the
    same bits as a store followed by two perturbing calls on the stored values.

    In a segment's `still` range z is 0. Frozen segments are only copied and converted. Padding is neither read nor
    written. dst may be src, and low_out may be low_in.
    """
    call = KernelCall(
        src=src,
        table=table,
        log=log,
        num_entries=num_entries,
        first_entry=first_entry,
        num_directions=num_directions,
        dst=dst,
        out=out,
        pair=pair,
        low_in=low_in,
        low_out=low_out,
        scales_in=scales_in,
        scales_out=scales_out,
        seed=seed,
        step=step,
        direction=direction,
        scale=scale,
        distribution=distribution,
        fold=fold,
        rounding=rounding,
        as_stored=as_stored,
    )
    call.check()
    if src.device.type == "cuda":
        from ds_zo.ops.triton_ops import replay_perturb_triton

        replay_perturb_triton(call)
    else:
        replay_perturb_reference(call)


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of stored bytes of a dtype; None if it has none. The uint8 of bf12 and the dtypes of `PACKED` are used
    for nothing else."""
    return PACKED.get(dtype) or FORMATS.get(dtype)


def dequantise_nf4_(out: torch.Tensor, packed: torch.Tensor, absmax: torch.Tensor) -> None:
    """Writes the values of an nf4 plane to `out`, rounded to its dtype. See [Note: nf4] in `ops.nf4`."""
    packed = packed.view(torch.uint8)
    nf4.check(out, packed, absmax)
    if out.is_cuda:
        from ds_zo.ops.triton_nf4 import dequantise_triton_

        dequantise_triton_(out, packed, absmax)
    else:
        nf4.dequantise_(out, packed, absmax)


def dequantise_mxfp4_(out: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes the values of an mxfp4 parameter to `out`, rounded to its dtype. See [Note: mxfp4] in `ops.mxfp4`."""
    packed = packed.view(torch.uint8)
    mxfp4.check(out, packed, scales)
    if out.is_cuda:
        from ds_zo.ops.triton_mxfp4 import dequantise_triton_

        dequantise_triton_(out, packed, scales)
    else:
        mxfp4.dequantise_(out, packed, scales)


def noise(
    seed: int,
    step: int,
    direction: int,
    offset: int,
    numel: int,
    distribution: Distribution = "normal",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """z for global offsets [offset, offset + numel): float32, a pure function of the arguments."""
    device = torch.device(device)
    if device.type != "cuda":
        z = _draw(seed=seed, step=step, direction=direction, offset=offset, numel=numel, distribution=distribution).z
        return torch.from_numpy(z.copy()).to(device)
    z_device = torch.zeros(numel, dtype=torch.float32, device=device)
    table = build_table([Segment(start=0, numel=numel, offset=offset)], device)
    replay_perturb(
        z_device,
        table=table,
        out=z_device,
        seed=seed,
        step=step,
        direction=direction,
        scale=1.0,
        distribution=distribution,
    )
    return z_device
