"""Checkpoints of N ranks resume on M, N and M in 1, 2 and 4, with the host store whole on each rank or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import assert_same_bits
from tests.helpers.ranks import job, run_job
from tests.helpers.zo_rank_cases import BF16, resume, resume_in_window, save, save_in_window

SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"stage": 0, **BF16},
    "sharded": {"stage": 3, **BF16},
    "sharded async": {"stage": 3, **BF16},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[Any]]:
    """Folders by the number of ranks that wrote them."""
    root = tmp_path_factory.mktemp("saved")
    return {root / str(n): job(save, n, root / str(n), SETTINGS) for n in (1, 2, 4)}


def test_every_rank_had_the_same_bits(saved: dict[Path, list[Any]]) -> None:
    for found in saved.values():
        for mine in found:
            for name in SETTINGS:
                assert_same_bits(mine[name], found[0]["whole"])
                assert mine[f"{name} next"] == found[0]["whole next"]
            assert mine["loaded"] == "third", "a rank that does not write has to wait for the one that does"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_resumes_on(num_ranks: int, saved: dict[Path, list[Any]]) -> None:
    """With the bits that were saved, and then the step that the run before would have made. (A step's g is a mean over
    ranks of the same number, which two or four times over is exact.) Every pair of saving ranks, loading ranks, saved
    store and loading store, not every combination of the four."""
    settings = {name: SETTINGS[name] for name in ("whole", "sharded")}
    for mine in job(resume, num_ranks, list(saved), settings):
        assert len(mine) == len(saved) * len(settings)
        for case, found in mine.items():
            folder, kind, _ = case.split(", ")
            before = next(answers for path, answers in saved.items() if path.name == folder)[0]
            assert_same_bits(found["bits"], before[kind])
            assert found["next"] == before[f"{kind} next"], case


def test_another_number_of_ranks_begins_a_new_window(tmp_path: Path) -> None:
    """The sums of an unfinished window belong to the ranks that made them."""
    assert run_job(save_in_window, 2, tmp_path) == [True, True]
    for num_ranks, steps in ((1, [1, 1, 2, 2, 2, 3, 3]), (2, [2, 2, 2, 3, 3, 3, 4])):
        for found in job(resume_in_window, num_ranks, tmp_path):
            assert any(found["projected"]) is (num_ranks == 2)
            assert found["steps"] == steps


def test_one_file_of_weights_from_a_sharded_store(saved: dict[Path, list[Any]]) -> None:
    for folder in saved:
        files = [torch.load(folder / name / "model.bin") for name in SETTINGS]
        for other in files[1:]:
            assert_same_bits(files[0], other)
