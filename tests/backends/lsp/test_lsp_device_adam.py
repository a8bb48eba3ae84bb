"""Adam of all layers in few launches is Adam layer by layer, bit for bit."""

from __future__ import annotations

import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_zo.backends.lsp.device_group import DeviceAdam, DeviceGroup
from ds_zo.backends.lsp.matrices import MatrixState, find_matrices, group_matrices
from ds_zo.backends.lsp.products import LaunchCache, Rate
from ds_zo.config import LSPParams
from ds_zo.projectors import PreparedLaunches
from tests.helpers.lsp_runs import small

SETTINGS = LSPParams(lr=1e-2, subspace_dim=6, nonzeros_per_row=2, projector="random", edge="dense")
CPU = torch.device("cpu")


def groups_of(model: nn.Module) -> list[DeviceGroup]:
    matrices = find_matrices(model, SETTINGS, device=CPU)
    return [DeviceGroup(group.matrices) for group in group_matrices(model, matrices, None)]


def some_gradients(groups: list[DeviceGroup], step: int) -> None:
    """The embedding is whole. In some steps a layer lacks a gradient or has one that is not finite."""
    generator = torch.Generator().manual_seed(step)
    for matrix in (matrix for group in groups for matrix in group.matrices):
        grad = torch.randn(matrix.shape, generator=generator)
        matrix.has_total = True
        if matrix.total is not None:
            matrix.total.copy_(grad)
        else:
            matrix.parameter.grad = grad.to(matrix.parameter.dtype)
    layer = groups[1].matrices
    if step == 2:
        layer[0].gradient.view(-1)[3] = math.nan
    if step == 3:
        layer[1].clear()
    if step == 4:
        for matrix in layer:
            matrix.clear()


def rates(matrices: list[MatrixState], *, step: int) -> list[Rate | None]:
    rate = Rate(1e-2, 0.1, step, True)
    return [None if "layernorm" in matrix.name else rate for matrix in matrices]


@pytest.mark.parametrize(("max_norm", "factor"), [(0.0, 1.0), (0.7, 1.0), (0.7, 2**-5)])
def test_layers_together_are_one_by_one(max_norm: float, factor: float) -> None:
    together, alone = (groups_of(small().to(torch.bfloat16)) for _ in range(2))
    assert not torch.equal(together[1].matrices[0].parameter, together[2].matrices[0].parameter)
    options = {"device": CPU, "max_norm": max_norm}
    adam, ones = DeviceAdam(together, SETTINGS, **options), [DeviceAdam([g], SETTINGS, **options) for g in alone]
    for step in range(6):
        some_gradients(together, step)
        some_gradients(alone, step)
        call = partial(rates, step=step)
        found = adam.step(call, factor=factor)
        expected = [result for one in ones for result in one.step(call, factor=factor)]
        for ours, theirs in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=0, atol=0, equal_nan=True)
        for ours, theirs in zip(together, alone, strict=True):
            for a, b in zip(ours.matrices, theirs.matrices, strict=True):
                assert torch.equal(a.parameter, b.parameter) and not a.has_total
            for a, b in zip(ours.moments, theirs.moments, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))
    assert {float(m.num_steps) for m in together[1].moments} == {3.0, 4.0}


class Counter(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


def test_another_layer_adds_few_torch_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the update of weights. See [Note: few launches]."""
    monkeypatch.setattr("ds_zo.backends.lsp.device_group.apply_directions_", lambda cache, updates: None)
    monkeypatch.setattr("ds_zo.optim.subspace_adam._VECTOR_NUMEL", 1)  # which only CPUs have
    counts = []
    for num_layers in (2, 12):
        groups = groups_of(small(num_hidden_layers=num_layers))
        adam = DeviceAdam(groups, SETTINGS, device=CPU, max_norm=0.5)
        for step in range(2):
            some_gradients(groups, step)
            with Counter() as counter:
                adam.step(partial(rates, step=step), factor=1.0)
        counts.append(counter.num_calls)
    assert counts[1] - counts[0] <= 10 * 2


def test_launches_that_cannot_be_repeated_are_not_kept() -> None:
    """They hold copies of operands, which may be whole gradients."""
    copy = torch.zeros(4)
    kept = weakref.ref(copy)
    launches = PreparedLaunches(CPU)
    launches.add([], copies=[copy])
    cache = LaunchCache()
    cache.put((1,), [], launches)
    del launches, copy
    assert kept() is None
