"""The projectors' kernels without a GPU: Triton's interpreter, in a fork of a warm process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from interpreted_kernels import errors_of_checks, names_of_checks
from warm_interpreter import WarmInterpreter

pytest.importorskip("triton")

from ds_zo.ops.triton_projector_batches import Launch

FILE = Path(__file__).with_name("projector_checks.py")
CHECKS = names_of_checks(FILE)


@pytest.fixture(scope="module")
def errors(warm_interpreter: WarmInterpreter) -> dict[str, str | None]:
    return errors_of_checks(FILE, warm_interpreter)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_kernel_matches_reference(errors: dict[str, str | None], check: str) -> None:
    error = errors[check]
    assert error is None, error


class StandIn:
    """What Triton's kernels look like from outside, of which no CPU compiles any."""

    arg_names: ClassVar[list[str]] = ["table", "num", "lr", "SIZE", "KIND"]

    def __init__(self, *, takes_all: bool) -> None:
        self.takes_all = takes_all
        self.calls: list[tuple[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def by_source(*args: Any, **named: Any) -> Compiled:
            self.calls.append(("source", (grid, *args, *named.values())))
            return Compiled(self)

        return by_source


class Compiled:
    def __init__(self, kernel: StandIn) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any) -> None:
            if not self.kernel.takes_all:
                raise TypeError("function takes exactly 3 arguments")
            self.kernel.calls.append(("compiled", (grid, *args)))

        return run


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_launch_goes_to_the_compiled_kernel_where_that_takes_it(
    takes_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "by_kernel", True)
    kernel = StandIn(takes_all=takes_all)
    launch = Launch(kernel, 5, ("table", 2), SIZE=64, KIND="k", num_warps=4, enable_fp_fusion=False)
    for lr in (0.1, 0.2, 0.3):
        launch(lr)
    options = (4, False)
    first, *others = kernel.calls
    assert first == ("source", ((5,), "table", 2, 0.1, 64, "k", *options))
    for call, lr in zip(others, (0.2, 0.3), strict=True):
        expected = ((5, 1, 1), "table", 2, lr, 64, "k") if takes_all else ((5,), "table", 2, lr, 64, "k", *options)
        assert call == ("compiled" if takes_all else "source", expected)
    assert Launch.by_kernel == takes_all
