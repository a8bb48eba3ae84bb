"""The data that a backend gives to the writer. This module does not depend on how a backend stores weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class WeightsFile:
    """Tensors that are written to one file. They are kept in memory until that is done."""

    tensors: Callable[[], Mapping[str, torch.Tensor]]
    """Returns contiguous tensors in host memory, by name. The writer calls it, perhaps in another thread."""
    nbytes: int
    key: str = ""
    """Identifies the file in the hash of all weights. A file with an empty key is not part of that hash."""
    written: Callable[[], None] = _nothing
    """Called when the tensors are not needed any more, whether they were written or not."""


@dataclass(frozen=True)
class Snapshot:
    """A backend's state at one step. A snapshot made with `hold` does not change while training continues."""

    weights_files: Sequence[WeightsFile]
    """File `weights-00000.safetensors` is the first one, in whichever order they are written."""
    state: Callable[[], dict[str, Any]]
    """Returns plain data and small tensors. The writer calls it, so that numbers on the device need not be ready when
    the snapshot is made."""
    order: Sequence[int] | None = None
    """Indices of the files in the order of writing, those first that training changes soonest; None: as listed."""
    is_as_replayed: bool = True
    """Whether a replay of the recorded steps would store the same bytes, so that their hash can check the replay."""

    def abandon(self) -> None:
        """Releases the memory of all files."""
        for weights_file in self.weights_files:
            weights_file.written()


_FILE_NBYTES = 512 * 2**20
_ATOMS = frozenset({bool, int, float, str, bytes})


def without_aliases(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a state dict, each once, and the other names of tied tensors, each with the first name."""
    first: dict[Any, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        key = (value.data_ptr(), value.shape, value.dtype, value.device) if value.numel() else name
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = value.detach()
    return tensors, aliases


def module_files(tensors: Mapping[str, torch.Tensor], *, hold: bool) -> list[WeightsFile]:
    """The tensors in files of about half a GiB. With `hold` they are copied now."""
    groups: list[dict[str, torch.Tensor]] = []
    room = 0
    for name, value in tensors.items():
        nbytes = value.numel() * value.element_size()
        if not groups or nbytes > room:
            groups.append({})
            room = _FILE_NBYTES
        groups[-1][name] = value.to("cpu", copy=True) if hold else value
        room -= nbytes

    def weights_file(members: Mapping[str, torch.Tensor]) -> WeightsFile:
        nbytes = sum(value.numel() * value.element_size() for value in members.values())
        return WeightsFile(lambda: {name: value.cpu().contiguous() for name, value in members.items()}, nbytes)

    return [weights_file(members) for members in groups]


def host_copy(value: Any) -> Any:
    """A copy of plain data for a writer in another thread. Tensors are copied to host memory now.

    The device may have no memory for a copy, and the writer does not run on the stream that trains.
    """
    if value is None or type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {copy.deepcopy(key): host_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(host_copy(item) for item in value)
    return copy.deepcopy(value)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are in `state_dict`, by their names there."""
    for prefix, m in module.named_modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and name not in m._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
