"""Rows from files: splits, fields, and what is said when they are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_zo.tasks import DataSource, TaskError, make_task
from ds_zo.tasks.registry import Head


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_folder_gives_each_split_its_own_file(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [{"sentence": f"{split} é", "label": 0, "idx": 7}])
    task = make_task("SST2", DataSource(folder=tmp_path))
    assert [task.rows(split)[0]["sentence"] for split in ("train", "dev", "test")] == ["train é", "dev é", "test é"]


def test_one_file_is_cut_into_disjoint_complete_splits(tmp_path: Path) -> None:
    rows = [{"sentence": str(i), "label": 0} for i in range(50)]
    task = make_task("sst2", DataSource(file=write_jsonl(tmp_path / "all.jsonl", rows)))
    parts = [[row["sentence"] for row in task.rows(split)] for split in ("train", "dev", "test")]
    assert list(map(len, parts)) == [46, 2, 2]
    assert sorted([name for part in parts for name in part], key=int) == [str(i) for i in range(50)]


def test_wrong_field_is_reported_with_those_found(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [{"sentence": "a", "label": 0}, {"text": "b", "label": 1}])
    with pytest.raises(TaskError, match=r"row 2 of .*train\.jsonl lacks sentence \(fields found: text, label\)"):
        make_task("sst2", DataSource(folder=tmp_path)).rows("train")
    write_jsonl(tmp_path / "train.jsonl", [{"sentence": "a", "label": 0}, {"sentence": None, "label": 1}])
    with pytest.raises(TaskError, match=r"needs sentence, which is null in row 2 of .*train\.jsonl"):
        make_task("sst2", DataSource(folder=tmp_path)).rows("train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken\n", r"f\.jsonl:1 is not JSON"),
        ("\n[1]\n", r"f\.jsonl:2 is a list"),
        ("\n", "has no rows"),
        ('{"sentence": "caf\xe9", "label": 0}\n', r"files of rows are UTF-8; .*f\.jsonl:1 is not"),
        ("\xef\xbb\xbf[1]\n", r"f\.jsonl:1 is a list"),  # after the mark that Windows writes
    ],
)
def test_malformed_file(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "f.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(TaskError, match=message):
        make_task("sst2", DataSource(file=tmp_path / "f.jsonl")).rows("train")


def test_absent_files_say_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(TaskError, match=r"looked for the file .*train\.jsonl.*holds train\.json"):
        make_task("sst2", DataSource(folder=tmp_path)).rows("train")
    with pytest.raises(TaskError, match=r"looked for .*nowhere: not a folder"):
        make_task("sst2", DataSource(folder=tmp_path / "nowhere")).rows("train")
    with pytest.raises(TaskError, match=r"looked for the text file .*notes\.txt: not found"):
        make_task("text", DataSource(file=tmp_path / "notes.txt")).rows("train")
    with pytest.raises(TaskError, match=r"needs data.*--data-dir.*premise"):
        make_task("rte").rows("train")
    with pytest.raises(TaskError, match="not both"):
        DataSource(folder=tmp_path, file=tmp_path / "x.jsonl")
    with pytest.raises(TaskError, match="reads no data"):
        make_task("code_or_text", DataSource(folder=tmp_path))


def test_short_single_file_asks_for_a_folder(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "few.jsonl", [{"sentence": "a", "label": 0}] * 3)
    with pytest.raises(TaskError, match=r"at least 20 rows.*has 3"):
        make_task("sst2", DataSource(file=file)).rows("train")


def test_text_file_rows_are_paragraphs(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("\n\n".join(f"paragraph {i}\nline two" for i in range(20)))
    task = make_task("text", DataSource(file=file))
    assert task.rows("test") == [{"text": "paragraph 19\nline two"}]
    assert len(task.rows("train")) == 18


def test_a_text_file_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes("caf\xe9\n\n".encode("latin-1") * 20)
    with pytest.raises(TaskError, match=r"must be UTF-8, got .*notes\.txt: .*; convert it \(--data\)"):
        make_task("text", DataSource(file=file)).check()
    file.write_bytes(b"\xef\xbb\xbf" + b"first\n\n" * 20)  # after the mark that Windows writes
    assert make_task("text", DataSource(file=file)).rows("train")[0] == {"text": "first"}


@pytest.mark.parametrize(
    ("task", "head", "row"),
    [
        ("sst2", "lm", {"sentence": 5, "label": 0}),
        ("text", "lm", {"text": 5}),
        ("alpaca", "lm", {"instruction": "Add.", "output": 3}),
        ("alpaca", "lm", {"instruction": "Add.", "input": ["1"], "output": "3"}),
        ("rte", "classifier", {"premise": "a", "hypothesis": 5, "label": 0}),
    ],
)
def test_a_text_that_is_no_string_is_told(tmp_path: Path, task: str, head: Head, row: dict) -> None:
    file = write_jsonl(tmp_path / "all.jsonl", [row] * 20)
    with pytest.raises(TaskError, match=rf"task {task}: texts must be strings, got the row "):
        make_task(task, DataSource(file=file), head=head).check()


def test_an_error_in_the_code_of_a_task_is_shown_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "all.jsonl", [{"sentence": "a", "label": 0}] * 20)
    task = make_task("sst2", DataSource(file=file))
    monkeypatch.setattr(task, "choice", lambda row: row.missing)
    with pytest.raises(AttributeError, match="missing"):
        task.check()
