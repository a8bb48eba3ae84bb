"""Runs a model for evaluation: log-likelihoods of labelled tokens, or a head's outputs, in batches, on one rank or
several."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ds_zo.tasks.encoding import IGNORED, Encoded, Side, collate, num_label_positions, position_ids

Model = Callable[..., Any]
"""A model or an engine around one: called with a batch's tensors, returns an object with `.logits`."""


@dataclass(frozen=True)
class Evaluator:
    """A model and the settings for running it on sequences. Rank `rank` of `world_size` evaluates every `world_size`-th
    item."""

    model: Model
    device: torch.device
    pad_token_id: int
    batch_size: int = 16
    rank: int = 0
    world_size: int = 1
    padding_side: Side = "right"

    def share(self, num_items: int) -> list[tuple[int, int]]:
        """(index, weight) of this rank's items. All ranks get equally many, because a partitioned model needs every
        rank in every forward. Additional items repeat the last one with weight 0."""
        per_rank = -(-num_items // self.world_size)
        indices = (self.rank + i * self.world_size for i in range(per_rank))
        return [(index, 1) if index < num_items else (num_items - 1, 0) for index in indices]

    @torch.no_grad()
    def log_likelihoods(self, sequences: Sequence[Encoded]) -> list[tuple[float, int]]:
        """(sum of log-probabilities, number of tokens) over the labelled tokens of each sequence."""
        results: list[tuple[float, int]] = [(0.0, 0)] * len(sequences)
        groups = self.alike(sequences)
        for chosen in self.batches([len(sequences[group[0]].input_ids) for group in groups]):
            batch = AnswerBatch(
                [[sequences[i] for i in groups[k]] for k in chosen],
                pad_token_id=self.pad_token_id,
                side=self.padding_side,
            )
            options: dict[str, Any] = {"use_cache": False}
            if accepts_argument(self.model, "logits_to_keep"):
                options["logits_to_keep"] = batch.num_positions
            found = batch.log_likelihoods(self.logits(batch.inputs, **options))
            for index, result in zip((i for k in chosen for i in groups[k]), found, strict=True):
                results[index] = result
        return results

    def alike(self, sequences: Sequence[Encoded]) -> list[list[int]]:
        """Groups of indices of sequences that one forward scores. With several ranks each sequence is a group of its
        own, so that all ranks make equally many forwards."""
        return alike(sequences) if self.world_size == 1 else [[index] for index in range(len(sequences))]

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Batches of indices of similar lengths, for little padding. The longest are first, so that a lack of memory
        shows at once."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        return (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))

    @torch.no_grad()
    def logits(self, batch: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
        if self.padding_side == "left" and needs_position_ids(self.model):
            inputs["position_ids"] = position_ids(inputs["attention_mask"])
        found: torch.Tensor = self.model(**inputs, **options).logits
        return found


def alike(sequences: Sequence[Encoded]) -> list[list[int]]:
    """Groups of indices of sequences that differ only in their last token, the only one with a label, as one-token
    answers to a prompt do."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        one_word = all(label == IGNORED for label in sequence.labels[:-1])
        key = tuple(sequence.input_ids[:-1]) if one_word else (-1, index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())


class AnswerBatch:
    """A padded batch with one row for each group of `alike` sequences."""

    def __init__(
        self, groups: Sequence[Sequence[Encoded]], *, pad_token_id: int, side: Side, multiple: int = 1
    ) -> None:
        self._groups = groups
        self.inputs = collate([group[0] for group in groups], pad_token_id=pad_token_id, side=side, multiple=multiple)
        """The model's keywords, without labels."""
        self._labels = self.inputs.pop("labels")
        self.num_positions = num_label_positions(self._labels)
        """The number of last positions of which logits are needed."""

    def log_likelihoods(self, logits: torch.Tensor, *, rows: Sequence[int] | None = None) -> list[tuple[float, int]]:
        """(sum of log-probabilities, number of tokens) over the labelled tokens of each sequence, group by group.
        `logits`: of all positions, or of the last ones. `rows`: the row of the batch of each row of the logits; None:
        the same."""
        chosen = list(range(len(self._groups)) if rows is None else rows)
        labels = self._labels[chosen, -logits.shape[1] :].to(logits.device)
        log_probabilities = log_probabilities_at_labels(logits, labels)
        positions: list[int] = []
        targets: list[int] = []
        counts: list[int] = []
        first = 0
        for row in chosen:
            for sequence in self._groups[row]:
                wanted = [label for label in sequence.labels[1:] if label != IGNORED]
                positions += range(first, first + len(wanted))
                targets += wanted
                counts.append(len(wanted))
            first += len(wanted)
        picked = iter(log_probabilities[tuple(torch.tensor([positions, targets], device=logits.device))].tolist())
        return [(math.fsum(islice(picked, count)), count) for count in counts]


def needs_position_ids(model: Model) -> bool:
    """Whether a model needs `position_ids` for sequences with padding on the left. Some models have no such argument or
    compute positions from the mask (OPT, BLOOM). Others compute them from the token ids, after reserved positions."""
    return accepts_argument(model, "position_ids") and not num_reserved_positions(model)


def num_reserved_positions(model: Model) -> int:
    """The number of positions before the first token's. It is not 0 if the table of positions has an entry for padding,
    as RoBERTa's has."""
    inner = getattr(model, "module", model)
    modules = inner.named_modules() if isinstance(inner, nn.Module) else ()
    tables = [m for name, m in modules if name.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
    return max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)


def accepts_argument(model: Model, argument: str) -> bool:
    """Whether the model's forward has a parameter of this name."""
    inner: Any = getattr(model, "module", model)  # the model of an engine
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # the model in a PEFT wrapper
    return argument in inspect.signature(getattr(inner, "forward", inner)).parameters


def log_probabilities_at_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens, in float32, at the positions that predict a label, row by row. At all positions
    they would need more memory than the logits."""
    found: torch.Tensor = torch.log_softmax(logits[:, :-1][labels[:, 1:] != IGNORED].float(), dim=-1)
    return found
