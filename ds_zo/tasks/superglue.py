"""SuperGLUE tasks, with the prompts and answer words of the MeZO paper's appendix."""

from __future__ import annotations

from collections.abc import Sequence

from ds_zo.tasks import metrics
from ds_zo.tasks.base import Choice, ChoiceTask
from ds_zo.tasks.data import Row
from ds_zo.tasks.hub import HubName

SUPERGLUE = "aps/super_glue"
FALSE_TRUE: dict[object, int] = {False: 0, True: 1, "0": 0, "1": 1, "False": 0, "True": 1, "false": 0, "true": 1}
"""Labels of public copies. `datasets` has 0 and 1, which equal False and True; SuperGLUE's own files have JSON's false
and true."""


class RTE(ChoiceTask):
    """Does the premise entail the hypothesis?"""

    name = "rte"
    fields = ("premise", "hypothesis", "label")
    text_fields = ("premise", "hypothesis")
    hub = HubName(SUPERGLUE, "rte")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, "entailment": 0, "not_entailment": 1})
        prompt = f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'
        return Choice(prompt, ("Yes", "No"), answer)


class CB(ChoiceTask):
    """Does someone who says the premise hold the hypothesis to be true, false, or neither?"""

    name = "cb"
    fields = ("premise", "hypothesis", "label")
    text_fields = ("premise", "hypothesis")
    hub = HubName(SUPERGLUE, "cb")
    num_labels = 3
    measures = (metrics.accuracy, metrics.macro_f1)

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, 2: 2, "entailment": 0, "contradiction": 1, "neutral": 2})
        prompt = f'Suppose {row["premise"]} Can we infer that "{row["hypothesis"]}"? Yes, No, or Maybe?\n'
        return Choice(prompt, ("Yes", "No", "Maybe"), answer)


class BoolQ(ChoiceTask):
    """A yes/no question about a passage. SuperGLUE's "Title -- " before the passage is removed."""

    name = "boolq"
    fields = ("question", "passage", "label")
    text_fields = ("question", "passage")
    hub = HubName(SUPERGLUE, "boolq")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, FALSE_TRUE)
        passage = row["passage"].split(" -- ", 1)[-1]
        question = row["question"].strip()
        question = question[:1].upper() + question[1:].rstrip("?") + "?"
        return Choice(f"{passage} {question}\n", ("No", "Yes"), answer)


class WSC(ChoiceTask):
    """Does a pronoun refer to a certain noun?"""

    name = "wsc"
    fields = ("text", "span1_text", "span2_text", "label")
    hub = HubName(SUPERGLUE, "wsc.fixed")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, FALSE_TRUE)
        asked = f'does the pronoun "{row["span2_text"].lower()}" refer to {row["span1_text"]}?'
        return Choice(f"{row['text']}\nIn the previous sentence, {asked} Yes or No?\n", ("No", "Yes"), answer)

    def texts(self, row: Row) -> tuple[str, ...]:
        return (row["text"], f"{row['span2_text']}: {row['span1_text']}")


class WiC(ChoiceTask):
    """Does a word mean the same in two sentences?"""

    name = "wic"
    fields = ("word", "sentence1", "sentence2", "label")
    hub = HubName(SUPERGLUE, "wic")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, FALSE_TRUE)
        asked = f'Does the word "{row["word"]}" have the same meaning in these two sentences? Yes, No?'
        return Choice(f"{asked}\n{row['sentence1']}\n{row['sentence2']}\n", ("No", "Yes"), answer)

    def texts(self, row: Row) -> tuple[str, ...]:
        return (f"{row['word']}: {row['sentence1']}", row["sentence2"])


class MultiRC(ChoiceTask):
    """Is this one of the right answers to a question about a paragraph? Metrics are over all answers and by
    question."""

    name = "multirc"
    fields = ("paragraph", "question", "answer", "label")
    hub = HubName(SUPERGLUE, "multirc")
    measures = (metrics.f1, metrics.accuracy)

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, FALSE_TRUE)
        asked = f'Question: {row["question"]}\nI found this answer "{row["answer"]}". Is that correct? Yes or No?'
        return Choice(f"{row['paragraph']}\n{asked}\n", ("No", "Yes"), answer)

    def texts(self, row: Row) -> tuple[str, ...]:
        return (row["paragraph"], f"{row['question']} {row['answer']}")

    def measure(self, predictions: Sequence[float], rows: Sequence[Row]) -> dict[str, float]:
        labels = [self.label(row) for row in rows]
        questions = [(row["paragraph"], row["question"]) for row in rows]
        by_question, exact = metrics.grouped_f1(predictions, labels, questions)
        return {**super().measure(predictions, rows), "f1_by_question": by_question, "exact_match": exact}


class COPA(ChoiceTask):
    """Which of two sentences is the cause, or the effect, of the premise?"""

    name = "copa"
    fields = ("premise", "choice1", "choice2", "question", "label")
    hub = HubName(SUPERGLUE, "copa")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, "0": 0, "1": 1})
        effect = self.answer_index(row, {"cause": 0, "effect": 1}, field="question")
        premise = row["premise"].strip().removesuffix(".") + (" so" if effect else " because")
        return Choice(premise, (_continuation(row["choice1"]), _continuation(row["choice2"])), answer)


def _continuation(sentence: str) -> str:
    """A sentence as the second half of another: it begins in lower case, unless its first word is "I"."""
    sentence = sentence.strip()
    first = sentence.split(" ", 1)[0]
    return " " + (sentence if first in ("I", "I'm", "I'd", "I've", "I'll") else sentence[:1].lower() + sentence[1:])
