"""The overlapped schedule on CUDA, with layers whose trip takes far longer than their compute: a missing wait shows."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn

from ds_zo.backends.lsp.device_group import DeviceGroup
from ds_zo.backends.lsp.host_group import GroupPhase
from tests.helpers.lomo_runs import start
from tests.helpers.lsp_runs import identity_projectors, lsp_json
from tests.helpers.weights import assert_close, parameters_of
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process", "deterministic")]

NUM_STEPS = 100
STREAMED = {
    "stage": 0,
    "offload_param": {"device": "cpu", "pin_memory": True},  # else nobody is ahead of a copy
    "offload_optimizer": {"device": "cpu"},
}
NONE_STAYS = {"stream": {"resident_blocks": 0}}
"""Left out, all blocks move to the device after the first step."""
WIDTH = 1024
"""A block is 8 MB in bf16: 0.15 ms on the link and more on the CPU, next to nothing to compute for sixteen tokens."""


def model(width: int = WIDTH) -> nn.Module:
    return seeded(lambda: Wandering(num_blocks=6, width=width))


def run(
    schedule: str, *, num_steps: int = NUM_STEPS, width: int = WIDTH, **json: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    json["params"] = {"subspace_dim": 512, "nonzeros_per_row": 4, **json.get("params", {}), "schedule": schedule}
    engine = start(lsp_json(**{"lr": 1e-4, "bf16": {"enabled": True}, **json}), model(width))
    losses = []
    for step in range(num_steps):
        batch = {name: value.to(engine.device) for name, value in plain_batch(step).items()}
        loss = engine(**batch)
        engine.backward(loss)
        starts_early = engine.backend._passes.starts_early and engine.backend.groups.on_host
        if starts_early and "gradient_accumulation_steps" not in json:
            assert any(group.phase is GroupPhase.UPDATING for group in engine.backend.groups.on_host)
        engine.step()
        losses.append(loss.detach().clone())  # nobody waits
    weights = parameters_of(engine)
    engine.destroy()
    return losses, weights


CASES: dict[str, dict[str, Any]] = {
    "projected": {},
    "learned": {"params": {"projector": "learned", "check_interval": 20, "fit_steps": 5}, "num_steps": 50},
    "whole": {"params": {"projector": "none"}},
    "clipped": {"clipping": 0.1},
    "fp32": {"bf16": {"enabled": False}, "num_steps": 50},
    "fp16": {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8}, "num_steps": 30},
    "streamed": {"zero_optimization": STREAMED, "num_steps": 50, "clipping": 0.1, "ds_zo": NONE_STAYS},
    "streamed until the device is filled": {"zero_optimization": STREAMED, "num_steps": 20},
    "streamed, accumulated": {
        "zero_optimization": STREAMED,
        "num_steps": 30,
        "gradient_accumulation_steps": 2,
        "ds_zo": NONE_STAYS,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_overlapped_equals_synchronous(name: str) -> None:
    losses, weights = run("layerwise", **CASES[name])
    expected_losses, expected = run("sync", **CASES[name])
    assert [float(loss) for loss in losses] == [float(loss) for loss in expected_losses]
    assert not [key for key in weights if not torch.equal(weights[key], expected[key])]


@pytest.mark.parametrize("name", ["projected", "clipped", "fp16"])
def test_adam_of_all_layers_in_few_launches_is_adam_layer_by_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {**CASES[name], "num_steps": 20, "offload": False}
    _, weights = run("layerwise", **case)
    monkeypatch.setattr(DeviceGroup, "is_complete", False)
    _, expected = run("layerwise", **case)
    assert not [key for key in weights if not torch.equal(weights[key], expected[key])]


def test_adam_on_the_device_does_not_wait_on_the_host() -> None:
    params = {"subspace_dim": 64, "nonzeros_per_row": 4}
    engine = start(lsp_json(lr=1e-4, offload=False, clipping=0.1, params=params, bf16={"enabled": True}), model(128))
    batch = {name: value.to(engine.device) for name, value in plain_batch(0).items()}
    for step in range(3):
        engine.backward(engine(**batch))
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.destroy()


@pytest.mark.parametrize("offload", [False, True])
def test_identity_projectors_are_adamw_on_cuda(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    identity_projectors(monkeypatch)
    settings: dict[str, Any] = {"bf16": {"enabled": False}, "lr": 1e-3, "width": 64, "num_steps": 30}
    _, weights = run("layerwise", offload=offload, params={"eps": 1e-5, "weight_decay": 0.1}, **settings)
    plain = model(64).cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-5)
    for step in range(30):
        plain(**{name: value.cuda() for name, value in plain_batch(step).items()}).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights, {name: p.detach().cpu() for name, p in plain.named_parameters()}, atol=1e-5)
