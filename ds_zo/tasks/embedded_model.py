"""The small pretrained decoder that is part of the package, and the bits-per-byte measure of a language model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "embedded"
"""The model's folder, for `from_pretrained`. tools/pretrain_embedded.py makes it; its README.md names the data."""


def folder_of(name: str) -> str:
    """The argument of `from_pretrained` for a `--model`: this folder for "embedded", else `name` itself."""
    return str(FOLDER) if name == "embedded" else name


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    length: int = 256,
    max_rows: int | None = None,
    batch_size: int = 16,
) -> float:
    """Cross-entropy over separate windows of `length` tokens, in bits per byte of UTF-8, comparable between tokenizers.

    With `max_rows`, at most so many windows are used, evenly spaced over the text. The first token of a window is only
    context: its bytes are not counted.
    """
    rows: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if not rows:
        raise ValueError(
            f"bits_per_byte needs a text of at least length={length} tokens, got {len(texts)} shorter texts"
        )
    if max_rows is not None and len(rows) > max_rows:
        rows = [rows[i * len(rows) // max_rows] for i in range(max_rows)]
    nats, num_bytes = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids = torch.tensor(batch, device=model.device)
        nats += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * (ids.numel() - len(batch))
        num_bytes += sum(
            len(tokenizer.decode(row[1:], clean_up_tokenization_spaces=False).encode("utf-8")) for row in batch
        )
    return nats / math.log(2) / num_bytes
