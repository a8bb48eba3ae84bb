"""`ds_zo.stream.tiles: null`: the first step chooses the fewest tiles that fit, and later steps and runs keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_zo.streaming.budget import MARGIN_NBYTES
from tests.helpers.adapter_runs import adapted, adapter_json
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.lomo_runs import lively, start, streamed, train
from tests.helpers.lsp_runs import CPU, lsp_json
from tests.helpers.tile_number_cases import BATCH, Net, Wide, budget, inputs, steps
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import assert_close, assert_equal, parameters_of
from tests.helpers.zoo import seeded

pytestmark = pytest.mark.usefixtures("single_process")


class Dropping(Wide):
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(super().of(x), 0.2, self.training)


class Average(Wide):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return super().of(x - self.mean)


class Crowded(Wide):
    """Its forward takes more memory than there is."""

    most = 3

    def of(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} samples")
        return super().of(x)


def run(
    block: type[nn.Module], *, free: int | None = None, num: int = 3, **stream: Any
) -> tuple[list[float], Any, Any, int]:
    """Losses, weights, the number of tiles and the most live bytes of the last step. `free`: bytes for activations."""
    gb = {} if free is None else {"device_memory_gb": budget(block, free)}
    model = seeded(lambda: Net(block))
    engine = start(streamed(lr=0.05, stream={**gb, **stream}), model)
    batches = inputs(num)
    losses = steps(engine, batches[:-1])
    with LiveBytes() as live:
        losses += steps(engine, batches[-1:])
    found = {name: value.detach().clone() for name, value in engine.module_state_dict().items()}
    number = engine.backend.blocks.num_tiles
    engine.destroy()
    return losses, found, number, live.peak


def test_a_batch_that_fits_runs_whole(log: pytest.LogCaptureFixture) -> None:
    """With the bits of one tile, and with no other forward."""
    losses, found, number, peak = run(Wide, free=3_000_000)
    assert number == 1 and peak < 3_000_000 and "slices of the batch" not in log.text
    expected = run(Wide, tiles=1)
    assert losses == expected[0]
    assert_equal(found, expected[1])
    model = seeded(lambda: Net(Wide))
    engine = start(streamed(stream={"device_memory_gb": budget(Wide, 3_000_000)}), model)
    steps(engine, inputs(1))
    engine.destroy()
    assert model.layers[0].sizes == [BATCH, BATCH]


def test_less_memory_takes_more_tiles(log: pytest.LogCaptureFixture) -> None:
    """Random numbers too are those of a run with the chosen number."""
    numbers = []
    for free in (900_000, 500_000, 300_000):
        log.clear()
        losses, found, number, peak = run(Dropping, free=free)
        numbers.append(number)
        assert peak <= free
        told = [line for line in log.messages if f"over up to {number} slices of the batch" in line]
        assert len(told) == 1 and "ds_zo.stream.tiles" in told[0]
        expected = run(Dropping, tiles=number)
        assert losses == expected[0]
        assert_equal(found, expected[1])
    assert 1 < numbers[0] < numbers[1] < numbers[2] <= BATCH


def test_a_forward_without_memory_runs_again_in_tiles() -> None:
    losses, found, number, _ = run(Crowded, free=3_000_000)
    expected = run(Wide, tiles=4)
    assert number == 4 and losses == expected[0]
    assert_equal(found, expected[1])


def test_a_sample_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crowded, "most", 0)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for"):
        run(Crowded, free=3_000_000)


def test_blocks_that_cannot_be_tiled_run_whole(log: pytest.LogCaptureFixture) -> None:
    losses, found, number, _ = run(Average, free=300_000)
    told = [line for line in log.messages if "whole batch" in line]
    assert number == 1 and len(told) == 1 and "it changes its buffers" in told[0]
    expected = run(Average, tiles=1)
    assert losses == expected[0]
    assert_equal(found, expected[1])


def test_a_resumed_run_keeps_the_number(tmp_path: Path) -> None:
    section = {"device_memory_gb": budget(Dropping, 300_000)}
    engine = start(streamed(lr=0.05, stream=section), seeded(lambda: Net(Dropping)))
    batches = inputs(4)
    steps(engine, batches[:2])
    engine.save_checkpoint(str(tmp_path))
    number, state = engine.backend.blocks.num_tiles, torch.get_rng_state()
    losses = [steps(engine, [x], seed=None)[0] for x in batches[2:]]
    engine.destroy()
    assert number > 1
    resumed = start(streamed(lr=0.05, stream={"device_memory_gb": 1}), seeded(lambda: Net(Dropping)))
    resumed.load_checkpoint(str(tmp_path))
    torch.set_rng_state(state)
    assert steps(resumed, batches[2:], seed=None) == losses
    assert resumed.backend.blocks.num_tiles == number
    resumed.destroy()
    for stream, weights_only, kept in (({"tiles": 2}, False, 2), ({"device_memory_gb": 1}, True, 1)):
        other = start(streamed(lr=0.05, stream=stream), seeded(lambda: Net(Dropping)))
        other.load_checkpoint(str(tmp_path), load_module_only=weights_only)
        steps(other, batches[:1])
        assert other.backend.blocks.num_tiles == kept
        other.destroy()


@pytest.mark.parametrize("backend", ["LOMO", "AdaLOMO", "lsp", "adapter"])
@pytest.mark.parametrize("offload", [False, True])
def test_each_backend_chooses(backend: str, offload: bool) -> None:
    def engine_of(**stream: Any) -> Any:
        if backend == "adapter":
            return start_adapter(adapted("rslora"), adapter_json(**stream))
        if backend == "lsp":
            place = {**CPU, "offload_param": {"device": "cpu"}}
            config = lsp_json(zero_optimization=place, lr=1e-3, ds_zo={"stream": stream})
            return start(config, lively("llama").train())
        return start(streamed(backend, lr=1e-2, stream=stream), lively("llama").train())

    data = [tiny_batch("llama", seed=seed, batch_size=6, length=16) for seed in range(3)]

    def trained(engine: Any) -> tuple[list[float], Any, Any]:
        losses = train(engine, data)
        found, number = parameters_of(engine), engine.backend.blocks.num_tiles
        engine.destroy()
        return losses, found, number

    losses, expected, _ = trained(engine_of(tiles=1))
    roomy = engine_of(device_memory_gb=1)
    taken = 1_000_000_000 - roomy.backend.blocks.store.unallocated_nbytes()
    assert trained(roomy)[2] == 1
    found, ours, number = trained(
        engine_of(device_memory_gb=(taken + MARGIN_NBYTES + 120_000) / 1e9, offload_activations=offload)
    )
    assert 1 < number <= 6
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(ours, expected, atol=1e-5)
