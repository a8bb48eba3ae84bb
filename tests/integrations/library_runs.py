"""The same small training run by the raw DeepSpeed loop, by Accelerate and by Trainer.

Test modules import `fresh_libraries` to have it take effect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_zo.config.registry import entry_of
from ds_zo.plugin.engine import PluginEngine
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import Weights

LEARNING_RATE = {"zo": 1e-3, "lomo": 1e-1, "adalomo": 1e-2, "lsp": 1e-3, "adapter": 1e-3}
"""Large enough that a few steps move a toy model."""

ENGINE_BACKENDS = ("zo", "lomo", "lsp")
"""AdaLOMO's backend is LOMO's with another rule for a weight. Its engine is tested by test_equivalence, its checkpoints
by test_trainer and checkpoint/test_resume_first_order, its ranks by distributed/test_lomo_ranks."""

MICRO_BATCH = 4
Batch = dict[str, torch.Tensor]


def forget() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()


@pytest.fixture(autouse=True)
def fresh_libraries(single_process: None) -> Iterator[None]:
    """Accelerate and transformers keep process-wide state; each test starts without it."""
    before = dict(os.environ)
    forget()
    yield
    forget()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@dataclass
class Run:
    losses: list[float]
    weights: Weights


def config_for(backend: str, *, accumulation: int = 1, stream: bool = False, **extra: Any) -> dict[str, Any]:
    """A JSON that names the backend in `optimizer.type`."""
    zero = zero_for(backend, stage=0, stream=stream)
    params: dict[str, Any] = {"lr": LEARNING_RATE[backend], "weight_decay": 0.0}
    if "accumulation" in entry_of(backend).params.model_fields and accumulation > 1:
        params["accumulation"] = "sequential"
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": backend, "params": params},
        "zero_optimization": zero,
        **extra,
    }


def zero_for(backend: str, *, stage: int, stream: bool = True) -> dict[str, Any]:
    places = ("param", "optimizer") if backend == "lsp" else ("param",)
    return {"stage": stage, **{f"offload_{place}": {"device": "cpu"} for place in places if stream}}


def section_for(backend: str, **extra: Any) -> dict[str, Any]:
    """A JSON for a script that builds its own optimizer."""
    config = config_for(backend, **extra)
    del config["optimizer"]
    return {**config, "ds_zo": {**config.get("ds_zo", {}), "backend": backend}}


def rows(num_batches: int) -> list[dict[str, torch.Tensor]]:
    """Examples in the order of `batches`."""
    return [{name: value[i] for name, value in batch.items()} for batch in batches(num_batches) for i in range(4)]


def batches(num_batches: int) -> list[Batch]:
    return [tiny_batch("llama", seed=seed, batch_size=MICRO_BATCH) for seed in range(num_batches)]


def collate(examples: Sequence[Batch]) -> Batch:
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def start(config: dict[str, Any], model: nn.Module | None = None, **kwargs: Any) -> DeepSpeedEngine:
    return deepspeed.initialize(model=model or tiny_model("llama"), config=config, **kwargs)[0]


def weights_of(engine: DeepSpeedEngine) -> Weights:
    return {name: value.detach().cpu().clone() for name, value in engine.module_state_dict().items()}


def on_device(engine: DeepSpeedEngine, batch: Batch) -> Batch:
    """An engine takes batches where it computes, as DeepSpeed's own do."""
    return {name: value.to(engine.device) for name, value in batch.items()}


def train(engine: DeepSpeedEngine, data: Sequence[Batch], **inputs: Any) -> list[float]:
    """The loop of DeepSpeed's own documentation; the loss of each micro-batch."""
    losses = []
    for batch in data:
        loss = engine(**on_device(engine, batch), **inputs).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def accelerator_for(config: dict[str, Any]) -> Accelerator:
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def loader(data: Sequence[Batch]) -> DataLoader[Any]:
    """Batches as they are: Accelerate's own shuffling is not what is compared."""
    return DataLoader(list(data), batch_size=None)


def loop(accelerator: Accelerator, model: Any, optimizer: Any, data: Any, scheduler: Any = None) -> list[float]:
    """The loop of Accelerate's own documentation."""
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**on_device(model, batch)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def arguments(folder: Path, config: dict[str, Any] | None, **changes: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": config["gradient_accumulation_steps"] if config else 1,
        "logging_steps": 1,
        "report_to": [],
        "lr_scheduler_type": "constant",
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
    }
    if "train_sampling_strategy" in TrainingArguments.__dataclass_fields__:  # transformers 4 shuffles by its seed alone
        defaults["train_sampling_strategy"] = "sequential"
    params = (config or {}).get("optimizer", {}).get("params", {})
    if isinstance(params.get("lr"), float):
        defaults["learning_rate"] = params["lr"]
    return TrainingArguments(output_dir=str(folder), deepspeed=config, **{**defaults, **changes})


def trainer_for(args: TrainingArguments, num_batches: int, model: nn.Module | None = None, **kwargs: Any) -> Trainer:
    data = rows(num_batches)
    kwargs = {"train_dataset": data, "eval_dataset": data[:8], "data_collator": collate, **kwargs}
    return Trainer(model=model or tiny_model("llama"), args=args, **kwargs)


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def engine_of(trainer: Trainer) -> PluginEngine:
    engine = trainer.model_wrapped
    assert type(engine) is PluginEngine
    return engine


def adam_apart(backend: str) -> float:
    """How far weights may be apart where LSP's Adam ran on the CPU in one run and on the GPU in the other."""
    return 2e-6 if backend == "lsp" and torch.cuda.is_available() else 0.0


def assert_same(a: Weights, b: Weights, *, atol: float = 0.0) -> None:
    assert a.keys() == b.keys()
    different = {name: apart for name, apart in differences(a, b).items() if not apart <= atol}
    largest = max(different.values(), default=0.0)
    assert not different, f"{len(different)} of {len(a)} differ, by {largest:.3g} at most: {', '.join(different)}"


def differences(a: Weights, b: Weights) -> dict[str, float]:
    """The largest in each tensor that is not the same bit for bit."""
    different = [name for name in a if not torch.equal(a[name], b[name])]
    return {name: (a[name].double() - b[name].double()).abs().max().item() for name in different}


def assert_moved(a: Weights, b: Weights) -> None:
    assert any(not torch.equal(a[name], b[name]) for name in a)
