"""LSP on 1, 2 and 4 gloo ranks: the same bits on all, the weights of one rank with the global batch, counted bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lsp_rank_cases import CASES, ON_FOUR, choose, compare, each, freeze, overlap, resume, save, strided
from tests.helpers.ranks import job, run_job
from tests.helpers.weights import assert_close, assert_equal

pytestmark = pytest.mark.slow

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


SYNC = {"params": {"schedule": "sync"}}
UNEVEN: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "layers that a batch leaves out": (choose, [(stage, kind) for stage in (0, 2) for kind in ("random", "learned")]),
    "strided parameters without a gradient on one rank": (strided, [(0, True), (2, True), (0, False)]),
    "parameters that are frozen before their step": (
        freeze,
        [({"offload": False},), ({},), ({"stage": 2},), (SYNC,), ({"stage": 1, **SYNC},)],
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_gradients_that_not_all_ranks_have_make_the_run_of_one(name: str) -> None:
    [alone], both = (job(each, num_ranks, *UNEVEN[name]) for num_ranks in (1, 2))
    for case, expected in alone.items():
        assert_equal(both[0][case], both[1][case])
        assert_close(both[0][case], expected, atol=5e-5 if "learned" in case else 1e-6)


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
