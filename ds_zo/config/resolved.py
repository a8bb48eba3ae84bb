"""What a JSON came to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zo.config.optimizers import OptimizerParams
from ds_zo.config.registry import BackendEntry, entry_of
from ds_zo.config.section import DsZoConfig
from ds_zo.config.stock import LossScale


@dataclass(frozen=True)
class Resolved:
    """A checked configuration, with DeepSpeed's defaults filled in."""

    backend: str
    """The name of a registered backend, in lower case."""

    optimizer: OptimizerParams
    """An instance of the entry's `params`. With a client optimizer lr and weight decay are its own."""

    section: DsZoConfig

    dtype: torch.dtype
    """What the model's parameters are given."""

    autocast: torch.dtype | None
    """`torch_autocast`'s dtype, None where that is off."""

    stream: bool
    """Blocks travel: `offload_param.device` is "cpu"."""

    pin_memory: bool
    zero_stage: int

    offload_optimizer: bool
    """LSP's Adam runs on the CPU."""

    gradient_clipping: float
    """Largest gradient norm, 0 for none. LOMO's `clip_grad_value` turns DeepSpeed's default into 0."""

    clipping_explicit: bool
    """`gradient_clipping` stands in the JSON, it is not DeepSpeed's default."""

    gradient_accumulation_steps: int
    loss_scale: LossScale

    ignored: tuple[str, ...] = ()
    """Dotted keys that were accepted and do nothing here."""

    warnings: tuple[str, ...] = ()
    """Lines worth a user's attention at start."""

    params_at: str = "optimizer.params"
    """Where the keys of `optimizer` stand in the JSON, or would: `ds_zo.params` where there is no optimizer block."""

    @property
    def entry(self) -> BackendEntry:
        """What the backend can do."""
        return entry_of(self.backend)

    @property
    def shards_device(self) -> bool:
        """On several ranks, each device keeps a piece of every block: LOMO at stage 3 without `offload_param`."""
        return self.zero_stage == 3 and not self.stream and self.entry.shards_device
