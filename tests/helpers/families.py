"""Small models of further families of the support matrix: recent decoders, and vision-language models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.helpers.moe_configs import moe_configs
from tests.helpers.tiny_models import VOCAB, tiny_batch
from tests.helpers.zoo import Batch, Case

IMAGE, START, END = VOCAB - 1, VOCAB - 2, VOCAB - 3
"""Tokens that stand for a part of an image, and around an image."""
SIDE, PATCH = 16, 4
"""Of an image, in pixels."""
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 4}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, Any] = {**_SIZE, "head_dim": 4, "sliding_window": 8, "layer_types": _LAYERS}
_SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
_QWEN_SIGHT: dict[str, Any] = {"depth": 2, "hidden_size": 16, "num_heads": 2, "patch_size": PATCH}

TEXT: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf.Qwen3Config(**_SIZE, head_dim=4),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GEMMA),
    "phi3": lambda: hf.Phi3Config(**_SIZE),
    "gpt-oss": lambda: hf.GptOssConfig(**_SIZE, **_EXPERTS, num_local_experts=4, sliding_window=8, layer_types=_LAYERS),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_SIZE, **_EXPERTS, num_experts=4, moe_intermediate_size=12),
}
"""Configs of language models."""


def _qwen_vl(kind: str, sight: dict[str, Any], section: list[int], **text: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    sight = {**_QWEN_SIGHT, **sight}
    return getattr(hf, f"{kind}Config")(
        text_config={**_SIZE, **text, "rope_parameters": rope}, vision_config=sight, **tokens
    )


def _tower(kind: str, model_type: str, text_type: str, text: dict[str, Any] | None = None, **more: Any) -> Any:
    """A vision tower of `model_type`, a projector, and a language model of `text_type`."""
    return getattr(hf, f"{kind}Config")(
        text_config={**(text or _SIZE), "model_type": text_type},
        vision_config={**_SIGHT, "model_type": model_type},
        **more,
    )


_QWEN25_SIGHT: dict[str, Any] = {"intermediate_size": 24, "out_hidden_size": 16, "window_size": 16}
_QWEN3_SIGHT: dict[str, Any] = {
    "intermediate_size": 24,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
VISION: dict[str, Callable[[], Any]] = {
    "qwen2-vl": lambda: _qwen_vl("Qwen2VL", {"embed_dim": 16, "mlp_ratio": 2}, [1, 1]),
    "qwen2.5-vl": lambda: _qwen_vl("Qwen2_5_VL", {**_QWEN25_SIGHT, "fullatt_block_indexes": [1]}, [1, 1]),
    "qwen3-vl": lambda: _qwen_vl("Qwen3VL", _QWEN3_SIGHT, [2, 1, 1], head_dim=8),
    "llava": lambda: _tower(
        "Llava", "clip_vision_model", "llama", image_token_id=IMAGE, image_seq_length=16, vision_feature_layer=-1
    ),
    "smolvlm": lambda: _tower("SmolVLM", "smolvlm_vision", "llama", image_token_id=IMAGE, scale_factor=2),
    "gemma3-vision": lambda: _tower(
        "Gemma3", "siglip_vision_model", "gemma3_text", _GEMMA, mm_tokens_per_image=16, image_token_id=IMAGE
    ),
    "paligemma": lambda: hf.PaliGemmaConfig(
        text_config={**_SIZE, "model_type": "gemma", "head_dim": 4},
        vision_config={**_SIGHT, "model_type": "siglip_vision_model", "projection_dim": 16, "vision_use_head": False},
        image_token_id=IMAGE,
        projection_dim=16,
        hidden_size=16,
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config={**_SIZE, "model_type": "qwen2"},
        vision_config={**_SIGHT, "image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        image_token_id=IMAGE,
        image_seq_length=4,
    ),
}
"""Configs of vision-language models."""
_NUM_TOKENS = {"llava": 16, "gemma3-vision": 16, "paligemma": 16}
"""Tokens of an image. 4 in the other models."""


def made(config: Any) -> nn.Module:
    """Decoders and vision-language models get larger weights: fresh ones hardly move the loss, so that a wrong update
    would not show. Those of T5's kind are large enough. Four times larger, they magnify rounding without bound."""
    kind = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    scale = 4.0
    if config.is_encoder_decoder:
        kind, scale = hf.AutoModelForSeq2SeqLM, 1.0
    torch.manual_seed(0)
    model: nn.Module = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(scale) if p.any() else p.normal_(std=0.1)  # Gemma 3 begins with a projector of zeros
    return model.train()


def summed_by_block(model: Any) -> Any:
    """The same encoder and decoder. Each decoder block uses its own view of the encoder's output, so autograd adds up
    the gradients of one block (of keys and of values) before it adds them to those of the other blocks."""

    def view(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
        encoded = given["encoder_hidden_states"]
        own = encoded.view_as(encoded)
        return tuple(own if x is encoded else x for x in args), {
            k: own if v is encoded else v for k, v in kwargs.items()
        }

    decoder = model.get_decoder()
    for block in getattr(decoder, "block", None) or decoder.layers:
        block.register_forward_pre_hook(view, with_kwargs=True)
    return model


def text_batch(seed: int) -> Batch:
    return tiny_batch("llama", seed=seed, batch_size=2, length=8)


def image_batch(kind: str, seed: int, *, batch_size: int = 2) -> Batch:
    """Sequences that begin with an image."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = _NUM_TOKENS.get(kind, 4)
    ids = torch.randint(3, END, (batch_size, num_tokens + 8), generator=generator)
    ids[:, 1 : num_tokens + 3] = torch.tensor([START, *[IMAGE] * num_tokens, END])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids >= END, -100)}
    if kind.startswith("qwen"):
        num_patches = (SIDE // PATCH) ** 2
        batch["pixel_values"] = torch.randn(batch_size * num_patches, 3 * 2 * PATCH**2, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * batch_size)
        return {**batch, "mm_token_type_ids": (ids == IMAGE).long()}
    shape = (1, 3, SIDE, SIDE) if kind == "smolvlm" else (3, SIDE, SIDE)  # SmolVLM takes several images a sequence
    batch["pixel_values"] = torch.randn(batch_size, *shape, generator=generator)
    if kind in ("gemma3-vision", "paligemma"):
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch


def case(kind: str) -> Case:
    """Of `TEXT`, `VISION` or `moe_configs`."""
    if kind in VISION:
        return Case(lambda: made(VISION[kind]()), lambda seed: image_batch(kind, seed))
    return Case(lambda: made(TEXT[kind]() if kind in TEXT else moe_configs()[kind]), text_batch)
