"""Classification and multiple choice, with the prompts of the MeZO paper's appendix."""

from __future__ import annotations

from ds_zo.tasks.base import Choice, ChoiceTask
from ds_zo.tasks.data import Row


class SST2(ChoiceTask):
    """Sentiment of a sentence from a film review."""

    name = "sst2"
    fields = ("sentence", "label")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, "0": 0, "1": 1, "negative": 0, "positive": 1})
        return Choice(f"{row['sentence'].strip()} It was", (" terrible", " great"), answer)


class RTE(ChoiceTask):
    """Does the premise entail the hypothesis?"""

    name = "rte"
    fields = ("premise", "hypothesis", "label")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, "entailment": 0, "not_entailment": 1})
        prompt = f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'
        return Choice(prompt, ("Yes", "No"), answer)


class BoolQ(ChoiceTask):
    """A yes/no question about a passage; SuperGLUE's "Title -- " before the passage is dropped."""

    name = "boolq"
    fields = ("question", "passage", "label")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {False: 0, True: 1, "False": 0, "True": 1, "false": 0, "true": 1})
        passage = row["passage"].split(" -- ", 1)[-1]
        question = row["question"].strip()
        question = question[:1].upper() + question[1:].rstrip("?") + "?"
        return Choice(f"{passage} {question}\n", ("No", "Yes"), answer)


class COPA(ChoiceTask):
    """Which of two sentences is the cause, or the effect, of the premise?"""

    name = "copa"
    fields = ("premise", "choice1", "choice2", "question", "label")

    def choice(self, row: Row) -> Choice:
        answer = self.answer_index(row, {0: 0, 1: 1, "0": 0, "1": 1})
        effect = self.answer_index(row, {"cause": 0, "effect": 1}, field="question")
        premise = row["premise"].strip().removesuffix(".") + (" so" if effect else " because")
        return Choice(premise, (_continuation(row["choice1"]), _continuation(row["choice2"])), answer)


def _continuation(sentence: str) -> str:
    """A sentence as the second half of another: no capital, unless it is the pronoun."""
    sentence = sentence.strip()
    first = sentence.split(" ", 1)[0]
    return " " + (sentence if first in ("I", "I'm", "I'd", "I've", "I'll") else sentence[:1].lower() + sentence[1:])
