"""Which members of an engine Accelerate and transformers touch, and that each works on every backend."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from deepspeed.runtime.engine import DeepSpeedEngine

from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import (
    ENGINE_BACKENDS,
    assert_moved,
    assert_same,
    batches,
    config_for,
    fresh_libraries,  # noqa: F401
    on_device,
    start,
    train,
    weights_of,
)


def _backward(engine: Any) -> torch.Tensor:
    loss = engine(**on_device(engine, batches(1)[0])).loss
    engine.backward(loss, scale_wrt_gas=False)
    return loss


def step(engine: Any, folder: Path) -> None:
    """One step as Accelerate and Trainer make it."""
    before, steps = weights_of(engine), engine.global_steps
    for is_boundary in (False, True):
        engine.set_gradient_accumulation_boundary(is_boundary=is_boundary)
        assert engine.is_gradient_accumulation_boundary() == is_boundary
    output = engine(**on_device(engine, batches(1)[0]), num_items_in_batch=torch.tensor(44))
    assert output.loss.requires_grad and output.loss.ndim == 0 and not output.loss.isnan()
    engine.backward(output.loss, scale_wrt_gas=False)
    if engine.resolved.backend == "zo":
        assert_same(before, weights_of(engine))
    engine.step()
    assert engine.global_steps == steps + 1 and engine.was_step_applied()
    norm = engine.get_global_grad_norm()
    assert norm is None or norm > 0  # a backend may have none


def zero_grad(engine: Any, folder: Path) -> None:
    """Trainer calls it after each step; what was accumulated is forgotten, as with DeepSpeed's own engine, whomever a
    script asks. LOMO accumulates nothing: its backward was the update."""
    reference = start(config_for(engine.resolved.backend))
    for who in (engine, engine.optimizer, engine.module):
        _backward(engine)
        who.zero_grad()
        if "lomo" in engine.resolved.backend:
            _backward(reference)
            reference.step()  # a second backward before it would be accumulation, which is refused
            assert all(p.grad is None for p in engine.module.parameters())
        for one in (engine, reference):
            train(one, batches(2)[1:])
        assert_same(weights_of(engine), weights_of(reference))
    engine.destroy()
    assert not any("zero_grad" in vars(owner) for owner in (engine.optimizer, engine.module))


def modes(engine: Any, folder: Path) -> None:
    engine.eval()
    assert not engine.module.training
    with torch.no_grad():
        assert not engine(**on_device(engine, batches(1)[0])).loss.requires_grad
    engine.train()
    assert engine.module.training


def module(engine: Any, folder: Path) -> None:
    unwrapped = accelerate.utils.extract_model_from_parallel(engine)
    assert unwrapped is engine.module and isinstance(unwrapped, transformers.PreTrainedModel)
    assert [n for n, _ in engine.named_parameters()] == [f"module.{n}" for n, _ in unwrapped.named_parameters()]


def state_dict(engine: Any, folder: Path) -> None:
    train(engine, batches(2))
    state = accelerate.utils.extract_model_from_parallel(engine).state_dict()
    assert_same({name: value.cpu() for name, value in state.items()}, weights_of(engine))


def json(engine: Any, folder: Path) -> None:
    assert engine.config["zero_optimization"]["stage"] == 0  # Trainer reads the dict to tell stage 3


def gather(engine: Any, folder: Path) -> None:
    train(engine, batches(1))
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert_same(engine._zero3_consolidated_16bit_state_dict(), weights_of(engine))
    engine.module.lm_head.weight.requires_grad_(False)
    trainable = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert "lm_head.weight" not in trainable and len(trainable) > 1


def checkpoint(engine: Any, folder: Path) -> None:
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    train(engine, batches(1))
    engine.save_checkpoint(str(folder), "pytorch_model")
    other = start(config_for(engine.resolved.backend), tiny_model("llama", seed=1))
    path, _ = other.load_checkpoint(
        str(folder), "pytorch_model", load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert path is not None
    assert train(other, batches(2)[1:]) == train(engine, batches(2)[1:])
    assert_same(weights_of(engine), weights_of(other))


def optimizer(engine: Any, folder: Path) -> None:
    assert isinstance(engine.optimizer, torch.optim.Optimizer)  # schedulers and AcceleratedOptimizer insist
    assert not hasattr(engine.optimizer, "overflow") or engine.optimizer.overflow is False
    engine.optimizer.param_groups[0]["lr"] = 0.0
    before = weights_of(engine)
    train(engine, batches(1))
    assert_same(before, weights_of(engine))


def no_sync(engine: Any, folder: Path) -> None:
    reference = start(config_for(engine.resolved.backend))
    with engine.no_sync():
        _backward(engine)
    engine.step()
    _backward(reference)
    reference.step()
    assert_same(weights_of(engine), weights_of(reference))


def destroy(engine: Any, folder: Path) -> None:
    """`accelerator.free_memory`, which every `train` begins with: the module stays whole and can be trained again."""
    backend = engine.resolved.backend
    narrow = ({"wire_dtype": "fp8", "master": "wire"}, {"wire_dtype": "bf16"})
    streams = narrow if backend == "zo" else ({"resident_blocks": 0},)
    for stream in ({}, *streams):
        engine = start(config_for(backend, stream=bool(stream), ds_zo={"stream": stream}))
        train(engine, batches(3))
        expected, module = weights_of(engine), engine.module
        engine.destroy()
        assert_same(expected, {name: value.cpu() for name, value in module.state_dict().items()})
        again = start(config_for(backend), module)
        del engine  # its finaliser must not touch what is another's now
        gc.collect()
        assert_same(expected, weights_of(again))
        train(again, batches(1))
        assert_moved(expected, weights_of(again))


CONTRACT: dict[str, tuple[str, Callable[[Any, Path], None]]] = {
    "__call__": ("Accelerate's loop, Trainer.compute_loss", step),
    "backward": ("DeepSpeedEngineWrapper.backward", step),
    "set_gradient_accumulation_boundary": ("DeepSpeedEngineWrapper.backward", step),
    "step": ("DeepSpeedEngineWrapper.backward", step),
    "get_global_grad_norm": ("DeepSpeedEngineWrapper.get_global_grad_norm, Trainer's log", step),
    "zero_grad": ("Trainer after each step", zero_grad),
    "train, eval": ("Trainer.training_step, evaluation_loop", modes),
    "module": ("Accelerator.unwrap_model, regional compilation", module),
    "state_dict": ("Accelerator.get_state_dict", state_dict),
    "config": ("Trainer.save_model", json),
    "zero_gather_16bit_weights_on_model_save": ("Accelerator.get_state_dict at stage 3", gather),
    "_zero3_consolidated_16bit_state_dict": ("Accelerator.get_state_dict, Trainer.save_model with PEFT", gather),
    "save_checkpoint": ("Accelerator.save_state, Trainer._save_optimizer_and_scheduler", checkpoint),
    "load_checkpoint": ("Accelerator.load_state, deepspeed_load_checkpoint", checkpoint),
    "optimizer": ("Accelerator.prepare", optimizer),
    "no_sync": ("Accelerator.no_sync, accumulate", no_sync),
    "destroy": ("Accelerator.free_memory", destroy),
}
"""Member: who calls it, and the call."""

NOT_CALLED = {
    "compile": "only with a dynamo backend configured",
    "register_post_step_hook": "only under SageMaker",
    "_configure_zero_optimizer": "named in a comment",
    "_consolidated_16bit_state_dict": "only under tensor parallelism, which the plugin refuses",
}


@pytest.mark.parametrize("call", dict.fromkeys(call for _, call in CONTRACT.values()), ids=lambda call: call.__name__)
@pytest.mark.parametrize("backend", ENGINE_BACKENDS)
def test_members(backend: str, call: Callable[[Any, Path], None], tmp_path: Path) -> None:
    call(start(config_for(backend)), tmp_path)


SOURCES = {
    (accelerate, "utils/deepspeed.py"): r"self\.engine\.(\w+)",
    (accelerate, "accelerator.py"): r"\bengine\.(\w+)\(|model\.(\w*16bit\w*|save_checkpoint|load_checkpoint)\(",
    (transformers, "trainer.py"): r"self\.(?:model_wrapped|deepspeed)\.(\w+)",
    (transformers, "integrations/deepspeed.py"): r"deepspeed_engine\.(\w+)",
}


def test_the_table_has_every_member_that_the_installed_libraries_touch() -> None:
    touched: set[str] = set()
    for (library, path), pattern in SOURCES.items():
        found = re.findall(pattern, (Path(library.__file__).parent / path).read_text(encoding="utf-8"))
        touched |= {name for names in found for name in ([names] if isinstance(names, str) else names) if name}
    assert len(touched) > 8
    assert touched - set(CONTRACT) - set(NOT_CALLED) == set()


def test_moving_zero_states_is_refused_with_the_remedy() -> None:
    engine = start(config_for("zo"))
    for call in (engine.offload_states, engine.reload_states):
        with pytest.raises(RuntimeError, match=r"which has none.*offload_param"):
            call()
    assert isinstance(engine, DeepSpeedEngine)
