"""The frozen base of an adapter run, as a checkpoint describes it ([Note: frozen base])."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn

from ds_zo import ops
from ds_zo.backends.adapter.streamed import StreamedBase
from ds_zo.backends.common.frozen_base import (
    check_base,
    describe_base,
    is_own_storage,
    refuse_base,
    sums_of_units,
)
from ds_zo.backends.recompute.model_blocks import ModelBlocks
from ds_zo.checkpoint import older_base
from ds_zo.checkpoint.layout import host_tensors


class FrozenBase:
    """Describes the frozen parameters of a model."""

    def __init__(self, module: nn.Module, blocks: ModelBlocks) -> None:
        self._module = module
        self._base = blocks if isinstance(blocks, StreamedBase) else None
        """None: the parameters are on the device."""

    def description(self) -> dict[str, Any]:
        return self._describe({name for name, p in self._module.named_parameters() if not p.requires_grad})

    def _describe(self, names: Collection[str]) -> dict[str, Any]:
        if self._base is None:
            own = {name: p for name, p in self._module.named_parameters() if name in names}
            sums = {name: ops.value_sum(p) for name, p in own.items()}
        else:
            sums = sums_of_units(self._base.store.placement.units, names)
        return describe_base(self._module, sums, self._formats(names))

    def _formats(self, names: Collection[str]) -> set[str]:
        if self._base is None:
            own = (p for name, p in self._module.named_parameters() if name in names)
            return {str(p.dtype).removeprefix("torch.") for p in own}
        parts = (part for unit in self._base.store.placement.units for part in unit.parts)
        return {part.stored_as for part in parts if any(p.name in names for p in part.placed)}

    def check(self, saved: Mapping[str, Any], *, folder: Path) -> None:
        """Raises if a checkpoint was saved over another base than this run's."""
        if "sums" in saved:
            check_base(saved, self._describe(saved["sums"]), folder=folder)
            return
        here = self.description()
        if saved["stored_as"] != here["stored_as"]:
            logger.warning(
                f"ds_zo: the frozen base of checkpoint {folder} was stored as {saved['stored_as']} and is "
                f"{here['stored_as']} here, so the two are not compared"
            )
        elif saved["sha256"] != older_base.hash_of_parameters(self._stored(here["sums"])):
            refuse_base(saved, folder=folder, found=here["source"])

    def _stored(self, names: Collection[str]) -> dict[str, dict[str, torch.Tensor]]:
        """The stored tensors of each parameter."""
        if self._base is None:
            return {name: {name: p.detach().cpu()} for name, p in self._module.named_parameters() if name in names}
        found: dict[str, dict[str, torch.Tensor]] = {}
        for unit in self._base.store.placement.units:
            own = {p.name: p.parameter.detach().cpu() for p in unit.placed} if is_own_storage(unit) else None
            for name, value in (host_tensors(unit) if own is None else own).items():
                if (parameter := name.partition(":")[0]) in names:
                    found.setdefault(parameter, {})[name] = value
        return found
