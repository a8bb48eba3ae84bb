"""Two gloo ranks on one GPU: pinned shards, three streams and gathers, with the bits of a store that is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import assert_same_bits
from tests.helpers.ranks import job
from tests.helpers.zo_rank_cases import BF16, STORAGES, alone, filled, resume, save, storages

pytestmark = pytest.mark.gpu


def test_a_sharded_store_changes_no_bit_on_cuda() -> None:
    first, second = job(storages, 2, list(STORAGES))
    for case, mine in first.items():
        assert mine["digests"] == second[case]["digests"], case
        name, _, stage = case.rpartition(" ")
        if stage == "3":
            assert mine["digests"] == first[f"{name} 0"]["digests"], case
            assert mine["bytes_up"] < first[f"{name} 0"]["bytes_up"], case


def test_blocks_that_come_to_stay_on_the_device() -> None:
    for mine in job(filled, 2):
        assert mine["0"]["digests"] == mine["3"]["digests"]
        assert mine["3"]["streamed"] == 0 and mine["3"]["host_nbytes"] == 0


def test_what_one_rank_does_alone_on_cuda() -> None:
    for mine in job(alone, 2):
        assert_same_bits(mine["0"]["state"], mine["3"]["state"])
        assert mine["0"]["seen"] == mine["3"]["seen"]


def test_checkpoints_of_two_ranks_resume_on_one_and_two_on_cuda(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"whole": {"stage": 0, **BF16}, "sharded": {"stage": 3, **BF16}}
    saved = job(save, 2, tmp_path, settings)[0]
    for num_ranks in (1, 2):
        for mine in job(resume, num_ranks, [tmp_path], settings):
            for case, found in mine.items():
                before = saved[case.split(", ")[1]]
                for name, value in before.items():
                    same = torch.equal(value, found["bits"][name]) if isinstance(value, torch.Tensor) else True
                    assert same, (case, name)
                assert found["next"] == saved[case.split(", ")[1] + " next"], case
