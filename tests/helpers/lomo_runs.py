"""LOMO runs on toy models, and the plain torch runs that they are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from torch import nn

import ds_zo  # noqa: F401
from tests.helpers.equivalence_runs import on_device
from tests.helpers.loaded_models import lora_over
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import Weights


def config_for(kind: str = "LOMO", *, clipping: float = 0.0, lr: float = 0.1, **more: Any) -> dict[str, Any]:
    """`params` adds to optimizer.params, the rest to the top level."""
    params = {"lr": lr, **more.pop("params", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": clipping,
        "optimizer": {"type": kind, "params": params},
        **more,
    }


def streamed(kind: str = "LOMO", *, stream: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """`stream` is `ds_zo.stream`."""
    place = {"stage": 0, "offload_param": {"device": "cpu"}}
    section = {**more.pop("ds_zo", {}), "stream": stream or {}}
    return config_for(kind, zero_optimization=place, ds_zo=section, **more)


def start(config: dict[str, Any], model: nn.Module, **kwargs: Any) -> Any:
    return deepspeed.initialize(model=model, config=config, **kwargs)[0]


def batches(name: str, num_batches: int, *, first: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    for seed in range(first, first + num_batches):
        yield tiny_batch(name, seed=seed, batch_size=2, length=8)


def checkpointed(model: nn.Module, reentrant: bool | None) -> nn.Module:
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    return model


def weights_of(module: nn.Module) -> Weights:
    """Copied to the host: streamed blocks are there, others where the device is."""
    return {name: p.detach().to("cpu", copy=True) for name, p in module.named_parameters()}


def train(engine: Any, data: Any, *, scale: Callable[[int], float] = lambda step: 1.0) -> list[float]:
    losses = []
    for step, batch in enumerate(data):
        loss = engine(**on_device(engine, batch)).loss * scale(step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plain(
    module: nn.Module, data: Any, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the loop that everybody knows."""
    losses, norms = [], []
    for batch in data:
        loss = module(**batch).loss
        loss.backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(module.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def lively(name: str, **overrides: Any) -> nn.Module:
    """Fresh weights hardly move the loss; these do, so that a wrong update shows."""
    model = tiny_model(name, **overrides)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(4.0)
    return model


def lora_model(*, train_base: bool = True) -> Any:
    """With adapters that begin at zero, over a base that is trained too or stays."""
    settings = {"lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": True}
    model = lora_over(lively("llama"), **settings, task_type="CAUSAL_LM")
    for p in model.parameters():
        p.requires_grad_(p.requires_grad or train_base)
    return model
