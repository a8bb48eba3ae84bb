"""What a plan chooses within a limit of device memory fits that limit by the plan's own figures, or nothing fits."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ds_zo.backends.zo.fold_interval import INTERVALS
from ds_zo.config.optimizers import ZOParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import Rates
from ds_zo.planner.estimate import Estimate, Limits
from ds_zo.planner.lomo import estimate_lomo
from ds_zo.planner.lsp import estimate_lsp
from ds_zo.planner.models import Model
from ds_zo.planner.zo import estimate_zo
from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.planner.planned_models import planned

TIMES = int(os.environ.get("DS_ZO_RANDOM_TIMES", "1"))
SEED = int(os.environ.get("DS_ZO_RANDOM_SEED", "0"))
ESTIMATES: dict[str, Callable[..., Estimate]] = {"zo": estimate_zo, "lomo": estimate_lomo, "lsp": estimate_lsp}


def model_of(draw: random.Random) -> Model:
    """A model of random size on a machine of random speeds: the link, the noise or other computing bounds its steps."""
    hidden, layers = 64 * draw.randint(1, 6), draw.randint(1, 9)
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, "num_hidden_layers": layers}
    model = planned("opt", dtype="bf16", **sizes)
    slower = 10 ** draw.uniform(-5, 1)
    usual = Rates()
    model.rates = replace(
        usual,
        link_up_gbps=slower * usual.link_up_gbps,
        link_down_gbps=slower * usual.link_down_gbps,
        link_both_gbps=slower * usual.link_both_gbps,
        noise_gdraws=10 ** draw.uniform(-4, 0) * usual.noise_gdraws,
    )
    return model


def streams_of(draw: random.Random, backend: str) -> tuple[StreamConfig, dict[str, Any]]:
    stream: dict[str, Any] = {"device_slots": draw.randint(2, 4)}
    if backend != "zo":
        return StreamConfig(**stream), {}
    stream |= {"master": draw.choice(["split", "wire"]), "wire_dtype": draw.choice(["auto", "fp8", "bf12"])}
    return StreamConfig(**stream), {"params": ZOParams(num_directions=draw.randint(1, 2))}


@pytest.mark.parametrize("backend", ESTIMATES)
def test_the_choice_fits_or_nothing_does(backend: str) -> None:
    draw = random.Random(f"{backend} {SEED}")
    num_fitting = num_refused = 0
    for _ in range(4 * TIMES):
        model = model_of(draw)
        stream, options = streams_of(draw, backend)
        estimate = ESTIMATES[backend]
        num_blocks, longest = len(model.blocks), INTERVALS[-1] if backend == "zo" else None
        placements = [(num_blocks, longest), *product(range(num_blocks), {1, longest} if longest else {None})]
        least = min(
            estimate(
                model,
                Limits(),
                stream=stream.model_copy(update={"resident_blocks": num_resident, "writeback_interval": interval}),
                offload=True,
                **options,
            ).device_nbytes
            for num_resident, interval in placements
        )
        whole = estimate(model, Limits(), stream=stream, offload=False, **options).device_nbytes
        top = max(least, whole)
        for _ in range(8):
            cap = MARGIN_NBYTES + draw.randint(least - (top - least) // 10 - 1, top + (top - least) // 10 + 1)
            for offload in (None, True):
                found = estimate(model, Limits(device_nbytes=cap), stream=stream, offload=offload, **options)
                could = cap >= least + MARGIN_NBYTES or (offload is None and cap >= whole + MARGIN_NBYTES)
                assert found.fits_device == could, (found.setting, found.device, cap, least, whole)
                num_fitting, num_refused = num_fitting + could, num_refused + (not could)
    assert num_fitting and num_refused
