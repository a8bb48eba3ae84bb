"""docs/support.md is made from rows, and the rows of the CPU are what a run gives today."""

from __future__ import annotations

import os
import random

import pytest

from tests.helpers import support_sweep
from tests.helpers.support_matrix import CELLS, PAGE, REFUSED, TRAINS, outcomes, page, read_rows, status


def test_the_page_is_made_from_the_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(read_rows(), text) == support_sweep.page(support_sweep.read_rows(), text)


def test_a_status_needs_a_row_that_says_so() -> None:
    cell = CELLS[0]
    assert status(cell, {}) == "untested"
    assert status(cell, {"cpu": {cell: "the ranks' weights differ"}}) == "fails on CPU"
    assert status(cell, {"cpu": {cell: TRAINS}, "gpu": {CELLS[1]: TRAINS}}) == "tested on CPU"
    assert status(cell, {"cpu": {cell: TRAINS}, "gpu": {cell: "losses [nan]"}}) == "fails on GPU"
    assert status(cell, {"cpu": {cell: TRAINS}, "gpu": {cell: TRAINS}}) == "tested on CPU and GPU"
    assert status(cell, {"cpu": {cell: REFUSED}}) == "refused"
    assert status(cell, {"cpu": {cell: TRAINS}, "gpu": {cell: REFUSED}}) == "refused on GPU"


@pytest.mark.slow
@pytest.mark.skipif("DS_ZO_RANDOM_TIMES" not in os.environ, reason="a minute of training: tools/random.sh runs it")
def test_every_cell_gives_the_outcome_of_its_row() -> None:
    rows = read_rows()["cpu"]
    assert list(rows) and set(rows) == set(CELLS)
    assert outcomes() == rows


@pytest.mark.slow
@pytest.mark.skipif("DS_ZO_RANDOM_TIMES" not in os.environ, reason="ten seconds of training: tools/random.sh runs it")
def test_streamed_runs_of_some_kinds_equal_plain_loops() -> None:
    seed = int(os.environ.get("DS_ZO_RANDOM_SEED", "0"))
    rows = support_sweep.read_rows()
    kinds = random.Random(seed).sample(sorted({kind for kind, _ in rows}), k=4)
    found = {cell: row["outcome"] for cell, row in support_sweep.outcomes(kinds).items()}
    assert found == {cell: row["outcome"] for cell, row in rows.items() if cell[0] in kinds}


@pytest.mark.gpu
@pytest.mark.slow
def test_every_cell_gives_the_same_outcome_on_a_gpu() -> None:
    """Cells without a row of a GPU must do on it what they do on the CPU."""
    rows = read_rows()
    assert outcomes(on_cpu=False) == {**rows["cpu"], **rows.get("gpu", {})}
