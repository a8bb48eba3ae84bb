"""Writes the checkpoints of `fixtures/backends`: `python tests/checkpoint/write_fixtures.py FOLDER`.

Each backend trains two steps and saves; `after.safetensors` holds the weights after the third step. The committed ones
were written by version 0.1.0 (commit c5e0946), whose checkpoints every later version loads. `fixtures/formats` are
checkpoints of commit d9a7d06, and the losses of the two steps after each. They were written by
`python tests/helpers/recorded_runs.py --save FOLDER --out ROWS`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn

import ds_zo  # noqa: F401

PARAMS: dict[str, dict[str, Any]] = {
    "LOMO": {"lr": 1e-2},
    "AdaLOMO": {"lr": 1e-2},
    "LSP": {"lr": 1e-2, "subspace_dim": 6, "nonzeros_per_row": 2, "fit_steps": 2, "check_interval": 2},
    "ZO": {"lr": 1e-3},
}


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def start(kind: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": kind, "params": PARAMS[kind]},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
    }
    return deepspeed.initialize(model=Toy().train(), config=config)[0]


def train(engine: Any, *steps: int) -> None:
    for step in steps:
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(batch.to(engine.device)))
        engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in engine.module.state_dict().items()}


def write(folder: Path) -> None:
    for kind in PARAMS:
        engine = start(kind)
        train(engine, 0, 1)
        engine.save_checkpoint(str(folder / kind))
        train(engine, 2)
        save_file(weights(engine), folder / kind / "after.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
