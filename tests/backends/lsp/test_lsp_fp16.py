"""fp16: the loss is scaled, Adam unscales in float32, and a step with a gradient that overflows changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zo.config import ConfigError
from tests.helpers.lomo_runs import batches, start, train
from tests.helpers.lsp_runs import lsp_json, small
from tests.helpers.weights import assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")

FP16 = {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}
STREAMED = {"stage": 0, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
PLACES: dict[str, dict[str, Any]] = {
    "host": {"params": {"edge": "dense"}},
    "device": {"offload": False, "params": {"edge": "dense"}},
    "streamed": {"zero_optimization": STREAMED},
}


def states(engine: Any) -> dict[str, torch.Tensor]:
    """Moments, their counts and projectors, by name."""
    found = {}
    for matrix, moments in engine.backend.groups.matrices_and_moments():
        own = {key: value.clone() for key, value in vars(moments).items()}
        if matrix.subspace is not None:
            own |= {side: getattr(matrix.subspace, side).values.clone() for side in ("P", "Q")}
        found |= {f"{matrix.name} {key}": value for key, value in own.items()}
    return found


def overflowing(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[0] = torch.inf
    return grad


@pytest.mark.parametrize("place", PLACES)
def test_an_overflow_in_one_matrix_skips_the_whole_step(place: str) -> None:
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    engine = start(lsp_json(lr=1e-3, fp16=FP16, scheduler=schedule, **PLACES[place]), small())
    train(engine, batches("llama", 1))
    before, before_states = parameters_of(engine), states(engine)
    p = engine.module.lm_head.weight if place == "streamed" else engine.module.model.layers[1].mlp.up_proj.weight
    handle = p.register_hook(overflowing)
    train(engine, batches("llama", 1, first=1))
    handle.remove()
    assert_equal(parameters_of(engine), before)
    assert_equal(states(engine), before_states)
    assert (engine.skipped_steps, engine.was_step_applied(), engine.optimizer.overflow) == (1, False, True)
    assert engine._get_optimizer_loss_scale() == 2.0**5 and engine.get_lr() == [0.5e-3]
    train(engine, batches("llama", 2, first=2))
    assert engine.skipped_steps == 1 and engine._get_optimizer_loss_scale() == 2.0**6  # two clean steps
    after = parameters_of(engine)
    assert sum(not torch.equal(after[name], value) for name, value in before.items()) > 10


@pytest.mark.parametrize(("place", "clip_scope"), [("host", "global"), ("device", "matrix"), ("streamed", "matrix")])
def test_the_scale_does_not_alter_updates_and_norms(place: str, clip_scope: str) -> None:
    """Powers of two cancel while nothing overflows or underflows. A float32 model trains the same but for rounding."""
    runs = []
    for fp16 in ({**FP16, "initial_scale_power": 0}, {**FP16, "loss_scale_window": 1000}, {"enabled": False}):
        json = {"lr": 1e-3, "clipping": 0.1, **PLACES[place], "fp16": fp16}
        json["params"] = {**json.get("params", {}), "clip_scope": clip_scope, "eps": 1e-5}
        engine = start(lsp_json(**json), small(num_hidden_layers=1))
        losses = train(engine, batches("llama", 3))
        runs.append((losses, engine.get_global_grad_norm()))
        engine.destroy()
    for losses, norm in runs[1:]:
        assert losses == pytest.approx(runs[0][0], rel=1e-2)
        assert norm == pytest.approx(runs[0][1], rel=2e-2)


def test_fits_and_a_resumed_run_go_on_with_the_scale(tmp_path: Path) -> None:
    learned = {"projector": "learned", "fit_steps": 2, "calibration_batches": 1}
    json = lsp_json(lr=1e-3, fp16=FP16, gradient_accumulation_steps=2, params=learned)
    whole = start(json, small())
    data = list(batches("llama", 8))
    train(whole, data[:5])  # two steps and a half
    whole.save_checkpoint(str(tmp_path))
    whole.wait_for_checkpoint()
    assert whole.backend.biases and whole._get_optimizer_loss_scale() == 2.0**7
    resumed = start(json, small(seed=1))
    resumed.load_checkpoint(str(tmp_path))
    assert resumed._get_optimizer_loss_scale() == 2.0**7
    assert train(resumed, data[5:]) == train(whole, data[5:])
    assert_equal(parameters_of(resumed), parameters_of(whole))


def test_gradients_without_a_scale_are_refused() -> None:
    engine = start(lsp_json(fp16=FP16), small())
    with pytest.raises(RuntimeError, match=r"fp16 needs the loss scale.*call engine\.backward\(loss\)"):
        engine(**next(batches("llama", 1))).loss.backward()
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight in torch\.float16.*fp16\.enabled"):
        start(lsp_json(), small().half())
