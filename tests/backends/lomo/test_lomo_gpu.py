"""LOMO on CUDA: streamed equals resident while copies take far longer than compute, one gradient is alive, and nobody
waits on the host.

Bit for bit needs deterministic algorithms and a fixed cuBLAS workspace, which must be chosen before CUDA starts.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.helpers.equivalence_runs import on_device, one_step, zo_engine
from tests.helpers.lomo_runs import checkpointed, config_for, lively
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import Weights, assert_equal, parameters_of
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("single_process", "deterministic")]

WIDTH = 2048
"""A block is 67 MB in float32: more than 1 ms on the link, a fraction of that to compute for sixteen tokens."""
NUM_BLOCKS = 6
NUM_STEPS = 10
LARGEST_NUMEL = 2 * WIDTH * WIDTH
"""Of a parameter."""
MIB = 2**20


@pytest.fixture(scope="module")
def deterministic(deterministic: None) -> Iterator[None]:
    yield
    large_model.cache_clear()
    resident_run.cache_clear()


@cache
def large_model() -> nn.Module:
    return seeded(lambda: Wandering(num_blocks=NUM_BLOCKS, width=WIDTH))


def config_of(stream: Mapping[str, Any] | None, *, kind: str = "LOMO", dtype: str | None = None, **more: Any) -> Any:
    """`stream` None: the model stays on the device."""
    config = config_for(kind, lr=0.02, **more, **({dtype: {"enabled": True}} if dtype else {}))
    if stream is not None:
        config["zero_optimization"] = {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}}
        config["ds_zo"] = {"stream": {"resident_blocks": 0, **stream}}
    return config


def give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def run(
    stream: Mapping[str, Any] | None,
    *,
    num_steps: int = NUM_STEPS,
    order: Callable[[int], list[int] | None] = lambda step: None,
    **options: Any,
) -> Weights:
    model = copy.deepcopy(large_model())
    with zo_engine(model, config_of(stream, **options)) as engine:
        for step in range(num_steps):
            one_step(engine, plain_batch(step, order=order(step)))
        found = parameters_of(engine)
    del engine, model
    give_back()
    before = dict(large_model().named_parameters())
    assert all(bool(value.isfinite().all()) for value in found.values())
    moved = [name for name, p in before.items() if not torch.equal(found[name], p.detach().to(found[name].dtype))]
    assert len(moved) > 0.9 * len(before), "weights did not move"
    return found


@cache
def resident_run(kind: str, dtype: str | None, clipping: float, num_steps: int = NUM_STEPS) -> Weights:
    return run(None, kind=kind, dtype=dtype, clipping=clipping, num_steps=num_steps)


@pytest.mark.parametrize(
    "stream",
    [{"device_slots": 2}, {"device_slots": 3}, {"resident_blocks": 2}, {"resident_blocks": NUM_BLOCKS}],
    ids=str,
)
@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_streamed_equals_resident(dtype: str | None, clipping: float, stream: dict[str, Any]) -> None:
    found = run(stream, dtype=dtype, clipping=clipping)
    assert_equal(found, resident_run("LOMO", dtype, clipping))


def test_blocks_visited_in_any_order() -> None:
    """All are visited by the second step; some several times in one."""
    orders = [[0, 1, 0, 2, 0], [5, 4, 3], [1, 1, 2], [5, 0]]
    runs = [run(stream, order=lambda step: orders[step % 4], clipping=0.5) for stream in (None, {})]
    assert_equal(*runs)


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_models_with_dropout(name: str, clipping: float) -> None:
    dropout = {"gpt2": {"resid_pdrop": 0.2, "attn_pdrop": 0.2}, "llama": {"attention_dropout": 0.2}}[name]
    found = []
    for stream in (None, {}):
        with zo_engine(lively(name, use_cache=False, **dropout), config_of(stream, clipping=clipping)) as engine:
            torch.manual_seed(3)
            with sdpa_kernel(SDPBackend.MATH):
                for seed in range(4):
                    one_step(engine, tiny_batch(name, seed=seed, batch_size=2, length=8))
            found.append(parameters_of(engine))
    assert_equal(*found)


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_gradient_peak_is_one_parameter(clipping: float, dtype: str | None, kind: str) -> None:
    """Of what a backward adds; all gradients would be twelve times that."""
    with zo_engine(copy.deepcopy(large_model()), config_of(None, kind=kind, dtype=dtype, clipping=clipping)) as engine:
        one_step(engine, plain_batch(0))  # workspaces, moments
        loss = engine(**on_device(engine, plain_batch(1)))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(loss)
        added = torch.cuda.max_memory_allocated() - before
        engine.step()
    largest = LARGEST_NUMEL * (2 if dtype else 4)
    assert largest <= added < 1.5 * largest + 8 * MIB


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_streamed_peak_is_slots_edges_and_one_gradient(dtype: str | None) -> None:
    give_back()
    start = torch.cuda.memory_allocated()
    with zo_engine(copy.deepcopy(large_model()), config_of({}, dtype=dtype)) as engine:
        for step in range(3):
            one_step(engine, plain_batch(step))
        taken = torch.cuda.max_memory_allocated() - start
        placement = engine.backend.blocks.store.placement
    block = placement.blocks[0].nbytes
    edges = sum(unit.nbytes for unit in (*placement.leaf_units, *placement.pass_long))
    largest = LARGEST_NUMEL * (2 if dtype else 4)
    assert taken < 2 * block + edges + 1.5 * largest + 96 * MIB  # two threads' cuBLAS workspaces among them


@pytest.mark.parametrize("stream", [None, {}], ids=["resident", "streamed"])
def test_nothing_waits_on_the_host(stream: dict[str, Any] | None) -> None:
    with zo_engine(copy.deepcopy(large_model()), config_of(stream, dtype="bf16")) as engine:
        for step in range(3):  # whose outputs of blocks are compared at once
            one_step(engine, plain_batch(step))
        batch = on_device(engine, plain_batch(3))
        for _ in range(16):  # one of them compares outputs, and a later one reads the result
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine.backward(engine(**batch))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            engine.step()


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
def test_direct_launches_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See [Note: direct launches]."""
    from ds_zo.ops import triton_launch

    found = run(None, kind=kind, dtype="bf16", num_steps=3)
    assert triton_launch._is_direct and triton_launch._compiled, "Triton refused a direct launch"
    monkeypatch.setattr(triton_launch, "_is_direct", False)
    monkeypatch.setattr(triton_launch, "_compiled", {})
    assert_equal(found, run(None, kind=kind, dtype="bf16", num_steps=3))


def test_compiled_blocks_train_alike() -> None:
    """One pass and two in turn: neither may find the other's code, in the process or on disk."""
    counters = torch._dynamo.utils.counters
    for reentrant, clipping in ((None, 0.0), (None, 0.5), (False, 0.0), (False, 0.5)):
        found = []
        for compiled in (False, True):
            counters.clear()
            model = checkpointed(lively("llama", num_hidden_layers=4, use_cache=False), reentrant)
            config = config_of(None, clipping=clipping) | {"ds_zo": {"compile_blocks": compiled}}
            config["optimizer"]["params"]["lr"] = 0.1
            with zo_engine(model, config) as engine:
                for seed in range(4):
                    one_step(engine, tiny_batch("llama", seed=seed, batch_size=2, length=8))
                found.append(parameters_of(engine))
        assert counters["stats"].get("unique_graphs", 0) <= 1  # one for four layers, or one compiled before
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_gradient_peak_is_one_block_where_blocks_are_compiled(clipping: float) -> None:
    config = config_of(None, clipping=clipping, dtype="bf16") | {"ds_zo": {"compile_blocks": True}}
    with zo_engine(copy.deepcopy(large_model()), config) as engine:
        for step in range(2):
            one_step(engine, plain_batch(step))
        loss = engine(**on_device(engine, plain_batch(2)))
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(loss)
        added = torch.cuda.max_memory_allocated() - before
        engine.step()
        block = sum(p.numel() for p in engine.module.layers[0].parameters()) * 2
    assert added < block + LARGEST_NUMEL * 2 + 8 * MIB


def test_a_budget_is_filled_and_kept() -> None:
    def taken_by(stream: dict[str, Any]) -> tuple[int, int, Weights]:
        """(bytes that the process held at most, as a budget counts, blocks that stayed, the weights)"""
        config = config_of({})
        config["ds_zo"]["stream"] = stream
        with zo_engine(copy.deepcopy(large_model()), config) as engine:
            for step in range(NUM_STEPS):
                one_step(engine, plain_batch(step))
            num_resident = sum(not unit.streamed for unit in engine.backend.blocks.store.placement.blocks)
            return torch.cuda.max_memory_reserved(), num_resident, parameters_of(engine)

    give_back()
    streamed, _, _ = taken_by({"resident_blocks": 0})
    give_back()
    # What was there before is no activation of the first step, nor what buffers are cut from that would hold on to it.
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    block = sum(p.numel() for p in large_model().layers[0].parameters()) * 4
    budget = streamed + MARGIN_NBYTES + int(2.5 * block)
    taken, num_resident, found = taken_by({"device_memory_gb": budget / 1e9})
    assert 1 <= num_resident <= 3, f"{num_resident} stay; bytes: {streamed=} {block=} {budget=} {taken=}"
    assert taken < budget
    assert_equal(found, resident_run("LOMO", None, 0.0))
