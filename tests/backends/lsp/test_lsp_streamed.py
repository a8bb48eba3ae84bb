"""Streamed LSP is resident LSP bit for bit: directions wait for a block's next visit and go home with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lomo_runs import batches, start, train
from tests.helpers.lsp_runs import adopt_always, lsp_json, small
from tests.helpers.weights import assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")

BOTH = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
LEARNED = {"projector": "learned", "check_interval": 2, "bias_threshold": 0.01, "calibration_batches": 1}


def on_host(config: dict[str, Any], **stream: Any) -> dict[str, Any]:
    place = {**config["zero_optimization"], **BOTH}
    return {**config, "zero_optimization": place, "ds_zo": {"stream": stream}}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"clipping": 0.1}, {}),
    "sync": ("llama", {"params": {"schedule": "sync"}}, {}),
    "bf16": ("gpt2", {"bf16": {"enabled": True}, "params": LEARNED}, {"device_slots": 3}),
    "accumulated": ("gpt2", {"gradient_accumulation_steps": 2, "params": {"weight_decay": 0.1}}, {}),
    "some stay": ("llama", {"clipping": 0.1, "params": {"clip_scope": "global"}}, {"resident_blocks": 1}),
    "learned": ("llama", {"params": {"fit_steps": 2, **LEARNED}}, {}),
    "whole": ("llama", {"params": {"projector": "none"}, "gradient_accumulation_steps": 2}, {}),
}


@pytest.fixture
def nothing_is_zero_by_chance() -> Iterator[None]:
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_is_zero_by_chance")
@pytest.mark.parametrize("case", CASES)
def test_streamed_equals_resident(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_always(monkeypatch)
    name, more, stream = CASES[case]
    config = lsp_json(**more)
    engines = [start(config, small(name)), start(on_host(config, **stream), small(name))]
    losses = [train(engine, batches(name, 5 if case == "bf16" else 10)) for engine in engines]
    assert losses[0] == losses[1]
    assert_equal(parameters_of(engines[1]), parameters_of(engines[0]))
    runtime = engines[1].backend.blocks.store.runtime
    assert runtime.transport.bytes_up > 0 and runtime.transport.bytes_down > 0
    num_streamed = sum(unit.streamed for unit in engines[1].backend.blocks.store.placement.blocks)
    assert num_streamed == 2 - stream.get("resident_blocks", 0)
    if case == "llama":
        for engine in engines:
            engine.module.eval()  # as `from_pretrained` leaves a model: it would ask for key-value caches
        before = parameters_of(engines[1])
        assert train(engines[0], batches(name, 2, first=10)) == train(engines[1], batches(name, 2, first=10))
        assert_equal(parameters_of(engines[1]), parameters_of(engines[0]))
        assert all(
            not torch.equal(before[key], after) for key, after in parameters_of(engines[1]).items() if "mlp" in key
        )


class Interrupted(Exception):
    pass


def fail(*hooked: Any) -> None:
    raise Interrupted


def test_readers_and_a_resumed_run_see_the_step_that_was_made(tmp_path: Path) -> None:
    """An evaluation, one that fails in a block, a state dict and a checkpoint each find directions that wait, and none
    is lost or applied twice."""
    config = lsp_json(params=LEARNED)
    resident, streamed = start(config, small()), start(on_host(config), small())
    data = list(batches("llama", 6))
    for engine in (resident, streamed):
        train(engine, data[:2])
    with torch.no_grad():
        assert torch.equal(streamed.module(**data[0]).logits, resident.module(**data[0]).logits)
    for engine in (resident, streamed):
        train(engine, data[2:3])
    assert_equal(dict(streamed.module.state_dict()), dict(resident.module.state_dict()))
    for engine in (resident, streamed):
        train(engine, data[3:4])
        handle = engine.module.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Interrupted), torch.no_grad():
            engine.module(**data[0])
        handle.remove()
    streamed.save_checkpoint(str(tmp_path))
    resumed = start(on_host(config), small())
    resumed.load_checkpoint(str(tmp_path))
    assert train(resumed, data[4:]) == train(streamed, data[4:]) == train(resident, data[4:])
    assert_equal(parameters_of(resumed), parameters_of(resident))
    before = parameters_of(streamed)
    streamed.destroy()
    assert_equal({name: p.detach() for name, p in streamed.module.named_parameters()}, before)


def test_two_losses_a_step_add_up() -> None:
    data = list(batches("llama", 2))
    at_once = lsp_json(params={"schedule": "sync"})
    engines = [start(config, small()) for config in (at_once, on_host(at_once))]
    for engine in engines:
        for batch in data:
            engine.backward(engine(**batch).loss)
        engine.step()
    assert_equal(parameters_of(engines[1]), parameters_of(engines[0]))
