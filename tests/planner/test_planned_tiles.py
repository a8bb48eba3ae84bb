"""Plans of blocks that run over tiles of the batch: their memory, their time, and how many tiles are chosen."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
from torch import nn

from ds_zo.config.resolve import resolve
from ds_zo.config.section import StreamConfig
from ds_zo.planner import Model, Rates, plan
from ds_zo.planner.estimate import Estimate
from ds_zo.planner.recomputed import trace_of
from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.planner.planned_models import planned

BATCH = 8
DEEP = {"num_hidden_layers": 6, "intermediate_size": 512}


@cache
def model() -> Any:
    return planned("llama", batch=BATCH, seq=32, **DEEP)


def estimate(backend: str, *, device_nbytes: int | None = None, **stream: Any) -> Estimate:
    gb = None if device_nbytes is None else (device_nbytes + MARGIN_NBYTES) / 1e9
    return plan(model(), backends=[backend], offload=True, stream=stream, device_memory_gb=gb).estimates[0]


def traced(part: Any) -> Any:
    return part.backward_trace(checkpointing=True, loss_in_chunks=True)


def test_tiles_have_the_work_of_the_batch_and_the_activations_of_one() -> None:
    whole, part = model(), model().with_batch(2)
    numels = [[p.numel() for p in block.parameters()] for block in whole.blocks]
    tiled = trace_of(whole, StreamConfig(tiles=4), traced, trained=numels)
    assert (tiled.forward.flops, tiled.backward.flops) == (traced(whole).forward.flops, traced(whole).backward.flops)
    assert tiled.forward.launch_s > 2 * traced(whole).forward.launch_s
    inputs = traced(whole).block_input_nbytes
    inside = traced(part).peak.total - len(numels) * traced(part).block_input_nbytes
    sums = 4 * (sum(numels[0]) + max(numels[0]))
    around = (len(numels) + 2) * inputs
    assert tiled.peak.total == pytest.approx(around + inside + sums, abs=inputs)
    assert tiled.peak.total < traced(whole).peak.total
    assert trace_of(whole, StreamConfig(tiles=1), traced, trained=numels) == traced(whole)


@pytest.mark.parametrize("backend", ["lomo", "lsp", "adapter"])
def test_as_many_tiles_are_chosen_as_memory_needs(backend: str) -> None:
    """The key is in the JSON, unless one tile is enough. A number that the user gives is kept."""
    needs = {tiles: estimate(backend, resident_blocks=0, tiles=tiles).device_nbytes for tiles in (1, 2, 8)}
    assert needs[8] < needs[2] < needs[1]
    found = estimate(backend, resident_blocks=0, device_nbytes=needs[1])
    assert found.fits and "tiles" not in found.setting
    found = estimate(backend, resident_blocks=0, device_nbytes=needs[2])
    assert found.fits and found.device_nbytes == needs[2] and found.setting.count("in 2 tiles") == 1
    assert resolve(dict(found.config), world_size=1).section.stream.tiles == 2
    assert not estimate(backend, resident_blocks=0, device_nbytes=needs[2], tiles=1).fits
    assert not estimate(backend, resident_blocks=0, device_nbytes=needs[8] - 1).fits


def test_tiles_of_another_order_of_blocks_are_left_out() -> None:
    """A model that runs its blocks in another order for a small batch is planned with the tiles that keep the order."""
    module = copy.deepcopy(model().module)
    inner, layers = module.model, list(module.model.layers)

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        inner.layers = nn.ModuleList(layers[::-1] if len(kwargs["input_ids"]) < 3 else layers)

    def end(*_: Any) -> None:
        inner.layers = nn.ModuleList(layers)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)
    of_order = partial(plan, Model("llama", module, BATCH, 32, "fp32", Rates()), backends=["lomo"], offload=True)
    gb = (estimate("lomo", resident_blocks=0, tiles=8).device_nbytes + MARGIN_NBYTES) / 1e9
    found = of_order(device_memory_gb=gb).estimates[0]
    assert not found.fits and "in 2 tiles" in found.setting
    with pytest.raises(ValueError, match=r"""4 tiles can't be planned.*plan with --stream '{"tiles": 1}'"""):
        of_order(stream={"tiles": 4})


def test_blocks_that_stay_are_worth_a_tile_where_the_link_is_slow() -> None:
    rest = estimate("lomo", resident_blocks=6, tiles=4).device_nbytes
    found = estimate("lomo", device_nbytes=rest)
    assert "0 of 6 blocks streamed" in found.setting and "tiles" in found.setting
    assert estimate("lomo", device_nbytes=rest, tiles=1).up_nbytes > 0
