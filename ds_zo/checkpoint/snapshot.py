"""What a backend hands to the writer. Nothing here knows how a backend keeps weights."""

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
class Piece:
    """Tensors that are written to one file, together, and held in memory no longer than that."""

    tensors: Callable[[], Mapping[str, torch.Tensor]]
    """Called when its turn comes, perhaps in another thread: contiguous tensors in host memory."""
    nbytes: int
    key: str = ""
    """Identifies it in the hash of all weights; empty: not a part of that."""
    written: Callable[[], None] = _nothing
    """Called once when the tensors are no longer needed, written or not."""


@dataclass(frozen=True)
class Snapshot:
    """The state of one moment. With `hold`, it stays that moment's while training goes on."""

    pieces: Sequence[Piece]
    """File `weights-00000.safetensors` is the first, whatever order they are written in."""
    state: Callable[[], dict[str, Any]]
    """Plain data and small tensors; called like a piece's tensors, so that late numbers may be late."""
    order: Sequence[int] | None = None
    """In which the pieces are written: soonest to change first."""

    def abandon(self) -> None:
        for piece in self.pieces:
            piece.written()


_PIECE_NBYTES = 512 * 2**20
_ATOMS = frozenset({bool, int, float, str, bytes})


def without_aliases(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a state dict, each once, and the other names of tied ones."""
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


def module_pieces(tensors: Mapping[str, torch.Tensor], *, hold: bool) -> list[Piece]:
    """Pieces of about half a GiB. `hold` copies them now."""
    groups: list[dict[str, torch.Tensor]] = []
    room = 0
    for name, value in tensors.items():
        nbytes = value.numel() * value.element_size()
        if not groups or nbytes > room:
            groups.append({})
            room = _PIECE_NBYTES
        groups[-1][name] = value.to("cpu", copy=True) if hold else value
        room -= nbytes

    def piece(members: Mapping[str, torch.Tensor]) -> Piece:
        nbytes = sum(value.numel() * value.element_size() for value in members.values())
        return Piece(lambda: {name: value.cpu().contiguous() for name, value in members.items()}, nbytes)

    return [piece(members) for members in groups]


def held(value: Any) -> Any:
    """Plain data of this moment for a writer in another thread. Tensors go to host memory now: a copy on the device
    could be what it has no room for, and its stream is not the writer's."""
    if value is None or type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {copy.deepcopy(key): held(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(held(item) for item in value)
    return copy.deepcopy(value)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to `state_dict`, by their names there."""
    for prefix, m in module.named_modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and name not in m._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer
