"""Repeated launches call compiled kernels directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ds_zo.ops import triton_launch
from ds_zo.ops.triton_launch import launch


class StandIn:
    """What Triton's kernels look like from outside, of which no CPU compiles any."""

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
def test_launches_of_one_kind_share_a_compiled_kernel(takes_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind is all that Triton compiles a kernel for: dtypes, alignment, widths of integers, constants."""
    monkeypatch.setattr(triton_launch, "_is_direct", True)
    monkeypatch.setattr(triton_launch, "_compiled", {})
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
        launch(kernel, (7, 2), (other,), (6,), {"SIZE": 64}, num_warps=4)
        assert kernel.calls[-1][0] == "source"  # not tried a second time
