"""What the CPU cannot show of the LSP bench: a step with early uploads is taken apart, on a slowed link too."""

from __future__ import annotations

import pytest

from benchmarks.speed import cases_of
from ds_zo.bench.runner import run_cases

pytestmark = pytest.mark.gpu


def test_a_step_is_taken_apart_on_every_link() -> None:
    cases = [case for case in cases_of("lsp-figure5", tiny=True) if case.params.get("take_apart")]
    rows = run_cases(cases, out=None)
    assert [row["status"] for row in rows] == ["ok"] * 4, [row.get("error") for row in rows]
    for row in rows:
        for found in (row, *row["links"].values()):
            parts = found["rest_s"] + found.get("exposed_copy_s", 0.0) + found["exposed_cpu_s"]
            assert parts == pytest.approx(found["apart_step_s"])
