"""Triton kernels against their references without a GPU: Triton's interpreter, in forks of a warm process."""

from __future__ import annotations

import pytest

from tests.helpers.interpreted_kernels import MODULES, errors_of_checks, names_of_checks
from tests.helpers.warm_interpreter import WarmInterpreter

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def errors(warm_interpreter: WarmInterpreter) -> dict[tuple[str, str], str | None]:
    return errors_of_checks(warm_interpreter)


@pytest.mark.parametrize(
    ("module", "check"), [(module, check) for module in MODULES for check in names_of_checks(module)]
)
def test_interpreted_kernel_matches_reference(
    errors: dict[tuple[str, str], str | None], module: str, check: str
) -> None:
    error = errors[module, check]
    assert error is None, error
