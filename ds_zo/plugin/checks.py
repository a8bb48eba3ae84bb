"""Models, optimizers and dtypes that no engine of ours can be made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_zo.checkpoint.files import SAFETENSORS_DTYPES
from ds_zo.checkpoint.snapshot import persistent_buffers
from ds_zo.config import ConfigError, Resolved
from ds_zo.config.registry import unknown_optimizer
from ds_zo.logs import warn


def check_dtype(resolved: Resolved) -> None:
    """Refuses fp16 on a device without it. DeepSpeed refuses it after it has moved the model, and gives no remedy."""
    if resolved.dtype is torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16 needs FP16 instructions, which this machine's {get_accelerator().device_name()} does not have; "
            "use bf16.enabled, or neither for float32, or a GPU",
            at="fp16.enabled",
        )


def check_optimizer_type(cls: type[DeepSpeedEngine], config: Mapping[str, Any]) -> None:
    """Refuses an optimizer name that DeepSpeed does not know. DeepSpeed's own error does not list our names."""
    block = config.get("optimizer")
    written = block.get("type") if isinstance(block, dict) else None
    if not isinstance(written, str) or any(cls._is_supported_optimizer(cls, n) for n in (written, written.lower())):
        return
    raise unknown_optimizer(written)


def check_whole(model: nn.Module) -> None:
    """Refuses a model whose parameters have lost their values to an earlier engine."""
    for name, p in model.named_parameters():
        if getattr(p, "_ds_zo_left", False) and not p.numel():
            raise RuntimeError(
                f"an engine needs whole weights, got parameter {name} without values: each rank had a shard of it "
                "(LOMO at stage 3) in an engine that was destroyed. Save the weights before the engine is destroyed "
                "and load them into a new model; with Trainer, make a new Trainer for each train() and evaluate before "
                "training by eval_on_start=True"
            )
        if p.numel() > 1 and not any(p.stride()):
            raise RuntimeError(
                f"an engine needs whole weights, got parameter {name} without memory: an earlier engine had stored its "
                "values in another form when making that engine failed. Load the model again"
            )


def check_savable(model: nn.Module) -> None:
    """Refuses a model that no checkpoint could hold, before hours of training."""
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
            raise ValueError(
                f"a checkpoint holds dense tensors of the dtypes that safetensors has, got {name} of {tensor.dtype}, "
                f"{tensor.layout}: give it another dtype, or register it by register_buffer(persistent=False) ({name})"
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, config: Resolved) -> None:
    """Refuses a param group without a learning rate, and an optimizer that has no parameter of the model. Warns of one
    that has others too, and of one that trains nothing.

    An optimizer with other parameters was made of another model, or before parameters of this model were replaced.
    """
    where = f"{type(optimizer).__name__}.param_groups"
    for index, group in enumerate(optimizer.param_groups):
        if group.get("lr") is None:
            raise ConfigError(
                f"every parameter group needs a learning rate, got {group.get('lr')!r}: give one to the optimizer "
                "passed to deepspeed.initialize",
                at=f"{where}[{index}]['lr']",
            )
    given = [p for group in optimizer.param_groups for p in group["params"]]
    own = {id(p) for p in module.parameters()}
    foreign = sum(id(p) not in own for p in given)
    remedy = "make the optimizer of model.parameters() after the model's last change (adapters, resized embeddings)"
    if given and foreign == len(given):
        raise ConfigError(f"an optimizer must have parameters of its model, got none of them; {remedy}", at=where)
    if foreign:
        warn(f"{foreign} of {len(given)} parameters are not the model's and are not trained: {remedy} ({where})")
    if config.trains and not any(p.requires_grad for p in given):
        warn(f"no parameter requires a gradient, so none is trained: call requires_grad_(True) on some ({where})")
