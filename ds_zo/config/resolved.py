"""The checked configuration that an engine is made from."""

from __future__ import annotations

from dataclasses import dataclass

from ds_zo.config.marks import Trait
from ds_zo.config.optimizers import OptimizerParams
from ds_zo.config.registry import BackendEntry, entry_of
from ds_zo.config.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Resolved(Settings):
    """A checked configuration, with DeepSpeed's defaults filled in."""

    optimizer: OptimizerParams
    """An instance of the `params` class of the backend's entry. With a script's own optimizer, its lr and
    weight decay are not those of this object."""

    @property
    def entry(self) -> BackendEntry:
        """What the backend can do."""
        return entry_of(self.backend)

    @property
    def shards_device(self) -> bool:
        """Whether, with several ranks, each device keeps a shard of every block: LOMO at stage 3 without
        `offload_param`."""
        return self.zero_stage == 3 and not self.stream and self.entry.has(Trait.SHARDS_DEVICE)
