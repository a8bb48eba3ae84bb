"""Real architectures at toy sizes, made from their configs: no weights are downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

VOCAB = 67
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
}
_GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32}

CONFIGS: dict[str, Callable[..., hf.PretrainedConfig]] = {
    "opt": lambda **kw: hf.OPTConfig(**{**_OPT, **kw}),
    "opt-350m": lambda **kw: hf.OPTConfig(**{**_OPT, "word_embed_proj_dim": 8, "do_layer_norm_before": False, **kw}),
    "llama": lambda **kw: hf.LlamaConfig(**{**_SIZE, "num_key_value_heads": 2, **kw}),
    "gpt2": lambda **kw: hf.GPT2Config(**{**_GPT2, **kw}),
    "qwen2": lambda **kw: hf.Qwen2Config(**{**_SIZE, "num_key_value_heads": 2, **kw}),
    "bloom": lambda **kw: hf.BloomConfig(**{"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 3, "n_head": 4, **kw}),
    "mistral": lambda **kw: hf.MistralConfig(**{**_SIZE, "num_key_value_heads": 2, **kw}),
    "gpt-neox": lambda **kw: hf.GPTNeoXConfig(**{**_SIZE, **kw}),
    "mixtral": lambda **kw: hf.MixtralConfig(
        **{**_SIZE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, **kw}
    ),
    "roberta": lambda **kw: hf.RobertaConfig(**{**_SIZE, "max_position_embeddings": 40, "num_labels": 3, **kw}),
}
"""Special token ids are dropped in `tiny_model`, which is what lets the vocabulary be this small."""

_DROPOUTS = (
    *("dropout", "attention_dropout", "hidden_dropout"),
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def tiny_model(name: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A freshly initialised model without dropout, the same weights for the same seed."""
    no_special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    no_special["pad_token_id"] = 1 if name in ("opt", "opt-350m", "roberta") else None
    no_dropout = dict.fromkeys(_DROPOUTS, 0.0)
    config = CONFIGS[name](**{**no_special, **no_dropout, **overrides})
    make = hf.AutoModelForSequenceClassification if name == "roberta" else hf.AutoModelForCausalLM
    torch.manual_seed(seed)
    model: nn.Module = make.from_config(config)
    return model.train()


def tiny_batch(name: str, *, seed: int = 0, batch_size: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    labels = torch.randint(0, 3, (batch_size,), generator=generator) if name == "roberta" else ids.clone()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
