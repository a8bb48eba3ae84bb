"""A vision-language model and mixtures of experts: streamed runs of HF Trainer have the bits of its plain runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from library_runs import (
    arguments,
    assert_moved,
    assert_same,
    collate,
    engine_of,
    fresh_libraries,  # noqa: F401
    logged,
    weights_of,
)
from support_matrix import uploaded_bytes, with_lora
from tiny_models import VOCAB, tiny_model
from torch import nn

IMAGE, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3
STAYS_OUT = {"resident_blocks": 0}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lomo": (
        {"optim": "sgd", "learning_rate": 0.1},
        {"optimizer": {"type": "LOMO", "params": {"lr": 0.1}}, "ds_zo": {"stream": STAYS_OUT}},
    ),
    "lora": ({"optim": "adamw_torch", "learning_rate": 1e-2}, {"ds_zo": {"backend": "adapter", "stream": STAYS_OUT}}),
}
"""Arguments of Trainer, and keys of the JSON."""


_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}


def qwen2_vl() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    text = {**_SIZE, "rope_parameters": rope}
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZE, **experts))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2_vl": qwen2_vl,
    "qwen3_moe": qwen3_moe,
    "mixtral": lambda: tiny_model("mixtral"),
}


def model_of(kind: str, method: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind]()
    return with_lora(model) if method == "lora" else model.train()


def rows(kind: str) -> list[dict[str, torch.Tensor]]:
    """Four examples. Those of the vision-language model show four tokens of an image."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(4):
        ids = torch.randint(3, END, (12,), generator=generator)
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        if kind == "qwen2_vl":
            ids[1:7] = torch.tensor([START, IMAGE, IMAGE, IMAGE, IMAGE, END])
            row["labels"] = ids.masked_fill(ids >= END, -100)
            row["mm_token_type_ids"] = (ids == IMAGE).long()
            row["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
            row["image_grid_thw"] = torch.tensor([1, 4, 4])
        found.append(row)
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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", MODELS)
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
