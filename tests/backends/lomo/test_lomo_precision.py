"""16-bit storage: rounding that keeps small updates in the mean, and fp16's loss scale."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import save_file
from torch import nn

from tests.helpers.lomo_runs import batches, config_for, lively, start, train, weights_of
from tests.helpers.weights import assert_equal

pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}


class Line(nn.Module):
    """Its gradient is one for every weight, whatever the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self) -> torch.Tensor:
        return self.weight.sum(dtype=torch.float32)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
def test_stochastic_rounding_moves_weights_in_the_mean_where_nearest_does_not(half: str, kind: str) -> None:
    lr, num_steps = 1e-4, 50  # a step is 1/40 (bf16) or 1/5 (fp16) of the spacing below 1
    moved: dict[str, torch.Tensor] = {}
    for rounding in ("stochastic", "nearest", "kahan"):
        more: dict[str, Any] = {half: {"enabled": True}, "ds_zo": {"rounding": rounding}}
        if half == "fp16":
            more[half]["initial_scale_power"] = 4  # the default, 2 ** 16, is more than fp16 holds
        engine = start(config_for(kind, lr=lr, **more), Line())
        for _ in range(num_steps):
            engine.backward(engine())
            engine.step()
        assert engine.skipped_steps == 0
        moved[rounding] = 1.0 - engine.module.weight.detach().float()
        if rounding == "kahan":
            moved[rounding] -= engine.backend.state_dict()["residues"]["weight"].float()
    assert not moved["nearest"].any()
    # AdaLOMO's update is lr times the weights' own scale, which is one here, and sinks by half a percent.
    assert moved["stochastic"].mean().item() == pytest.approx(lr * num_steps, rel=0.1)
    assert moved["stochastic"].unique().numel() > 1
    assert moved["kahan"].mean().item() == pytest.approx(lr * num_steps, rel=0.02)


FP16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}


def run(engine: Any, overflows: list[bool]) -> list[float]:
    """The loss scale that monitors see after each step."""
    scales = []
    for step, overflow in enumerate(overflows):
        batch = next(batches("llama", 1, first=step))
        engine.backward(engine(**batch).loss * (float("inf") if overflow else 1.0))
        engine.step()
        scales.append(engine._get_optimizer_loss_scale())
    return scales


@pytest.mark.parametrize("clipping", [0.0, 1.0])
def test_an_overflow_is_skipped_and_counted_and_halves_the_scale(clipping: float) -> None:
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    engine = start(config_for(clipping=clipping, lr=0.01, fp16=FP16, scheduler=schedule), lively("llama"))
    before = weights_of(engine.module)
    assert run(engine, [True]) == [8.0]
    assert_equal(before, weights_of(engine.module))
    assert (engine.skipped_steps, engine.was_step_applied(), engine.optimizer.overflow) == (1, False, True)
    assert engine.get_lr() == [0.01]  # as DeepSpeed: a skipped step does not move the schedule
    assert run(engine, [False, False, False, True, False]) == [8.0, 8.0, 16.0, 8.0, 8.0]
    assert (engine.skipped_steps, engine.was_step_applied(), engine.global_steps) == (2, True, 6)
    assert any(not torch.equal(before[n], p) for n, p in engine.module.named_parameters())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({**FP16, "hysteresis": 2}, [16.0, 8.0, 8.0]),
        ({**FP16, "min_loss_scale": 8}, [8.0, 8.0, 8.0]),
        ({"enabled": True, "loss_scale": 32.0}, [32.0, 32.0, 32.0]),
        ({**FP16, "loss_scale_window": 1}, [8.0, 4.0, 8.0]),
    ],
    ids=["hysteresis", "least", "static", "window"],
)
def test_the_jsons_loss_scale_keys_are_honoured(settings: dict[str, Any], expected: list[float]) -> None:
    engine = start(config_for(fp16=settings), lively("llama"))
    assert run(engine, [True, True, False]) == expected
    assert engine.skipped_steps == 2


def test_the_scale_does_not_alter_updates_or_norms() -> None:
    """Powers of two cancel exactly while nothing overflows or underflows."""
    runs = []
    for power in (0, 6):
        fp16 = {"enabled": True, "initial_scale_power": power}
        engine = start(config_for(clipping=0.5, lr=0.05, fp16=fp16), lively("llama"))
        losses = train(engine, batches("llama", 4))
        runs.append((losses, engine.get_global_grad_norm(), weights_of(engine.module)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-2)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-2)


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
@pytest.mark.parametrize(
    ("clipping", "params"), [(0.3, {"norm_scope": "group"}), (0.0, {"clip_grad_value": 0.01})], ids=["group", "value"]
)
def test_one_pass_clippings_unscale_under_fp16_and_skip_overflows(
    kind: str, clipping: float, params: dict[str, Any]
) -> None:
    runs = []
    for power in (0, 6):
        fp16 = {"enabled": True, "initial_scale_power": power}
        engine = start(config_for(kind, clipping=clipping, lr=0.05, params=params, fp16=fp16), lively("llama"))
        before = weights_of(engine.module)
        assert run(engine, [True]) == [max(1.0, 2.0 ** (power - 1))]
        assert_equal(before, weights_of(engine.module))
        run(engine, [False] * 3)
        runs.append((before, weights_of(engine.module)))
    moved = [torch.cat([(after[n] - before[n]).float().flatten() for n in before]) for before, after in runs]
    assert moved[0].norm().item() == pytest.approx(moved[1].norm().item(), rel=0.05)
    assert torch.nn.functional.cosine_similarity(moved[0], moved[1], dim=0) > 0.95


@pytest.mark.parametrize("seed", range(6))
def test_weights_that_a_user_writes_have_no_residue_of_the_old_ones(seed: int, tmp_path: Path) -> None:
    """A residue of a large weight would be larger than a small one that takes its place."""
    draw = random.Random(seed)
    kind, clipping = draw.choice(["LOMO", "AdaLOMO"]), draw.choice([0.0, 1.0])
    engine = start(config_for(kind, lr=1e-2, clipping=clipping, **BF16, ds_zo={"rounding": "kahan"}), lively("llama"))
    train(engine, batches("llama", 3))
    small = {name: value * 2**-10 for name, value in engine.module.state_dict().items()}
    way = ["load_state_dict", "in place", "a model folder"][seed % 3]
    if way == "load_state_dict":
        engine.module.load_state_dict(small)
    elif way == "in place":
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                p.copy_(small[name])
    else:
        save_file({name: value.contiguous() for name, value in small.items()}, tmp_path / "model.safetensors")
        engine.load_checkpoint(str(tmp_path))
    assert not engine.backend.state_dict()["residues"]
    assert all(torch.equal(safe_get_full_fp32_param(p), p.float()) for p in engine.module.parameters())
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, batches("llama", 2))
    assert_equal(weights_of(engine.module), small)
    assert engine.backend.state_dict()["residues"]
