"""The states of an accumulation window, and what each permits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.backends.lomo.skipped_updates import SkippedUpdates
from ds_zo.backends.lomo.window import AccumulationWindow, WindowState

CPU = torch.device("cpu")
LOSS = torch.tensor(1.0)


def window(accumulation: str = "refuse") -> AccumulationWindow:
    return AccumulationWindow(SkippedUpdates(CPU), accumulation=accumulation, params_at="optimizer.params")


def backward(found: AccumulationWindow, *, guard: float = 0.0, finite: bool = True) -> None:
    """As of one parameter, whose gradient's guard is NaN if its update is to be skipped."""
    found.begin(LOSS)
    if finite:
        state = ParameterState("w", nn.Parameter(torch.ones(1)), 0, is_adapter=False, layer=None)
        found.skipped.add(state, torch.tensor(guard))
    found.end(0.5, finite=finite)


def refuses(found: AccumulationWindow) -> bool:
    try:
        found.begin(LOSS)
    except RuntimeError as error:
        assert "a step has one backward" in str(error) and "optimizer.params.accumulation" in str(error)
        return True
    return False


def test_a_window_is_filled_by_a_backward_and_emptied_by_a_step() -> None:
    found = window()
    assert found.state is WindowState.EMPTY
    backward(found)
    assert (found.state, found.num_updates) == (WindowState.UPDATED, 1) and refuses(found)
    outcome = found.step()
    assert outcome.applied and outcome.grad_norm == 0.5
    assert found.state is WindowState.EMPTY and not refuses(found)
    assert window().step().applied is True


@pytest.mark.parametrize(("guard", "finite"), [(math.nan, True), (0.0, False)], ids=["one pass", "two passes"])
def test_a_backward_that_updates_nothing_leaves_room_for_another(guard: float, finite: bool) -> None:
    found = window()
    backward(found, guard=guard, finite=finite)
    assert not refuses(found)
    assert (found.state, found.num_updates) == (WindowState.MEASURED, 0)
    backward(found)
    assert found.state is WindowState.UPDATED and found.step().applied


def test_a_bare_backward_is_counted_at_the_next_call() -> None:
    found = window()
    found.begin_bare()
    assert (found.state, found.num_updates) == (WindowState.UPDATED_BARE, 0)
    found.end_bare()
    found.end_bare()
    assert (found.state, found.num_updates) == (WindowState.UPDATED, 1) and refuses(found)
    found.step()
    found.begin_bare()
    assert refuses(found)
    found.permit_backward()
    assert (found.state, found.num_updates) == (WindowState.MEASURED, 2) and not refuses(found)


def test_sequential_windows_stay_updated() -> None:
    found = window("sequential")
    backward(found)
    backward(found, finite=False)
    assert (found.state, found.num_updates) == (WindowState.UPDATED, 1)
    backward(found, guard=math.nan)
    found.read_skipped()
    assert found.num_updates == 1 and found.step().applied is True


@pytest.mark.parametrize("finite", [True, False])
def test_a_saved_window_goes_on_in_its_state(finite: bool) -> None:
    found, resumed = window(), window()
    backward(found, finite=finite)
    resumed.restart(found.num_updates)
    resumed.load_state_dict(found.state_dict())
    assert resumed.state is found.state and refuses(resumed) is finite
    assert resumed.step() == found.step()
    resumed.load_state_dict(found.state_dict())
    assert resumed.state is WindowState.EMPTY
