"""Counter-based noise, storage formats and the fused operation of the ZO backend.

`replay_perturb` dispatches on the device: numpy on the CPU (`reference`), one Triton kernel on CUDA (`triton_ops`,
which the first CUDA call imports).
"""

from __future__ import annotations

import torch

from ds_zo.ops.bit_sums import bit_sum, sum_in_form, value_sum
from ds_zo.ops.codecs import CHUNK_NUMEL, copy_staged_, decode, encode_
from ds_zo.ops.factor_layout import FactorLayout, Matrix
from ds_zo.ops.formats import FORMATS, Format, rounding_std, storage_format
from ds_zo.ops.frozen import PACKED, FrozenFormat, dequantise_mxfp4_, dequantise_nf4_, format_of
from ds_zo.ops.mxfp4 import MXFP4
from ds_zo.ops.nested import NF4_NESTED
from ds_zo.ops.nf4 import NF4
from ds_zo.ops.philox import philox4x32
from ds_zo.ops.reference import factors_reference, replay_perturb_reference
from ds_zo.ops.rng import NOISE_VERSION, Distribution
from ds_zo.ops.rng import draw as _draw
from ds_zo.ops.schema import AS_STORED, Copies, KernelCall, Noise, Pending, Planes, Rounding, Store
from ds_zo.ops.segments import SEGMENT_ALIGNMENT, Segment, SegmentTable, build_table

__all__ = [
    "AS_STORED",
    "CHUNK_NUMEL",
    "FORMATS",
    "MXFP4",
    "NF4",
    "NF4_NESTED",
    "NOISE_VERSION",
    "PACKED",
    "SEGMENT_ALIGNMENT",
    "Copies",
    "Distribution",
    "FactorLayout",
    "Format",
    "FrozenFormat",
    "Matrix",
    "Noise",
    "Pending",
    "Planes",
    "Rounding",
    "Segment",
    "SegmentTable",
    "Store",
    "bit_sum",
    "build_table",
    "copy_staged_",
    "decode",
    "dequantise_mxfp4_",
    "dequantise_nf4_",
    "encode_",
    "factors",
    "format_of",
    "noise",
    "philox4x32",
    "replay_perturb",
    "rounding_std",
    "storage_format",
    "sum_in_form",
    "value_sum",
]


def replay_perturb(
    source: Planes,
    *,
    table: SegmentTable,
    noise: Noise,
    pending: Pending | None = None,
    store: Store | None = None,
    copies: Copies | None = None,
) -> None:
    """Replay pending updates onto stored weights, store the result and write perturbed copies of it, in one pass.

    For every element of a trainable segment, in float32:

    1. x = decode(source).
    2. With `pending`: for each entry, x = x * decay[group], then for each direction d
       x = x - coefficient[group, d] * z(its step, d).
    3. With `store`: store.to = encode(x). Then x = decode(store.to) without the low plane.
    4. With `copies`: out = x + scale * z and pair = x - scale * z, for z of the step and direction of `noise`.

    A call with `AS_STORED` and two copies gives the same bits as a store followed by two calls that copy what was
    stored.

    In a segment's `still` range z is 0. Frozen segments are only copied and converted. Padding is neither read nor
    written. Planes of `store.to` may be those of `source`.
    """
    call = KernelCall(source, table, noise, pending, store, copies)
    call.check()
    if source.storage.device.type == "cuda":
        from ds_zo.ops.triton_ops import replay_perturb_triton

        replay_perturb_triton(call)
    else:
        replay_perturb_reference(call)


def factors(table: SegmentTable, *, noise: Noise, out: torch.Tensor) -> None:
    """Fill a table with the factors of rank-1 noise for the table's matrices, in one launch.

    Row m of `out` is for member `noise.direction` + m of the noise's seed and step. Its columns are those of
    `table.factors`, whose `views` finds u and v of a matrix. They are the numbers of which `replay_perturb` makes z.
    """
    if (
        out.shape[1:] != (table.factors.numel,)
        or out.dtype != table.factor_dtype
        or out.device != table.device
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"factors must be a contiguous {table.factor_dtype} tensor of {table.factors.numel} columns on "
            f"{table.device}, got {out.dtype} {tuple(out.shape)} on {out.device} (out)"
        )
    if out.device.type == "cuda":
        from ds_zo.ops.triton_factors import factors_triton

        factors_triton(table, noise, out)
    else:
        factors_reference(table, noise, out)


def noise(
    seed: int,
    step: int,
    direction: int,
    offset: int,
    numel: int,
    distribution: Distribution = "normal",
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """z for global offsets [offset, offset + numel): float32, a pure function of the arguments. Rank-1 noise depends on
    matrices too: `factors` makes it."""
    device = torch.device(device)
    if device.type != "cuda":
        z = _draw(seed=seed, step=step, direction=direction, offset=offset, numel=numel, distribution=distribution).z
        return torch.from_numpy(z.copy()).to(device)
    z_device = torch.zeros(numel, dtype=torch.float32, device=device)
    table = build_table([Segment(start=0, numel=numel, offset=offset)], device)
    replay_perturb(
        Planes(z_device),
        table=table,
        noise=Noise(seed, step, direction, distribution),
        copies=Copies(z_device, scale=1.0),
    )
    return z_device
