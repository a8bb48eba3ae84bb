"""From text to token ids with labels, and from those to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that transformers' losses skip."""


@dataclass(frozen=True)
class Encoded:
    """One sequence; `labels` repeats the ids that count and has IGNORED elsewhere."""

    input_ids: list[int]
    labels: list[int]


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, *, max_length: int, end: bool = False
) -> Encoded:
    """`prompt + answer` with labels on the answer's tokens alone; `end` adds the end-of-sequence token to them.

    Both are tokenized together, as a model would meet them in running text; where a token straddles the border it
    belongs to the answer. What is too long loses the prompt's beginning (after leading special tokens), then the
    answer's end.
    """
    ids: list[int] = list(tokenizer(prompt + answer, truncation=False)["input_ids"])
    prompt_ids: list[int] = list(tokenizer(prompt, truncation=False)["input_ids"])
    start = _common_prefix(ids, prompt_ids)
    if end and tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    special = set(tokenizer.all_special_ids)
    num_leading = next((i for i, token in enumerate(ids[:start]) if token not in special), start)
    num_dropped = min(max(0, len(ids) - max_length), max(0, start - num_leading - 1))
    ids = ids[:num_leading] + ids[num_leading + num_dropped :]
    start -= num_dropped
    return Encoded(ids[:max_length], ([IGNORED] * start + ids[start:])[:max_length])


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pack(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_length: int) -> list[Encoded]:
    """Texts joined by the end-of-sequence token and cut every `max_length` tokens; a stump of one token is dropped."""
    ids: list[int] = []
    for text in texts:
        ids.extend(tokenizer(text, truncation=False, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    rows = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
    return [Encoded(row, row) for row in rows if len(row) > 1]


def collate(sequences: Sequence[Encoded], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """A right-padded batch for a causal model: padding is masked, carries no label, and shifts no position."""
    length = max(len(sequence.input_ids) for sequence in sequences)
    shape = (len(sequences), length)
    batch = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, IGNORED, dtype=torch.long),
    }
    for row, sequence in enumerate(sequences):
        num_tokens = len(sequence.input_ids)
        batch["input_ids"][row, :num_tokens] = torch.tensor(sequence.input_ids)
        batch["attention_mask"][row, :num_tokens] = 1
        batch["labels"][row, :num_tokens] = torch.tensor(sequence.labels)
    return batch


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any valid id would do, because padding is masked."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0
