"""Streamed LOMO is resident LOMO bit for bit, whatever streams, and is LOMO in all else."""

from __future__ import annotations

from typing import Any

import pytest
from lomo_runs import assert_equal, batches, config_for, lively, start, train, weights_of

pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}


def streamed(kind: str = "LOMO", *, stream: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    place = {"stage": 0, "offload_param": {"device": "cpu"}}
    return config_for(kind, zero_optimization=place, ds_zo={"stream": stream or {}}, **more)


@pytest.mark.parametrize("clipping", [0.0, 0.5], ids=["one pass", "two passes"])
@pytest.mark.parametrize("dtype", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
def test_streamed_equals_resident(name: str, dtype: dict[str, Any], clipping: float) -> None:
    resident = start(config_for(clipping=clipping, **dtype), lively(name))
    expected = train(resident, batches(name, 4))
    engine = start(streamed(clipping=clipping, **dtype), lively(name))
    assert train(engine, batches(name, 4)) == expected
    assert_equal(weights_of(engine.module), weights_of(resident.module))
    assert engine.get_global_grad_norm() == resident.get_global_grad_norm()
