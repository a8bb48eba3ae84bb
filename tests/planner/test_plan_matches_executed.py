"""A plan prices the list of actions that engines execute, whole: copies, computations, slots and their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ds_zo.config.optimizers import LSPParams, ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import Limits, pricing
from ds_zo.planner.adapter import estimate_adapter
from ds_zo.planner.lomo import estimate_lomo
from ds_zo.planner.lsp import estimate_lsp
from ds_zo.planner.zo import estimate_zo
from ds_zo.streaming.schedule import Action, Kind, sweep
from tests.helpers.executed_lists import INTERVAL, KINDS, NUM_BLOCKS, executed, text
from tests.helpers.ranks import job
from tests.planner.planned_models import planned

ON_RANKS = [kind for kind in KINDS if kind != "LSP"]
"""LSP streams weights on one rank only."""

pytestmark = pytest.mark.usefixtures("single_process")


def priced(kind: str, num_resident: int, monkeypatch: pytest.MonkeyPatch) -> list[Action]:
    """The list of a plan. It has as many steps of ZO as every block needs for its fold."""
    found: list[Action] = []
    seconds = pricing.seconds

    def note(actions: Sequence[Action], seconds_of: Any) -> float:
        found[:] = actions
        return seconds(actions, seconds_of)

    monkeypatch.setattr(pricing, "seconds", note)
    settings: dict[str, Any] = {"resident_blocks": num_resident}
    model = planned("llama", dtype="bf16" if kind == "ZO with low planes" else "fp32", num_hidden_layers=NUM_BLOCKS)
    options: dict[str, Any] = {"stream": StreamConfig(**settings), "offload": True}
    if kind.startswith("ZO"):
        options["stream"] = StreamConfig(**settings, writeback_interval=INTERVAL)
        estimate_zo(model, Limits(), params=ZOParams(), **options)
    elif kind == "LOMO":
        estimate_lomo(model, Limits(), **options)
    elif kind == "LSP":
        params = LSPParams(subspace_dim=8, nonzeros_per_row=2, projector="random")
        estimate_lsp(model, Limits(), params=params, **options)
    else:
        estimate_adapter(model, Limits(), **options)
    return [action for action in found if action.block != pricing.NON_BLOCKS]


@pytest.mark.parametrize("num_resident", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_executes_the_list_that_its_plan_prices(
    kind: str, num_resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = priced(kind, num_resident, monkeypatch)
    found = [action for one_pass in executed(0, kind, num_resident, 0)["passes"] for action in one_pass]
    assert text(found) == text(expected)
    if kind != "adapter":
        assert Kind.DOWNLOAD in {action.kind for action in found}


def all_kinds(rank: int, stage: int) -> dict[str, Any]:
    kinds = ("ZO", "LOMO") if stage == 3 else ON_RANKS
    return {kind: executed(rank, kind, 0, stage)["passes"] for kind in kinds}


def test_so_does_each_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in job(all_kinds, 2, 0):
        for kind in ON_RANKS:
            assert text(a for one_pass in found[kind] for a in one_pass) == text(priced(kind, 0, monkeypatch)), kind


def test_ranks_that_divide_blocks_execute_one_list_of_gathers() -> None:
    first, second = job(all_kinds, 2, 3)
    assert first == second
    order = range(NUM_BLOCKS)
    collective: dict[str, Any] = {"streamed": order, "num_slots": 2, "gathers": True}
    forward, backward = first["LOMO"]
    assert text(forward) == text(sweep(order, **collective))
    assert text(backward) == text(sweep(order[::-1], downloads=order, **collective))
    for one_pass in first["ZO"]:
        downloads = {action.block for action in one_pass if action.kind is Kind.DOWNLOAD}
        expected = sweep(order, downloads=downloads, loaded={0: 0, 1: 1}, then=order, **collective)
        assert len(downloads) in (2, 3) and text(one_pass) == text(expected)
