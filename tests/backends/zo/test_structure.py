"""`Structure` detects every change of a model that a step must react to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.backends.zo.model_check import Structure

Groups = list[dict[str, Any]]


def set_child(model: nn.Sequential, groups: Groups) -> None:
    model[1] = nn.Linear(4, 4)


def add_child(model: nn.Sequential, groups: Groups) -> None:
    model[0].add_module("more", nn.Linear(4, 4))


def set_parameter(model: nn.Sequential, groups: Groups) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def add_parameter(model: nn.Sequential, groups: Groups) -> None:
    model[0].register_parameter("more", nn.Parameter(torch.zeros(4)))


def drop_bias(model: nn.Sequential, groups: Groups) -> None:
    model[0].bias = None


def resize(model: nn.Sequential, groups: Groups) -> None:
    model[0].weight.data = torch.zeros(4, 5)


def freeze(model: nn.Sequential, groups: Groups) -> None:
    model[2].weight.requires_grad_(False)


def replace_forward(model: nn.Sequential, groups: Groups) -> None:
    model[1].forward = model[2].forward


def add_group(model: nn.Sequential, groups: Groups) -> None:
    groups.append({"params": []})


def swap_groups(model: nn.Sequential, groups: Groups) -> None:
    (a,), (b, *rest) = groups[0]["params"], groups[1]["params"]
    groups[0]["params"], groups[1]["params"] = [b], [a, *rest]


CHANGES = (
    *(set_child, add_child, set_parameter, add_parameter, drop_bias, resize, freeze),
    *(replace_forward, add_group, swap_groups),
)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: Callable[[nn.Sequential, Groups], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first, *others = model.parameters()
    groups: Groups = [{"params": [first]}, {"params": others}]
    structure = Structure(model, groups)
    model[0].weight.data = model[0].weight.data.clone()  # where a weight lies may change
    groups = [{**group, "params": list(group["params"])} for group in groups]
    assert structure.is_unchanged(groups)
    change(model, groups)
    assert not structure.is_unchanged(groups)
