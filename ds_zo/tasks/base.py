"""What a task is: rows, how they become training sequences, how a model is scored on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from ds_zo.tasks.data import SPLITS, DataSource, Row, Split, read_rows
from ds_zo.tasks.encoding import Encoded, encode_answer
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.scoring import Evaluator


@dataclass(frozen=True)
class Score:
    """Sums that can be added over ranks before the metric is taken."""

    metric: Literal["accuracy", "perplexity"]
    total: float
    """Right answers, or the negative log-likelihood in nats."""
    count: float
    """Examples, or tokens."""

    @property
    def value(self) -> float:
        mean = self.total / self.count
        return mean if self.metric == "accuracy" else math.exp(min(mean, 700.0))

    def __str__(self) -> str:
        return f"accuracy {self.value:.1%}" if self.metric == "accuracy" else f"perplexity {self.value:.2f}"


class Task(ABC):
    """One instance reads one data source. Subclasses say which fields they read and what they make of a row."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """What every row must have."""

    def __init__(self, source: DataSource | None = None) -> None:
        self.source = source or DataSource()

    def rows(self, split: Split) -> Sequence[Row]:
        return read_rows(self.source, split, fields=self.fields, task=self.name)

    def check(self) -> None:
        """Read every split once, so that what is wrong with the data is said before a model is loaded."""
        for split in SPLITS:
            self.rows(split)

    @abstractmethod
    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        """What to train on: labels mark the tokens whose loss counts."""

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


@dataclass(frozen=True)
class Choice:
    """A prompt and its possible continuations, each complete with the space or newline that joins it."""

    prompt: str
    options: tuple[str, ...]
    answer: int


class ChoiceTask(Task):
    """Options are ranked by their log-likelihood a token; training raises the right one's."""

    @abstractmethod
    def choice(self, row: Row) -> Choice:
        """The prompt, the options and which is right."""

    def check(self) -> None:
        for split in SPLITS:
            self.choices(split)

    def choices(self, split: Split) -> list[Choice]:
        return [self.choice(row) for row in self.rows(split)]

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
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
        choices = self.choices(split)[:num_examples]
        share = evaluator.share(len(choices))
        mine = [choices[index] for index, _ in share]
        sequences = [
            encode_answer(tokenizer, choice.prompt, option, max_length=max_length)
            for choice in mine
            for option in choice.options
        ]
        scores = iter([total / count for total, count in evaluator.log_likelihoods(sequences)])
        num_right = 0
        for choice, (_, weight) in zip(mine, share, strict=True):
            ranked = [next(scores) for _ in choice.options]
            num_right += weight * (max(range(len(ranked)), key=ranked.__getitem__) == choice.answer)
        return Score("accuracy", num_right, sum(weight for _, weight in share))

    def answer_index(self, row: Row, values: dict[object, int], *, field: str = "label") -> int:
        """Which option a label means; `values` maps every spelling that occurs in public copies of the data."""
        label = row[field]
        if not isinstance(label, (str, int)) or label not in values:
            known = ", ".join(repr(value) for value in values)
            raise TaskError(f"task {self.name}: {field} must be one of {known}, got {label!r} in the row {row}")
        return values[label]


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
        return Score(
            "perplexity", nats, sum(weight * count for (_, count), (_, weight) in zip(results, share, strict=True))
        )
