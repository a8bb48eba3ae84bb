"""Writes `nf4_vectors.safetensors`: tensors that bitsandbytes has quantised on a CPU, and its results.

Run it with bitsandbytes and safetensors installed: `python tests/ops/write_nf4_vectors.py`. Names are CASE.FIELD; the
fields besides `values` and `dequantised` are those of a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import save_file

VECTORS = Path(__file__).with_name("nf4_vectors.safetensors")
SHAPES = {"whole": (8, 64), "short": (5, 30), "odd": (5, 13)}
"""Groups of 64 are whole, the last is short, or the number of values is odd."""


def vectors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for kind, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = torch.randn(shape, generator=generator).to(dtype)
            if kind == "whole":
                values[1] = 0  # a group of zeros
            for double in (False, True):
                packed, state = bnb.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=double)
                case = f"{kind}-{str(dtype).removeprefix('torch.')}-{'double' if double else 'single'}"
                fields = {"values": values, "weight": packed, "dequantised": bnb.dequantize_4bit(packed, state)}
                fields |= {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
                found |= {f"{case}.{name}": value.clone().contiguous() for name, value in fields.items()}
    return found


if __name__ == "__main__":
    save_file(vectors(), VECTORS)
