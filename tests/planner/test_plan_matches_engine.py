"""Bytes that a plan promises are those of the buffers that engines take: the same units, laid out the same."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest

import ds_zo  # noqa: F401
from ds_zo.config.optimizers import LSPParams, ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import Estimate, Limits
from ds_zo.planner.adapter import estimate_adapter
from ds_zo.planner.estimate import PROCESS_NBYTES
from ds_zo.planner.lomo import estimate_adalomo, estimate_lomo
from ds_zo.planner.lsp import estimate_lsp
from ds_zo.planner.zo import estimate_zo
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.planner.planned_models import planned

pytestmark = pytest.mark.usefixtures("single_process")
OFFLOADED = {"device": "cpu"}


DEEP = {"num_hidden_layers": 7}
"""So that what slots hold between steps is less than a model."""


def start(
    model: Any, kind: str, params: dict[str, Any] | None = None, *, dtype: str = "fp32", shape: Any = None, **more: Any
) -> Any:
    """An engine for a model, or for a toy model by its name; `more` are top-level keys."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **(params or {})}},
        **more,
    }
    if isinstance(model, str):
        model = tiny_model(model, **(shape or {}))
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def with_adapters(**shape: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=16, target_modules="all-linear")
    return peft.get_peft_model(tiny_model("llama", **shape).bfloat16(), settings, autocast_adapter_dtype=False).train()


def assert_stored_as_planned(plan: Estimate, block_store: Any) -> None:
    """The host store, the slots, and the weights that stay on the device, adapters aside."""
    units = block_store.placement.units
    assert plan.host["weights"] == block_store.store.nbytes
    assert plan.device["slots"] == sum(slot.buffer.numel() for slot in block_store.runtime.slots)
    has_adapters = "adapters" in plan.device
    assert plan.device["weights"] == sum(
        u.nbytes for u in units if not u.streamed and not (has_adapters and u.trainable)
    )


def assert_moves_as_planned(plan: Estimate, engine: Any, runtime: Any, *, num_steps: int = 1, besides: int = 0) -> None:
    """The bytes that `num_steps` steps copy in each direction; `besides`: copies of a step that no runtime makes."""
    up, down = runtime.transport.bytes_up, runtime.transport.bytes_down
    for seed in range(num_steps):
        one_step(engine, seed=seed)
    moved = runtime.transport.bytes_up - up, runtime.transport.bytes_down - down
    assert moved == (num_steps * (plan.up_nbytes - besides), num_steps * (plan.down_nbytes - besides))


def streams(stream: dict[str, Any]) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 0, "offload_param": OFFLOADED}, "ds_zo": {"stream": stream}}


def one_step(engine: Any, *, seed: int = 0) -> None:
    engine.backward(engine(**tiny_batch("llama", seed=seed, batch_size=2, length=8)).loss)
    engine.step()


def zo_plan(name: str, *, offload: bool = True, num_directions: int = 1, **stream: Any) -> Estimate:
    model = planned(name, dtype="bf16")
    params = ZOParams(num_directions=num_directions)
    return estimate_zo(model, Limits(), stream=StreamConfig(**stream), params=params, offload=offload)


@pytest.mark.parametrize(
    ("stream", "num_directions"),
    [
        ({"resident_blocks": 0, "writeback_interval": 4}, 1),
        ({"resident_blocks": 0, "writeback_interval": 1, "device_slots": 3}, 1),
        ({"resident_blocks": 1, "writeback_interval": 4, "master": "wire"}, 2),
        ({"resident_blocks": 2, "writeback_interval": 4}, 1),
        ({"resident_blocks": 0, "writeback_interval": 4, "master": "wire", "wire_dtype": "fp8"}, 1),
        ({"resident_blocks": 1, "writeback_interval": 2, "wire_dtype": "bf12"}, 1),
    ],
)
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_zo_takes_the_planned_bytes_on_both_sides(name: str, stream: dict[str, Any], num_directions: int) -> None:
    plan = zo_plan(name, num_directions=num_directions, **stream)
    engine = start(name, "ZO", {"num_directions": num_directions}, dtype="bf16", **streams(stream))
    block_store, materialiser = engine.backend.store.blocks, engine.backend.store.materialiser
    units, runtime = block_store.placement.units, block_store.runtime
    assert plan.host_nbytes - PROCESS_NBYTES == block_store.store.nbytes
    slots = [*runtime.slots, *runtime.low_slots]
    assert plan.device.get("slots", 0) == sum(slot.buffer.numel() for slot in slots)
    assert plan.device["scratch"] + plan.device.get("second_copy", 0) == materialiser.scratch.numel()
    weights = sum(u.nbytes * (not u.streamed) + u.low_nbytes * (not u.low_streamed) for u in units)
    assert plan.device["weights"] == weights + materialiser._replay_slot.buffer.numel()


def test_adapters_over_a_narrow_base_take_the_planned_bytes_of_the_base() -> None:
    stream: dict[str, Any] = {"resident_blocks": 1, "frozen_dtype": "nf4"}
    shape = {"hidden_size": 128, "intermediate_size": 256}
    model = planned("llama", dtype="bf16", **shape)
    plan = estimate_zo(model, Limits(), stream=StreamConfig(**stream), params=ZOParams(), offload=True)
    block_store = start(with_adapters(**shape), "ZO", dtype="bf16", **streams(stream)).backend.store.blocks
    assert_stored_as_planned(plan, block_store)
    assert (plan.up_nbytes, plan.down_nbytes) == (block_store.store.nbytes, 0)
    trained = sum(p.numel for u in block_store.placement.units for p in u.placed if p.trainable)
    assert plan.device["adapters"] == 4 * trained, "16 bits and their low bits"


def test_zo_without_offload_keeps_everything_on_the_device() -> None:
    plan = zo_plan("opt", offload=False)
    block_store = start("opt", "ZO", dtype="bf16").backend.store.blocks
    assert plan.host_nbytes == PROCESS_NBYTES and block_store.store.nbytes == 0
    assert plan.device["weights"] == sum(u.nbytes + u.low_nbytes for u in block_store.placement.units)
    assert "slots" not in plan.device and plan.up_nbytes == plan.down_nbytes == 0


def test_zo_moves_the_planned_bytes() -> None:
    model = planned("llama", **DEEP)
    stream = {"resident_blocks": 1, "writeback_interval": 4}
    plan = estimate_zo(model, Limits(), stream=StreamConfig(**stream), offload=True)
    engine = start("llama", "ZO", shape=DEEP, **streams(stream))
    for seed in range(2):
        one_step(engine, seed=seed)
    assert_moves_as_planned(plan, engine, engine.backend.store.blocks.runtime, num_steps=4)


@pytest.mark.parametrize("kind", ["LOMO", "AdaLOMO"])
def test_streamed_lomo_takes_and_moves_the_planned_bytes(kind: Any) -> None:
    stream = {"resident_blocks": 1, "offload_activations": True}
    estimate = {"LOMO": estimate_lomo, "AdaLOMO": estimate_adalomo}[kind]
    plan = estimate(planned("llama", **DEEP), Limits(), stream=StreamConfig(**stream), offload=True)
    engine = start("llama", kind, shape=DEEP, **streams(stream))
    block_store = engine.backend.blocks.store
    assert_stored_as_planned(plan, block_store)
    one_step(engine)
    inputs = engine.backend.blocks.recomputation.host_inputs.nbytes
    assert plan.host["activations"] == inputs > 0
    assert_moves_as_planned(plan, engine, block_store.runtime, besides=inputs)


@pytest.mark.parametrize("edge", ["lsp", "freeze", "dense"])
def test_lsp_takes_the_planned_bytes_on_the_host(edge: Any) -> None:
    own = {"subspace_dim": 8, "nonzeros_per_row": 2, "edge": edge}
    plan = estimate_lsp(planned("llama"), Limits(), params=LSPParams(**own))
    place = {"zero_optimization": {"stage": 0, "offload_optimizer": OFFLOADED}}
    backend = start("llama", "LSP", {**own, "projector": "random"}, **place).backend
    assert plan.host["payload"] == pytest.approx(backend.groups.store.nbytes, rel=0.02)  # which aligns every matrix
    moments = sum(m.num_bytes for group in backend.groups.on_host for m in group.moments)
    assert plan.host["states"] == moments
    projectors = [s.subspace for s in backend._matrices if s.subspace is not None]
    taken = sum(pair.num_bytes for pair in projectors)
    assert plan.device["projectors"] == pytest.approx(taken, rel=0.25)  # columns are filled up to the fullest


@pytest.mark.parametrize("resident", [0, 3])
def test_streamed_lsp_takes_and_moves_the_planned_bytes(resident: int) -> None:
    own = {"subspace_dim": 8, "nonzeros_per_row": 2, "projector": "random"}
    stream = {"resident_blocks": resident}
    plan = estimate_lsp(
        planned("llama", **DEEP), Limits(), stream=StreamConfig(**stream), params=LSPParams(**own), offload=True
    )
    zero = plan.config["zero_optimization"]
    more = {"zero_optimization": zero, "ds_zo": plan.config["ds_zo"]}
    engine = start("llama", "LSP", own, shape=DEEP, **more)
    backend = engine.backend
    block_store = backend.blocks.store
    assert_stored_as_planned(plan, block_store)
    assert plan.host["states"] == sum(m.num_bytes for group in backend.groups.on_host for m in group.moments)
    assert plan.host["payload"] == pytest.approx(backend.groups.store.nbytes, rel=0.02)
    assert plan.device["states"] == sum(m.num_bytes for group in backend.groups.on_device for m in group.moments)
    for _ in range(2):
        one_step(engine)
    assert_moves_as_planned(plan, engine, block_store.runtime, besides=plan.host["payload"] // 2)


@pytest.mark.parametrize("form", ["nf4", "nf4_nested"])
def test_adapter_takes_the_planned_bytes_on_both_sides(form: str) -> None:
    stream = {"resident_blocks": 1, "frozen_dtype": form, "offload_activations": True}
    plan = estimate_adapter(planned("llama", dtype="bf16"), Limits(), stream=StreamConfig(**stream), offload=True)
    model, section = with_adapters(), streams(stream)
    section["ds_zo"]["backend"] = "adapter"
    engine = start(model, "AdamW", dtype="bf16", **section)
    one_step(engine)
    store = engine.backend.blocks.store
    assert_stored_as_planned(plan, store)
    assert plan.device["scratch"] == engine.backend.startup_summary().device_bytes["scratch"]
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert plan.device["adapters"] == trained + engine.backend._trained.nbytes
    moments = [state[key] for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert plan.device["states"] == sum(moment.nbytes for moment in moments)
    assert plan.host["activations"] >= engine.backend.blocks.recomputation.host_inputs.nbytes > 0
