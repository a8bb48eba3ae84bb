"""ZO on 1, 2 and 4 gloo ranks: the same weights on all, bit for bit, and those of one rank with the same batch.

Bound against one rank: a loss of about 3.5 is rounded to 1e-6 of itself in each pass, which g divides by 2 zo_eps; a
weight moves by lr * g * z with |z| < 5, and later steps start from weights that differ by so much.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoint_runs import assert_same_bits
from tests.helpers.ranks import job, run_job
from tests.helpers.tiny_models import tiny_model
from tests.helpers.zo_rank_cases import (
    NUM_STEPS,
    STORAGES,
    WHOLE,
    alone,
    directions,
    failed_backward,
    from_folder,
    machines,
    members,
    objective,
    refusal,
    resumed_random_states,
    storages,
    trained_positions,
    uneven,
    wire,
)

pytestmark = pytest.mark.slow

LR, EPS = 1e-3, 1e-3
G_ERROR = 2 * 3.5e-6 / (2 * EPS)
BOUND = NUM_STEPS * LR * G_ERROR * 5 * 2


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)


@pytest.fixture(scope="module")
def stored() -> dict[int, list[Any]]:
    """On four ranks what more ranks could change: gathering two planes, and averaging (directions are divided among
    them below)."""
    names = {1: ["fp32", "two directions"], 2: list(STORAGES), 4: ["fp32", "bf16 split"]}
    return {num_ranks: job(storages, num_ranks, names[num_ranks]) for num_ranks in names}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_stay_identical_after_every_step(num_ranks: int, stored: dict[int, list[Any]]) -> None:
    first, *others = stored[num_ranks]
    for case, mine in first.items():
        assert len(mine["digests"]) == NUM_STEPS and len(set(mine["digests"])) == NUM_STEPS, case
        for other in others:
            assert mine["digests"] == other[case]["digests"], case


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sharded_store_changes_no_bit(num_ranks: int, stored: dict[int, list[Any]]) -> None:
    for found in stored[num_ranks]:
        for case in {name.rpartition(" ")[0] for name in found}:
            whole, sharded = found[f"{case} 0"], found[f"{case} 3"]
            assert whole["digests"] == sharded["digests"], case
            padding = 2 * 2 * 3 * 256 * num_ranks  # of three blocks, of both planes
            assert abs(sharded["host_nbytes"] * num_ranks - whole["host_nbytes"]) <= padding or "resident" in case
            assert 0 < sharded["bytes_down"] < whole["bytes_down"], case
            assert 0 < sharded["bytes_up"] < whole["bytes_up"], case


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [(2, "fp32 0"), (2, "fp32 3"), (2, "two directions 0"), (2, "two directions 3"), (4, "fp32 0"), (4, "fp32 3")],
)
def test_ranks_make_the_run_of_one(num_ranks: int, case: str, stored: dict[int, list[Any]]) -> None:
    several, one = stored[num_ranks][0][case], stored[1][0][case]
    for ours, theirs in zip(several["norms"], one["norms"], strict=True):
        assert abs(ours - theirs) <= 2 * G_ERROR
    assert largest_difference(several["state"], one["state"]) <= BOUND


def test_resident_and_accumulated_runs_of_two_ranks_are_those_of_one() -> None:
    [one], two = (job(storages, num_ranks, list(WHOLE), (0,)) for num_ranks in (1, 2))
    for case, mine in two[0].items():
        assert mine["digests"] == two[1][case]["digests"], case
        assert largest_difference(mine["state"], one[case]["state"]) <= BOUND, case


def test_ranks_may_read_the_model_from_files(tmp_path: Path) -> None:
    tiny_model("llama", num_hidden_layers=2, attention_dropout=0.5).save_pretrained(tmp_path)
    first, second = job(from_folder, 2, tmp_path)
    assert len({found["digest"] for found in (*first.values(), *second.values())}) == 1
    for mine in (first, second):
        assert len({str(found["losses"]) for found in mine.values()}) == 1


def test_each_machine_keeps_a_store() -> None:
    found = job(machines, 4)
    for rank, mine in enumerate(found):
        assert mine["ranks of this machine"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        whole, sharded = mine["bf16 split 0"], mine["bf16 split 3"]
        assert sharded["digests"] == whole["digests"] == found[0]["bf16 split 0"]["digests"]
        assert sharded["host_nbytes"] == pytest.approx(whole["host_nbytes"] / 2, rel=0.2)


@pytest.fixture(scope="module")
def divided() -> dict[int, list[Any]]:
    return {num_ranks: job(directions, num_ranks) for num_ranks in (1, 2, 4)}


def test_directions_over_ranks_make_the_run_of_one(divided: dict[int, list[Any]]) -> None:
    """Also that ranks train on the batch of the first of their group: the others were given nonsense."""
    one = divided[1][0]["1 at stage 0"]
    cases = [(n, case) for n, found in divided.items() for case in found[0]]
    assert len(cases) == 2 + 3 + 4, cases
    for num_ranks, case in cases:
        for found in divided[num_ranks]:
            assert found[case]["digests"] == divided[num_ranks][0][case]["digests"], (num_ranks, case)
        assert largest_difference(divided[num_ranks][0][case]["state"], one["state"]) <= BOUND, (num_ranks, case)


def test_directions_must_divide_ranks() -> None:
    for answer in run_job(refusal, 2):
        assert "direction_parallel must divide the number of ranks (2), got 3" in answer
        assert "optimizer.params.direction_parallel" in answer


def test_uneven_batches_and_a_bad_loss_keep_ranks_together() -> None:
    first, second = job(uneven, 2)
    for stage in ("0", "3"):
        assert first[stage]["digests"] == second[stage]["digests"]
        assert first[stage]["digests"][0] == first[stage]["digests"][1], "the step with the bad loss changed weights"
        assert len(set(first[stage]["digests"])) == 3
        assert first[stage]["skipped"] == second[stage]["skipped"] == 1
    assert first["0"]["digests"] == first["3"]["digests"]


def test_what_one_rank_does_alone_does_not_disturb_a_sharded_store() -> None:
    found = job(alone, 2)
    for mine in found:
        assert_same_bits(mine["0"]["state"], mine["3"]["state"])
        assert mine["0"]["seen"] == mine["3"]["seen"]
        for stage in (0, 3):
            assert_same_bits(mine[f"left by {stage}"], mine[str(stage)]["state"])
    weight = "blocks.0.linear.weight"
    for rank, mine in enumerate(found):
        assert torch.equal(mine["left by 3, changed"], found[0]["left by 3"][weight] + rank)


def test_bytes_on_the_wire() -> None:
    """Data and direction parallel: four bytes a direction, and the batch, whatever the model's size. Sharded: each rank
    sends its shard of each block to each other rank, and nothing else."""
    for found in job(wire, 2):
        for width in (16, 48):
            assert found[f"data {width}"]["counts"] == {"all_reduce": 4 * 2}
            assert found[f"data {width}"]["ranks"] == 4 * 2
            ids = 2 * 6 * 8
            counts = found[f"directions {width}"]["counts"]
            assert counts.pop("broadcast_object_list", 0) == 0  # names and shapes
            assert counts.pop("all_reduce") == 4 * 2 and counts.pop("broadcast") == ids and not counts
            assert found[f"directions {width}"]["ranks"] == 4 * 2 + ids
            sharded = found[f"sharded {width}"]
            assert sharded["counts"].pop("all_reduce") == 4 + 4  # g, and that all have begun
            assert sharded["stored"] / 2 <= sharded["gathered"] <= sharded["stored"] / 2 + 3 * 256


def test_a_rank_whose_backward_raised_makes_the_step_with_the_others(tmp_path: Path) -> None:
    first, last = job(failed_backward, 2, tmp_path)
    assert first["digest"] == last["digest"]
    rows = list(csv.reader(next(tmp_path.rglob("*train_loss.csv")).open()))[1:]
    means = [(a + b) / 2 for a, b in zip(first["losses"], last["losses"], strict=True)]
    assert [float(value) for _, value in rows] == pytest.approx([means[0], first["losses"][1], means[2]])


@pytest.mark.parametrize(
    ("stage", "params"), [(0, {}), (3, {"num_directions": 2}), (0, {"num_directions": 2, "direction_parallel": 2})]
)
def test_all_ranks_make_a_step_by_a_score_or_none_does(stage: int, params: dict[str, Any]) -> None:
    first, last = job(objective, 2, stage, params)
    assert first["by score"] == last["by score"] == first["by loss"] == last["by loss"]
    assert "made no step, because the objective failed on another rank" in first["error"]
    assert "made no step, because the objective returned NaN" in last["error"]
    num_own_directions = params.get("num_directions", 1) // params.get("direction_parallel", 1)
    assert first["failed"] == last["failed"] == 2 * num_own_directions
    assert first["steps"] == last["steps"] == NUM_STEPS + 1
    assert first["last"] == last["last"]


def test_members_are_divided_among_ranks() -> None:
    whole = job(members, 1, 0)[0]["weights"]
    for stage in (0, 3):
        first, last = job(members, 2, stage)
        assert first["digest"] == last["digest"]
        assert largest_difference(first["weights"], whole) < BOUND


def test_each_rank_of_a_resumed_training_has_its_own_random_states(tmp_path: Path) -> None:
    found = job(resumed_random_states, 2, tmp_path)
    assert not torch.equal(found[0]["before"], found[1]["before"])
    assert all(torch.equal(mine["before"], mine["after"]) for mine in found)


@pytest.mark.parametrize("direction_parallel", [1, 2])
def test_training_skips_no_example_where_ranks_share_batches(direction_parallel: int, tmp_path: Path) -> None:
    first, last = job(trained_positions, 2, tmp_path, direction_parallel)
    num_batches = 2 // direction_parallel
    used = sorted({*first["given"], *last["given"]})
    assert used == list(range(0, 8 * num_batches, 2)), "micro-batches of two examples follow one another"
    assert (first["given"] == last["given"]) is (direction_parallel == 2)
    for found in (first, last):
        assert found["num_seen"] == 8 * num_batches
        assert found["num_steps"] == round(found["num_examples"] / (4 * num_batches))
