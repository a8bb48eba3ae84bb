"""LOMO on 1, 2 and 4 gloo ranks: the same weights on all, bit for bit, and those of one rank with the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lomo_rank_cases import CASES, death, resume, runs, save, uneven, wire, with_stage
from zo_rank_cases import run_job


def job(work: Any, num_ranks: int, *args: Any) -> list[Any]:
    found = run_job(work, num_ranks, *args)
    for rank, answer in enumerate(found):
        assert isinstance(answer, dict), f"rank {rank}: {answer}"
    return found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, atol: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=1e-6, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def found() -> dict[int, list[Any]]:
    some = ["one pass", "clipped", "adalomo", "streamed"]
    return {1: job(runs, 1, list(CASES)), 2: job(runs, 2, list(CASES)), 4: job(runs, 4, some)}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_stay_identical_after_every_step(num_ranks: int, found: dict[int, list[Any]]) -> None:
    first, *others = found[num_ranks]
    for case, mine in first.items():
        assert len(set(mine["digests"])) == (2 if case == "poisoned" else 3), case
        for other in others:
            assert mine["digests"] == other[case]["digests"], case
            assert (mine["norm"], mine["skipped"]) == (other[case]["norm"], other[case]["skipped"]), case


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_make_the_run_of_one(num_ranks: int, found: dict[int, list[Any]]) -> None:
    for case, mine in found[num_ranks][0].items():
        alone = found[1][0][case]
        assert mine["skipped"] == alone["skipped"] == (case == "poisoned")
        if case not in ("bf16", "fp16", "streamed bf16"):  # there gradients are rounded before they are averaged
            assert_close(mine["weights"], alone["weights"])
            assert mine["norm"] == (alone["norm"] and pytest.approx(alone["norm"], rel=1e-5)), case


def test_one_bucket_is_filled_while_one_is_on_its_way(found: dict[int, list[Any]]) -> None:
    for case, mine in found[2][0].items():
        assert mine["most_alive"] == 2 if "streamed" not in case else mine["most_alive"] <= 2, case


def test_ranks_may_lack_gradients_that_others_have() -> None:
    """Skipped, repeated and reordered blocks, parameters that one rank or none reaches."""
    [alone], pair = job(uneven, 1, None), job(uneven, 2, None)
    for case, one in alone.items():
        assert pair[0][case]["digests"] == pair[1][case]["digests"], case
        assert len(set(pair[0][case]["digests"])) == 4
        assert_close(pair[0][case]["weights"], one["weights"])
        assert torch.equal(one["weights"]["never"], torch.ones(3)) and torch.equal(
            pair[0][case]["weights"]["never"], torch.ones(3)
        )


def test_one_gradient_is_reduced_a_pass() -> None:
    """And a mark for each parameter, rounded up for each bucket to equal pieces that begin aligned."""
    for counted in job(wire, 2):
        for case, counts in counted.items():
            num_passes = 1 if case == "one pass" else 2
            over = counts["reduced"] - num_passes * counts["gradient"]
            norm = 8 if num_passes == 2 else 0
            assert counts["by_all_reduce"] == counts["reduced"] / num_passes + norm, case
            assert 0 <= over <= num_passes * (4 * counts["num_parameters"] + 2 * 16 * counts["num_buckets"]), case


def test_checkpoints_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    folders = {n: tmp_path / str(n) for n in (1, 2)}
    saved = {n: job(save, n, folder)[0] for n, folder in folders.items()}
    for num_ranks in (1, 2):
        for resumed in job(resume, num_ranks, list(folders.values())):
            for n in folders:
                for case, weights in saved[n].items():
                    assert_close(resumed[f"{n} {case}"], weights)


def test_a_rank_that_dies_ends_the_others() -> None:
    for config in (CASES["clipped"], with_stage(CASES["streamed"], 3)):
        survivor, dead = run_job(death, 2, config, wait=5)
        assert dead is None and isinstance(survivor, dict), survivor
        assert "died or stopped" in survivor["message"] and "load_checkpoint" in survivor["message"]


# Sharded: ZeRO stage 3, where the ranks of a machine keep the streamed blocks together


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_blocks_change_no_bit(num_ranks: int, found: dict[int, list[Any]]) -> None:
    cases = [case for case in found[num_ranks][0] if "streamed" in case]
    for whole, sharded in zip(found[num_ranks], job(runs, num_ranks, cases, 3), strict=True):
        for case in cases:
            assert whole[case]["digests"] == sharded[case]["digests"], case
            assert whole[case]["norm"] == sharded[case]["norm"], case
            assert 0 < sharded[case]["host_nbytes"] * num_ranks <= whole[case]["host_nbytes"] + 2 * 256 * num_ranks


def test_ranks_that_share_blocks_may_lack_gradients_that_others_have() -> None:
    whole, sharded = job(uneven, 2, 0), job(uneven, 2, 3)
    for ours, theirs in zip(whole, sharded, strict=True):
        for case in ours:
            assert ours[case]["digests"] == theirs[case]["digests"], case
