"""The layer-wise schedule is the synchronous one in another order: the same bits, whatever happens around a step."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_zo.backends.lsp import calibration as lsp_calibration
from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.backends.lsp.host_group import GroupPhase
from ds_zo.backends.lsp.matrices import MatrixGroup, find_matrices
from ds_zo.backends.lsp.ranks import CollectiveCall
from ds_zo.backends.lsp.scheduler import Job, RemoteJob, UpdateQueue, transition_layer
from ds_zo.backends.lsp.shared_groups import SharedHostGroup
from ds_zo.backends.lsp.transfers import Transfers
from ds_zo.config import LSPParams
from ds_zo.optim import subspace_adam
from ds_zo.optim.subspace_adam import HostScratch
from ds_zo.plugin import engine as plugin
from ds_zo.projectors import workspace
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.intercepted import without_interception
from ds_zo.streaming.streams import DONE, InlineStreams
from tests.helpers.lomo_runs import batches, checkpointed, start, train
from tests.helpers.lsp_runs import adopt_always, lsp_json, small
from tests.helpers.weights import assert_close, assert_equal, parameters_of
from tests.helpers.zoo import Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process")

SETTINGS: dict[str, dict[str, Any]] = {
    "projected": {},
    "whole": {"params": {"projector": "none"}},
    "bf16": {"bf16": {"enabled": True}, "lr": 1e-3, "clipping": 0.1},
    "clipped": {"clipping": 1.0},
    "refits": {
        "params": {
            "projector": "learned",
            "check_interval": 2,
            "bias_threshold": 0.1,
            "fit_steps": 1,
            "calibration_batches": 1,
        }
    },
    "accumulation": {"gradient_accumulation_steps": 2},
    "decayed": {"params": {"weight_decay": 0.1}},
}


def run(schedule: str, *, num_batches: int = 4, **json: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    json["params"] = {**json.get("params", {}), "schedule": schedule}
    engine = start(lsp_json(**json), small())
    losses = train(engine, batches("llama", num_batches))
    assert engine.backend._passes.starts_early == (schedule == "layerwise")
    return losses, parameters_of(engine)


@pytest.mark.parametrize("name", SETTINGS)
def test_layerwise_equals_synchronous(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_always(monkeypatch)
    losses, weights = run("layerwise", **SETTINGS[name])
    expected_losses, expected = run("sync", **SETTINGS[name])
    assert losses == expected_losses
    assert_equal(weights, expected)


def test_whole_matrices_in_chunks_train_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Adam does with many threads. Not clipped: norms are equal to rounding."""
    json: dict[str, Any] = {"params": {"projector": "none"}, "bf16": {"enabled": True}, "lr": 1e-3}
    losses, expected = run("sync", num_batches=3, **json)
    monkeypatch.setattr(subspace_adam, "MIN_THREADS_FOR_CHUNKS", 1)
    monkeypatch.setattr(subspace_adam, "_CHUNK_NUMEL", 128)
    parts: list[int] = []
    adam = subspace_adam.adam_
    monkeypatch.setattr(subspace_adam, "adam_", lambda *a, **k: (parts.append(a[0][0].numel()), adam(*a, **k)))
    chunked_losses, weights = run("layerwise", num_batches=3, **json)
    assert chunked_losses == losses and parts.count(128) > 10
    assert_equal(weights, expected)


def stored(engine: Any) -> dict[str, torch.Tensor]:
    """Weights as they are in memory: reading a parameter would bring it up to date."""
    with without_interception():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_layers_are_on_their_way_before_backward_returns_and_lag_until_used() -> None:
    engine = start(lsp_json(), small())
    data = list(batches("llama", 2))
    train(engine, data[:1])
    engine.backward(engine(**data[1]).loss)
    groups = engine.backend.groups.on_host
    assert all(group.phase is GroupPhase.UPDATING for group in groups)
    engine.step()
    assert all(group.phase is GroupPhase.UPDATE_PENDING for group in groups)
    lagging = stored(engine)
    layer = engine.module.model.layers[1]
    layer.register_forward_pre_hook(lambda *args: seen.update(weight=layer.mlp.up_proj.weight.detach().clone()))
    seen: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        engine.module(**data[0])  # evaluation of the raw module, as Trainer does
    weights = parameters_of(engine)
    assert torch.equal(seen["weight"], weights["model.layers.1.mlp.up_proj.weight"])
    assert not torch.equal(lagging["lm_head.weight"], weights["lm_head.weight"])


def test_readers_see_the_step_that_was_made() -> None:
    engine = start(lsp_json(params={"schedule": "sync"}), small("gpt2"))
    train(engine, batches("gpt2", 2))
    expected = {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def gathered(engine: Any) -> dict[str, torch.Tensor]:
        with GatheredParameters(list(engine.module.parameters())):
            return {name: p.detach().clone() for name, p in engine.module.named_parameters()}

    def full(engine: Any) -> dict[str, torch.Tensor]:
        return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}

    def destroyed(engine: Any) -> dict[str, torch.Tensor]:
        module = engine.module
        engine.destroy()
        assert not any(hasattr(p, "_hp_mapping") for p in module.parameters())
        return {name: p.detach() for name, p in module.named_parameters()}

    def of_a_part(engine: Any) -> dict[str, torch.Tensor]:
        return {f"transformer.{name}": value for name, value in engine.module.transformer.state_dict().items()}

    readers: list[Callable[[Any], dict[str, torch.Tensor]]] = [
        lambda engine: engine.module.state_dict(),
        of_a_part,
        lambda engine: engine.module_state_dict(),
        gathered,
        full,
        destroyed,
    ]
    for read in readers:
        engine = start(lsp_json(), small("gpt2"))
        train(engine, batches("gpt2", 2))
        lagging = stored(engine)
        assert any(not torch.equal(lagging[name], value) for name, value in expected.items())
        found = read(engine)
        assert_equal({name: found[name] for name in expected}, expected)


def test_an_evaluation_in_inference_mode_changes_nothing() -> None:
    """It applies directions, and may be the first to need memory that training goes on with."""
    weights = []
    for evaluates in (True, False):
        engine = start(lsp_json(), small())
        workspace.release()
        for batch in batches("llama", 3):
            train(engine, [batch])
            if evaluates:
                with torch.inference_mode():
                    engine(**batch)
        weights.append(parameters_of(engine))
    assert_equal(*weights)


def test_a_weight_of_two_blocks_is_up_to_date_in_either() -> None:
    """The last one is used first, or alone."""
    found = []
    for schedule in ("sync", "layerwise"):
        model = seeded(lambda: Wandering(num_blocks=3))
        model.layers[2].up.weight = model.layers[0].up.weight
        engine = start(lsp_json(params={"schedule": schedule}), model)
        losses = []
        for step in range(3):
            engine.backward(engine(**plain_batch(step, order=[2, 1, 0])))
            engine.step()
            with torch.no_grad():
                losses.append(engine(**plain_batch(step, order=[2])).item())
        found.append((losses, parameters_of(engine)))
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_what_is_written_to_a_gathered_weight_stays() -> None:
    engine = start(lsp_json(lr=1e-3), small())
    loaded = {name: value + 1.0 for name, value in engine.module.model.layers[1].state_dict().items()}
    [first, second] = engine.module.model.layers[0].mlp.up_proj.weight, engine.module.lm_head.weight
    train(engine, batches("llama", 2))
    where = first.data_ptr()
    with GatheredParameters([first], modifier_rank=0):
        assert first.data_ptr() == where
        first.data.fill_(0.5)
    safe_set_full_fp32_param(second, torch.full(second.shape, 0.25))
    engine.module.model.layers[1].load_state_dict(loaded)
    assert_equal(dict(engine.module.model.layers[1].state_dict()), loaded)
    assert first.data_ptr() == where
    assert bool((first == 0.5).all()) and bool((second == 0.25).all())
    train(engine, batches("llama", 1))
    engine.backend.apply_pending_updates()
    assert 0 < float((first.detach() - 0.5).abs().max()) < 0.1


def test_two_losses_a_step_add_up_or_are_refused() -> None:
    """The engine expects a step after the first backward, and the layer-wise schedule starts Adam in it."""
    params = {"eps": 1e-5}
    first, second, third = batches("llama", 3)
    early, late, whole = (
        start(lsp_json(lr=1e-3, params={**params, "schedule": schedule}, clipping=0.1), small())
        for schedule in ("layerwise", "sync", "layerwise")
    )
    for engine in (early, late):
        engine.backward(engine(**first).loss)
    late.backward(late(**second).loss)
    loss = early(**second).loss
    for backward in (lambda: early.backward(loss), lambda: loss.backward(retain_graph=True)):
        with pytest.raises(
            RuntimeError, match=r"one engine\.backward.*another gradient of .*call engine\.backward\(\) once"
        ):
            backward()
    early.zero_grad()
    early.backward(early(**first).loss + early(**second).loss)
    whole.backward(whole(**first).loss + whole(**second).loss)
    for engine in (early, late, whole):
        engine.step()
        train(engine, [third])
    for engine in (early, late):
        assert_close(parameters_of(engine), parameters_of(whole), atol=1e-6)


def test_zero_grad_forgets_what_was_begun() -> None:
    """By whom ever it is asked for: optimizer and module know of whole gradients only."""
    for schedule, who in (("layerwise", "engine"), ("sync", "module"), ("layerwise", "optimizer")):
        weights = []
        for forgets in (True, False):
            params = {"schedule": schedule, "eps": 1e-5}
            engine = start(lsp_json(lr=1e-3, params=params, clipping=0.1), small())
            data = list(batches("llama", 4))
            train(engine, data[:2])
            if forgets:
                engine.backward(engine(**data[2]).loss)
                (engine if who == "engine" else getattr(engine, who)).zero_grad()
            train(engine, data[3:])
            weights.append(parameters_of(engine))
        assert_close(*weights, atol=1e-6)


def test_gradients_that_a_script_drops_are_forgotten() -> None:
    """Also without vectors, whose gradients tell where all others are projected or on their way to the host."""
    for extra in ({"params": {"schedule": "sync"}}, {"clipping": 0.1, "params": {"clip_scope": "global"}}):
        json = lsp_json(**{**extra, "params": {**extra["params"], "projector": "none"}})
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))
        engine = start(json, model)
        before = parameters_of(engine)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        for p in model.parameters():
            p.grad = None
        engine.step()
        assert_equal(parameters_of(engine), before)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
        assert not any(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    weights = []
    for kind in (reentrant, None):
        engine = start(lsp_json(), checkpointed(small(), kind))
        train(engine, batches("llama", 3))
        weights.append(parameters_of(engine))
    assert_close(*weights, atol=1e-5)


def test_a_failure_on_the_adam_thread_is_raised_where_its_result_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: HostAdam, active: Any, **options: Any) -> torch.Tensor:
        raise MemoryError("no room")

    monkeypatch.setattr(HostAdam, "update", fail)
    engine = start(lsp_json(), small())
    with pytest.raises(MemoryError, match="no room"):
        train(engine, batches("llama", 2))


def test_transition_layer_is_the_papers() -> None:
    # 24 layers; one takes 4 down, 12 on the CPU, 4 up: 100 - 20 of the backward hide 80 / 12 layers' updates.
    assert transition_layer(24, backward_s=100, download_s=4, update_s=12, upload_s=4) == round(24 - 80 / 12)
    assert transition_layer(24, backward_s=1000, download_s=4, update_s=12, upload_s=4) == 0
    assert transition_layer(24, backward_s=10, download_s=4, update_s=12, upload_s=4) == 24
    assert transition_layer(24, backward_s=10, download_s=0, update_s=0, upload_s=0) == 0


@pytest.mark.parametrize(("last_first", "order"), [(False, "abc"), (True, "cba")])
def test_the_queue_serves_the_first_or_the_last_that_came(last_first: bool, order: str) -> None:
    queue, served, gate = UpdateQueue(), [], threading.Event()

    def work(name: str) -> torch.Tensor:
        served.append(name)
        return torch.zeros(1)

    def hold(job: Job) -> torch.Tensor:
        gate.wait()
        return torch.zeros(1)

    queue.put(Job(hold))
    jobs = [Job(lambda job, name=name: work(name)) for name in "abc"]
    time.sleep(0.05)  # the first is being held
    for job in jobs:
        queue.put(job)
    queue.order.last_first = last_first
    gate.set()
    for job in jobs:
        job.wait()
    queue.close()
    assert "".join(served) == order


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("where", ["here", "in Adam's thread"])
def test_a_collected_engine_leaves_the_weights_of_its_last_step(where: str, streams: bool) -> None:
    """The collector may come in Adam's thread, which has jobs to do that the engine's end waits for."""
    streamed = {"offload_param": {"device": "cpu"}} if streams else {}
    json = lsp_json(zero_optimization={"stage": 0, "offload_optimizer": {"device": "cpu"}, **streamed})
    engine = start(json, small())
    train(engine, batches("llama", 2))
    expected = parameters_of(engine)
    engine.destroy()

    engine = start(json, small())
    train(engine, batches("llama", 1))
    queue, module, dropped = engine.backend.groups.queue, engine.module, threading.Event()

    def collect(job: Job) -> torch.Tensor:
        assert dropped.wait(10)
        gc.collect()
        return torch.zeros(0)

    loss = engine(**next(batches("llama", 1, first=1))).loss
    if where != "here":
        queue.put(Job(collect))
    engine.backward(loss)
    engine.step()
    assert any(group.phase is GroupPhase.UPDATE_PENDING for group in engine.backend.groups.on_host)
    del engine, loss
    dropped.set()
    if where == "here":
        gc.collect()
    assert queue._thread is not None
    queue._thread.join(20)
    assert not queue._thread.is_alive()
    while plugin._destroying_threads:
        plugin._destroying_threads.pop().join(20)
    assert not any(m._forward_pre_hooks for m in module.modules())
    assert_equal(dict(module.named_parameters()), expected)


def test_an_engine_whose_adam_failed_is_destroyed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(lsp_json(), small())

    def fails(self: HostAdam, active: Any, **options: Any) -> torch.Tensor:
        raise MemoryError("no room for Adam")

    monkeypatch.setattr(HostAdam, "update", fails)
    train(engine, batches("llama", 1))
    with pytest.raises(MemoryError, match="no room for Adam"):
        engine.destroy()
    assert not any(m._forward_pre_hooks for m in engine.module.modules())
    assert engine.backend.groups.queue._thread is None or not engine.backend.groups.queue._thread.is_alive()
    engine.destroy()


def test_a_fit_that_found_no_memory_is_made_with_the_next_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first batch of a calibration and in a later one."""
    fit, failing = lsp_calibration.fit, True
    fitted: list[int] = []

    def may_fail(grad: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if failing:
            raise torch.OutOfMemoryError("no room for a fit")
        fitted.append(grad.numel())
        return fit(grad, *args, **kwargs)

    monkeypatch.setattr(lsp_calibration, "fit", may_fail)
    params = {"projector": "learned", "check_interval": 1, "bias_threshold": 0.01}
    engine = start(lsp_json(params=params), small())
    projected = [matrix for matrix in engine.backend._matrices if matrix.subspace is not None]
    for _ in range(2):
        failing = True
        with pytest.raises(torch.OutOfMemoryError):
            train(engine, batches("llama", 1))
        engine.zero_grad()
        failing = False
        fitted.clear()
        train(engine, batches("llama", 1))
        assert len(fitted) == len(projected)
    assert {matrix.subspace.num_draws for matrix in projected} == {1}


def test_a_job_that_ends_late_leaves_the_next_step_of_its_layer_alone() -> None:
    """A job of another rank is read by the first thread that waits for it, perhaps in the next step."""

    def at_once(work: Callable[[], None]) -> CollectiveCall:
        call = CollectiveCall(work, streams=streams)
        call.run(streams.compute)
        return call

    streams, queue, settings = InlineStreams(torch.device("cpu")), UpdateQueue(), LSPParams()
    first_of_two = SimpleNamespace(size=2, index=0, submit=at_once, average_=lambda value: None)
    layer = MatrixGroup("layer", True, find_matrices(nn.Linear(4, 4), settings, device=streams.device))
    options: dict[str, Any] = {"device": streams.device, "store": HostStore(streams.device, pin=False), "queue": queue}
    options |= {"transfers": Transfers(streams, order=queue.order), "scratch": HostScratch(), "max_norm": 0.0}
    group = SharedHostGroup(layer, settings, ranks=first_of_two, owner=1, unit=None, **options)  # type: ignore[arg-type]
    for matrix in group.matrices:
        matrix.parameter.grad, matrix.has_total = torch.ones(matrix.shape), True
    group.start([True, True], downloads=False)
    late = group.job
    assert isinstance(late, RemoteJob) and len(group.averages()) == 2
    group.discard()
    group.matrices[1].parameter.grad, group.matrices[1].has_total = torch.ones(group.matrices[1].shape), True
    group.start([False, True], downloads=False)
    late.set_ready(DONE)
    late.wait()
    assert list(group.averages()) == [id(group.matrices[1])]
