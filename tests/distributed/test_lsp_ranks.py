"""LSP on 1, 2 and 4 gloo ranks: the same bits on all, the weights of one rank with the global batch, counted bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lomo_runs import assert_equal
from tests.helpers.lsp_rank_cases import CASES, ON_FOUR, choose, compare, freeze, overlap, resume, save, strided
from tests.helpers.ranks import job, run_job

Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    return {n: job(compare, n) for n in (1, 2, 4)}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_of_the_global_batch(name: str, results: Results) -> None:
    """To 1e-6; fits that end on other bits differ by more, and so do weights that fp16 rounds."""
    atol = 5e-5 if "learned" in name else 4e-3 if "fp16" in name else 1e-6
    alone = results[1][0][name]
    for num_ranks in (2, 4) if name in ON_FOUR else (2,):
        first, *others = (mine[name] for mine in results[num_ranks])
        for other in others:
            assert_equal(other["weights"], first["weights"])
            assert (other["norm"], other["skipped"]) == (first["norm"], first["skipped"])
        for key, value in first["weights"].items():
            torch.testing.assert_close(value, alone["weights"][key], rtol=0, atol=atol, msg=f"{num_ranks} {key}")
        assert first["skipped"] == alone["skipped"] == name.startswith("poisoned")
        assert first["norm"] == pytest.approx(alone["norm"], rel=1e-3, nan_ok=True)


def test_bytes_on_the_wire_are_those_of_the_subspace(results: Results) -> None:
    """d x d a matrix, whatever its size; vectors and a flag a parameter. Owned states: the directions once more."""
    d, num_matrices, num_blocks = 6, 2 * 7 + 2, 2
    vectors = 16 * (2 * num_blocks + 1)
    flags = num_matrices + 2 * num_blocks + 1
    averaged = 4 * (d * d * num_matrices + vectors + flags)
    for num_ranks in (2, 4):
        for mine in results[num_ranks]:
            assert mine["random"]["bytes"] == averaged
            assert mine["owned"]["bytes"] == averaged + 4 * (d * d + 1) * num_matrices
            assert mine["on the device"]["bytes"] == averaged


def test_each_layers_states_are_on_one_rank(results: Results) -> None:
    whole = results[1][0]["owned"]["states"]
    for num_ranks in (2, 4):
        kept = [mine["owned"]["states"] for mine in results[num_ranks]]
        assert sum(kept) == whole and max(kept) < whole
        assert all(mine["random"]["states"] == whole for mine in results[num_ranks])


def test_work_begins_inside_the_backward_and_a_rank_reads_alone() -> None:
    for mine in run_job(overlap, 2):
        assert isinstance(mine, dict), mine
        assert mine["after_backward"] == {"UPDATING"} and mine["after_step"] == {"UPDATE_PENDING"}
        if mine["alone"]:
            assert_equal({name: mine["alone"][name] for name in mine["weights"]}, mine["weights"])


@pytest.mark.parametrize("stage", [0, 2])
def test_a_layer_that_a_batch_leaves_out_holds_nobody_up(stage: int) -> None:
    """One that nobody uses does not move."""
    [alone] = run_job(choose, 1, stage)
    both = run_job(choose, 2, stage)
    for mine in both:
        assert isinstance(mine, dict), mine
        for projector, atol in (("random", 1e-6), ("learned", 5e-5)):
            assert mine[projector]["moved"] == [True, True, False, True]
            assert_equal(mine[projector]["weights"], both[0][projector]["weights"])
            for name, value in mine[projector]["weights"].items():
                torch.testing.assert_close(value, alone[projector]["weights"][name], rtol=0, atol=atol)


@pytest.mark.parametrize(("stage", "offload"), [(0, True), (2, True), (0, False)])
def test_a_rank_without_a_gradient_of_a_strided_parameter(stage: int, offload: bool) -> None:
    [alone] = run_job(strided, 1, stage, offload)
    both = run_job(strided, 2, stage, offload)
    for mine in both:
        assert isinstance(mine, dict), mine
        assert_equal(mine, both[0])
        for name, value in mine.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-6, msg=name)


SYNC = {"params": {"schedule": "sync"}}


@pytest.mark.parametrize("case", [{"offload": False}, {}, {"stage": 2}, SYNC, {"stage": 1, **SYNC}], ids=str)
def test_gradients_of_parameters_that_are_frozen_before_their_step_count_on_all_ranks(case: dict[str, Any]) -> None:
    [alone] = run_job(freeze, 1, case)
    first, second = run_job(freeze, 2, case)
    assert isinstance(first, dict), first
    assert_equal(second, first)
    for name, value in first.items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-6, msg=name)


def test_checkpoints_of_n_ranks_resume_on_m(tmp_path: Path) -> None:
    """One rank's on four, and theirs on two and on one. Each run ends as the one that nothing interrupted."""
    [alone] = run_job(save, 1, tmp_path / "of 1")
    assert isinstance(alone, dict), alone
    norms = {name: weights.pop("norms") for name, weights in alone.items()}
    resumed = run_job(resume, 4, tmp_path / "of 1", 0, tmp_path / "of 4")
    for num_ranks in (2, 1):
        resumed += run_job(resume, num_ranks, tmp_path / "of 4", 1, None)
    for mine in resumed:
        assert isinstance(mine, dict), mine
        for name, weights in mine.items():
            seen = weights.pop("norms")
            assert torch.equal(seen, norms[name][-len(seen) :]), name
            assert_equal(weights, alone[name])
