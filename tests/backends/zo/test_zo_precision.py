"""Storage narrower than float32: which values are kept exactly, and which only in the mean.

[Note: judging a rounded run] Losses in bf16 differ from losses in float32, so trajectories are not compared directly.
Instead, a run's own projected gradients are recorded. Plain MeZO replays them in float32 from the run's first weights.
The two then differ only by the rounding of stored updates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.equivalence_runs import Measured, masters_of, one_step, zo_config, zo_engine
from tests.helpers.mezo_reference import PlainMeZO
from tests.helpers.weights import Weights, parameters_of
from tests.helpers.zoo import CASES, Wandering, plain_batch, seeded

pytestmark = pytest.mark.usefixtures("single_process")

ZO_EPS = 1e-2
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Of a value, relative to it, at most."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


@dataclass
class Run:
    start: Weights
    """Of the stored weights, before the first step."""
    end: Weights
    """Masters."""
    rounded: Weights
    """What a state dict says at the end."""
    replayed: Weights
    blocks: set[str]
    """Names of the parameters that stream."""


def recorded_run(
    model: nn.Module,
    batches: list[dict[str, Any]],
    measured: Measured,
    *,
    lr: float,
    clip: float | None = None,
    **options: Any,
) -> Run:
    """Trains, then replays the recorded gradients; see [Note: judging a rounded run]."""
    reference = PlainMeZO(model, lr=lr, zo_eps=ZO_EPS)
    config = zo_config(lr=lr, zo_eps=ZO_EPS, clip_projected_grad=clip, **options)
    with zo_engine(model, config) as engine:
        start = masters_of(engine)
        blocks = {placed.name for unit in engine.backend.store.blocks.placement.blocks for placed in unit.placed}
        gradients = []
        for batch in batches:
            one_step(engine, batch)
            plus, minus = (loss.float().cpu() for loss in measured.take()[-1])
            g = (plus - minus) / (2 * ZO_EPS)
            gradients.append(float(g if clip is None else g.clamp(-clip, clip)))
        end, rounded = masters_of(engine), parameters_of(engine)
    reference.load(start)
    for g in gradients:
        reference.update([g])
    return Run(start, end, rounded, reference.weights, blocks)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_split_master_is_the_float32_replay(name: str, dtype: str, measured: Measured) -> None:
    """Every pair of model, dtype and interval, not every triple."""
    interval = 1 if (name == "llama") == (dtype == "fp16") else 4
    case = CASES[name]
    batches = [case.batch(seed) for seed in range(9)]
    run = recorded_run(case.make(), batches, measured, lr=1e-4, dtype=dtype, stream={"writeback_interval": interval})
    for key, expected in run.replayed.items():
        moved = (expected - run.start[key]).abs().max()
        torch.testing.assert_close(run.end[key], expected, rtol=1e-6, atol=1e-9)
        assert moved > 1e-5, f"{key} hardly moved: the comparison shows nothing"
        step_of_format = run.end[key].abs() * HALF_ULP[dtype] * 1.01 + 1e-7
        assert ((run.rounded[key].float() - run.end[key]).abs() <= step_of_format).all()


@pytest.mark.parametrize(("wire", "tolerance"), [("fp8", 1e-5), ("bf12", 1e-7)])
def test_split_master_with_a_narrow_wire_is_the_float32_replay(wire: str, tolerance: float, measured: Measured) -> None:
    """Low planes have 16 bits below e4m3's own four and bf12's eight."""
    case = CASES["llama"]
    batches = [case.batch(seed) for seed in range(6)]
    options: dict[str, Any] = {"dtype": "bf16", "stream": {"wire_dtype": wire, "writeback_interval": 2}}
    run = recorded_run(case.make(), batches, measured, lr=1e-3, **options)
    for key, expected in run.replayed.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(run.end[key], expected, rtol=0.0, atol=tolerance * scale)
        assert (expected - run.start[key]).abs().max() > 1e-3 * scale


@dataclass
class Drift:
    """The fraction of the float32 drift that a run made: 1 is all of it."""

    slope: float
    error: float
    """Standard."""

    @classmethod
    def of(cls, made: torch.Tensor, meant: torch.Tensor) -> Drift:
        made, meant = made.double(), meant.double()
        weight = float((meant * meant).sum())
        slope = float((made * meant).sum()) / weight
        left = made - meant
        return cls(slope, float(((meant * left) ** 2).sum().sqrt()) / weight)

    @property
    def unbiased(self) -> bool:
        assert self.error < 0.08, f"too few samples to tell ({self})"
        return abs(self.slope - 1.0) < 5 * self.error


FORMATS: dict[str, tuple[float, dict[str, Any]]] = {
    "bf16": (1e-5, {"dtype": "bf16"}),
    "fp16": (1.5e-6, {"dtype": "fp16"}),
    "bf16 under fp32": (1e-5, {"stream": {"wire_dtype": "bf16"}}),
    "bf12 under bf16": (1e-5, {"dtype": "bf16", "stream": {"wire_dtype": "bf12"}}),
    "fp8 under bf16": (2e-4, {"dtype": "bf16", "stream": {"wire_dtype": "fp8"}}),
    "fp8 under fp32": (2e-4, {"stream": {"wire_dtype": "fp8"}}),
}
"""A learning rate with which an update is about a fiftieth of the distance between two stored values, and the rest."""


def drift_of_blocks(name: str, measured: Measured, *, rounding: str, interval: int = 1) -> Drift:
    lr, options = FORMATS[name]
    options = {**options, "stream": {**options.get("stream", {}), "master": "wire", "writeback_interval": interval}}
    model = seeded(lambda: Wandering(width=32))
    batches = [plain_batch(seed) for seed in range(16)]
    # Clipped to a small value every |g| is that value, so that the size of an update is known.
    run = recorded_run(model, batches, measured, lr=lr / 0.01, clip=0.01, section={"rounding": rounding}, **options)
    made = torch.cat([(run.end[key] - run.start[key]).flatten() for key in sorted(run.blocks)])
    meant = torch.cat([(run.replayed[key] - run.start[key]).flatten() for key in sorted(run.blocks)])
    return Drift.of(made, meant)


@pytest.mark.parametrize(
    ("name", "interval"),
    [*((name, 1) for name in FORMATS), *((name, 4) for name in FORMATS if name.endswith("under bf16"))],
)
def test_wire_storage_follows_float32_in_the_mean(name: str, interval: int, measured: Measured) -> None:
    drift = drift_of_blocks(name, measured, rounding="stochastic", interval=interval)
    assert drift.unbiased, drift


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_rounding_loses_small_updates(name: str, measured: Measured) -> None:
    """Shows that the test above can fail, and why stochastic rounding is the default."""
    drift = drift_of_blocks(name, measured, rounding="nearest")
    assert not drift.unbiased and drift.slope < 0.5, drift


def difference_of_passes(rounding: str) -> Drift:
    """Differences of norm weights, all near 1, where bf16's neighbours are eight times zo_eps apart."""
    model = seeded(lambda: Wandering(width=32))
    config = zo_config(dtype="bf16", lr=0.0, zo_eps=1e-3, section={"rounding": rounding})
    seen: list[torch.Tensor] = []
    made, meant = [], []
    reference = PlainMeZO(model, lr=0.0)
    with zo_engine(model, config) as engine:
        for layer in engine.module.layers:
            layer.norm.register_forward_pre_hook(lambda norm, args: seen.append(norm.weight.detach().float().cpu()))
        for step in range(40):
            seen.clear()
            one_step(engine, plain_batch(step))
            for i in range(len(model.layers)):  # what follows in the first step is its check, pass after pass
                plus, minus = seen[2 * i], seen[2 * i + 1]
                made.append(plus - minus)
                meant.append(2e-3 * reference.noise(f"layers.{i}.norm.weight", 0))
            reference.update([0.0])
    return Drift.of(torch.cat(made), torch.cat(meant))


def test_passes_differ_by_the_perturbation_in_the_mean() -> None:
    assert difference_of_passes("stochastic").unbiased


def test_nearest_rounding_loses_the_perturbation_of_norms() -> None:
    assert difference_of_passes("nearest").slope < 0.5


def test_the_printed_bound_of_wire_storage_holds(measured: Measured) -> None:
    """Compares the rounding error of weights stored in bf16 and folded every step with the bound in the start-up
    log."""
    num_steps, stream = 30, {"master": "wire", "writeback_interval": 1}
    with zo_engine(seeded(CASES["llama"].make), zo_config(dtype="bf16", stream=stream)) as engine:
        bound = engine.backend.store.rounding_bound(num_steps)
        assert f"{engine.backend.store.rounding_bound(1000):.2g} in 1,000 steps" in engine.backend.describe()
    batches = [CASES["llama"].batch(seed) for seed in range(num_steps)]
    run = recorded_run(seeded(CASES["llama"].make), batches, measured, lr=1e-5, dtype="bf16", stream=stream)
    matrices = [name for name in run.blocks if run.start[name].dim() == 2]
    walked = torch.cat(
        [((run.end[n] - run.replayed[n]) / run.start[n].abs().clamp_min(1e-4)).flatten() for n in matrices]
    )
    assert 0.01 * bound < walked.std() < bound
