"""A streamed run has the bits of a resident one wherever its buffers begin, with any number of threads.

docs/exactness.md states which runs are equal.

`tools/variants.sh` runs this file under each vector width of an x86-64 CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import families
from tests.helpers.families import summed_by_block
from tests.helpers.lomo_runs import batches, config_for, start, streamed, train
from tests.helpers.lsp_runs import lsp_json, small
from tests.helpers.torch_threads import threads
from tests.helpers.weights import assert_equal, parameters_of
from tests.helpers.zoo import CASES

pytestmark = pytest.mark.usefixtures("single_process")

ODD_OFFSETS = [4, 36]
"""Bytes from an address that torch's allocator aligned: float32 needs no more than 4."""
ON_HOST = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
STAYS_OUT = {"resident_blocks": 0}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZO": (
        config_for("ZO", lr=1e-3, params={"num_directions": 2}),
        streamed("ZO", lr=1e-3, params={"num_directions": 2}, stream={**STAYS_OUT, "writeback_interval": 2}),
    ),
    "LOMO": (config_for(clipping=0.5), streamed(clipping=0.5, stream=STAYS_OUT)),
    "AdaLOMO": (config_for("AdaLOMO", lr=1e-2), streamed("AdaLOMO", lr=1e-2, stream=STAYS_OUT)),
    "LSP": (
        lsp_json(clipping=0.1, params={"subspace_dim": 7}),
        {**lsp_json(clipping=0.1, params={"subspace_dim": 7}), "zero_optimization": ON_HOST},
    ),
}
"""A resident and a streamed configuration. 7 x 7 is a multiple of no vector width."""


@contextmanager
def buffers_begin_at(offset: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Byte buffers on the CPU, which slots, stores and scratch are made of, begin so many bytes behind an aligned
    address."""

    def shifted(make: Any) -> Any:
        def made(*size: Any, **options: Any) -> torch.Tensor:
            on_cpu = torch.device(options.get("device") or "cpu").type == "cpu"
            if options.get("dtype") is not torch.uint8 or not on_cpu or len(size) != 1 or not isinstance(size[0], int):
                return make(*size, **options)
            return make(size[0] + offset, **options)[offset:]

        return made

    with monkeypatch.context() as patch:
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, shifted(getattr(torch, name)))
        yield


def run(
    config: dict[str, Any], model: nn.Module | None = None, data: Any = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start(config, small() if model is None else model)
    losses = train(engine, batches("llama", 4) if data is None else data)
    found = losses, parameters_of(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", RUNS)
def test_streamed_equals_resident_wherever_buffers_begin(
    kind: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, streamed_config = RUNS[kind]
    with threads(num_threads):
        losses, weights = run(resident)
        for offset in [0, *ODD_OFFSETS]:
            with buffers_begin_at(offset, monkeypatch):
                found_losses, found = run(streamed_config)
            assert found_losses == losses, f"buffers begin at {offset} bytes"
            assert_equal(found, weights)


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO", "LSP"])
@pytest.mark.parametrize("model", ["t5", "switch_transformers"])
def test_t5_differs_only_by_the_order_in_which_gradients_of_the_encoders_output_are_added(
    model: str, kind: str
) -> None:
    case = CASES[model] if model in CASES else families.case(model)
    resident = lsp_json(lr=1e-3) if kind == "LSP" else config_for(kind, lr=1e-3)
    streamed_config = {**resident, "zero_optimization": {"stage": 0, **ON_HOST}, "ds_zo": {"stream": STAYS_OUT}}
    data = [case.batch(seed) for seed in range(3)]
    losses, weights = run(streamed_config, case.make(), data)
    same_losses, same = run(resident, summed_by_block(case.make()), data)
    assert same_losses == losses
    assert_equal(same, weights)

    # Before the sum nothing differs: the first step leaves the decoder and the head with the same bits.
    _, weights = run(streamed_config, case.make(), data[:1])
    _, same = run(resident, case.make(), data[:1])
    after_sum = {name for name in weights if name.startswith(("decoder.", "lm_head."))}
    assert after_sum
    assert_equal({name: same[name] for name in after_sum}, {name: weights[name] for name in after_sum})
