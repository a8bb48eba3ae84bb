"""Random delays on every stream and thread change no bit of streamed training: 200 steps on CUDA, a few on the CPU.

On CUDA the copies of a block take far longer than its compute, so that a missing wait shows. Bit for bit needs
deterministic algorithms and a fixed cuBLAS workspace, which must be chosen before CUDA starts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ablations import in_turn
from tests.helpers.adapter_runs import adapted, adapter_json, start
from tests.helpers.equivalence_runs import masters_of, on_device, one_step, zo_config
from tests.helpers.lomo_runs import config_for
from tests.helpers.lsp_runs import CPU, lsp_json
from tests.helpers.stream_delays import delayed, random_pause
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import Weights, assert_equal, parameters_of, weights
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process", "deterministic")

NUM_BLOCKS = 6
STREAMED = {"offload_param": {"device": "cpu", "pin_memory": True}}
"""For `zero_optimization`. Without pinned memory no copy is asynchronous."""
BF16 = {"bf16": {"enabled": True}}
WIDTH = 1024
"""A block is 8 MB in bf16 and 17 MB in float32: its copies take longer than its compute for sixteen tokens."""


@pytest.fixture(scope="module")
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


def train(json: dict[str, Any], num_steps: int, width: int, read: Callable[[Any], Weights] = parameters_of) -> Weights:
    model = seeded(lambda: Wandering(num_blocks=NUM_BLOCKS, width=width))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = start(model, json, model_parameters=None)
    for step in range(num_steps):
        one_step(engine, plain_batch(step % 50))
    return finished(engine, read, before)


def finished(engine: Any, read: Callable[[Any], Weights], before: Weights) -> Weights:
    """The weights at the end. `before`: trained weights at the start."""
    found = read(engine)
    engine.destroy()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    assert all(bool(value.isfinite().all()) for value in found.values() if value.is_floating_point())
    unmoved = [name for name, value in before.items() if torch.equal(found[name], value.to(found[name].dtype))]
    assert len(unmoved) < 0.2 * len(before), f"did not move: {unmoved}"
    return found


def run_zo(streams: bool, num_steps: int, width: int, *, dtype: str | None = "bf16") -> Weights:
    """In bf16, low planes are uploaded and downloaded at folds."""
    stream = {"writeback_interval": 3 if dtype else 2, **({"resident_blocks": 1} if streams else {})}
    json = zo_config(stream=stream, offload=streams, dtype=dtype, lr=1e-7 if width == WIDTH else 1e-3)
    return train(json, num_steps, width, masters_of)


def run_lomo(
    streams: bool, num_steps: int, width: int, *, clipping: float = 0.0, kind: str = "LOMO", **stream: Any
) -> Weights:
    json = config_for(kind, lr=0.01, clipping=clipping, **BF16)
    if streams:
        json |= {"zero_optimization": {"stage": 0, **STREAMED}, "ds_zo": {"stream": {"resident_blocks": 1, **stream}}}
    return train(json, num_steps, width)


def run_lsp(overlaps: bool, num_steps: int, width: int, **params: Any) -> Weights:
    """The run to compare with streams too: a resident block's vectors take their Adam step on the GPU."""
    schedule = "layerwise" if overlaps else "sync"
    params = {"subspace_dim": width // 2, "nonzeros_per_row": 4, "schedule": schedule, **params}
    json = lsp_json(lr=1e-4 if width == WIDTH else 1e-2, params=params, **BF16)
    json["zero_optimization"] = {**CPU, **STREAMED}
    json["ds_zo"] = {"stream": {"resident_blocks": 0}}
    return train(json, num_steps, width)


def run_adapter(streams: bool, num_steps: int, width: int, **stream: Any) -> Weights:
    sizes = {"hidden_size": width // 2, "intermediate_size": 2 * width} if width == WIDTH else {}
    model = adapted("rslora", dtype=torch.bfloat16, num_hidden_layers=NUM_BLOCKS, **sizes)
    trained = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    json = adapter_json(resident_blocks=1 if streams else NUM_BLOCKS, **(stream if streams else {}), **BF16)
    json["zero_optimization"] = {"stage": 0, **STREAMED}
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    engine = start(model, json, optimizer=trained)
    with sdpa_kernel(SDPBackend.MATH):  # other kernels add in any order in the backward pass
        for step in range(num_steps):
            loss = engine(**on_device(engine, tiny_batch("llama", seed=step % 50, batch_size=1, length=8))).loss
            engine.backward(loss)
            engine.step()
    return finished(engine, lambda engine: weights(engine.module), before)


RUNS: dict[str, Callable[..., Weights]] = {
    "ZO with low planes": run_zo,
    "ZO in float32": lambda *args: run_zo(*args, dtype=None),
    "LOMO": run_lomo,
    "LOMO in two passes": lambda *args: run_lomo(*args, clipping=0.5, offload_activations=True),
    "AdaLOMO": lambda *args: run_lomo(*args, kind="AdaLOMO"),
    "LSP": run_lsp,
    "LSP without projectors": lambda *args: run_lsp(*args, projector="none"),
    "adapter": run_adapter,
    "adapter with inputs on the host": lambda *args: run_adapter(*args, offload_activations=True),
}
BRIEFLY = ["ZO with low planes", "LOMO", "LSP", "adapter with inputs on the host"]


@pytest.mark.parametrize(
    ("name", "num_steps", "width"),
    [
        *(pytest.param(name, 200, WIDTH, id=f"{name}, 200 steps", marks=pytest.mark.gpu) for name in RUNS),
        *(pytest.param(name, 3, 16, id=f"{name}, a few steps") for name in BRIEFLY),
    ],
)
def test_random_delays_change_nothing(name: str, num_steps: int, width: int) -> None:
    with in_turn():
        expected = RUNS[name](False, num_steps, width)
    with delayed(random_pause()):
        assert_equal(RUNS[name](True, num_steps, width), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BRIEFLY)
def test_delays_show_a_missing_wait(name: str) -> None:
    """Streams do not wait for uploads and downloads of blocks, which come later than a slow host launches a block. A
    recomputed block, or a repeated pass of ZO, that differs from the first one is a ValueError."""
    with in_turn():
        expected = RUNS[name](False, 10, WIDTH)
    late = ("upload", "low_upload", "download")
    late_copies = delayed(lambda what: torch.cuda._sleep(40_000_000) if what in late else None, waits=False)
    with late_copies, pytest.raises((AssertionError, ValueError)):
        assert_equal(RUNS[name](True, 10, WIDTH), expected)
