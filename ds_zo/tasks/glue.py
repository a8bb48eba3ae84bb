"""GLUE tasks. SST-2 has the MeZO paper's prompt. The paper runs the other tasks on masked models only; their prompts
are this package's own."""

from __future__ import annotations

from ds_zo.tasks import metrics
from ds_zo.tasks.base import Choice, ChoiceTask, LabelledTask
from ds_zo.tasks.data import Row
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.hub import HubName

GLUE = "nyu-mll/glue"
NO_YES: dict[object, int] = {0: 0, 1: 1, "0": 0, "1": 1}
PARAPHRASE = (metrics.accuracy, metrics.f1)
"""F1 is that of label 1, "the sentences have the same meaning", which is the rarer label."""


class SST2(ChoiceTask):
    """Sentiment of a sentence from a film review."""

    name = "sst2"
    fields = ("sentence", "label")
    text_fields = ("sentence",)
    hub = HubName(GLUE, "sst2")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {**NO_YES, "negative": 0, "positive": 1})
        return Choice(f"{row['sentence'].strip()} It was", (" terrible", " great"), answer)


class CoLA(ChoiceTask):
    """Would a native speaker say this sentence?"""

    name = "cola"
    fields = ("sentence", "label")
    text_fields = ("sentence",)
    hub = HubName(GLUE, "cola")
    measures = (metrics.matthews, metrics.accuracy)

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {**NO_YES, "unacceptable": 0, "acceptable": 1})
        return Choice(f"{row['sentence'].strip()}\nIs this sentence good English? Yes or No?\n", ("No", "Yes"), answer)


class MRPC(ChoiceTask):
    """Do two sentences from the news say the same?"""

    name = "mrpc"
    fields = ("sentence1", "sentence2", "label")
    text_fields = ("sentence1", "sentence2")
    hub = HubName(GLUE, "mrpc")
    measures = PARAPHRASE

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {**NO_YES, "not_equivalent": 0, "equivalent": 1})
        prompt = f"{row['sentence1']}\n{row['sentence2']}\nDo these two sentences mean the same? Yes or No?\n"
        return Choice(prompt, ("No", "Yes"), answer)


class QQP(ChoiceTask):
    """Do two questions of a forum's users ask for the same?"""

    name = "qqp"
    fields = ("question1", "question2", "label")
    text_fields = ("question1", "question2")
    hub = HubName(GLUE, "qqp")
    measures = PARAPHRASE

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {**NO_YES, "not_duplicate": 0, "duplicate": 1})
        prompt = f"{row['question1']}\n{row['question2']}\nDo these two questions ask the same? Yes or No?\n"
        return Choice(prompt, ("No", "Yes"), answer)


class QNLI(ChoiceTask):
    """Does a sentence hold the answer to a question?"""

    name = "qnli"
    fields = ("question", "sentence", "label")
    text_fields = ("question", "sentence")
    hub = HubName(GLUE, "qnli")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {**NO_YES, "entailment": 0, "not_entailment": 1})
        prompt = f'{row["sentence"]}\nDoes this answer the question "{row["question"]}" Yes or No?\n'
        return Choice(prompt, ("Yes", "No"), answer)


class MNLI(ChoiceTask):
    """Does the premise entail the hypothesis, leave it open, or exclude it?"""

    name = "mnli"
    fields = ("premise", "hypothesis", "label")
    text_fields = ("premise", "hypothesis")
    hub = HubName(GLUE, "mnli", test="validation_matched")
    num_labels = 3

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, 2: 2, "entailment": 0, "neutral": 1, "contradiction": 2})
        prompt = f'Suppose {row["premise"]} Can we infer that "{row["hypothesis"]}"? Yes, No, or Maybe?\n'
        return Choice(prompt, ("Yes", "Maybe", "No"), answer)


class STSB(LabelledTask):
    """How alike are two sentences, from 0 to 5? A number: learned by regression, so a classification head is needed."""

    name = "stsb"
    fields = ("sentence1", "sentence2", "label")
    text_fields = ("sentence1", "sentence2")
    hub = HubName(GLUE, "stsb")
    num_labels = 1
    measures = (metrics.pearson, metrics.spearman)

    def label(self, row: Row) -> float:
        try:
            found = float(row["label"])
        except (TypeError, ValueError):
            found = float("nan")
        if not 0 <= found <= 5:  # GLUE's test split has -1 in place of its unpublished labels
            raise TaskError(f"task stsb: label must be a number from 0 to 5, got {row['label']!r} in the row {row}")
        return found
