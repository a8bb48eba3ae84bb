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
