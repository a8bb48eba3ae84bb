"""The README's example of a task of one's own works as printed, and what it promises about data holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import ds_zo.tasks
from ds_zo.tasks import TASKS, Choice, ChoiceTask, DataSource, TaskError, make_task, register
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.encoding import IGNORED

README = Path(ds_zo.tasks.__file__).parent / "README.md"


@pytest.fixture
def weather(tmp_path: Path) -> Iterator[Path]:
    """Runs the example; gives a folder of data for it."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    try:
        exec(compile(code, "weather.py", "exec"), {"__name__": "weather"})
        for split in ("train", "dev", "test"):
            rows = [{"report": "It rained.", "label": "foul"}, {"report": "Sun.", "label": 1, "more": 0}]
            (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield tmp_path
    finally:
        TASKS.pop("weather", None)


def test_the_example_trains_on_its_label_words(weather: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    first, _ = make_task("weather", DataSource(folder=weather)).sequences("train", tokenizer, max_length=64)
    assert tokenizer.decode(first.input_ids) == "It rained. The day was foul"
    assert tokenizer.decode([token for token in first.labels if token != IGNORED]) == " foul"
    head = make_task("weather", DataSource(folder=weather), head="classifier")
    assert [s.label for s in head.sequences("train", tokenizer, max_length=64)] == [0, 1]


def test_a_wrong_field_is_reported_with_those_found(weather: Path) -> None:
    (weather / "dev.jsonl").write_text(json.dumps({"text": "Snow.", "label": 0}) + "\n")
    with pytest.raises(TaskError, match=r"row 1 of .*dev\.jsonl lacks report \(fields found: text, label\)"):
        make_task("weather", DataSource(folder=weather)).check()


@pytest.mark.parametrize("parts", [("", (" a", " b"), 0), ("It was", ("", " b"), 1), ("It was", (" a", " b"), 2)])
def test_a_choice_that_can_not_be_scored_is_told(parts: tuple[str, tuple[str, ...], int]) -> None:
    with pytest.raises(TaskError, match="a choice has a prompt, options that are not empty"):
        Choice(*parts)


def test_a_name_is_taken_once() -> None:
    class Another(ChoiceTask):
        name = "sst2"
        fields = ()

    with pytest.raises(TaskError, match="there is a task named 'sst2' already: SST2"):
        register(Another)


def test_the_readme_lists_every_task_and_its_fields() -> None:
    text = README.read_text(encoding="utf-8")
    for name, task in TASKS.items():
        if not task.__module__.startswith("ds_zo."):
            continue  # registered by another test of this process
        assert f"`{name}`" in text
        if name != "code_or_text":
            (line,) = [
                line
                for line in text.split("## A task")[0].split("| task | fields |")[1].splitlines()
                if f"`{name}`" in line
            ]
            assert all(re.search(rf"\b{field}\b", line.split("|")[2]) for field in task.fields), name
