"""64-bit sums of the bits of weights, which tell two models apart at about the speed of the memory.

A SHA-256 of 100 GB takes minutes on one core. The sums are not proof against intent.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ds_zo.ops.nf4 import NF4, Quantised

_ROW_NUMEL = 4096
_CHUNK_NUMEL = 1024 * _ROW_NUMEL
"""Words of 32 bits that one thread, or one call on a device, adds up at a time."""


def bit_sum(tensor: torch.Tensor) -> int:
    """A sum of the tensor's 32-bit words modulo 2**64, in which each word has a weight of its own. It is equal on every
    device. Tensors of one size that differ have the same sum by chance alone, about once in 2**32."""
    data = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
    num_words = data.numel() // 4
    add = _add_rows if data.device.type == "cpu" else _add_rows_on_device
    words = data[: 4 * num_words]
    chunks = [words[start : start + 4 * _CHUNK_NUMEL] for start in range(0, words.numel(), 4 * _CHUNK_NUMEL)]
    if len(chunks) > 1 and data.device.type == "cpu":
        with ThreadPoolExecutor() as threads:
            rows = list(threads.map(add, chunks))
    else:
        rows = [add(chunk) for chunk in chunks]
    rest = int.from_bytes(bytes(data[4 * num_words :].tolist()), "little")
    sums = np.concatenate([*rows, np.array([rest], dtype=np.int64)])
    return int(np.dot(sums, _weights(_ROW_NUMEL, len(sums)))) % 2**64


def _add_rows(data: torch.Tensor) -> Any:
    """The weighted sum of each row of words; the last row may be short."""
    words = data.numpy().view(np.int32)
    whole = len(words) // _ROW_NUMEL * _ROW_NUMEL
    found = np.einsum("ij,j->i", words[:whole].reshape(-1, _ROW_NUMEL), _WEIGHTS)
    short = np.einsum("j,j->", words[whole:], _WEIGHTS[: len(words) - whole])
    return np.append(found, short)


def _add_rows_on_device(data: torch.Tensor) -> Any:
    words = (data if data.storage_offset() % 4 == 0 else data.clone()).view(torch.int32)
    whole = words.numel() // _ROW_NUMEL * _ROW_NUMEL
    weights = torch.from_numpy(_WEIGHTS).to(words.device)
    found = (words[:whole].view(-1, _ROW_NUMEL) * weights).sum(dim=1)
    short = (words[whole:] * weights[: words.numel() - whole]).sum()
    return torch.cat([found, short[None]]).cpu().numpy()


def _weights(first: int, number: int) -> Any:
    """Odd numbers that are scrambled from their index, so that no two words may change places."""
    x = np.arange(first + 1, first + 1 + number, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x ^ (x >> np.uint64(29))) | np.uint64(1)).view(np.int64)


_WEIGHTS = _weights(0, _ROW_NUMEL)


def value_sum(value: torch.Tensor | Quantised) -> str:
    """The form of a parameter's value, which is its dtype or its four-bit format, and the sum of its bits."""
    if isinstance(value, Quantised):
        value = value.plain()  # nested scales have the sum of the float32 numbers that they stand for
        form = "nf4" if value.wire is NF4.dtype else "mxfp4"
        return f"{form} {bit_sum(value.packed):016x}{bit_sum(value.absmax):016x}"
    return f"{str(value.dtype).removeprefix('torch.')} {bit_sum(value):016x}"


def sum_in_form(value: torch.Tensor | Quantised, form: str) -> str:
    """`value_sum` of a value of a model's files in the form of another sum, if the value can be converted to it."""
    dtype = getattr(torch, form, None)
    if dtype is None or isinstance(dtype, str):
        return value_sum(value)
    return value_sum((value.values() if isinstance(value, Quantised) else value).to(dtype))
