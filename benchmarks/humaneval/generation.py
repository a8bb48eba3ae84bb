"""Greedy decoding of a batch of prompts, by the model or engine that an evaluator runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_zo.tasks.encoding import common_prefix, pad, position_ids
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.scoring import Evaluator, accepts_argument, needs_position_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECK_EVERY = 16
"""Steps between two looks at the texts: each waits for the device."""


@torch.no_grad()
def complete(
    evaluator: Evaluator,
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    is_done: Callable[[str], bool],
    probe: str = "",
) -> list[str]:
    """The model's continuation of each prompt, one token after another, each the most likely. A batch ends when
    `is_done` holds for all its texts or they have ended; texts may continue beyond that point.

    `probe` is the beginning of a typical continuation. Where the tokenizer joins its characters and the last ones of a
    prompt, the model writes that token, as it does in training (`encode_answer`).

    All ranks must make equally many forward passes, so that with several ranks no batch ends early.
    """
    encoded, cut = [], []
    for prompt in prompts:
        ids = list(tokenizer(prompt)["input_ids"])
        start = common_prefix(ids, tokenizer(prompt + probe)["input_ids"])
        encoded.append(ids[:start])
        cut.append(tokenizer.decode(ids[start:]))
    found = [""] * len(prompts)
    for chosen in evaluator.batches([len(ids) for ids in encoded]):
        longest, most = _longest([encoded[i] for i in chosen], evaluator), _num_positions(evaluator.model)
        if longest >= most:
            raise TaskError(
                f"a prompt and its continuation must fit the model's positions: a prompt has {longest} tokens, the "
                f"model {most} positions; take a model with more (--model)"
            )
        batch = _Batch(evaluator, [encoded[i] for i in chosen], [cut[i] for i in chosen], tokenizer)
        for step in range(1, min(max_new_tokens, most - longest) + 1):
            batch.step()
            if step % _CHECK_EVERY == 0 and evaluator.world_size == 1:
                texts = batch.texts()
                if all(ended or is_done(text) for text, ended in texts):
                    break
        for i, (text, _) in zip(chosen, batch.texts(), strict=True):
            found[i] = text
    return found


def _longest(encoded: Sequence[Sequence[int]], evaluator: Evaluator) -> int:
    """Most tokens of a prompt in a batch. With several ranks it is that of all ranks' batches: it limits the number of
    forward passes, which all ranks make together."""
    longest = max(map(len, encoded))
    if evaluator.world_size == 1:
        return longest
    found = torch.tensor(longest, device=evaluator.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


class _Batch:
    """Prompts with padding on the left, their cache of keys and values, and the tokens so far. `cut` is the end of each
    prompt that the model writes once more."""

    def __init__(
        self, evaluator: Evaluator, ids: list[list[int]], cut: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._model, self._cut, self._tokenizer = evaluator.model, cut, tokenizer
        columns = {"input_ids": (ids, evaluator.pad_token_id), "attention_mask": ([[1] * len(row) for row in ids], 0)}
        inputs = pad(columns, side="left")
        self._input_ids = inputs["input_ids"].to(evaluator.device)
        self._mask = inputs["attention_mask"].to(evaluator.device)
        self._cache: Any = None
        self._options = {"logits_to_keep": 1} if accepts_argument(evaluator.model, "logits_to_keep") else {}
        self._needs_positions = needs_position_ids(evaluator.model)
        self._tokens: list[torch.Tensor] = []

    def step(self) -> None:
        inputs: dict[str, Any] = {"input_ids": self._input_ids, "attention_mask": self._mask}
        if self._needs_positions:
            inputs["position_ids"] = position_ids(self._mask)[:, -self._input_ids.shape[1] :]
        found = self._model(**inputs, past_key_values=self._cache, use_cache=True, **self._options)
        self._cache = found.past_key_values
        self._input_ids = found.logits[:, -1].argmax(dim=-1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._tokens.append(self._input_ids)

    def texts(self) -> list[tuple[str, bool]]:
        """(text, whether the model ended it) of each row."""
        ends = {self._tokenizer.eos_token_id, self._tokenizer.pad_token_id} - {None}
        found = []
        for row, cut in zip(torch.cat(self._tokens, dim=1).tolist(), self._cut, strict=True):
            length = next((i for i, token in enumerate(row) if token in ends), len(row))
            text = self._tokenizer.decode(row[:length], skip_special_tokens=True)
            found.append((text.removeprefix(cut), length < len(row)))
        return found


def _num_positions(model: Any) -> int:
    config = getattr(getattr(model, "module", model), "config", None)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
