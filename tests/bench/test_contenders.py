"""The comparison is fair by construction: one JSON but for three sections, one set of batches, one ruler."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig

from ds_zo.backends.lsp.calibration import Calibration
from ds_zo.bench.compare import add_arguments
from ds_zo.bench.contenders import ALL, DIFFERING, ORDER, chosen, config_of, shared_config
from ds_zo.bench.entrant import EntrantSpec, _partitioned, run_contender
from ds_zo.bench.runner import read_rows
from ds_zo.bench.shapes import materialise
from ds_zo.bench.table_cases import make_cases
from ds_zo.bench.traces import read_trace, union_length
from ds_zo.bench.workload import text_batches, zipf_batches
from ds_zo.config import backend_of, resolve
from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED_MODEL

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "compare"
SHARED = shared_config(batch=2, dtype="bf16")


@pytest.mark.parametrize("name", [name for name in ALL if ALL[name].peer is None])
def test_a_contender_is_its_own_sections_and_deepspeed_accepts_them(name: str) -> None:
    config = config_of(ALL[name], SHARED)
    assert [{key: c[key] for key in SHARED if key not in DIFFERING} for c in (config, SHARED)] == [
        {key: value for key, value in c.items() if key not in DIFFERING} for c in (SHARED, config)
    ]
    assert config["bf16"] == {"enabled": True} | ALL[name].bf16
    assert not DeepSpeedConfig(config).timers_config.enabled, "it would wait for the device twice a step"
    assert backend_of(config) == ALL[name].backend
    if ALL[name].backend is not None:
        assert resolve(config).ignored == ()


def test_cases_are_planned_to_take_what_they_took(h200: pytest.MonkeyPatch) -> None:
    """On the machine of the committed results, by table. One case may be off by more."""
    for folder in (COMMITTED / "llama-1.3b" / "uncapped", COMMITTED / "opt-13b" / "24gb"):
        rows = {row["case"]: row for row in read_rows(folder / "rows.jsonl")}
        ran = {name: row for name, row in rows.items() if row["status"] == "ok" and name in ORDER}
        spec = next(iter(ran.values()))["params"]["spec"]
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        told = ["--model", spec["model"], "--batch", str(spec["batch"]), "--seq", str(spec["length"])]
        args = parser.parse_args([*told, "--contenders", ",".join(ran)])
        for key in ("steps", "warmup", "max_s"):
            setattr(args, key, spec[key])
        _, *cases = make_cases(args, device="cuda", device_memory_gb=spec["device_memory_gb"])
        planned_s, took_s = sum(case.expected_s for case in cases), sum(ran[case.name]["wall_s"] for case in cases)
        assert 0.6 * took_s < planned_s < 1.6 * took_s, folder


def test_a_smaller_card_is_told_to_ours_and_shrinks_the_buckets_of_stock() -> None:
    ours = config_of(ALL["zo"], SHARED, device_memory_gb=4)
    assert ours["ds_zo"]["stream"]["device_memory_gb"] == 3.84
    stock = config_of(ALL["zero2-offload"], SHARED, device_memory_gb=6)["zero_optimization"]
    assert stock["reduce_bucket_size"] == stock["allgather_bucket_size"] == 125_000_000
    assert config_of(ALL["zero2-offload"], SHARED, device_memory_gb=24) == config_of(ALL["zero2-offload"], SHARED)


def test_clipping_needs_the_norm_that_is_otherwise_left_out() -> None:
    clipped = shared_config(batch=2, dtype="bf16", gradient_clipping=1.0)
    assert config_of(ALL["adamw-flat"], SHARED)["zero_optimization"]["compute_grad_norm"] is False
    assert "compute_grad_norm" not in config_of(ALL["adamw-flat"], clipped)["zero_optimization"]


def test_a_learning_rate_is_one_contenders_own() -> None:
    assert config_of(ALL["sgd"], SHARED, lr=0.5)["optimizer"]["params"]["lr"] == 0.5
    assert ALL["sgd"].optimizer["params"]["lr"] != 0.5


def numel_and_nbytes(optimizer: Any) -> tuple[int, int]:
    """Elements of an offloading optimizer's master weights, and bytes of all that it keeps in host memory."""
    stage3 = hasattr(optimizer, "grad_partitions_flat_buffer")
    masters = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
    staging = (
        [optimizer.grad_partitions_flat_buffer] if stage3 else optimizer.param_buffer_of_bit16_for_cpu_offload_groups
    )
    states = [t for state in optimizer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    kept = [*masters, *(p.grad for p in masters), *staging, *(t for t in states if t.numel() > 1)]
    return sum(p.numel() for p in masters), sum(t.nbytes for t in kept)


@pytest.mark.usefixtures("single_process")
def test_low_memory_states_take_the_planned_bytes_and_train_as_adamw_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in micro-batches, and with activations offloaded."""
    engines: list[Any] = []
    monkeypatch.setattr("ds_zo.bench.entrant._ageing", lambda entrant, config, engine: engines.append(engine))
    losses = {}
    cases = ("adamw-lean", 2), ("zero2-offload", 1), ("zero2-offload-bf16-act", 2), ("zero3-offload-bf16", 1)
    for name, accumulation, lr in [*((*case, 3e-3) for case in cases), ("adamw-lean", 1, 0.0)]:
        spec = EntrantSpec("random:llama-tiny", batch=4, length=8, steps=2, warmup=1, dtype="bf16", device="cpu")
        spec = replace(spec, layers=1, accumulation=accumulation)
        config = config_of(ALL[name], shared_config(batch=4, dtype="bf16", accumulation=accumulation), lr=lr)
        row = run_contender(contender=name, config=config, spec=asdict(spec))
        losses[name if lr else "untrained"] = row["losses"]
        assert ("2 micro-batches a step" in row["settings"]) == (accumulation == 2)
        if ALL[name].peer is None:
            numel, nbytes = numel_and_nbytes(engines[-1].optimizer)
            assert nbytes == (18 if name == "zero2-offload" else 10) * numel
    untrained = losses.pop("untrained")
    assert all(found == pytest.approx(losses["adamw-lean"], abs=2e-3) for found in losses.values()), losses
    assert untrained[2] - losses["adamw-lean"][2] > 0.02, "a model that does not learn would agree, too"


def test_contenders_are_chosen_by_name() -> None:
    assert [c.name for c in chosen(["zo", "adamw"])] == ["adamw", "zo"]
    with pytest.raises(ValueError, match="unknown contender adam; there are adamw, adamw-flat, adamw-lean, sgd"):
        chosen(["adam"])


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("shape", ["opt-tiny", "llama-tiny"])
def test_zero3_is_built_in_partitions_from_the_same_values(shape: str) -> None:
    import deepspeed

    spec = EntrantSpec(f"random:{shape}", batch=1, length=8, steps=1, warmup=0, dtype="bf16", device="cpu", layers=1)
    lazy = spec.lazy_model()
    model = _partitioned(lazy, config_of(ALL["zero3-offload-param"], SHARED), spec)
    whole = materialise(lazy)
    assert all(p.numel() == 0 for p in model.parameters())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(p, q), name
    for (name, b), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        assert b.dtype == other.dtype and torch.equal(b, other), name


def test_random_weights_get_the_same_learnable_tokens_in_every_process() -> None:
    first, second = (zipf_batches(100, batch=8, length=500, seed=3) for _ in range(2))
    assert torch.equal(first(5), second(5)) and not torch.equal(first(5), first(6))
    counts = torch.bincount(first(0).flatten(), minlength=100).sort(descending=True).values
    assert counts[0] / counts.sum() == pytest.approx(1 / sum(1 / rank for rank in range(1, 101)), rel=0.15)
    frequencies = counts[counts > 0] / counts.sum()
    assert float(-(frequencies * frequencies.log()).sum()) < 0.95 * math.log(100)


def test_a_model_that_can_read_gets_text() -> None:
    ids = text_batches(str(EMBEDDED_MODEL), None, batch=2, length=64, seed=0)(0)
    assert ids.shape == (2, 64) and len(ids.unique()) > 10
    assert not torch.equal(ids[0], ids[1])


def event(category: str, start: float, duration: float, name: str = "k", nbytes: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "ts": start, "dur": duration, "name": name, "args": {"bytes": nbytes}}


def test_a_copy_counts_where_nothing_computes_beside_it() -> None:
    events = [
        event("kernel", 0, 10),
        event("gpu_memcpy", 5, 15, "Memcpy HtoD (Pinned -> Device)", 3_000),
        event("gpu_memcpy", 18, 4, "Memcpy DtoH (Device -> Pinned)", 1_000),
        event("gpu_memcpy", 30, 5, "Memcpy DtoD (Device -> Device)", 9_000),
        event("cpu_op", 0, 1000),
    ]
    found = read_trace(events, steps=2)
    assert found["up_gb"] == 1.5e-6 and found["down_gb"] == 0.5e-6
    assert found["gpu_compute_s"] == pytest.approx(7.5e-6)
    assert found["gpu_copy_s"] == pytest.approx(8.5e-6)
    assert found["copy_exposed_s"] == pytest.approx(6e-6)
    assert found["gpu_idle_s"] == pytest.approx(4e-6)
    assert read_trace([event("cpu_op", 0, 5)], steps=1) == {}


def test_intervals_are_united() -> None:
    assert union_length([(0, 4), (1, 2), (3, 6), (8, 9)]) == 7


@pytest.mark.usefixtures("single_process")
def test_lsp_is_timed_after_its_projectors_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting: list[bool] = []
    begin = Calibration.begin_backward

    def begin_backward(self: Calibration, step: int, trained: Any) -> None:
        begin(self, step, trained)
        fitting.append(any(map(self.wants_gradient, trained)))

    monkeypatch.setattr(Calibration, "begin_backward", begin_backward)
    spec = EntrantSpec("random:llama-tiny", batch=2, length=8, steps=2, warmup=1, dtype="bf16", device="cpu", layers=1)
    config = config_of(ALL["lsp"], shared_config(batch=2, dtype="bf16"))
    config["optimizer"]["params"] |= {"subspace_dim": 8, "fit_steps": 4}
    row = run_contender(contender="lsp", config=config, spec=asdict(spec))
    num_warmup = len(row["warmup_seconds"])
    assert any(fitting[:num_warmup]) and not any(fitting[num_warmup:])
