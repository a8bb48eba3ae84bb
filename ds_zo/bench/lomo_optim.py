"""The LOMO authors' package, lomo-optim, as a `Trainer`."""

from __future__ import annotations

import importlib
from importlib import metadata

import torch
from torch import nn

from ds_zo.bench.trainer import Trainer, loss_of


def lomo_optim_trainer(model: nn.Module, *, lr: float | None, adaptive: bool = False, clipping: float = 0.0) -> Trainer:
    """The package's LOMO, or AdaLOMO where `adaptive`. `lr` None means the package's usual rate.

    LOMO that clips needs two backward passes. It gets one forward pass, because the package retains the graph; the
    authors' own trainer makes two forward passes, which is slower.
    """
    import torch.distributed as dist

    peer = importlib.import_module("lomo_optim")
    if not dist.is_initialized():  # the package asks for its rank
        dist.init_process_group("nccl" if next(model.parameters()).is_cuda else "gloo")
    rate = lr or (5e-4 if adaptive else 1e-3)
    make = peer.AdaLomo if adaptive else peer.Lomo
    optimizer = make(model, lr=rate, clip_grad_norm=clipping or None)

    def backward(loss: torch.Tensor) -> None:
        if clipping:
            optimizer.grad_norm(loss)
        optimizer.fused_backward(loss, rate)

    clips = f", clip_grad_norm {clipping:g}, two backwards on one forward" if clipping else ""
    words = f"lomo-optim {_version('lomo-optim')} {make.__name__}{clips}"
    return Trainer(loss_of(model), backward, lambda: None, words)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # on the path, not installed
        return "(version unknown)"
