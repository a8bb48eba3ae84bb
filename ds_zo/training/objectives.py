"""The scores that `--objective` names. ZO raises them in place of lowering the loss."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_zo.tasks import ChoiceTask, Encoded, HeadTask, LabelledTask, Task
from ds_zo.tasks.base import best_options
from ds_zo.tasks.metrics import Measure, accuracy, f1, macro_f1
from ds_zo.tasks.scoring import AnswerBatch, alike
from ds_zo.training.data import TrainingBatches
from ds_zo.training.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = ("accuracy", "f1")
ScoreFunction = Callable[[Any, Any], Any]
"""A function of (outputs, batch), as `engine.zo_step` takes it."""


@dataclass(frozen=True)
class ScoredBatch:
    """A micro-batch and the function that scores the outputs of its forward."""

    inputs: dict[str, torch.Tensor]
    score: ScoreFunction
    num_positions: int | None = None
    """The number of last positions of which the score reads logits; None: of all positions."""


class Objective:
    """Makes scored micro-batches. This base class scores the task's own training batches."""

    def __init__(self, score: ScoreFunction) -> None:
        self._score = score

    def prepare(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> None:
        """Encodes what the batches need besides the training sequences. The base class needs nothing."""

    def batch_at(self, batches: TrainingBatches, position: int) -> ScoredBatch:
        """The micro-batch that begins at a position of the training order."""
        return ScoredBatch(batches.at(position), self._score)


def objective_of(args: argparse.Namespace, task: Task) -> Objective | None:
    """The objective that `--objective` names; None without the option."""
    name: str | None = args.objective
    if name is None:
        return None
    path, _, function = name.rpartition(":")
    if name not in METRICS and not path.endswith(".py"):
        raise UserError(f"an objective must be {', '.join(METRICS)} or FILE.py:function, got {name!r} (--objective)")
    if path:
        return Objective(_function_of(Path(path), function))
    if not isinstance(task, LabelledTask) or task.num_labels == 1:
        raise UserError(
            f"objective {name} needs a task with a set of labels, got {task.name}: name a function of outputs and "
            "batch, as FILE.py:function (--objective)"
        )
    measure = accuracy if name == "accuracy" else f1 if task.num_labels == 2 else macro_f1
    if isinstance(task, HeadTask):
        return Objective(_of_head(measure))
    assert isinstance(task, ChoiceTask)
    return OptionObjective(task, measure)


def _function_of(path: Path, name: str) -> ScoreFunction:
    if not path.is_file():
        raise UserError(f"looked for a Python file at {path}: not found (--objective)")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as for a script, so that it can import modules beside it
    try:
        functions = {key: value for key, value in runpy.run_path(str(path)).items() if callable(value)}
    except Exception as error:
        raise UserError(f"{path} raised {error!r} when it was imported (--objective)") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if name not in functions:
        found = ", ".join(sorted(key for key in functions if not key.startswith("_"))) or "none"
        raise UserError(f"looked for a function {name!r} in {path}, which has {found} (--objective)")
    found_function: ScoreFunction = functions[name]
    return found_function


def _of_head(measure: Measure) -> ScoreFunction:
    def score(outputs: Any, batch: Any) -> float:
        return measure(outputs.logits.argmax(dim=-1).tolist(), batch["labels"].tolist())

    return score


class OptionObjective(Objective):
    """Makes batches of prompts with all their options. The score compares the most likely options with the labels, as
    the task's evaluation does."""

    def __init__(self, task: ChoiceTask, measure: Measure) -> None:
        self._task = task
        self._measure = measure
        self._labels: list[float] = []
        """The index of the right option of each training example."""
        self._options: list[list[Encoded]] = []
        """Each training example's prompt with every option."""

    def prepare(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> None:
        for choice in self._task.choices("train"):
            self._labels.append(choice.answer)
            self._options.append(self._task.encode_options(choice, tokenizer, max_length=max_length))

    def batch_at(self, batches: TrainingBatches, position: int) -> ScoredBatch:
        score = OptionScore(
            [(self._options[i], self._labels[i]) for i in batches.indices(position)], self._measure, batches
        )
        return ScoredBatch(score.answers.inputs, score, score.answers.num_positions)


class OptionScore:
    """The score of one batch of prompts with all their options."""

    def __init__(
        self, examples: Sequence[tuple[list[Encoded], float]], measure: Measure, batches: TrainingBatches
    ) -> None:
        """`examples`: the options of each, and the index of the right one."""
        self._examples = examples
        self._measure = measure
        self._rows = [(index, group) for index, (options, _) in enumerate(examples) for group in alike(options)]
        """The example of each row of the batch, and its options that the row scores."""
        self.answers = AnswerBatch(
            [[examples[index][0][option] for option in group] for index, group in self._rows],
            pad_token_id=batches.pad_token_id,
            side=batches.side,
            multiple=batches.multiple,
        )

    def __call__(self, outputs: Any, batch: Any) -> float:
        return self._measure(*self._compared(outputs, range(len(self._rows))))

    def of_rows(self, outputs: Any, rows: Sequence[int]) -> float | list[float]:
        """The score of outputs whose rows are for these rows of the batch. Accuracy is returned for each row where each
        example is one."""
        best, labels = self._compared(outputs, rows)
        if self._measure is accuracy and len(best) == len(rows):
            return [float(b == label) for b, label in zip(best, labels, strict=True)]
        return self._measure(best, labels)

    def _compared(self, outputs: Any, rows: Sequence[int]) -> tuple[list[float], list[float]]:
        """The most likely option of each example in these rows, and the right one."""
        found = iter(self.answers.log_likelihoods(outputs.logits, rows=rows))
        likelihoods, counts, labels = [], [], []
        known: dict[int, tuple[float, int]] = {}
        before = -1
        for row in rows:
            index, group = self._rows[row]
            if known and (index != before or group[0] in known):
                break
            known |= {option: next(found) for option in group}
            before = index
            options, label = self._examples[index]
            if len(known) == len(options):
                likelihoods += [known[option] for option in range(len(options))]
                counts.append(len(options))
                labels.append(label)
                known = {}
        if known:
            raise ValueError(
                "the rows of a member must have all options of their examples, got a part of them: change num_members "
                "or the batch (optimizer.params.num_members)"
            )
        return best_options(likelihoods, counts), labels
