"""Models with heads of several kinds, and a mode that measures the logits that exist at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as hf
from torch import nn

from tests.helpers.live_bytes import LiveBytes
from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model

CHUNK = 5
"""Tokens of a chunk. A batch has 32."""
WIDTH, RANK = 16, 2
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def of_config(make: Any, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(make(**{**SMALL, **more}))
    return model


def with_lora_head() -> nn.Module:
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_model("llama"), config)


def with_saved_head() -> nn.Module:
    config = peft.LoraConfig(r=RANK, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_model("llama"), config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "untied": lambda: tiny_model("llama", tie_word_embeddings=False),
    "tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "lora": with_lora_head,
    "modules_to_save": with_saved_head,
    "opt": lambda: tiny_model("opt"),
    "soft-capped": lambda: of_config(hf.Gemma2Config, final_logit_softcapping=0.3, attn_implementation="eager"),
    "multiplied": lambda: of_config(hf.CohereConfig, logit_scale=0.3),
    "divided": lambda: of_config(hf.GraniteConfig, logits_scaling=3.0),
}


class WatchingForCausalLM(hf.LlamaForCausalLM):
    """Uses its logits, and other modules, between head and loss. With `mask` it writes to its logits."""

    def __init__(self, *, mask: bool) -> None:
        super().__init__(tiny_model("llama").config)  # type: ignore[arg-type]
        self.value = nn.Linear(WIDTH, 1)
        self.mask = mask

    def forward(self, **batch: Any) -> Any:
        hidden = self.model(input_ids=batch["input_ids"])[0]
        logits = self.lm_head(hidden)
        value = self.value(hidden).mean()
        if self.mask:
            logits[:, :, 5:9] = -1.0
        loss = self.loss_function(logits=logits * 2, labels=batch["labels"], vocab_size=VOCAB)
        return hf.modeling_outputs.CausalLMOutput(loss=loss + value, logits=logits)


class LiveLogits(LiveBytes):
    """Records the most bytes of logits, gradients of logits included, that were alive at a time."""

    def counts(self, tensor: torch.Tensor) -> bool:
        # Transposed weights of the head have as many rows as the hidden size, or as the rank of its adapter.
        return tensor.shape[-1:] == (VOCAB,) and tensor.shape[:-1].numel() not in (WIDTH, RANK)


def a_batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Some of its labels are ignored."""
    batch = tiny_batch("llama", seed=seed, batch_size=2, length=16)
    labels = batch["labels"].clone()
    labels[0, 2:5] = -100
    return {**batch, "labels": labels}


def reads(lines: list[str]) -> list[str]:
    """The lines that say that logits are read."""
    return [line for line in lines if "outputs.logits are used" in line]
