"""Reads weights that other programs wrote: folders of safetensors, and DeepSpeed's own files without executing them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.files import TORCH_DTYPES
from ds_zo.checkpoint.layout import Form
from ds_zo.streaming.loading import SafetensorsSource


class Weights(Mapping[str, torch.Tensor]):
    """A mapping of tensors by name, which reads each tensor when it is asked for."""

    def __init__(
        self, forms: Mapping[str, Form], read: Callable[[str], torch.Tensor], *, omitted: Collection[str] = ()
    ) -> None:
        """`omitted`: names of frozen weights that a checkpoint has left out. A model keeps its own."""
        self.forms = forms
        self.omitted = set(omitted)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.forms:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.forms)

    def __len__(self) -> int:
        return len(self.forms)


def model_source(folder: Path) -> Weights | None:
    """The weights of a folder that `save_pretrained` or `ds-zo export` wrote; None for any other folder.

    The header of every file is read here.
    """
    try:
        source = SafetensorsSource(folder)
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from None
    try:
        headers = {name: source.header(name) for name in sorted(source.names())}
        forms = {name: (TORCH_DTYPES[dtype], shape) for name, (dtype, shape) in headers.items()}
    except _UNREADABLE as error:
        raise _unreadable(folder, error) from None
    return Weights(forms, source)


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"a model folder has whole safetensors files, and those of {folder} can't be read: {error!r}. Copy the folder "
        "again"
    )


def check_forms(forms: Mapping[str, Form], here: Mapping[str, torch.Tensor], *, of: str) -> None:
    """Raises where a tensor of `here` has another shape or kind of number in `forms`, before anything is changed."""
    for name in sorted(forms.keys() & here.keys()):
        dtype, shape = forms[name]
        if shape != tuple(here[name].shape):
            raise CheckpointError(
                f"{of} is of another model: {name} has shape {shape} there and {tuple(here[name].shape)} here: load "
                f"weights of a model with these shapes ({name})"
            )
        if _kind(dtype) != _kind(here[name].dtype):
            raise CheckpointError(
                f"{of} is of another model: {name} has dtype {dtype} there and {here[name].dtype} here: a weight is "
                f"loaded from another width, not from another kind of number ({name})"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, ...]:
    return dtype.is_floating_point, dtype.is_complex, dtype is torch.bool


def check_weights(
    weights: Weights, here: Mapping[str, torch.Tensor], aliases: Mapping[str, str], *, strict: bool
) -> None:
    """Raises where names, shapes or kinds of number are of another model, before anything is changed."""
    names = {
        name for name in here if name not in aliases and not any(a in weights for a, n in aliases.items() if n == name)
    }
    missing, unknown = names - set(weights) - weights.omitted, set(weights) - set(here)
    if not set(weights) & set(here) or (strict and (missing or unknown)):
        example = min(missing) if missing else min(unknown, default="")
        raise CheckpointError(
            f"these are weights of another model: {len(missing)} are missing, {len(unknown)} unknown, such as "
            f"{example}; load_module_strict=False loads those with equal names"
        )
    check_forms(weights.forms, here, of="the folder or checkpoint")


@contextmanager
def plain_loading(checkpoint_engine: Any, *, scheduler_state: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Inside this context, DeepSpeed loads only tensors and plain data from its files, which are pickles.

    If the run that saved had no scheduler, DeepSpeed would load None into ours. It loads `scheduler_state` instead.
    """

    def load(path: str, map_location: Any = None) -> Any:
        try:
            state = torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            first_line = str(error).strip().splitlines()[0]
            raise CheckpointError(
                "a DeepSpeed checkpoint may hold tensors and plain data, because anything else would have to be "
                f"executed, got {path}: {first_line} If you trust the file, name its classes in "
                "torch.serialization.add_safe_globals, or make a safetensors folder of it"
            ) from None
        if scheduler_state is not None and isinstance(state, dict) and state.get("lr_scheduler", state) is None:
            state["lr_scheduler"] = scheduler_state
        return state

    checkpoint_engine.load = load
    try:
        yield
    finally:
        del checkpoint_engine.load
