"""The methods of the speed suites. Each makes a trainer of a model; the contenders of `ds_zo.bench` are methods too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import ablations
from benchmarks.lora_models import has_peft, repeat_first_block, shared_host_memory, with_lora, with_lora_over_4_bits
from benchmarks.references import InMemoryMeZO
from benchmarks.training_case import TrainingCase
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.bench.contenders import ALL, Contender, config_of, shared_config
from ds_zo.bench.lomo_optim import lomo_optim_trainer
from ds_zo.bench.trainer import Batch, Trainer, engine_trainer, loss_of, set_checkpointing, torch_adamw_trainer
from ds_zo.planner.models import DTYPES
from ds_zo.records.rows import Row

Make = Callable[[TrainingCase, nn.Module, torch.device], Trainer]

_ON_HOST = {"device": "cpu", "pin_memory": True}
_ZO_EPS = 1e-3
_LORA = Contender(
    "lora",
    "LoRA, streamed base",
    "AdamW trains adapters over a streamed base",
    optimizer={"type": "AdamW", "params": {"lr": 1e-4}},
    zero_optimization={"stage": 0, "offload_param": _ON_HOST},
    ds_zo={"backend": "adapter", "stream": {}},
    backend="adapter",
)


@dataclass(frozen=True)
class Method:
    """A way to train, and what is known of it before it is tried."""

    make: Make
    """Makes the trainer of a case. The model is on the device, unless the case or the method streams it."""
    reads_weights: bool = False
    """Whether the model that `make` gets is on the meta device: the method reads the weights itself."""
    checkpoints: bool = True
    """Whether the model's blocks are checkpointed, if the case asks for it, before `make` gets the model."""
    keeps_gradients: bool = False
    """Whether all gradients are alive at once."""
    state_bytes: int = 0
    """Device bytes a parameter of optimizer state. AdaLOMO's moments are a row and a column a matrix: nothing, here."""
    period: int = 1
    """Steps after which the kinds of step repeat."""
    planned_as: str | None = None
    """The backend of `ds-zo plan` that states memory and seconds of the case; None: rows have no plan."""


def _contender(contender: Contender, *, lr: float | None = None, **known: Any) -> Method:
    """`lr`: in place of the contender's own."""
    is_zo = contender.backend == "zo"
    about: Row = {"reads_weights": is_zo, "checkpoints": not is_zo, "period": contender.period}
    return Method(partial(_trained, contender, lr), **about, **known)


def _trained(
    contender: Contender, lr: float | None, case: TrainingCase, model: nn.Module, where: torch.device
) -> Trainer:
    rate = case.lr or lr
    if contender.peer == "torch":
        return torch_adamw_trainer(model, lr=rate or 1e-4, clipping=case.clipping)
    if contender.peer is not None:
        return lomo_optim_trainer(model, lr=rate, clipping=case.clipping)
    config = config_of(contender, _shared(case), lr=rate)
    config["optimizer"]["params"] |= case.params or {}
    if contender.backend is not None:
        _place(config, case)
    initialize = partial(ablations.initialize, case.without) if contender.backend == "zo" else None
    trainer = engine_trainer(model, config, contender.settings, initialize=initialize)
    return replace(trainer, settings=trainer.engine.backend.describe()) if contender.backend == "lsp" else trainer


def _shared(case: TrainingCase) -> Row:
    return shared_config(batch=case.pairs[0][0], dtype=case.dtype, gradient_clipping=case.clipping)


def _place(config: Row, case: TrainingCase) -> None:
    """Changes the JSON of a backend of ds_zo to what the case says of memory, compilation and checkpoints."""
    zero, section = config["zero_optimization"], config.setdefault("ds_zo", {})
    if case.adam_on_device:
        del zero["offload_optimizer"]
    if case.resident:
        zero.pop("offload_param", None)
    elif case.stream is not None:
        zero["offload_param"] = dict(_ON_HOST)
    if case.stream is not None:
        section["stream"] = dict(case.stream)
    if case.compiled:
        section["compile_blocks"] = True
    if case.checkpoint is not None:
        section["checkpoint"] = dict(case.checkpoint)


def _over_streamed_base(
    contender: Contender, lr: float, case: TrainingCase, model: nn.Module, where: torch.device
) -> Trainer:
    """Adapters over a base that ds_zo reads from the model's source."""
    kept = repeat_first_block(model, (case.stream or {}).get("frozen_dtype", "nf4")) if case.repeated else {}
    ranks = {"rank": case.rank, "experts_rank": case.experts_rank}
    adapted = with_lora(model, **ranks, dtype=DTYPES[case.dtype], device=torch.device("cpu"))
    with shared_host_memory(case.host_blocks):
        trainer = _trained(contender, lr, case, adapted, where)
    kept.clear()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return _of_adapters(trainer, case)


def _of_adapters(trainer: Trainer, case: TrainingCase) -> Trainer:
    adapters = {"rank": case.rank, "adapters": "peft" if has_peft() else "plain"}
    return replace(trainer, facts=trainer.facts | adapters)


def _lora_on_device(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    return _adamw(with_lora(model, rank=case.rank, dtype=DTYPES[case.dtype], device=where), case)


def _lora_over_4_bits(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    return _adamw(with_lora_over_4_bits(model, rank=case.rank, dtype=DTYPES[case.dtype], device=where), case)


def _adamw(adapted: nn.Module, case: TrainingCase) -> Trainer:
    set_checkpointing(adapted, case.checkpointing)
    return _of_adapters(torch_adamw_trainer(adapted, lr=case.lr or 1e-4, clipping=case.clipping), case)


def _zero3_over_4_bits(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    """DeepSpeed's ZeRO-3, with parameters in pinned host memory and uploads ahead of their use."""
    adapted = with_lora_over_4_bits(model, rank=case.rank, dtype=DTYPES[case.dtype], device=where)
    set_checkpointing(adapted.train(), case.checkpointing)
    config = {
        **_shared(case),
        "optimizer": {"type": "AdamW", "params": {"lr": case.lr or 1e-4, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_param": dict(_ON_HOST),
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    words = "DeepSpeed ZeRO-3, parameters on the host, overlap_comm"
    return _of_adapters(engine_trainer(adapted, config, words), case)


def _mezo(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    trainer, loss = InMemoryMeZO(model.eval(), lr=case.lr or 1e-7, zo_eps=_ZO_EPS), loss_of(model)
    forward = lambda batch: trainer.step(lambda: loss(batch))  # noqa: E731
    return Trainer(forward, _nothing, _nothing, "in memory, plain SDPA, no KV cache")


def _drawn_noise(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    """No training: for each of `num_members` seeds, torch draws a number for each weight and adds it."""
    num_seeds = (case.params or {})["num_members"]

    @torch.no_grad()
    def forward(batch: Batch) -> torch.Tensor:
        for seed in range(num_seeds):
            torch.manual_seed(seed)
            for p in model.parameters():
                z = torch.randn_like(p)
                p.add_(z, alpha=_ZO_EPS)
        return z.float().std()

    return Trainer(forward, _nothing, _nothing, f"torch.randn for every parameter and each of {num_seeds} seeds")


def _nothing(*_: object) -> None: ...


def _no_update(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    """Forward and backward alone, with gradients dropped as they come: what bounds every first-order method."""

    def drop(p: torch.Tensor) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(drop)
    return Trainer(loss_of(model), torch.Tensor.backward, _nothing, "gradients dropped, no update")


def _no_update_chunked_loss(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    """The same with LOMO's head and loss: what bounds LOMO."""
    trainer, losses = _no_update(case, model, where), CausalLosses(model)

    def forward(batch: Batch) -> torch.Tensor:
        with losses.in_chunks(batch):
            return trainer.forward(batch)

    return replace(trainer, forward=forward, settings=f"{trainer.settings}, loss in chunks")


def _hooks(case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    """SGD inside the backward pass in three lines: rounds to nearest, checks nothing for NaN, takes the model's own
    loss."""

    @torch.no_grad()
    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.add_(p.grad, alpha=-(case.lr or 1e-3))
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    words = "SGD in plain post-accumulate hooks, rounded to nearest"
    return Trainer(loss_of(model), torch.Tensor.backward, _nothing, words)


Optimizer = Callable[..., torch.optim.Optimizer]


def _torch(make: Optimizer, words: str, case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    optimizer = make(list(model.parameters()))
    return _stepped(optimizer, model, f"torch {words}, weights and state in the model's dtype, no master weights")


def _torch_master(make: Optimizer, words: str, case: TrainingCase, model: nn.Module, where: torch.device) -> Trainer:
    optimizer = MasterWeights(model.parameters(), lambda master: make([master], fused=True))
    return _stepped(optimizer, model, f"torch {words}, fused, float32 master weights and state")


def _stepped(optimizer: torch.optim.Optimizer | MasterWeights, model: nn.Module, words: str) -> Trainer:
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


_SGD: Optimizer = partial(torch.optim.SGD, lr=1e-3)
_ADAMW: Optimizer = partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)
_STREAMED_LORA: Row = {"reads_weights": True, "checkpoints": False}

METHODS: dict[str, Method] = {
    **{name: _contender(contender) for name, contender in ALL.items()},
    "zo": _contender(ALL["zo"], lr=1e-7),
    "lomo": _contender(ALL["lomo"], lr=1e-3, planned_as="lomo"),
    "adamw-lean": _contender(ALL["adamw-lean"], keeps_gradients=True, state_bytes=4),
    "adalomo-optim": Method(lambda case, model, where: lomo_optim_trainer(model, lr=case.lr, adaptive=True)),
    "lora": Method(partial(_over_streamed_base, _LORA, 1e-4), **_STREAMED_LORA, planned_as="adapter"),
    "zo-lora": Method(partial(_over_streamed_base, ALL["zo"], 1e-7), **_STREAMED_LORA, planned_as="zo"),
    "lora-peft": Method(_lora_on_device, checkpoints=False),
    "lora-bitsandbytes": Method(_lora_over_4_bits, reads_weights=True, checkpoints=False),
    "lora-zero3": Method(_zero3_over_4_bits, reads_weights=True, checkpoints=False),
    "mezo": Method(_mezo, checkpoints=False),
    "drawn-noise": Method(_drawn_noise, checkpoints=False),
    "no-update": Method(_no_update),
    "no-update-chunked-loss": Method(_no_update_chunked_loss),
    "hooks": Method(_hooks),
    "torch-sgd": Method(partial(_torch, _SGD, "SGD"), keeps_gradients=True),
    "torch-sgd-master": Method(partial(_torch_master, _SGD, "SGD"), keeps_gradients=True, state_bytes=4),
    "torch-adamw": Method(partial(_torch, _ADAMW, "AdamW"), keeps_gradients=True, state_bytes=4),
    "torch-adamw-master": Method(partial(_torch_master, _ADAMW, "AdamW"), keeps_gradients=True, state_bytes=12),
}
"""By the name that a case gives."""


def method_of(case: TrainingCase) -> Method:
    """The method of a case, which can do what the case asks for."""
    method = METHODS.get(case.method)
    if method is None:
        raise ValueError(f"a method is one of {', '.join(METHODS)}, got {case.method}: correct it (method)")
    contender = ALL.get(case.method)
    is_ours = method.planned_as is not None or (contender is not None and contender.backend is not None)
    if case.stream is not None and not is_ours:
        raise ValueError(f"methods of ds_zo stream, got stream for {case.method}: leave it out (stream)")
    if case.compiled and case.method in ("lomo-optim", "adalomo-optim"):
        raise ValueError(f"the authors' package is measured as it comes, got compiled for {case.method}: leave it out")
    return method
