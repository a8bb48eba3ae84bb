"""The projectors' kernels without a GPU: Triton's interpreter, in a fork of a warm process."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted_kernels import errors_of_checks, names_of_checks
from warm_interpreter import WarmInterpreter

pytest.importorskip("triton")

FILE = Path(__file__).with_name("projector_checks.py")
CHECKS = names_of_checks(FILE)


@pytest.fixture(scope="module")
def errors(warm_interpreter: WarmInterpreter) -> dict[str, str | None]:
    return errors_of_checks(FILE, warm_interpreter)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_kernel_matches_reference(errors: dict[str, str | None], check: str) -> None:
    error = errors[check]
    assert error is None, error
