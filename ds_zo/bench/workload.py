"""The batches that every contender sees, a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_zo.planner.shapes import RANDOM

Batches = Callable[[int], torch.Tensor]
"""A function from the step to token ids (batch x length) on the CPU."""
_NUM_CHARACTERS = 500_000
"""Least number of characters that are read from the standard library."""


def batches_of(model_name: str, config: Any, *, batch: int, length: int, data: Path | None, seed: int) -> Batches:
    """Returns text for a pretrained model, and Zipf-distributed tokens for random weights."""
    if model_name.startswith(RANDOM):
        return zipf_batches(int(config.vocab_size), batch=batch, length=length, seed=seed)
    return text_batches(model_name, data, batch=batch, length=length, seed=seed)


def zipf_batches(num_tokens: int, *, batch: int, length: int, seed: int) -> Batches:
    """Returns tokens of frequency 1/rank, in an order of ranks that the seed draws. A model can learn the frequencies,
    so that learning curves of random weights are meaningful."""
    generator = torch.Generator().manual_seed(seed)
    frequencies = 1.0 / torch.arange(1, num_tokens + 1, dtype=torch.float64)
    cumulative = (frequencies / frequencies.sum()).cumsum(0)
    token_of_rank = torch.randperm(num_tokens, generator=generator)

    def at(step: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(seed * 1_000_003 + step + 1)
        uniform = torch.rand(batch * length, generator=draws, dtype=torch.float64)
        ranks = torch.searchsorted(cumulative, uniform).clamp_(max=num_tokens - 1)
        return token_of_rank[ranks].reshape(batch, length)

    return at


def text_batches(model_name: str, data: Path | None, *, batch: int, length: int, seed: int) -> Batches:
    """Returns windows of a text file; without one, of the sources of Python's standard library, which every machine
    has."""
    from transformers import AutoTokenizer

    from ds_zo.tasks.stdlib_text import modules

    text = data.read_text(encoding="utf-8") if data is not None else _some(modules(held_out=True))
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_name)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"text needs the model's tokenizer, and that of {model_name} does not load: {why}") from error
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) <= length:
        raise ValueError(f"the text must have more than {length} tokens, got {len(ids)} (--data, --seq)")

    def at(step: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(seed * 1_000_003 + step + 1)
        starts = torch.randint(0, len(ids) - length, (batch,), generator=draws)
        return torch.stack([ids[start : start + length] for start in starts.tolist()])

    return at


def _some(sources: Any) -> str:
    text = ""
    for _, source in sources:
        text += source + "\n"
        if len(text) > _NUM_CHARACTERS:
            break
    return text
