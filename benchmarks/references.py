"""Published optimizers in their plain form, which ZO and LSP are compared with: MeZO and GaLore.

A JSON names them by `optimizer.type` where `register` was called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from torch import nn

import ds_zo
from ds_zo import ops
from ds_zo.backends import Backend, StepOutcome
from ds_zo.config import OptimizerParams


class InMemoryMeZO:
    """MeZO by the recipe of Malladi et al. (2023): perturbs in place by +1, -2, +1 times `zo_eps` and updates, drawing
    the same noise again for each sweep. ZO's speed is compared with it."""

    def __init__(self, model: nn.Module, *, lr: float, zo_eps: float) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._lr, self._zo_eps = lr, zo_eps
        self._seeds = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
        seed = int(torch.randint(2**31 - 1, (), generator=self._seeds))
        self._sweep(seed, self._zo_eps)
        plus = loss()
        self._sweep(seed, -2 * self._zo_eps)
        minus = loss()
        self._sweep(seed, self._zo_eps)
        g = ((plus - minus) / (2 * self._zo_eps)).item()
        self._sweep(seed, -self._lr * g)
        return plus

    def _sweep(self, seed: int, scale: float) -> None:
        torch.manual_seed(seed)
        for p in self._parameters:
            z = torch.normal(mean=0, std=1, size=p.data.size(), device=p.device, dtype=p.dtype)
            p.data = p.data + scale * z


class MeZOParams(OptimizerParams):
    """MeZO on ZO's noise."""

    zo_eps: float = Field(1e-3, gt=0)
    """Size of the perturbation."""

    seed: int = 0
    """Seed of the noise."""


class MeZO(Backend):
    """MeZO on the noise of the ZO backend, in one process: ZO's accuracy is compared with it.

    z is drawn once per step for all parameters and used for the four sweeps. Order and offsets are ZO's:
    `named_parameters()`, tied parameters once, frozen ones included. In float32 the two methods take the same steps, up
    to the rounding of weights that MeZO perturbs in place. In 16 bits they differ by that rounding, which is the object
    of the comparison. Dropout, which the paper turns off, uses the same masks in both passes, as in ZO: different masks
    would dominate g.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._settings: Any = self.config.optimizer
        self._num_steps, self._g = 0, 0.0
        self._trained: list[torch.Tensor] = []
        self._z: list[torch.Tensor] = []

    def forward(self, *args: Any, **batch: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.module(*args, **batch)
        zo_eps = self._settings.zo_eps
        with torch.no_grad():
            self._draw()
            self._sweep(zo_eps)
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                plus = self.module(*args, **batch)
            self._sweep(-2 * zo_eps)
            minus = self.module(*args, **batch)
            self._sweep(zo_eps)
            self._g = ((plus.loss.float() - minus.loss.float()) / (2 * zo_eps)).item()
            plus.loss = (plus.loss.float() + minus.loss.float()) / 2
        plus.loss.requires_grad_()  # the engine's `backward` takes no other loss
        return plus

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Does nothing: both losses are known after the forward."""

    @torch.no_grad()
    def step(self) -> StepOutcome:
        self._sweep(-self.param_groups[0]["lr"] * self._g)
        self._trained, self._z = [], []
        self._num_steps += 1
        return StepOutcome(applied=True)

    def _draw(self) -> None:
        parameters = list(self.module.parameters())
        numel = sum(p.numel() for p in parameters)
        z = ops.noise(self._settings.seed, self._num_steps, 0, 0, numel, device=self.device)
        cast = {dtype: z.to(dtype) for dtype in {p.dtype for p in parameters}}
        offset = 0
        for p in parameters:
            if p.requires_grad:
                self._trained.append(p.data)
                self._z.append(cast[p.dtype][offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def _sweep(self, scale: float) -> None:
        torch._foreach_add_(self._trained, self._z, alpha=scale)


class GaLoreParams(OptimizerParams):
    """GaLore."""

    rank: int = Field(gt=0)
    """Singular directions that are kept."""

    refresh_interval: int = Field(200, gt=0)
    """Steps between two decompositions."""

    scale: float = 0.25
    """Factor on the projected updates."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""

    eps: float = 1e-8
    """Adam's epsilon."""


class GaLore(Backend):
    """GaLore (Zhao et al., 2024), to compare LSP with: Adam on the gradient's leading singular directions, with all
    states on the device.

    The shorter side of a matrix is projected: R = P^T G or G Q with orthonormal columns, computed from the gradient's
    SVD every `refresh_interval` steps. Adam's moments of R are kept at a refresh. As in the authors' code, linear
    layers except the head are projected; embeddings, head and vectors get Adam.
    """

    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._settings: Any = self.config.optimizer
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
        whole = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        whole |= {id(head.weight)} if head is not None else set()
        self._projected = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear)} - whole
        self.states: dict[nn.Parameter, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> StepOutcome:
        self.average_gradients()
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.config.gradient_clipping > 0:
            nn.utils.clip_grad_norm_([p for p, _ in trained], self.config.gradient_clipping)
        for p, group in trained:
            self._update_(p, lr=group["lr"], weight_decay=group["weight_decay"])
        self.zero_grad()
        return StepOutcome(applied=True)

    def _update_(self, p: nn.Parameter, *, lr: float, weight_decay: float) -> None:
        assert p.grad is not None
        settings, state = self._settings, self.states.setdefault(p, {"step": 0})
        projects, (beta1, beta2) = id(p) in self._projected, settings.betas
        gradient = self._project(p.grad.float(), state) if projects else p.grad.float()
        state["step"] += 1
        if "mean" not in state:
            state["mean"], state["mean_square"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["mean"].lerp_(gradient, 1 - beta1)
        state["mean_square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (state["mean_square"] / (1 - beta2 ** state["step"])).sqrt_().add_(settings.eps)
        update = state["mean"] / (1 - beta1 ** state["step"]) / denominator
        if projects:
            P = state["projector"]
            update = settings.scale * (update @ P.t() if p.shape[0] >= p.shape[1] else P @ update)
        p.mul_(1 - lr * weight_decay).add_(update.to(p.dtype), alpha=-lr)

    def _project(self, G: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        settings, on_right = self._settings, G.shape[0] >= G.shape[1]
        if state["step"] % settings.refresh_interval == 0:
            U, _, V_t = torch.linalg.svd(G, full_matrices=False)
            P = V_t[: settings.rank].t() if on_right else U[:, : settings.rank]
            state["projector"] = P.contiguous()
        return G @ state["projector"] if on_right else state["projector"].t() @ G


def register() -> None:
    """Makes the two backends available to JSONs in this process."""
    ds_zo.register_backend("MeZO", MeZO, params=MeZOParams)
    ds_zo.register_backend("GaLore", GaLore, params=GaLoreParams, clips_gradients=True)
