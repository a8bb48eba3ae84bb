"""DeepSpeed's accessors of full parameters, where the whole model is on the device."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

from tests.helpers import adapter_runs, lomo_runs
from tests.helpers.weights import assert_equal

pytestmark = pytest.mark.usefixtures("single_process")


def lomo(kind: str = "LOMO", *, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    bf16 = {"bf16": {"enabled": True}} if dtype is torch.bfloat16 else {}
    return lomo_runs.start(lomo_runs.config_for(kind, **bf16, **more), lomo_runs.lively("llama").to(dtype))


def adapter(*, dtype: torch.dtype = torch.float32, offload: bool = False) -> Any:
    bf16 = {"bf16": {"enabled": True}} if dtype is torch.bfloat16 else {}
    json = adapter_runs.adapter_json(offload=offload, **bf16)
    return adapter_runs.start(adapter_runs.adapted(dtype=dtype), json)


KAHAN = {"ds_zo": {"rounding": "kahan"}}
ENGINES: dict[str, Callable[[], Any]] = {
    "lomo": lomo,
    "lomo bf16": lambda: lomo(dtype=torch.bfloat16),
    "lomo kahan": lambda: lomo(lr=1e-3, dtype=torch.bfloat16, **KAHAN),
    "adalomo kahan": lambda: lomo("AdaLOMO", lr=1e-3, dtype=torch.bfloat16, **KAHAN),
    "adapter": adapter,
    "adapter bf16": lambda: adapter(dtype=torch.bfloat16),
}


def train(engine: Any, num_steps: int, *, first: int = 0) -> None:
    adapter_runs.train(engine, adapter_runs.batches(num_steps, seed=first))


def full(engine: Any) -> dict[str, torch.Tensor]:
    return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


@pytest.mark.parametrize("kind", ENGINES)
def test_full_parameters_continue_a_run(kind: str) -> None:
    """Weights that are written to another engine of the same step give it the same next steps. The tolerance is that of
    gradients: a weight in the middle of two bfloat16 numbers may be rounded to either. Low bits are larger."""
    ours, theirs = ENGINES[kind](), ENGINES[kind]()
    for engine in (ours, theirs):
        torch.manual_seed(1)
        train(engine, 2)
    expected = full(theirs)
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(expected[name], p.detach().float(), rtol=2**-8, atol=0)
        assert expected[name].data_ptr() != p.data_ptr()
    has_low_bits = any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    assert has_low_bits is (kind != "lomo bf16")
    draw = random.Random(0)
    for p in ours.module.parameters():
        if draw.random() < 0.5:
            safe_set_full_fp32_param(p, torch.randn(p.shape))
    assert any(not torch.equal(value, expected[name]) for name, value in full(ours).items())
    for name, p in ours.module.named_parameters():
        safe_set_full_fp32_param(p, expected[name])
    assert_equal(full(ours), expected)
    for engine in (ours, theirs):
        torch.manual_seed(2)
        train(engine, 2, first=2)
    for name, value in full(theirs).items():
        tolerances = {"rtol": 2**-13, "atol": 1e-5} if "kahan" in kind else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(full(ours)[name], value, **tolerances)
    assert any(not torch.equal(value, expected[name]) for name, value in full(ours).items())


@pytest.mark.parametrize("kind", ENGINES)
def test_a_module_is_pickled_as_a_plain_one(kind: str) -> None:
    engine = ENGINES[kind]()
    train(engine, 1)
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(dict(loaded.named_parameters()), dict(engine.module.named_parameters()))
    module = engine.module
    assert not any(hasattr(p, "_hp_mapping") for p in loaded.parameters())
    engine.destroy()
    assert not any(vars(p) for p in module.parameters())


@pytest.mark.parametrize("kind", ["lomo", "adapter", "streamed adapter"])
def test_gradients_and_states_are_absent_or_refused(kind: str) -> None:
    engine = adapter(offload=True) if kind == "streamed adapter" else ENGINES[kind]()
    train(engine, 1)
    for p in engine.module.parameters():
        assert safe_get_full_grad(p) is None
        assert safe_get_full_optimizer_state(p, "exp_avg") is None
        with pytest.raises(ValueError, match=r"safe_set_full_grad needs a gradient.*safe_set_full_fp32_param"):
            safe_set_full_grad(p, torch.zeros(p.shape))
        with pytest.raises(ValueError, match=r"needs ZeRO's optimizer states.*load_checkpoint"):
            safe_set_full_optimizer_state(p, torch.zeros(p.shape), "exp_avg")
