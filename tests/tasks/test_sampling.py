"""Seeded subsets: which rows, how many, the same ones again; official splits from a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds_zo.tasks import DataSource, Draw, HubName, TaskError, make_task
from ds_zo.tasks.glue import SST2


def test_train_then_dev_of_one_permutation() -> None:
    rows = list(range(3000))
    order = np.random.RandomState(0).permutation(3000).tolist()
    train, dev = Draw().cut_train(rows)
    assert train == order[:1000] and dev == order[1000:1500]
    assert Draw().pick(list(range(872)), 1000) == np.random.RandomState(0).permutation(872).tolist()
    assert Draw(seed=1).cut_train(rows)[0] != train


@pytest.mark.parametrize(("num_rows", "expected"), [(400, (300, 100)), (250, (150, 100)), (40, (20, 20))])
def test_small_training_splits_keep_most_rows_for_training(num_rows: int, expected: tuple[int, int]) -> None:
    train, dev = Draw().cut_train(range(num_rows))
    assert (len(train), len(dev)) == expected
    assert not {*train} & {*dev}


def write(path: Path, prefix: str, num: int) -> None:
    path.write_text("".join(json.dumps({"sentence": f"{prefix}{i}", "label": i % 2}) + "\n" for i in range(num)))


def test_a_folder_with_the_suites_own_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", "t", 50)
    write(tmp_path / "validation.jsonl", "v", 30)
    task = make_task("sst2", DataSource(folder=tmp_path, draw=Draw(num_train=8, num_dev=4, num_test=5)))
    parts = {split: [row["sentence"] for row in task.rows(split)] for split in ("train", "dev", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 8, "dev": 4, "test": 5}
    assert all(name.startswith("t") for name in parts["train"] + parts["dev"])
    assert all(name.startswith("v") for name in parts["test"])
    assert not {*parts["train"]} & {*parts["dev"]}


def test_ready_splits_are_taken_whole_unless_a_draw_is_asked_for(tmp_path: Path) -> None:
    for split in ("train", "dev", "test"):
        write(tmp_path / f"{split}.jsonl", split, 30)
    assert len(make_task("sst2", DataSource(folder=tmp_path)).rows("train")) == 30
    drawn = make_task("sst2", DataSource(folder=tmp_path, draw=Draw(num_train=3))).rows("train")
    assert len(drawn) == 3 and drawn == make_task("sst2", DataSource(folder=tmp_path, draw=Draw(num_train=3))).rows(
        "train"
    )
    write(tmp_path / "test.jsonl", "test", 1200)
    for draw in (Draw(num_train=3), Draw(seed=1)):
        test = make_task("sst2", DataSource(folder=tmp_path, draw=draw)).rows("test")
        assert len(test) == 1200 and test[0]["sentence"] == "test0", "nobody asked for a part of this one"
    assert len(make_task("code_or_text", DataSource(draw=Draw(num_dev=6))).rows("dev")) == 6


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(TaskError, match="num_dev = 0"):
        Draw(num_dev=0)
    with pytest.raises(TaskError, match=r"seed of a draw.*got -1"):
        Draw(seed=-1)
    with pytest.raises(TaskError, match="text has no public copy"):
        make_task("text", DataSource(from_hub=True)).rows("train")
    with pytest.raises(TaskError, match="not both"):
        DataSource(folder=Path("a"), from_hub=True)


def test_official_splits_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reads a folder as it reads the Hub."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", "t", 20)
    write(tmp_path / "data" / "validation.jsonl", "v", 6)
    monkeypatch.setattr(SST2, "hub", HubName(str(tmp_path / "data")))
    task = make_task("sst2", DataSource(from_hub=True, draw=Draw(num_train=5)))
    assert [len(task.rows(split)) for split in ("train", "dev", "test")] == [5, 10, 6]
    assert {row["sentence"][0] for row in task.rows("test")} == {"v"}
    monkeypatch.setattr(SST2, "hub", HubName(str(tmp_path / "nowhere")))
    with pytest.raises(TaskError, match=r"sst2 could not be read from the Hub .*--data-dir"):
        task.rows("train")
