"""What a task is: rows, how they become training sequences, how a model is scored on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from ds_zo.tasks import metrics
from ds_zo.tasks.data import SPLITS, DataSource, Row, Split, read_rows
from ds_zo.tasks.encoding import Side, collate, encode_answer
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.hub import HubName
from ds_zo.tasks.score import Score
from ds_zo.tasks.scoring import Evaluator

__all__ = ["Choice", "ChoiceTask", "LabelledTask", "LanguageTask", "Score", "Task"]


class Task(ABC):
    """One instance reads one data source. Subclasses say which fields they read and what they make of a row."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """What every row must have."""
    hub: ClassVar[HubName | None] = None
    """Where `datasets` finds it; None for a task that has no public copy of its own."""

    def __init__(self, source: DataSource | None = None) -> None:
        self.source = source or DataSource()

    def rows(self, split: Split) -> Sequence[Row]:
        return read_rows(self.source, split, fields=self.fields, task=self.name, hub=self.hub)

    def check(self) -> None:
        """Read every split once, so that what is wrong with the data is said before a model is loaded."""
        for split in SPLITS:
            self.rows(split)

    @abstractmethod
    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Any]:
        """What to train on; `collate` makes a batch of it."""

    def collate(self, sequences: Sequence[Any], *, pad_token_id: int, side: Side = "right") -> dict[str, torch.Tensor]:
        """A padded batch: what the model is called with, `labels` included."""
        return collate(sequences, pad_token_id=pad_token_id, side=side)

    @abstractmethod
    def evaluate(
        self,
        evaluator: Evaluator,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        num_examples: int | None = None,
    ) -> Score:
        """This rank's part of the score on the first `num_examples` (None: all) of a split."""


class LabelledTask(Task):
    """Every row has one right label: a number from 0 to `num_labels` - 1, or any number where `num_labels` is 1."""

    num_labels: ClassVar[int] = 2
    text_fields: ClassVar[tuple[str, ...]] = ()
    """What a classification head reads, one or two texts; none: the task makes no sense without a prompt."""
    metric: ClassVar[str] = "accuracy"
    needs_head: ClassVar[bool] = False
    """No words to choose from: a language model cannot be asked."""

    @abstractmethod
    def label(self, row: Row) -> float:
        """What is right for a row."""

    def texts(self, row: Row) -> tuple[str, ...]:
        return tuple(row[field] for field in self.text_fields)

    def check(self) -> None:
        for split in SPLITS:
            for row in self.rows(split):
                self.label(row)

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        """All metrics that the task is reported by, `metric` among them."""
        return {"accuracy": metrics.accuracy(predictions, [self.label(row) for row in rows])}

    def score(self, rows: Sequence[Row], predicted: Sequence[tuple[int, int, float]]) -> Score:
        """One rank's part from its (index, weight, prediction)s: a vector with zeros for what other ranks predict, so
        that metrics which are no means (F1 by question, correlations) are taken once over the whole split."""
        mine = [0.0] * len(rows)
        for index, weight, prediction in predicted:
            mine[index] += weight * prediction
        return Score(self.metric, tuple(mine), lambda whole: self.measure(whole, rows))

    def answer_index(self, row: Row, values: dict[object, int], *, field: str = "label") -> int:
        """Which option a label means; `values` maps every spelling that occurs in public copies of the data."""
        label = row[field]
        if not isinstance(label, (str, int)) or label not in values:
            known = ", ".join(repr(value) for value in values)
            raise TaskError(f"task {self.name}: {field} must be one of {known}, got {label!r} in the row {row}")
        return values[label]


@dataclass(frozen=True)
class Choice:
    """A prompt and its possible continuations, each complete with the space or newline that joins it."""

    prompt: str
    options: tuple[str, ...]
    answer: int


class ChoiceTask(LabelledTask):
    """Options are ranked by their log-likelihood a token; training raises the right one's."""

    @abstractmethod
    def choice(self, row: Row) -> Choice:
        """The prompt, the options and which is right."""

    def label(self, row: Row) -> int:
        return self.choice(row).answer

    def choices(self, split: Split) -> list[Choice]:
        return [self.choice(row) for row in self.rows(split)]

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Any]:
        return [
            encode_answer(tokenizer, choice.prompt, choice.options[choice.answer], max_length=max_length)
            for choice in self.choices(split)
        ]

    def evaluate(
        self,
        evaluator: Evaluator,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        num_examples: int | None = None,
    ) -> Score:
        rows = list(self.rows(split))[:num_examples]
        share = evaluator.share(len(rows))
        mine = [self.choice(rows[index]) for index, _ in share]
        sequences = [
            encode_answer(tokenizer, choice.prompt, option, max_length=max_length)
            for choice in mine
            for option in choice.options
        ]
        scores = iter([total / count for total, count in evaluator.log_likelihoods(sequences)])
        predicted = []
        for choice, (index, weight) in zip(mine, share, strict=True):
            ranked = [next(scores) for _ in choice.options]
            predicted.append((index, weight, max(range(len(ranked)), key=ranked.__getitem__)))
        return self.score(rows, predicted)


class LanguageTask(Task):
    """Sequences speak for themselves: trained by the model's own loss, scored by perplexity of the labelled tokens."""

    def evaluate(
        self,
        evaluator: Evaluator,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        num_examples: int | None = None,
    ) -> Score:
        sequences = self.sequences(split, tokenizer, max_length=max_length)[:num_examples]
        share = evaluator.share(len(sequences))
        results = evaluator.log_likelihoods([sequences[index] for index, _ in share])
        nats = -sum(weight * total for (total, _), (_, weight) in zip(results, share, strict=True))
        num_tokens = sum(weight * count for (_, count), (_, weight) in zip(results, share, strict=True))
        return Score.mean("perplexity", nats, num_tokens)
