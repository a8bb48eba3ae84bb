"""MeZO with the interface of an engine, as `launch/train.py` uses it, on the noise of the ZO backend: ZO's accuracy is
compared with it.

z is drawn once per step for all parameters and used for the four sweeps. Order and offsets are ZO's:
`named_parameters()`, tied parameters once, frozen ones included. In float32 the two methods take the same steps, up to
the rounding of weights that MeZO perturbs in place. In 16 bits they differ by that rounding, which is the object of the
comparison. Dropout, which the paper turns off, uses the same masks in both passes, as in ZO: different masks would
dominate g.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo import ops

_STATE = "state.pt"


class MeZOEngine:
    """Perturbs the weights in place by +1, -2, +1 times `zo_eps` around two forward passes. It has no accumulation, no
    schedule, and runs in one process."""

    def __init__(self, model: nn.Module, config: dict[str, Any], *, device: torch.device) -> None:
        for rule, holds in (
            ("gradient_accumulation_steps must be 1", config.get("gradient_accumulation_steps", 1) == 1),
            ("a scheduler is not supported: leave it out", "scheduler" not in config),
        ):
            if not holds:
                raise ValueError(f"the MeZO reference is plain: {rule}")
        params = config["optimizer"]["params"]
        self.lr, self.zo_eps, self.seed = float(params["lr"]), float(params["zo_eps"]), int(params.get("seed", 0))
        self.module = model.to(device)
        self.device = device
        self.training = True
        self.global_steps = 0
        self._batch_size = int(config["train_micro_batch_size_per_gpu"])
        self._numel = sum(p.numel() for p in model.parameters())
        self._trained: list[torch.Tensor] = []
        self._z: list[torch.Tensor] = []
        self._g = 0.0

    def __call__(self, **batch: Any) -> Any:
        with torch.no_grad():
            if not self.training:
                return self.module(**batch)
            self._draw()
            self._sweep(self.zo_eps)
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                plus = self.module(**batch)
            self._sweep(-2 * self.zo_eps)
            minus = self.module(**batch)
            self._sweep(self.zo_eps)
            self._g = ((plus.loss.float() - minus.loss.float()) / (2 * self.zo_eps)).item()
            plus.loss = (plus.loss.float() + minus.loss.float()) / 2
            return plus

    def backward(self, loss: torch.Tensor) -> None:
        """Does nothing: both losses are known after the forward."""

    @torch.no_grad()
    def step(self) -> None:
        self._sweep(-self.lr * self._g)
        self._trained, self._z = [], []
        self.global_steps += 1

    def _draw(self) -> None:
        z = ops.noise(self.seed, self.global_steps, 0, 0, self._numel, device=self.device)
        cast = {dtype: z.to(dtype) for dtype in {p.dtype for p in self.module.parameters()}}
        offset = 0
        for p in self.module.parameters():
            if p.requires_grad:
                self._trained.append(p.data)
                self._z.append(cast[p.dtype][offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def _sweep(self, scale: float) -> None:
        torch._foreach_add_(self._trained, self._z, alpha=scale)

    def train(self, mode: bool = True) -> None:
        self.training = mode
        self.module.train(mode)

    def eval(self) -> None:
        self.train(False)

    def train_batch_size(self) -> int:
        return self._batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch_size

    def gradient_accumulation_steps(self) -> int:
        return 1

    def zero_optimization_partition_weights(self) -> bool:
        return False

    def save_checkpoint(self, folder: str, *, tag: str, client_state: dict[str, Any]) -> None:
        place = Path(folder) / tag
        place.mkdir(parents=True, exist_ok=True)
        state = {"module": self.module.state_dict(), "client": client_state, "global_steps": self.global_steps}
        torch.save(state, place / _STATE)
        (Path(folder) / "latest").write_text(tag)

    def load_checkpoint(self, folder: str) -> tuple[str | None, dict[str, Any]]:
        place = Path(folder) / (Path(folder) / "latest").read_text().strip()
        state = torch.load(place / _STATE, map_location=self.device, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.global_steps = state["global_steps"]
        return str(place), {**state["client"], "global_steps": self.global_steps}
