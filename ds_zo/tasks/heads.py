"""Labelled tasks for models with a classification head, which predict a label or a number from text without a
prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ds_zo.tasks.base import LabelledTask
from ds_zo.tasks.data import Row, Split
from ds_zo.tasks.encoding import Side, encode_texts, pad
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.scoring import Evaluator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Labelled:
    """One text, or pair of texts, and its label."""

    input_ids: list[int]
    token_type_ids: list[int] | None
    """For each token, which of two texts it belongs to; None for models without this input (BERT's family has it)."""
    label: float


class HeadTask(LabelledTask):
    """A task with the rows, labels and metrics of another, for models of `AutoModelForSequenceClassification` with
    `num_labels` outputs (one: regression by squared error)."""

    name = "head"
    fields = ()

    def __init__(self, task: LabelledTask) -> None:
        super().__init__(task.source)
        self.task = task
        self.name, self.num_labels, self.measures = task.name, task.num_labels, task.measures  # type: ignore[misc]

    def rows(self, split: Split) -> Sequence[Row]:
        return self.task.rows(split)

    def label(self, row: Row) -> float:
        return self.task.label(row)

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        return self.task.measure(predictions, rows)

    def check(self) -> None:
        self.task.check()
        if not self.task.texts(self.rows("train")[0]):
            raise TaskError(
                f"task {self.task.name} has no form for a classification head: its options are part of the text "
                f"(--head lm)"
            )
        super().check()

    def check_row(self, row: Row) -> None:
        "".join(self.task.texts(row))

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Labelled]:
        return [self.encode(tokenizer, row, max_length=max_length) for row in self.rows(split)]

    def encode(self, tokenizer: PreTrainedTokenizerBase, row: Row, *, max_length: int) -> Labelled:
        texts = self.task.texts(row)
        if tokenizer.sep_token_id is None:  # a decoder's tokenizer would join a pair without a separator
            return Labelled(encode_texts(tokenizer, texts, max_length=max_length), None, self.task.label(row))
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return Labelled(encoded["input_ids"], encoded.get("token_type_ids"), self.task.label(row))

    def collate(
        self, sequences: Sequence[Labelled], *, pad_token_id: int, side: Side = "right", multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        columns = {
            "input_ids": ([s.input_ids for s in sequences], pad_token_id),
            "attention_mask": ([[1] * len(s.input_ids) for s in sequences], 0),
        }
        if sequences[0].token_type_ids is not None:
            columns["token_type_ids"] = ([s.token_type_ids or [] for s in sequences], 0)
        dtype = torch.float32 if self.num_labels == 1 else torch.long
        return {
            **pad(columns, side=side, multiple=multiple),
            "labels": torch.tensor([s.label for s in sequences], dtype=dtype),
        }

    def predict(
        self, evaluator: Evaluator, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, max_length: int
    ) -> list[float]:
        encoded = [self.encode(tokenizer, row, max_length=max_length) for row in rows]
        predictions = [0.0] * len(rows)
        for indices in evaluator.batches([len(s.input_ids) for s in encoded]):
            batch = self.collate(
                [encoded[i] for i in indices], pad_token_id=evaluator.pad_token_id, side=evaluator.padding_side
            )
            del batch["labels"]
            logits = evaluator.logits(batch).float()
            answers = logits[:, 0] if self.num_labels == 1 else logits.argmax(dim=-1)
            for index, answer in zip(indices, answers.tolist(), strict=True):
                predictions[index] = answer
        return predictions
