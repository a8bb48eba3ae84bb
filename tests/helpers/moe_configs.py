"""Small configs of every mixture of experts in the installed transformers, found by their keys."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as _CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as _SEQ_TO_SEQ

_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "max_position_embeddings": 64,
    **dict.fromkeys(("hidden_size", "d_model", "mamba_d_ssm"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "q_lora_rank", "index_head_dim", "block_ff_dim"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim", "mamba_num_heads", "ssm_state_size"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "expert_capacity"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers", "eos_token_id"), 1),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id", "zero_expert_num"), 0),
}
"""Values for keys that a config has by default."""
_LATENT = {"num_key_value_heads": 4}
"""Latent attention makes a key and a value for each head."""
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"partial_rotary_factor": 1.0},
    "ernie4_5_moe": {"moe_k": 2},
    "switch_transformers": {"decoder_start_token_id": 0},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": 96},
    "qwen4_exp_text": {"ngram_vocab_size_base": 96, "split_ngram_parts": 2},
}


@cache
def moe_configs() -> dict[str, Any]:
    """A small config of each kind of language model with experts, by its model type."""
    found = {}
    for kind in (*_CAUSAL.keys(), *_SEQ_TO_SEQ.keys()):
        keys = {*inspect.signature(kind).parameters, *kind.attribute_map}
        if counts := keys & {*_NUM_EXPERTS}:
            small = {key: value for key, value in _SIZES.items() if key in keys}
            model = (_CAUSAL if kind in _CAUSAL.keys() else _SEQ_TO_SEQ)[kind]  # noqa: SIM118
            own = (_LATENT if "kv_lora_rank" in keys else {}) | _OWN.get(kind.model_type, {})
            found[kind.model_type] = kind(**small | dict.fromkeys(counts, 4) | own, architectures=[model.__name__])
    return found
