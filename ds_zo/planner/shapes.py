"""Published model shapes by name, as transformers configs: what `random:opt-6.7b` means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPT = {
    # name: (layers, hidden size, heads, word_embed_proj_dim)
    "opt-tiny": (2, 64, 4, 64),
    "opt-125m": (12, 768, 12, 768),
    "opt-350m": (24, 1024, 16, 512),
    "opt-1.3b": (24, 2048, 32, 2048),
    "opt-2.7b": (32, 2560, 32, 2560),
    "opt-6.7b": (32, 4096, 32, 4096),
    "opt-13b": (40, 5120, 40, 5120),
    "opt-30b": (48, 7168, 56, 7168),
    "opt-66b": (64, 9216, 72, 9216),
    "opt-175b": (96, 12288, 96, 12288),
}

LLAMA = {
    # name: (layers, hidden size, intermediate size, heads, key and value heads, vocabulary)
    "llama-tiny": (2, 64, 176, 4, 4, 32000),
    "llama-125m": (12, 768, 2048, 12, 12, 32000),
    "llama-350m": (24, 1024, 2736, 16, 16, 32000),
    "llama-1.1b": (22, 2048, 5632, 32, 4, 32000),
    "llama-1.3b": (24, 2048, 5504, 16, 16, 32000),
    "llama-3b": (26, 3200, 8640, 32, 32, 32000),
    "llama-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama-30b": (60, 6656, 17920, 52, 52, 32000),
    "llama-65b": (80, 8192, 22016, 64, 64, 32000),
    "llama-70b": (80, 8192, 28672, 64, 8, 32000),
}

SMOLLM2 = {
    # as LLAMA; the head is the embedding
    "smollm2-tiny": (2, 64, 176, 4, 2, 49152),
    "smollm2-135m": (30, 576, 1536, 9, 3, 49152),
}

GPT2 = {
    # name: (layers, hidden size, heads)
    "gpt2-tiny": (2, 64, 4),
    "gpt2-124m": (12, 768, 12),
    "gpt2-355m": (24, 1024, 16),
    "gpt2-774m": (36, 1280, 20),
    "gpt2-1.3b": (40, 1600, 25),
    "gpt2-1.5b": (48, 1600, 25),
}

BLOOM = {
    # name: (layers, hidden size, heads)
    "bloom-tiny": (2, 64, 4),
    "bloom-560m": (24, 1024, 16),
    "bloom-7b1": (30, 4096, 32),
    "bloom-176b": (70, 14336, 112),
}

QWEN3_MOE = {
    # name: (layers, hidden size, heads, key and value heads, size of a head, an expert's size, experts, for a token)
    "qwen3-moe-tiny": (2, 64, 4, 2, 16, 32, 8, 2),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 768, 128, 8),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 1536, 128, 8),
}

GPT_OSS = {
    # name: (layers, hidden size, heads, key and value heads, size of a head, an expert's size, experts, for a token)
    "gpt-oss-tiny": (2, 64, 4, 2, 16, 32, 8, 2),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 2880, 32, 4),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 2880, 128, 4),
}


_COMMON = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_LLAMA_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_QWEN3_MOE_KEYS = (
    *(*_COMMON, "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
)
_GPT_OSS_KEYS = (
    *(*_COMMON, "num_key_value_heads", "head_dim"),
    *("intermediate_size", "num_local_experts", "num_experts_per_tok"),
)
_OPT_FIXED = {"vocab_size": 50272, "dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0}
_GPT2_FIXED = {"vocab_size": 50257, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BLOOM_FIXED = {"vocab_size": 250880, "hidden_dropout": 0.0, "attention_dropout": 0.0}
_QWEN3_MOE_FIXED = {"vocab_size": 151936, "norm_topk_prob": True, "tie_word_embeddings": False}
_GPT_OSS_FIXED = {"vocab_size": 201088, "tie_word_embeddings": False}
_FAMILIES: tuple[tuple[str, Mapping[str, tuple[int, ...]], tuple[str, ...], Mapping[str, Any]], ...] = (
    ("OPTConfig", OPT, (*_COMMON, "word_embed_proj_dim"), _OPT_FIXED),
    ("LlamaConfig", LLAMA, (*_LLAMA_KEYS, "vocab_size"), {"tie_word_embeddings": False}),
    ("LlamaConfig", SMOLLM2, (*_LLAMA_KEYS, "vocab_size"), {"tie_word_embeddings": True}),
    ("GPT2Config", GPT2, _COMMON, _GPT2_FIXED),
    ("BloomConfig", BLOOM, _COMMON, _BLOOM_FIXED),
    ("Qwen3MoeConfig", QWEN3_MOE, _QWEN3_MOE_KEYS, _QWEN3_MOE_FIXED),
    ("GptOssConfig", GPT_OSS, _GPT_OSS_KEYS, _GPT_OSS_FIXED),
)
"""For each architecture the class of its config, its shapes, the keys of a shape's numbers, and fixed values."""
SHAPES = tuple(name for _, shapes, _, _ in _FAMILIES for name in shapes)
TINY_VOCABULARY = 512
"""Vocabulary of the shapes named tiny, which are for tests and first trials."""
RANDOM = "random:"


def _family_of(shape: str) -> Any:
    return next(family for family in _FAMILIES if shape in family[1])


def tiny_of(shape: str) -> str:
    """The shape of the same architecture that is for tests."""
    return next(name for name in _family_of(shape)[1] if name.endswith("-tiny"))


def config_of(shape: str, *, num_layers: int | None = None, max_length: int = 2048) -> Any:
    """The transformers config of a shape such as `opt-6.7b` or `random:opt-6.7b`; `num_layers` cuts its depth."""
    import transformers

    shape = shape.removeprefix(RANDOM)
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}")
    kind, shapes, keys, fixed = _family_of(shape)
    values: dict[str, Any] = {**dict(zip(keys, shapes[shape], strict=True)), **fixed}
    if shape.endswith("tiny"):
        values["vocab_size"] = TINY_VOCABULARY
    if num_layers:
        values["num_hidden_layers"] = num_layers
    if shapes not in (BLOOM, GPT_OSS):  # positions of BLOOM have no limit, and those of gpt-oss are scaled from theirs
        values["max_position_embeddings"] = max_length
    if shapes is OPT:
        values |= {"ffn_dim": 4 * values["hidden_size"], "do_layer_norm_before": shape != "opt-350m"}
    return getattr(transformers, kind)(**values)
