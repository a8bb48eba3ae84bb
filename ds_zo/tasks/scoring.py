"""How likely a causal model finds the labelled tokens of sequences, batched, on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_zo.tasks.encoding import IGNORED, Encoded, collate

Model = Callable[..., Any]
"""A model or an engine around one: called with a batch's tensors, returns an object with `.logits`."""


@dataclass(frozen=True)
class Evaluator:
    """What is needed to run a model on sequences; `rank` of `world_size` takes every `world_size`-th item."""

    model: Model
    device: torch.device
    pad_token_id: int
    batch_size: int = 16
    rank: int = 0
    world_size: int = 1

    def share(self, num_items: int) -> list[tuple[int, int]]:
        """(index, weight) of this rank's items. All ranks get equally many, because a partitioned model needs every
        rank in every forward: the surplus repeats the last item with weight 0."""
        per_rank = -(-num_items // self.world_size)
        indices = (self.rank + i * self.world_size for i in range(per_rank))
        return [(index, 1) if index < num_items else (num_items - 1, 0) for index in indices]

    @torch.no_grad()
    def log_likelihoods(self, sequences: Sequence[Encoded]) -> list[tuple[float, int]]:
        """(sum of log-probabilities, number of tokens) over the labelled tokens of each sequence."""
        results: list[tuple[float, int]] = []
        for start in range(0, len(sequences), self.batch_size):
            batch = collate(sequences[start : start + self.batch_size], pad_token_id=self.pad_token_id)
            labels = batch.pop("labels").to(self.device)
            inputs = {name: tensor.to(self.device) for name, tensor in batch.items()}
            logits = self.model(**inputs, use_cache=False).logits
            sums, counts = label_log_likelihood(logits, labels)
            results += zip(sums.tolist(), counts.tolist(), strict=True)
        return results


def label_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: the labelled tokens' summed log-probability in float32, and their number.

    The log-softmax is taken only where a label stands: over all positions it would double the logits' memory.
    """
    targets = labels[:, 1:]
    mask = targets != IGNORED
    picked = torch.log_softmax(logits[:, :-1][mask].float(), dim=-1)
    picked = picked.gather(-1, targets[mask].unsqueeze(-1)).squeeze(-1)
    rows = mask.nonzero()[:, 0]
    sums = torch.zeros(len(labels), device=logits.device).index_add_(0, rows, picked)
    return sums, mask.sum(dim=1)
