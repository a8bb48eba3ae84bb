"""The checked settings of a JSON, besides the parameters of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_zo.config.section import DsZoConfig
from ds_zo.config.stock import LossScale


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that rules of an optimizer's parameters read, with DeepSpeed's defaults filled in."""

    backend: str
    """The name of a registered backend, in lower case."""

    section: DsZoConfig

    dtype: torch.dtype
    """Dtype of the model's parameters."""

    autocast: torch.dtype | None
    """Dtype of `torch_autocast`; None where it is off."""

    stream: bool
    """Whether blocks are streamed from the host: `offload_param.device` is "cpu"."""

    pin_memory: bool
    zero_stage: int

    offload_optimizer: bool
    """Whether LSP's Adam runs on the CPU."""

    gradient_clipping: float
    """Largest gradient norm; 0 for no limit. With LOMO's `clip_grad_value` the default is 0, not DeepSpeed's."""

    clipping_explicit: bool
    """Whether the JSON contains `gradient_clipping`; otherwise it is DeepSpeed's default."""

    gradient_accumulation_steps: int
    loss_scale: LossScale

    ignored: tuple[str, ...] = ()
    """Dotted names of keys that are accepted and have no effect."""

    warnings: tuple[str, ...] = ()
    """Sentences that the engine logs as warnings when it is made."""

    params_at: str = "optimizer.params"
    """Place of the optimizer's keys in the JSON: `ds_zo.params` where there is no optimizer block."""

    trains: bool = True
    """False for an engine that has no optimizer: it evaluates, and refuses to train."""
