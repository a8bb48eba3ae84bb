"""LOMO on 1, 2 and 4 gloo ranks: the same weights on all, bit for bit, and those of one rank with the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lomo_rank_cases import CASES, apart, resume, runs, save, uneven, wire, write_gathered
from tests.helpers.ranks import job
from tests.helpers.tile_number_cases import chosen_by_ranks
from tests.helpers.weights import assert_close

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[int, list[Any]]:
    """On four ranks what more ranks could change: sums of gradients, norms and shards. Clipping makes the one pass
    after it has measured."""
    some = ["clipped", "adalomo", "streamed"]
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
        assert mine["samples_at_once"] == samples_of(case, num_ranks)
        if case not in ("bf16", "fp16", "streamed bf16"):  # there gradients are rounded before they are averaged
            assert_close(mine["weights"], alone["weights"])
            assert mine["norm"] == (alone["norm"] and pytest.approx(alone["norm"], rel=1e-5)), case


def samples_of(case: str, num_ranks: int) -> int:
    """Samples in a call of a block, of the four that all ranks have together."""
    return 4 // num_ranks // (2 if "tiles" in case else 1)


def test_one_bucket_is_filled_while_one_is_on_its_way(found: dict[int, list[Any]]) -> None:
    for case, mine in found[2][0].items():
        assert mine["max_live_buckets"] == 2 if "streamed" not in case else mine["max_live_buckets"] <= 2, case
        if "streamed" not in case and case != "poisoned":
            assert_overlapped(mine["events"])


def assert_overlapped(events: list[tuple[str, int]]) -> None:
    """Between a bucket's sending and its taking, gradients of another came; but for the last, which nothing follows
    (but those around sharded blocks, which wait for the end)."""
    last = max(i for i, (what, _) in enumerate(events) if what == "came")
    sent = [(i, b) for i, (what, b) in enumerate(events[:last]) if what == "sent" and events[i - 1] == ("came", b)]
    assert len(sent) >= 4
    for i, bucket in sent[:-1]:
        if ("taken", bucket) in events[i:]:
            meanwhile = events[i : events.index(("taken", bucket), i)]
            assert any(what == "came" and other != bucket for what, other in meanwhile), (bucket, events)


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
    """And a mark for each parameter, rounded up for each bucket to equal shards that begin aligned. Where devices have
    shards of blocks, these are gathered once in the forward pass and once in each backward pass, and reduce-scattered
    in each; whole gradients are reduced only where the rule needs them."""
    ranks = job(wire, 2)
    for case, counts in ranks[0].items():
        assert counts["digest"] == ranks[1][case]["digest"], f"{case}: a short last batch parted the ranks"
    for counted in ranks:
        for case, counts in counted.items():
            if case.startswith("sharded"):
                check_sharded_wire(case, counts)
                continue
            num_passes = 1 if case == "one pass" else 2
            over = counts["reduced"] - num_passes * counts["gradient"]
            norm = 8 if num_passes == 2 else 0
            assert counts["by_all_reduce"] == counts["reduced"] / num_passes + norm, case
            assert 0 <= over <= num_passes * (4 * counts["num_parameters"] + 2 * 16 * counts["num_buckets"]), case


def check_sharded_wire(case: str, counts: dict[str, int]) -> None:
    num_ranks, num_passes = 2, 1 if "one pass" in case else 2
    assert counts["gathered"] == (1 + num_passes) * counts["kept"] * (num_ranks - 1), case
    in_blocks, around = counts["in_blocks"], counts["gradient"] - counts["in_blocks"]
    scattered = {"sharded one pass": in_blocks, "sharded clipped": 2 * in_blocks + around}.get(case, in_blocks + around)
    reduced = around if "adalomo" not in case else in_blocks + around
    slack = num_passes * num_ranks * (20 * counts["num_parameters"] + 32 * counts["num_buckets"])
    padding = num_ranks * counts["kept"] - in_blocks  # of parameters to 256 elements, as they are stored
    assert 0 <= counts["reduced"] - counts["by_all_reduce"] - scattered <= slack + num_passes * padding, case
    assert 0 <= counts["by_all_reduce"] - reduced <= slack, case


def test_checkpoints_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Every rank has the same batch: an average of equals is exact, so any number of ranks makes the same steps."""
    folders = {n: tmp_path / str(n) for n in (1, 4)}
    saved = {n: job(save, n, folder)[0] for n, folder in folders.items()}
    for num_ranks, of in {1: [4], 2: [4], 4: [1]}.items():
        for resumed in job(resume, num_ranks, [folders[n] for n in of]):
            for n in of:
                for case, weights in saved[n].items():
                    assert_close(resumed[f"{n} {case}"], weights)


def test_ranks_agree_on_the_number_of_tiles() -> None:
    """The batch of one of them needs no tiles."""
    first, second = job(chosen_by_ranks, 2)
    assert first == second
    assert first["number"] == 4 and first["sizes"] == [2] * 8


def test_ranks_that_do_different_things_with_shards_are_told() -> None:
    for rank, answer in enumerate(job(apart, 2)):
        assert f"rank {1 - rank} did something else" in answer["message"], answer
        assert "every rank makes the same calls" in answer["message"] and "zero_optimization.stage" in answer["message"]


# Sharded: ZeRO stage 3, where the ranks of a machine keep the streamed blocks together


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_blocks_change_no_bit(num_ranks: int, found: dict[int, list[Any]]) -> None:
    """Whether ranks have shards of them in host memory or, without `offload_param`, on their devices. (There,
    squares of gradients, and four ranks' gradients, are added in another order.)"""
    cases = [case for case in found[num_ranks][0] if case != "bare"]
    shards = job(runs, num_ranks, cases, 3)
    for whole, sharded in zip(found[num_ranks], shards, strict=True):
        for case in cases:
            mine = sharded[case]
            assert mine["digests"] == shards[0][case]["digests"], case
            assert mine["norm"] == (whole[case]["norm"] and pytest.approx(whole[case]["norm"], rel=1e-6)), case
            assert mine["skipped"] == whole[case]["skipped"]
            assert mine["samples_at_once"] == samples_of(case, num_ranks)
            assert 0 < mine["kept"] * num_ranks <= mine["blocks"] + 2 * 256 * num_ranks, case
            if "streamed" in case:
                assert whole[case]["norm"] == mine["norm"], case
            if "streamed" in case or (num_ranks == 2 and case in ("one pass", "grouped")):
                assert whole[case]["digests"] == mine["digests"], case
            else:
                atol = 0.02 if case in ("bf16", "fp16") else 1e-6
                assert_close(mine["weights"], whole[case]["weights"], atol=atol)
            if case in ("one pass", "clipped"):
                assert_overlapped(mine["events"])


def test_ranks_that_share_blocks_may_lack_gradients_that_others_have() -> None:
    whole, sharded = job(uneven, 2, 0), job(uneven, 2, 3)
    for ours, theirs in zip(whole, sharded, strict=True):
        for case in ours:
            if case == "resident":  # clipped by a norm whose squares are added by shards: see docs/exactness.md
                assert_close(ours[case]["weights"], theirs[case]["weights"])
                continue
            assert ours[case]["digests"] == theirs[case]["digests"], case
    assert sharded[0]["resident"]["digests"] == sharded[1]["resident"]["digests"]


def test_all_ranks_take_over_a_gathered_weight_on_the_device() -> None:
    first, second = job(write_gathered, 2)
    torch.testing.assert_close(first["written"], torch.ones_like(first["written"]), atol=0.1, rtol=0)
    assert first["digest"] == second["digest"]
