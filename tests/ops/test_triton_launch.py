"""Repeated launches call compiled kernels directly."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")

from ds_zo.ops.triton_launch import Launch, launch


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
    repeated = Launch(kernel, 5, ("table", 2), SIZE=64, KIND="k", num_warps=4, enable_fp_fusion=False)
    for lr in (0.1, 0.2, 0.3):
        repeated(lr)
    options = (4, False)
    first, *others = kernel.calls
    assert first == ("source", ((5,), "table", 2, 0.1, 64, "k", *options))
    for call, lr in zip(others, (0.2, 0.3), strict=True):
        expected = ((5, 1, 1), "table", 2, lr, 64, "k") if takes_all else ((5,), "table", 2, lr, 64, "k", *options)
        assert call == ("compiled" if takes_all else "source", expected)
    assert Launch.by_kernel == takes_all


@pytest.mark.parametrize("takes_all", [True, False])
def test_launches_of_one_kind_share_a_compiled_kernel(takes_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind is all that Triton compiles a kernel for: dtypes, alignment, widths of integers, constants."""
    monkeypatch.setattr(Launch, "by_kernel", True)
    kernel = StandIn(takes_all=takes_all)
    x, other = torch.zeros(64), torch.zeros(64)
    assert not (x.data_ptr() | other.data_ptr()) % 16
    kinds = [(x, 5, 64), (x.bfloat16(), 5, 64), (x[1:], 5, 64), (x, 2**31, 64), (x, 5, 128)]
    for tensor, number, size in kinds:
        launch(kernel, (3,), (tensor,), (number,), {"SIZE": size}, num_warps=4)
    assert [who for who, _ in kernel.calls] == ["source"] * len(kinds)
    launch(kernel, (7, 2), (other,), (6,), {"SIZE": 64}, num_warps=4)
    who, (grid, *arguments) = kernel.calls[-1]
    if takes_all:
        assert (who, grid, arguments) == ("compiled", (7, 2, 1), [other.data_ptr(), 6, 64])
    else:
        assert (who, grid) == ("source", (7, 2)) and arguments[0] is other
    assert Launch.by_kernel == takes_all
