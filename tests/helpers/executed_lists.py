"""The actions that a training step executes, on one rank or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, get_peft_model

import ds_zo  # noqa: F401
from ds_zo.streaming.runtime import Runtime
from ds_zo.streaming.schedule import NO_SLOT, Action
from tests.helpers.tiny_models import tiny_batch, tiny_model

NUM_BLOCKS = 7
"""So that what slots hold between steps is less than a model."""
INTERVAL = 3
KINDS = ("ZO", "ZO with low planes", "LOMO", "LSP", "adapter")
OFFLOADED = {"device": "cpu"}


def json_of(kind: str, *, num_resident: int, stage: int) -> dict[str, Any]:
    name = kind.split()[0]
    params = {"subspace_dim": 8, "nonzeros_per_row": 2, "projector": "random"} if kind == "LSP" else {}
    stream = {"resident_blocks": num_resident} | ({"writeback_interval": INTERVAL} if name == "ZO" else {})
    zero: dict[str, Any] = {"stage": stage, "offload_param": OFFLOADED}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": kind == "ZO with low planes"},
        "optimizer": {"type": "Adapter" if kind == "adapter" else name, "params": {"lr": 1e-3, **params}},
        "zero_optimization": zero | ({"offload_optimizer": OFFLOADED} if kind == "LSP" else {}),
        "ds_zo": {"stream": stream},
    }


def engine_of(kind: str, *, num_resident: int, stage: int = 0) -> Any:
    config = json_of(kind, num_resident=num_resident, stage=stage)
    model = tiny_model("llama", num_hidden_layers=NUM_BLOCKS)
    if kind != "adapter":
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    del config["optimizer"]
    config["ds_zo"]["backend"] = "adapter"
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()
    trained = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=trained, config=config)[0]


@contextmanager
def recorded() -> Iterator[list[list[Action]]]:
    """Yields a list to which every pass that ends inside adds the actions that it has executed."""
    passes: list[list[Action]] = []
    finish = Runtime.finish

    def noting(runtime: Runtime) -> None:
        finish(runtime)
        passes.append(list(runtime.executed))

    Runtime.finish = noting  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        Runtime.finish = finish  # type: ignore[method-assign]


def executed(rank: int, kind: str, num_resident: int, stage: int) -> dict[str, Any]:
    """The actions of `INTERVAL` steps of ZO, or of one step of another kind. Three steps come first."""
    engine = engine_of(kind, num_resident=num_resident, stage=stage)
    with recorded() as passes:
        for step in range(3 + (INTERVAL if "ZO" in kind.split() else 1)):
            if step == 3:
                passes.clear()
            engine.backward(engine(**tiny_batch("llama", seed=step, batch_size=2, length=8)).loss)
            engine.step()
        found = list(passes)
        engine.destroy()
    return {"passes": found}


def text(actions: Iterable[Action]) -> str:
    """The actions, with slots numbered in the order in which they appear."""
    numbers: dict[bool, dict[int, int]] = {False: {NO_SLOT: NO_SLOT}, True: {NO_SLOT: NO_SLOT}}

    def number(slot: int, *, low: bool) -> int:
        return numbers[low].setdefault(slot, len(numbers[low]) - 1)

    return " ".join(
        str(
            a._replace(
                block=a.block % NUM_BLOCKS,
                slot=number(a.slot, low=a.kind.is_low),
                low_slot=number(a.low_slot, low=True),
            )
        )
        for a in actions
    )
