"""Encodes plain Python data as JSON, with its tensors apart. Decoding executes no code from the file."""

from __future__ import annotations

import argparse
import base64
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.files import SAFETENSORS_DTYPES

_TAG = "$"
"""Begins the key of an object that stands for a value of a type that JSON does not have."""


def encode(value: Any, tensors: dict[str, torch.Tensor], *, at: str = "state") -> Any:
    """Returns JSON for `value`, and puts its tensors into `tensors` under their path `at`. No object's code is kept."""
    if value is None or isinstance(value, (bool, str)):
        return str.__str__(value) if isinstance(value, str) else value  # an enum's str() is its name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor) and value.dtype in SAFETENSORS_DTYPES and value.layout is torch.strided:
        return {"$tensor": _put(tensors, at, value.detach())}
    if isinstance(value, np.ndarray) and _is_plain(value):
        signed = value.view(f"i{value.itemsize}") if value.dtype.kind == "u" and value.itemsize > 1 else value
        whole = np.ascontiguousarray(signed).reshape(value.shape)  # ascontiguousarray makes a scalar a vector
        return {"$array": _put(tensors, at, torch.from_numpy(whole)), "dtype": value.dtype.str}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return encode(value.item(), tensors, at=at)
    if isinstance(value, argparse.Namespace):
        return {"$namespace": encode(vars(value), tensors, at=at)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(_TAG) for key in value):
            return {str.__str__(key): encode(item, tensors, at=f"{at}.{key}") for key, item in value.items()}
        pairs = [
            [encode(key, tensors, at=f"{at}.key{i}"), encode(item, tensors, at=f"{at}.{key}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return {"$dict": pairs}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, tensors, at=f"{at}.{i}") for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        kinds = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
        return {next(tag for kind, tag in kinds.items() if isinstance(value, kind)): items}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, PurePath):
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        raise CheckpointError(
            f"a checkpoint holds dense tensors of the dtypes that safetensors has, got a {kind} of {value.dtype}: "
            f"convert it to such a dtype, or pass its parts ({at})"
        )
    raise CheckpointError(
        f"a checkpoint holds plain data and tensors, got a {kind}: pass its state_dict(), vars() or str() instead "
        f"({at})"
    )


def _put(tensors: dict[str, torch.Tensor], at: str, value: torch.Tensor) -> str:
    """The name that a tensor is saved under: `at`, or a longer one where another tensor's path reads the same."""
    name = at.encode(errors="replace").decode()  # a file name in `at` may hold bytes that are not text
    while name in tensors:
        name += "'"
    tensors[name] = value
    return name


def _is_plain(array: np.ndarray[Any, Any]) -> bool:
    """Whether torch has the array's dtype and byte order, and no element is masked."""
    kind = array.dtype.kind in "fiub" and array.itemsize <= 8 and array.dtype.isnative
    return kind and not isinstance(array, np.ma.MaskedArray)


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `encode` was given, except that mappings become dicts and paths become strings."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith(_TAG):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    if tag == "$float":
        return float(content)
    if tag == "$tensor":
        return tensors[content]
    if tag == "$array" and np.dtype(value["dtype"]).kind in "fiub":  # never objects
        return tensors[content].numpy().view(np.dtype(value["dtype"]))
    if tag == "$namespace":
        return argparse.Namespace(**decode(content, tensors))
    if tag == "$dict":
        return {decode(key, tensors): decode(item, tensors) for key, item in content}
    if tag == "$tuple":
        return tuple(decode(item, tensors) for item in content)
    if tag == "$set":
        return {decode(item, tensors) for item in content}
    if tag == "$frozenset":
        return frozenset(decode(item, tensors) for item in content)
    if tag == "$bytes":
        return base64.b64decode(content)
    if tag == "$dtype" and isinstance(getattr(torch, str(content), None), torch.dtype):
        return getattr(torch, content)
    if tag == "$device":
        return torch.device(content)
    raise CheckpointError(
        f"the checkpoint's state has a value of a type that this ds_zo does not know, {tag} {content!r}: load it with "
        "the ds_zo that wrote it"
    )
