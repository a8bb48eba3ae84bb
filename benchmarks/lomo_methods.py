"""The first-order methods that LOMO is measured beside, each as a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.training_case import drop_gradients, with_compiled_blocks
from ds_zo.backends.common.chunked_loss import losses_in_chunks, models_with_causal_loss
from ds_zo.bench.lomo_optim import lomo_optim_trainer
from ds_zo.bench.trainer import Batch, Trainer, loss_of
from ds_zo.records.rows import Row

STATE_BYTES = {
    "lomo": 0,
    "lomo_clipped": 0,
    "adalomo": 0,
    "peer_lomo": 0,
    "peer_lomo_clipped": 0,
    "peer_adalomo": 0,
    "hooks": 0,
    "sgd": 0,
    "sgd_master": 4,
    "adamw": 4,
    "adamw_fused": 4,
    "adamw_master": 12,
    "zero3_offload": 0,
    "no_update": 0,
}
"""Device bytes a parameter of optimizer state. AdaLOMO's moments are a row and a column a matrix: nothing, here."""

KEEPS_GRADIENTS = frozenset({"sgd", "sgd_master", "adamw", "adamw_fused", "adamw_master"})
OURS = frozenset({"lomo", "lomo_clipped", "adalomo"})
"""Methods that take `stream`."""
COMPILED = OURS | KEEPS_GRADIENTS | {"no_update", "hooks"}
"""Methods that take `compiled`. The authors' package is measured as it comes."""


def make_trainer(
    method: str,
    model: nn.Module,
    *,
    batch_size: int,
    lr: float | None = None,
    stream: Mapping[str, Any] | None = None,
    compiled: bool = False,
) -> Trainer:
    """`model` is where it trains, in its training dtype; streamed ones may still have to be read from their source.
    `compiled`: each block, by the same code for all methods."""
    if method not in STATE_BYTES:
        raise ValueError(f"method must be one of {', '.join(STATE_BYTES)}, got {method!r}")
    if stream is not None and method not in OURS:
        raise ValueError(f"stream is for {', '.join(sorted(OURS))}, got method {method!r}: leave stream out")
    if compiled and method not in COMPILED:
        raise ValueError(f"compiled is for {', '.join(sorted(COMPILED))}, got method {method!r}: leave it out")
    if method.startswith("peer_"):
        return lomo_optim_trainer(method, model, lr=lr)
    if method == "zero3_offload":
        return _zero3_offload(model, batch_size=batch_size, lr=lr)
    if method in OURS:
        trainer = _ours(method, model, batch_size=batch_size, lr=lr, stream=stream, compiled=compiled)
    elif method == "hooks":
        trainer = _hooks(model, lr=lr)
    else:
        trainer = _torch(method, model, lr=lr) if method in KEEPS_GRADIENTS else _no_update(model)
    return with_compiled_blocks(trainer, model) if compiled else trainer


def _nothing() -> None: ...


def _engine(model: nn.Module, config: Row, *, settings: str) -> Trainer:
    import deepspeed

    import ds_zo  # noqa: F401

    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.train()
    return Trainer(loss_of(engine), engine.backward, engine.step, settings, engine, facts={"config": config})


def dtype_section(model: nn.Module) -> Row:
    dtype = next(model.parameters()).dtype
    return {} if dtype is torch.float32 else {{torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]: {"enabled": True}}


def _no_update(model: nn.Module) -> Trainer:
    """Forward and backward alone, with gradients dropped as they come and LOMO's loss: what bounds LOMO from below."""
    drop_gradients(model)
    models, plain = models_with_causal_loss(model), loss_of(model)

    def forward(batch: Batch) -> torch.Tensor:
        with losses_in_chunks(models):
            return plain(batch)

    words = "forward and backward, gradients dropped, no update"
    return Trainer(forward, torch.Tensor.backward, _nothing, words)


def _hooks(model: nn.Module, *, lr: float | None) -> Trainer:
    """SGD inside the backward pass in three lines: rounds to nearest, checks nothing for NaN, takes the model's own
    loss."""

    @torch.no_grad()
    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.add_(p.grad, alpha=-(lr or 1e-3))
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    words = "SGD in plain post-accumulate hooks, rounded to nearest"
    return Trainer(loss_of(model), torch.Tensor.backward, _nothing, words)


def _ours(
    method: str,
    model: nn.Module,
    *,
    batch_size: int,
    lr: float | None,
    stream: Mapping[str, Any] | None,
    compiled: bool,
) -> Trainer:
    adaptive, clipped = method == "adalomo", method == "lomo_clipped"
    config: Row = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 1.0 if clipped else 0.0,
        "optimizer": {"type": "AdaLOMO" if adaptive else "LOMO", "params": {"lr": lr or (5e-4 if adaptive else 1e-3)}},
        "zero_optimization": {"stage": 0},
        "ds_zo": {"compile_blocks": compiled},
        **dtype_section(model),
    }
    words = f"ds_zo {config['optimizer']['type']}, gradient_clipping {config['gradient_clipping']:g}"
    if stream is not None:
        config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
        config["ds_zo"]["stream"] = dict(stream)
        words += f", streamed {dict(stream)}"
    return _engine(model, config, settings=words)


def _zero3_offload(model: nn.Module, *, batch_size: int, lr: float | None) -> Trainer:
    """ZeRO-3 with everything on the host, as DeepSpeed's documentation advises: pinned, copies overlapped with compute,
    its own vectorised Adam; buckets large enough for one GPU that has memory left."""
    on_host = {"device": "cpu", "pin_memory": True}
    config: Row = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": lr or 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": on_host,
            "offload_optimizer": on_host,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 100_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "sub_group_size": 1_000_000_000,
        },
        **dtype_section(model),
    }
    words = "DeepSpeed ZeRO-3, parameters and optimizer on the host (pinned), DeepSpeedCPUAdam, overlap_comm"
    return _engine(model, config, settings=words)


def _torch(method: str, model: nn.Module, *, lr: float | None) -> Trainer:
    kind, _, form = method.partition("_")
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = lr or (1e-5 if kind == "adamw" else 1e-3)

    def make(params: Iterable[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
        if kind == "adamw":
            return torch.optim.AdamW(params, lr=rate, weight_decay=0.0, **options)
        return torch.optim.SGD(params, lr=rate, **options)

    dtype = str(parameters[0].dtype).removeprefix("torch.")
    optimizer: torch.optim.Optimizer | MasterWeights
    if form == "master":
        optimizer = MasterWeights(parameters, lambda master: make([master], fused=True))
        words = f"torch {kind}, fused, float32 master weights and state"
    else:
        optimizer = make(parameters, fused=True) if form == "fused" else make(parameters)
        words = f"torch {kind}, {form or 'foreach (its default)'}, {dtype} weights and state, no master weights"

    def update() -> None:
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return Trainer(loss_of(model), torch.Tensor.backward, update, words)


class MasterWeights:
    """Float32 copies that are updated in place of 16-bit weights, one parameter at a time: mixed precision with no more
    than one float32 gradient alive, which is the least this form of training can take."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: Callable[[torch.Tensor], torch.optim.Optimizer]
    ) -> None:
        self._owned = []
        for p in parameters:
            master = p.detach().to(torch.float32, copy=True)
            self._owned.append((p, master, make(master)))

    @torch.no_grad()
    def step(self) -> None:
        for p, master, optimizer in self._owned:
            if p.grad is None:
                continue
            master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            master.grad = None
            p.copy_(master)
