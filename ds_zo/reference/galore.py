"""GaLore (Zhao et al., 2024) in its plain form, to compare LSP with: Adam on the gradient's leading singular
directions, with all states on the device.

The shorter side of a matrix is projected: R = P^T G or G Q with orthonormal columns, computed from the gradient's SVD
every `refresh_interval` steps. Adam's moments of R are kept at a refresh, as in the authors' code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
import torch
from torch import nn

from ds_zo.config import ConfigError

TYPE = "galore"
"""The optimizer.type that selects GaLore in launch/train.py."""


class GaLoreAdamW(torch.optim.Optimizer):
    """AdamW that projects the parameters of groups with `rank`, and no others."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int | None = None,
        refresh_interval: int = 200,
        scale: float = 0.25,
    ) -> None:
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "rank": rank}
        super().__init__(params, {**defaults, "refresh_interval": refresh_interval, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "DeepSpeed passes none"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update_(p, group)

    def _update_(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        assert p.grad is not None
        state = self.state[p]
        step = state["step"] = state.get("step", 0) + 1
        projects = group["rank"] is not None and p.ndim == 2
        gradient = self._project(p.grad.float(), state, group) if projects else p.grad.float()
        if "mean" not in state:
            state["mean"], state["mean_square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["mean_square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (state["mean_square"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = state["mean"] / (1 - beta1**step) / denominator
        if projects:
            P = state["projector"]
            update = group["scale"] * (update @ P.t() if p.shape[0] >= p.shape[1] else P @ update)
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-group["lr"])

    @staticmethod
    def _project(G: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        on_right = G.shape[0] >= G.shape[1]
        if (state["step"] - 1) % group["refresh_interval"] == 0:
            U, _, V_t = torch.linalg.svd(G, full_matrices=False)
            P = V_t[: group["rank"]].t() if on_right else U[:, : group["rank"]]
            state["projector"] = P.contiguous()
        return G @ state["projector"] if on_right else state["projector"].t() @ G


def galore_engine(model: nn.Module, config: dict[str, Any]) -> Any:
    """Makes a DeepSpeed engine for a JSON whose optimizer.type is `galore`. As in the authors' code, linear layers
    except the head are projected; embeddings, head and vectors get Adam."""
    config = copy.deepcopy(config)
    params = dict(config.pop("optimizer").get("params", {}))
    if "rank" not in params:
        raise ConfigError("GaLore needs a rank, got none: name one, e.g. 128", at="optimizer.params.rank")
    rank = params.pop("rank")
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    whole = tables | ({id(head.weight)} if head is not None else set())
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - whole
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) in linear], "rank": rank},
        {"params": [p for p in trained if id(p) not in linear], "rank": None},
    ]
    optimizer = GaLoreAdamW(groups, **params)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
