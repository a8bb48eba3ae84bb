"""Engines that are garbage-collected without `destroy`: the state that they leave on a GPU, and the next engine in the
process."""

from __future__ import annotations

import gc
from typing import Any

import deepspeed
import pytest
import torch

from ds_zo.plugin import engine as plugin
from tests.helpers.equivalence_runs import one_step, zo_config, zo_engine
from tests.helpers.lomo_runs import weights_of
from tests.helpers.zoo import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process")]

LLAMA = CASES["llama"]
STREAMED = {"offload_param": {"device": "cpu", "pin_memory": True}}
ON_HOST = {"offload_optimizer": {"device": "cpu"}}


def config_of(kind: str, **zero: Any) -> dict[str, Any]:
    own = {"subspace_dim": 6, "nonzeros_per_row": 2, "projector": "random"} if kind == "LSP" else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": {"lr": 1e-2, **own}},
        "zero_optimization": {"stage": 0, **zero},
    }


CONFIGS = {
    "ZO": zo_config(lr=1e-3, offload=False),
    "ZO, streamed": zo_config(lr=1e-3),
    "LOMO, streamed": config_of("LOMO", **STREAMED),
    "LSP": config_of("LSP", **ON_HOST),
    "LSP, streamed": config_of("LSP", **ON_HOST, **STREAMED),
}


def steps(engine: Any) -> None:
    for step in range(4):
        one_step(engine, LLAMA.batch(step))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_collected_engine_leaves_the_weights_of_its_last_step(name: str) -> None:
    """The weights equal those that a destroyed engine leaves, up to the order of atomic adds; repeated three times."""
    model = LLAMA.make()
    with zo_engine(model, CONFIGS[name]) as engine:
        steps(engine)
    del engine
    expected = weights_of(model)
    for _ in range(3):
        model = LLAMA.make()
        engine = deepspeed.initialize(model=model, config=dict(CONFIGS[name]))[0]
        steps(engine)
        del engine
        gc.collect()
        while plugin._destroying_threads:
            plugin._destroying_threads.pop().join()
        found = weights_of(model)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=2e-4, msg=key)
