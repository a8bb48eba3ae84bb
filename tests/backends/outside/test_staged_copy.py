"""The recipe "Add a transport" of CONTRIBUTING.md: a backend trains with a transport that the tests add."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest

from ds_zo.backends.recompute.backend import RecomputedBackend
from ds_zo.config import registry
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.transport import LocalCopy, Transport, stored_bytes
from ds_zo.streaming.units import Unit
from tests.backends.outside import block_sgd
from tests.backends.outside.staged_copy import StagedCopy
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, train
from tests.helpers.stream_clocks import Races, buffers_of, clocked
from tests.helpers.weights import assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")
PARAMS = {"lr": 0.05, "momentum": 0.9}
CONFIG = streamed("BlockSGD", params=PARAMS, stream={"resident_blocks": 0, "device_slots": 2})


@pytest.fixture
def use_transport(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes BlockSGD pass a transport to `make_blocks`. None: it passes none."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    block_sgd.register()

    def use(kind: type[StagedCopy] | None) -> None:
        make = None if kind is None else lambda streams, store: kind(streams)
        made = partialmethod(RecomputedBackend.make_blocks, transport=make)
        monkeypatch.setattr(block_sgd.BlockSGD, "make_blocks", made, raising=False)

    return use


def run(config: dict[str, Any]) -> tuple[list[float], dict[str, Any], Transport | None]:
    """Losses, weights and the transport of a run; None: nothing streams."""
    engine = start(config, lively("llama"))
    losses, found = train(engine, batches("llama", 3)), parameters_of(engine)
    transport = engine.backend.blocks.store.transport if engine.backend.blocks.is_streamed else None
    engine.destroy()
    return losses, found, transport


def test_a_run_has_the_bits_and_the_traffic_of_the_packages_own(use_transport: Any) -> None:
    use_transport(StagedCopy)
    losses, found, staged = run(CONFIG)
    use_transport(None)
    for config in (CONFIG, config_for("BlockSGD", params=PARAMS)):
        other_losses, other, local = run(config)
        assert losses == other_losses
        assert_equal(found, other)
        if local is not None:
            assert isinstance(staged, StagedCopy) and isinstance(local, LocalCopy)
            assert (staged.bytes_up, staged.bytes_down) == (local.bytes_up, local.bytes_down)
    assert staged is not None and staged.bytes_down > 0


class Forgetful(StagedCopy):
    """It does not record `saved`."""

    def copy_back(self, unit: Unit, used: Slot, *, low: bool) -> None:
        target = stored_bytes(unit, low=low)
        target.copy_(used.buffer[: target.numel()])


@pytest.mark.parametrize("kind", [StagedCopy, Forgetful])
def test_the_clocks_find_an_event_that_is_forgotten(use_transport: Any, kind: type[Transport]) -> None:
    use_transport(kind)
    with clocked():
        engine = start(CONFIG, lively("llama"))
        runtime = engine.backend.blocks.store.runtime
        with Races(lambda: buffers_of(runtime)) as races:
            train(engine, batches("llama", 2))
        engine.destroy()
    assert races.num_writes > 50 and bool(races.found) is (kind is Forgetful)
