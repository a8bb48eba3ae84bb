"""Encodes texts as token ids with labels, and pads them to batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from ds_zo.tasks.errors import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that transformers' losses ignore."""


Side = Literal["right", "left"]


@dataclass(frozen=True)
class Encoded:
    """One sequence. `labels` has the token's id where the loss counts it, and IGNORED elsewhere."""

    input_ids: list[int]
    labels: list[int]


@lru_cache(maxsize=2**15)  # every evaluation encodes the same texts
def encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, *, max_length: int, end: bool = False
) -> Encoded:
    """Encodes `prompt + answer` with labels on the answer's tokens only. `end` appends the end-of-sequence token to the
    answer.

    Both are tokenized together, as in running text. A token with characters of both belongs to the answer. A sequence
    that is too long loses the beginning of the prompt (after leading special tokens), then the end of the answer.
    """
    ids = list(_ids(tokenizer, prompt + answer))
    start = common_prefix(ids, _ids(tokenizer, prompt))
    if end and tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    special = set(tokenizer.all_special_ids)
    num_leading = next((i for i, token in enumerate(ids[:start]) if token not in special), start)
    num_dropped = min(max(0, len(ids) - max_length), max(0, start - num_leading - 1))
    ids = ids[:num_leading] + ids[num_leading + num_dropped :]
    start -= num_dropped
    if start >= max_length:
        raise TaskError(
            f"a sequence must have room for {start} tokens of the prompt and for an answer, got {max_length}: take a "
            "larger length (--max-length)"
        )
    return Encoded(ids[:max_length], ([IGNORED] * start + ids[start:])[:max_length])


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, max_length: int) -> Encoded:
    """Encodes a conversation by the tokenizer's chat template, with labels on the assistant's turns and on their ends.
    A conversation that is too long loses its end."""

    def ids_of(count: int, *, opens: bool = False) -> list[int]:
        """The tokens of the first messages. `opens`: and of the words before the assistant's next turn."""
        text = tokenizer.apply_chat_template(list(messages[:count]), tokenize=False, add_generation_prompt=opens)
        return list(tokenizer(text, truncation=False, add_special_tokens=False)["input_ids"])

    ids = ids_of(len(messages))
    labels = [IGNORED] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = common_prefix(ids, ids_of(i, opens=True)) if i else 0
            end = common_prefix(ids, ids_of(i + 1))
            labels[start:end] = ids[start:end]
    if all(label == IGNORED for label in labels[:max_length]):
        raise TaskError(
            f"a conversation must have a turn of the assistant within {max_length} tokens, got none: take a larger "
            "length (--max-length)"
        )
    return Encoded(ids[:max_length], labels[:max_length])


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_length: int) -> list[int]:
    """Encodes texts joined by newlines. If they are too long, the end of the longer text is cut first, as tokenizers
    for text pairs do: a long premise must not remove its hypothesis."""
    ids = list(_ids(tokenizer, "\n".join(texts)))
    special = set(tokenizer.all_special_ids)
    end = next((i for i in range(len(ids), 0, -1) if ids[i - 1] not in special), len(ids))
    border = min(common_prefix(ids, _ids(tokenizer, texts[0])), end) if len(texts) > 1 else end
    room = max(0, max_length - (len(ids) - end))
    first = min(border, max(room - (end - border), -(-room // 2)))
    return (ids[:first] + ids[border : min(end, border + room - first)] + ids[end:])[:max_length]


@lru_cache(maxsize=16)  # a prompt is encoded once for all its options; a long passage takes a millisecond
def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, truncation=False)["input_ids"])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of tokens that two sequences begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def pack(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, max_length: int) -> list[Encoded]:
    """Joins texts by the end-of-sequence token and cuts them every `max_length` tokens. A last part of one token is
    dropped."""
    ids: list[int] = []
    for text in texts:
        ids.extend(tokenizer(text, truncation=False, add_special_tokens=False)["input_ids"])
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    rows = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
    found = [Encoded(row, row) for row in rows if len(row) > 1]
    if not found:
        raise TaskError(
            f"a sequence must have two tokens or more, got {len(ids)} of text, cut every {max_length}: give more text, "
            "or take a larger length (--data, --max-length)"
        )
    return found


def collate(
    sequences: Sequence[Encoded], *, pad_token_id: int, side: Side = "right", multiple: int = 1
) -> dict[str, torch.Tensor]:
    """A padded batch for a causal model. Padding is masked and has no labels. Padding on the left shifts positions: a
    model that counts them from the first column then needs `position_ids`."""
    return pad(
        {
            "input_ids": ([s.input_ids for s in sequences], pad_token_id),
            "attention_mask": ([[1] * len(s.input_ids) for s in sequences], 0),
            "labels": ([s.labels for s in sequences], IGNORED),
        },
        side=side,
        multiple=multiple,
    )


def pad(columns: dict[str, tuple[list[list[int]], int]], *, side: Side, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Makes a padded tensor of each column's (rows, filler). A row has the same length in all columns. Lengths are
    rounded up to a `multiple`, for fewer shapes: CUDA graphs and compiled code are made for each shape."""
    batch = {}
    for name, (rows, filler) in columns.items():
        length = -(-max(map(len, rows)) // multiple) * multiple
        batch[name] = torch.full((len(rows), length), filler, dtype=torch.long)
        for i, row in enumerate(rows):
            at = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
            batch[name][i, at] = torch.tensor(row, dtype=torch.long)
    return batch


def num_label_positions(labels: torch.Tensor) -> int:
    """The number of last positions of a batch that include all positions which predict a label. Earlier positions need
    no logits. Where only answers have labels, the number is small."""
    predicts = (labels[:, 1:] != IGNORED).any(dim=0).nonzero()
    return labels.shape[1] - int(predicts[0]) if len(predicts) else 1


def position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Positions counted from each row's first token that is not padding. Padding gets any valid position."""
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id for padding: the tokenizer's padding or end-of-sequence token, else 0. Padding is masked, so any valid id
    serves."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0
