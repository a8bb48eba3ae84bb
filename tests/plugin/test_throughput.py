"""Samples per second are logged without emptying the device."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer

import ds_zo  # noqa: F401
from ds_zo.plugin.throughput import EventTimer
from tests.helpers.tiny_models import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("single_process")

NUM_SAMPLES = 4
STEP_S = 0.25


class Device:
    """A device that needs a quarter of a second a forward and has not reached what was issued last."""

    def __init__(self) -> None:
        self.issued_s = 0.0
        self.waits: list[float] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.at_s = -1.0

            def record(self) -> None:
                self.at_s = device.issued_s

            def query(self) -> bool:
                return self.at_s < device.issued_s

            def synchronize(self) -> None:
                device.waits.append(self.at_s)

            def elapsed_time(self, end: Event) -> float:
                assert end.query() or device.waits, "read before the device was there"
                return (end.at_s - self.at_s) * 1e3

        self.Event = Event


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "Event", device.Event)

    def synchronize(*_: Any) -> None:
        raise AssertionError("the device was emptied")

    monkeypatch.setattr(accelerator, "synchronize", synchronize)
    return device


def zo_config(**extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": NUM_SAMPLES,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-4, "zo_eps": 1e-3}},
        **extra,
    }


def run(config: dict[str, Any], num_micro_steps: int, device: Device) -> tuple[Any, list[str]]:
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    lines: list[str] = []
    engine.tput_timer.logging = lines.append
    batch = tiny_batch("llama")
    for _ in range(num_micro_steps):
        loss = engine(**batch).loss
        device.issued_s += STEP_S
        engine.backward(loss)
        engine.step()
    return engine, lines


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_timed_where_the_device_passes_them(device: Device, accumulation: int) -> None:
    config = zo_config(steps_per_print=4, gradient_accumulation_steps=accumulation)
    engine, lines = run(config, 9 * accumulation, device)
    assert isinstance(engine.tput_timer, EventTimer)
    assert [line.split(",")[0] for line in lines] == [
        f"epoch=0/micro_step={step * accumulation}/global_step={step}" for step in (4, 8)
    ]
    for line in lines:  # a forward is counted from its start to the end of the step that it belongs to
        rates = dict(part.split("=") for part in line.split(", ")[1:3])
        assert float(rates["RunningAvgSamplesPerSec"]) == pytest.approx(NUM_SAMPLES / STEP_S)
        assert float(rates["CurrSamplesPerSec"]) == pytest.approx(NUM_SAMPLES / STEP_S)
    assert len(device.waits) == 2, "one wait a report, for the step that it reports"
    assert len(engine.tput_timer._spans) <= 1


def test_a_timer_that_waits_for_nothing_stays(device: Device) -> None:
    for throughput in ({"enabled": False}, {"synchronized": False}):
        engine, _ = run(zo_config(timers={"throughput": throughput}), 1, device)
        assert type(engine.tput_timer) is ThroughputTimer


def test_deepspeeds_loader_starts_the_same_timer(device: Device) -> None:
    rows = [{name: value[0] for name, value in tiny_batch("llama").items()}] * (4 * NUM_SAMPLES)
    engine, _, loader, _ = deepspeed.initialize(
        model=tiny_model("llama"),
        config=zo_config(),
        training_data=rows,  # type: ignore[arg-type]
    )
    assert loader.tput_timer is engine.tput_timer
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
    assert engine.tput_timer.global_step_count == 4


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["ZO", "LOMO", "LSP"])
def test_no_step_empties_the_device(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = zo_config(optimizer={"type": backend, "params": {"lr": 1e-4}}, bf16={"enabled": True}, steps_per_print=4)
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    batch = {name: value.to(engine.device) for name, value in tiny_batch("llama").items()}
    waits: list[int] = []
    for step in range(9):
        if step == 3:  # the first ones measure and compile
            monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(1))
        engine.backward(engine(**batch).loss)
        engine.step()
    assert not waits
    assert engine.tput_timer.avg_samples_per_sec() > 0
