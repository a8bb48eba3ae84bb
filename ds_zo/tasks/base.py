"""Base classes of tasks. A task has rows, turns them into training sequences and scores a model on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ds_zo.tasks import metrics
from ds_zo.tasks.data import SPLITS, DataSource, Row, Split, read_rows
from ds_zo.tasks.encoding import Encoded, Side, collate, encode_answer
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.hub import HubName
from ds_zo.tasks.score import Score
from ds_zo.tasks.scoring import Evaluator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Choice", "ChoiceTask", "LabelledTask", "LanguageTask", "Score", "Task"]


class Task(ABC):
    """A task on one data source. Subclasses define the fields of a row and the sequences made from it."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """Fields that every row must have."""
    hub: ClassVar[HubName | None] = None
    """The task's dataset on the Hub; None if it has no public copy."""

    def __init__(self, source: DataSource | None = None) -> None:
        self.source = source or DataSource()

    def rows(self, split: Split) -> Sequence[Row]:
        return read_rows(self.source, split, fields=self.fields, task=self.name, hub=self.hub)

    def check(self) -> None:
        """Reads every split once, so that errors in the data are reported before a model is loaded."""
        for row in (row for split in SPLITS for row in self.rows(split)):
            try:
                self.check_row(row)
            except (AttributeError, TypeError) as error:
                if all(isinstance(value, str) for name, value in row.items() if name != "label"):
                    raise
                raise TaskError(f"task {self.name}: texts must be strings, got the row {row} ({error})") from error

    def check_row(self, row: Row) -> None:  # noqa: B027
        """Raises for a row that the task cannot use. A TypeError or AttributeError means that a text is no string."""

    def digest(self) -> str | None:
        """Tells apart the rows of different machines; None for a task whose rows are the same everywhere."""
        return None

    @abstractmethod
    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Any]:
        """The training sequences of a split, from which `collate` makes batches."""

    def collate(
        self, sequences: Sequence[Any], *, pad_token_id: int, side: Side = "right", multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        """A padded batch: the model's keyword arguments, `labels` included."""
        return collate(sequences, pad_token_id=pad_token_id, side=side, multiple=multiple)

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
        """This rank's part of the score on the first `num_examples` rows (None: all) of a split."""


class LabelledTask(Task):
    """A task whose rows have one right label each: a number from 0 to `num_labels` - 1, or any number if `num_labels`
    is 1."""

    num_labels: ClassVar[int] = 2
    text_fields: ClassVar[tuple[str, ...]] = ()
    """The one or two fields that a classification head reads. Empty: the task needs a prompt, or overrides `texts`."""
    measures: ClassVar[tuple[metrics.Measure, ...]] = (metrics.accuracy,)
    """The task's metrics. Runs are compared by the first."""

    @abstractmethod
    def label(self, row: Row) -> float:
        """The right label of a row."""

    def texts(self, row: Row) -> tuple[str, ...]:
        return tuple(row[field] for field in self.text_fields)

    def check_row(self, row: Row) -> None:
        self.label(row)

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        labels = [self.label(row) for row in rows]
        return {measure.__name__: measure(predictions, labels) for measure in self.measures}

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Any]:
        raise NotImplementedError(f"task {self.name} has no prompt: HeadTask runs it")

    def predict(
        self, evaluator: Evaluator, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, max_length: int
    ) -> list[float]:
        """The label that the model predicts for each row."""
        raise NotImplementedError(f"task {self.name} has no prompt: HeadTask runs it")

    def evaluate(
        self,
        evaluator: Evaluator,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        num_examples: int | None = None,
    ) -> Score:
        """The score's sums are the predictions of all rows, with zeros for the rows of other ranks. Metrics that are
        not means (F1 by question, correlations) are thus computed once, over the whole split."""
        rows = list(self.rows(split))[:num_examples]
        share = evaluator.share(len(rows))
        predicted = self.predict(evaluator, [rows[index] for index, _ in share], tokenizer, max_length=max_length)
        mine = [0.0] * len(rows)
        for (index, weight), prediction in zip(share, predicted, strict=True):
            mine[index] += weight * prediction
        return Score(self.measures[0].__name__, tuple(mine), lambda whole: self.measure(whole, rows))

    def answer_index(self, row: Row, values: dict[object, int], *, field: str = "label") -> int:
        """The index of the option that the row's label denotes. `values` maps every spelling of a label in public
        copies of the data to its index."""
        label = row[field]
        if not isinstance(label, (str, int)) or label not in values:
            known = ", ".join(repr(value) for value in values)
            raise TaskError(f"task {self.name}: {field} must be one of {known}, got {label!r} in the row {row}")
        return values[label]


@dataclass(frozen=True)
class Choice:
    """A prompt and its possible continuations. Each option begins with the space that joins it, if there is one."""

    prompt: str
    options: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if not self.prompt or not all(self.options) or not 0 <= self.answer < len(self.options):
            raise TaskError(
                f"a choice has a prompt, options that are not empty, and an answer that is the index of one; got {self}"
            )


class ChoiceTask(LabelledTask):
    """A task that ranks options by their mean log-likelihood per token. Training raises that of the right option."""

    @abstractmethod
    def choice(self, row: Row) -> Choice:
        """The prompt, the options and the index of the right option."""

    def label(self, row: Row) -> int:
        return self.choice(row).answer

    def choices(self, split: Split) -> list[Choice]:
        return [self.choice(row) for row in self.rows(split)]

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Any]:
        return [
            encode_answer(tokenizer, choice.prompt, choice.options[choice.answer], max_length=max_length)
            for choice in self.choices(split)
        ]

    def predict(
        self, evaluator: Evaluator, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, max_length: int
    ) -> list[float]:
        encoded = [self.encode_options(self.choice(row), tokenizer, max_length=max_length) for row in rows]
        found = evaluator.log_likelihoods([option for options in encoded for option in options])
        return best_options(found, [len(options) for options in encoded])

    @staticmethod
    def encode_options(choice: Choice, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        """The prompt with each option."""
        return [encode_answer(tokenizer, choice.prompt, option, max_length=max_length) for option in choice.options]


def best_options(log_likelihoods: Iterable[tuple[float, int]], num_options: Sequence[int]) -> list[float]:
    """The index of the option with the highest mean log-likelihood per token, for each choice. `log_likelihoods`: the
    sum and the number of tokens of every option of every choice."""
    means = iter([total / count for total, count in log_likelihoods])
    ranked = [list(islice(means, num)) for num in num_options]
    return [max(range(len(found)), key=found.__getitem__) for found in ranked]


class LanguageTask(Task):
    """Language modelling: trained by the model's own loss, scored by the perplexity of the labelled tokens."""

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
