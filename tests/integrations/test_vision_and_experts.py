"""A vision-language model and mixtures of experts: streamed runs of HF Trainer have the bits of its plain runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from tests.helpers import families
from tests.helpers.support_matrix import uploaded_bytes, with_lora
from tests.integrations.library_runs import (
    arguments,
    assert_moved,
    assert_same,
    collate,
    engine_of,
    fresh_libraries,  # noqa: F401
    logged,
    weights_of,
)

STAYS_OUT = {"resident_blocks": 0}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lomo": (
        {"optim": "sgd", "learning_rate": 0.1},
        {"optimizer": {"type": "LOMO", "params": {"lr": 0.1}}, "ds_zo": {"stream": STAYS_OUT}},
    ),
    "lora": ({"optim": "adamw_torch", "learning_rate": 1e-2}, {"ds_zo": {"backend": "adapter", "stream": STAYS_OUT}}),
}
"""Arguments of Trainer, and keys of the JSON."""

KINDS = {"qwen2_vl": "qwen2-vl", "qwen3_moe": "qwen3-moe", "mixtral": "mixtral"}
"""Of `families`."""


def model_of(kind: str, method: str) -> nn.Module:
    model = families.case(KINDS[kind]).make()
    return with_lora(model) if method == "lora" else model


def rows(kind: str) -> list[dict[str, torch.Tensor]]:
    """Four examples. Those of the vision-language model show an image."""
    found = []
    for seed in range(4):
        batch = families.case(KINDS[kind]).batch(seed)
        patches = batch.pop("pixel_values", None)
        row = {name: values[0] for name, values in batch.items()}
        found.append(row if patches is None else {**row, "pixel_values": patches[: len(patches) // 2]})
    return found


def run(kind: str, method: str, folder: Path, json: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of two steps."""
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 0.0, **METHODS[method][0]}
    args = arguments(folder, json, **settings)
    trainer = hf.Trainer(model_of(kind, method), args, train_dataset=rows(kind), data_collator=collate)
    trainer.train()
    if json is not None:
        engine = engine_of(trainer)
        assert uploaded_bytes(engine.backend)
        return logged(trainer, "loss"), weights_of(engine)
    return logged(trainer, "loss"), {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "method"), [("qwen2_vl", "lomo"), ("qwen2_vl", "lora"), ("qwen3_moe", "lomo"), ("mixtral", "lora")]
)
def test_a_streamed_run_has_the_bits_of_plain_trainer(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with monkeypatch.context() as patch:
        patch.delenv("LOCAL_RANK")  # as without a launcher; else Accelerate wraps the model for several ranks
        losses, expected = run(kind, method, tmp_path, None)
    json = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
        **METHODS[method][1],
    }
    streamed_losses, streamed = run(kind, method, tmp_path, json)
    assert_moved(expected, model_of(kind, method).state_dict())
    assert streamed_losses == losses
    assert_same(streamed, expected)
