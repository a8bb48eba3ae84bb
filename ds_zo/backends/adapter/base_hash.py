"""The hash of a frozen base. A checkpoint has the hash in place of the base ([Note: frozen base])."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.adapter.streamed import StreamedBase
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.files import hash_json, hash_tensors
from ds_zo.checkpoint.layout import host_tensors
from ds_zo.streaming.loading import source_of
from ds_zo.streaming.units import Unit


class BaseHash:
    """Describes the frozen parameters of a model, as they are stored."""

    def __init__(self, module: nn.Module, base: StreamedBase | None) -> None:
        """`base`: None: the parameters are on the device."""
        self._module = module
        self._base = base
        self._found: tuple[Any, dict[str, str]] | None = None
        """The last description, and what it depends on. 100 GB take minutes to hash on one core."""

    def description(self) -> dict[str, str]:
        """The source of the base, the formats in which it is stored, and the hash of the stored bytes."""
        frozen = {name: p for name, p in self._module.named_parameters() if not p.requires_grad}
        names, own, num_writes = frozenset(frozen), list(frozen.values()), 0
        if self._base is not None:
            units = [unit for unit in self._base.block_store.placement.units if _is_own_storage(unit)]
            own = [p.parameter for unit in units for p in unit.placed if p.name in names]
            num_writes = self._base.state.num_writes
        key = (names, _sums(own), num_writes)
        if self._found is None or self._found[0] != key:
            self._found = (key, self._describe(names))
        return self._found[1]

    def _describe(self, names: frozenset[str]) -> dict[str, str]:
        if self._base is None:
            tensors = [(name, p.detach().cpu()) for name, p in self._module.named_parameters() if name in names]
            formats = {str(value.dtype).removeprefix("torch.") for _, value in tensors}
            groups = [{name: value} for name, value in tensors]
        else:
            units = self._base.block_store.placement.units
            formats = {p.stored_as for u in units for p in u.parts if any(q.name in names for q in p.placed)}
            groups = []
            for unit in units:
                by_name: dict[str, dict[str, torch.Tensor]] = {}
                own = {p.name: p.parameter.detach().cpu() for p in unit.placed} if _is_own_storage(unit) else None
                for name, value in (host_tensors(unit) if own is None else own).items():
                    by_name.setdefault(name.partition(":")[0], {})[name] = value
                groups += [tensors for name, tensors in by_name.items() if name in names]
        with ThreadPoolExecutor() as threads:
            hashes = dict(zip((min(group) for group in groups), threads.map(hash_tensors, groups), strict=True))
        source = source_of(self._module)
        return {"source": source, "stored_as": " ".join(sorted(formats)), "sha256": hash_json(hashes)}

    def check(self, saved: Mapping[str, str], *, folder: Path) -> None:
        """Raises if a checkpoint was saved over another base than this run's."""
        here = self.description()
        if saved["stored_as"] != here["stored_as"]:
            logger.warning(
                f"ds_zo: the frozen base of checkpoint {folder} was stored as {saved['stored_as']} and is "
                f"{here['stored_as']} here, so the two are not compared"
            )
        elif saved["sha256"] != here["sha256"]:
            raise CheckpointError(
                f"checkpoint {folder} has no frozen weights and needs the base of its run ({saved['source']}, sha256 "
                f"{saved['sha256'][:16]}), got another base (sha256 {here['sha256'][:16]}): load the same model"
            )


def _is_own_storage(unit: Unit) -> bool:
    """Whether the unit's parameters are used as they are. Nothing counts a user's writes to them."""
    return not unit.streamed and unit.viewable


def _sums(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """A sum of the bits of each tensor: a reading at the memory's speed, which also shows writes through `p.data`, as
    PEFT's `merge_adapter` makes them. The tensors' versions do not."""
    words = (t.detach().reshape(-1).view(torch.int16 if t.element_size() % 2 == 0 else torch.uint8) for t in tensors)
    return tuple(int(total) for total in [part.sum(dtype=torch.int64) for part in words])
