"""Words, a tokenizer for them, and examples of TRL's trainers."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **special)


def words(first: int, num: int) -> str:
    return " ".join(f"w{i}" for i in range(first, first + num))


SENTENCES: list[dict[str, Any]] = [{"text": words(i, 4)} for i in range(8)]
PROMPTS: list[dict[str, Any]] = [{"prompt": words(i, 2)} for i in range(8)]
PAIRS: list[dict[str, Any]] = [
    {"prompt": words(i, 2), "chosen": f" {words(i + 2, 1)}", "rejected": f" {words(i + 9, 1)}"} for i in range(8)
]
JUDGED: list[dict[str, Any]] = [
    {"prompt": words(i, 2), "completion": f" {words(i + 2, 2)}", "label": i % 2 == 0} for i in range(8)
]
COMPARED: list[dict[str, Any]] = [{"chosen": words(i, 3), "rejected": words(i + 9, 3)} for i in range(8)]
