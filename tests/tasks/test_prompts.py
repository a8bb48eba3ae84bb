"""Each task's prompt, options and answer on hand-written rows."""

from __future__ import annotations

import pytest

from ds_zo.tasks import TASKS, ChoiceTask, TaskError, make_task

CASES = [
    (
        "sst2",
        {"sentence": "a quiet , moving film ", "label": 1},
        ["a quiet , moving film It was terrible", "a quiet , moving film It was great"],
        1,
    ),
    (
        "rte",
        {"premise": "It rained all day.", "hypothesis": "It was wet.", "label": "entailment"},
        [
            'It rained all day.\nDoes this mean that "It was wet." is true? Yes or No?\nYes',
            'It rained all day.\nDoes this mean that "It was wet." is true? Yes or No?\nNo',
        ],
        0,
    ),
    (
        "boolq",
        {"passage": "Oak -- Oaks are trees.", "question": "are oaks birds", "label": False},
        ["Oaks are trees. Are oaks birds?\nNo", "Oaks are trees. Are oaks birds?\nYes"],
        0,
    ),
    (
        "copa",
        {
            "premise": "The cup fell.",
            "choice1": "It broke.",
            "choice2": "I smiled.",
            "question": "effect",
            "label": 0,
        },
        ["The cup fell so it broke.", "The cup fell so I smiled."],
        0,
    ),
    (
        "copa",
        {
            "premise": "The cup fell.",
            "choice1": "The cat jumped.",
            "choice2": "It broke.",
            "question": "cause",
            "label": "1",
        },
        ["The cup fell because the cat jumped.", "The cup fell because it broke."],
        1,
    ),
    (
        "cb",
        {"premise": "They left early.", "hypothesis": "they stayed", "label": "contradiction"},
        [
            f'Suppose They left early. Can we infer that "they stayed"? Yes, No, or Maybe?\n{word}'
            for word in ("Yes", "No", "Maybe")
        ],
        1,
    ),
    (
        "wsc",
        {"text": "Ann thanked Sue because She had helped.", "span1_text": "Sue", "span2_text": "She", "label": True},
        [
            "Ann thanked Sue because She had helped.\n"
            f'In the previous sentence, does the pronoun "she" refer to Sue? Yes or No?\n{word}'
            for word in ("No", "Yes")
        ],
        1,
    ),
    (
        "wic",
        {"word": "bank", "sentence1": "The bank was green.", "sentence2": "The bank was shut.", "label": 0},
        [
            'Does the word "bank" have the same meaning in these two sentences? Yes, No?\n'
            f"The bank was green.\nThe bank was shut.\n{word}"
            for word in ("No", "Yes")
        ],
        0,
    ),
    (
        "multirc",
        {"paragraph": "Bo has a cat.", "question": "What has Bo?", "answer": "a cat", "idx": {"answer": 0}, "label": 1},
        [
            f'Bo has a cat.\nQuestion: What has Bo?\nI found this answer "a cat". Is that correct? Yes or No?\n{word}'
            for word in ("No", "Yes")
        ],
        1,
    ),
    (
        "cola",
        {"sentence": "Him slept.", "label": 0},
        [f"Him slept.\nIs this sentence good English? Yes or No?\n{word}" for word in ("No", "Yes")],
        0,
    ),
    (
        "mrpc",
        {"sentence1": "It fell.", "sentence2": "It dropped.", "label": "equivalent"},
        [f"It fell.\nIt dropped.\nDo these two sentences mean the same? Yes or No?\n{word}" for word in ("No", "Yes")],
        1,
    ),
    (
        "qqp",
        {"question1": "Why?", "question2": "How so?", "label": 1},
        [f"Why?\nHow so?\nDo these two questions ask the same? Yes or No?\n{word}" for word in ("No", "Yes")],
        1,
    ),
    (
        "qnli",
        {"question": "Who won?", "sentence": "It rained.", "label": "not_entailment"},
        [f'It rained.\nDoes this answer the question "Who won?" Yes or No?\n{word}' for word in ("Yes", "No")],
        1,
    ),
    (
        "mnli",
        {"premise": "A dog ran.", "hypothesis": "It was brown.", "label": 1},
        [
            f'Suppose A dog ran. Can we infer that "It was brown."? Yes, No, or Maybe?\n{word}'
            for word in ("Yes", "Maybe", "No")
        ],
        1,
    ),
    ("code_or_text", {"line": "x = 1", "label": "code"}, ["x = 1\nis_code = True", "x = 1\nis_code = False"], 0),
]


@pytest.mark.parametrize(("name", "row", "texts", "answer"), CASES)
def test_prompt_with_each_option(name: str, row: dict, texts: list[str], answer: int) -> None:
    task = make_task(name)
    assert isinstance(task, ChoiceTask)
    choice = task.choice(row)
    assert [choice.prompt + option for option in choice.options] == texts
    assert choice.answer == answer


def test_every_choice_task_has_a_case() -> None:
    assert {name for name, task in TASKS.items() if issubclass(task, ChoiceTask)} == {case[0] for case in CASES}


def test_unknown_label_names_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"rte: label must be one of .*'entailment'.*got 'maybe'"):
        make_task("rte").choice({"premise": "a", "hypothesis": "b", "label": "maybe"})  # type: ignore[attr-defined]


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"looked for a task named 'sst3'.*sst2"):
        make_task("sst3")
