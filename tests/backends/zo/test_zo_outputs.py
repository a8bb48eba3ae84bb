"""From a model's output to an update: every form of output, every scale that the caller applies, and steps that are
skipped."""

from __future__ import annotations

import itertools
import weakref
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import ModelOutput

from ds_zo import ops
from ds_zo.backends.zo import outputs
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    EPS,
    LR,
    Recorder,
    Toy,
    close,
    engine_for,
    log_lines,
    one_step,
    toy_batches,
    train,
    zo_json,
)

pytestmark = pytest.mark.usefixtures("single_process")

BATCHES = toy_batches(8)
JSON = zo_json(interval=3)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


class LogitsToy(Toy):
    """Returns logits, and the loss if it is asked for."""

    def both(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.middle(self.embed(ids)))
        return logits, cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor
    loss: torch.Tensor


class Plain:
    def __init__(self, logits: torch.Tensor, loss: torch.Tensor) -> None:
        self.logits, self.loss = logits, loss


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "bare": lambda logits, loss: loss,
    "of one element": lambda logits, loss: loss.view(1),
    "dict": lambda logits, loss: {"logits": logits, "loss": loss, "note": "kept"},
    "tuple": lambda logits, loss: (loss, logits),
    "list": lambda logits, loss: [loss, logits],
    "named tuple": lambda logits, loss: Pair(loss, logits),
    "model output": lambda logits, loss: CausalLMOutput(loss=loss, logits=logits),
    "an object": lambda logits, loss: Plain(logits, loss),
    "a frozen one": lambda logits, loss: Frozen(logits, loss),
    "mapping": lambda logits, loss: UserDict(logits=logits, loss=loss),
    "several": lambda logits, loss: {"logits": logits, "loss": loss / 2, "rest": loss / 2},
}


def find_loss(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, dict) and "rest" in output:
        return output["loss"] + output["rest"]
    if isinstance(output, (dict, UserDict)):
        return output["loss"]
    return output[0] if isinstance(output, (tuple, list)) else output.loss


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_output_trains_the_same(form: str) -> None:
    class Returns(LogitsToy):
        def forward(self, ids: torch.Tensor) -> Any:
            return FORMS[form](*self.both(ids))

    engine, reference = engine_for(Returns(), JSON), engine_for(Toy(), JSON)
    for batch in BATCHES[:4]:
        expected = reference(**batch)
        reference.backward(expected)
        reference.step()
        output = engine(**batch)
        assert type(output) is type(FORMS[form](torch.zeros(1), torch.zeros(())))
        loss = find_loss(output)
        assert loss.item() == expected.item()
        assert loss.requires_grad
        if form == "model output":
            assert output.loss is output["loss"]
            assert output[0] is output.loss
        if form == "dict":
            assert output["note"] == "kept"
            mark = output["logits"].grad_fn
            assert mark is not loss.grad_fn, "only the loss is tied: a difference of logits would be kept"
            assert not mark.saved_tensors
        engine.backward(loss)
        engine.step()
    assert_equal(weights(engine.module), weights(reference.module))


@dataclass
class Fused(ModelOutput):
    """Returns the labels' log-probabilities beside the loss, as TRL's fused heads do."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class ReturnsLogProbs(LogitsToy):
    def forward(self, ids: torch.Tensor) -> Fused:
        logits, loss = self.both(ids)
        every = logits[:, :-1].log_softmax(-1)
        log_probs = every.gather(-1, ids[:, 1:, None])[..., 0]
        return Fused(loss=loss, log_probs=log_probs, entropy=-(every.exp() * every).sum(-1))


def test_a_loss_that_the_caller_sums_from_log_probabilities() -> None:
    """As TRL's trainers do."""
    engine, reference = engine_for(ReturnsLogProbs(), JSON), engine_for(Toy(), JSON)
    for batch in BATCHES[:4]:
        expected = reference(**batch)
        reference.backward(expected)
        reference.step()
        output = engine(**batch)
        with pytest.raises(ValueError, match="an output of the model besides its loss"):
            engine.backward(output.loss + output.entropy.mean())
        loss = -output.log_probs.sum() / output.log_probs.numel()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        engine.backward(loss)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(reference.get_global_grad_norm(), rel=1e-3, abs=2e-3)
    expected_weights = weights(reference.module)
    for name, value in weights(engine.module).items():
        torch.testing.assert_close(value, expected_weights[name], rtol=0, atol=1e-4, msg=name)


class ReturnsLogits(LogitsToy):
    def forward(self, ids: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.both(ids)[0], "ids": ids, "nothing": None}


@dataclass
class Logits:
    logits: torch.Tensor
    ids: torch.Tensor
    nothing: None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class ReturnsObjects(ReturnsLogits):
    def forward(self, ids: torch.Tensor) -> Any:
        return Logits(self.both(ids)[0], ids)


def linear_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return -(logits.gather(-1, ids[..., None])).mean()


def smoothed_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.2)


@pytest.mark.parametrize(
    ("kind", "criterion", "accuracy"), [(ReturnsLogits, linear_loss, 1e-4), (ReturnsObjects, smoothed_loss, 1e-3)]
)
def test_a_criterion_of_the_users_own(kind: type[Toy], criterion: Callable[..., torch.Tensor], accuracy: float) -> None:
    """g is exact for a loss that is linear in the outputs and right to O(zo_eps^2) for another."""
    engine = engine_for(kind(), JSON)
    reference = PlainMeZO(kind())
    with log_lines(20) as lines:
        for batch in BATCHES[:4]:
            reference.model.load_state_dict(engine.module.state_dict())
            plus, minus = reference.passes(lambda m, b=batch: criterion(m(**b)["logits"], b["ids"]))
            reference.steps += 1
            output = engine(**batch)
            assert output["nothing"] is None
            assert torch.equal(output["ids"], batch["ids"])
            loss = criterion(output["logits"], batch["ids"])
            assert loss.item() == pytest.approx((plus + minus).item() / 2, rel=1e-5)
            engine.backward(loss)
            engine.step()
            g = (plus - minus).item() / (2 * EPS)
            assert engine.get_global_grad_norm() == pytest.approx(abs(g), rel=accuracy, abs=2e-3)
    assert len([line for line in lines if "returns no loss" in line]) == 1


# Terms of a loss that the model's forward does not return: the others are drawn in tests/random/test_zo_losses.py


def test_the_first_step_keeps_one_output_at_a_time() -> None:
    """What it keeps beside a running pass counts as activations, and takes the place of blocks on a GPU."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Counts(Toy):
        def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
            alive.append(sum(ref() is not None for ref in made))
            logits = torch.zeros(8)
            made.append(weakref.ref(logits))
            return {"loss": super().forward(**batch), "logits": logits}

    engine = engine_for(Counts().train(), zo_json())
    engine.backward(engine(**toy_batches(1)[0])["loss"])
    engine.step()
    assert len(alive) >= 4 and max(alive) == 1


class TakesABatch(LogitsToy):
    def forward(self, batch: UserDict[str, torch.Tensor]) -> Any:  # type: ignore[override]
        logits, loss = self.both(batch["ids"])
        return CausalLMOutput(loss=loss + batch["shift"].sum(), logits=logits)


def test_an_input_that_requires_grad_is_refused_inside_a_container() -> None:
    engine, shift = engine_for(TakesABatch(), JSON), torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="This loss also depends on"):
        engine.backward(2 * engine(UserDict(**BATCHES[0], shift=shift)).loss)
    engine.zero_grad()
    engine.backward(engine(UserDict(**BATCHES[0], shift=shift.detach())).loss)


def test_a_head_of_ones_own_on_measured_outputs_gets_gradients() -> None:
    """A model that returns no loss has all its outputs measured, and code after them is differentiated by autograd."""
    engine, head = engine_for(ReturnsLogits(), JSON), nn.Linear(32, 2)
    before = weights(engine.module)["head.bias"]
    engine.backward(head(engine(**BATCHES[0])["logits"]).square().mean())
    engine.step()
    assert head.weight.grad.abs().max() > 0
    assert not torch.equal(weights(engine.module)["head.bias"], before)


def test_a_destroyed_engine_leaves_parameters_to_others() -> None:
    engine = engine_for(ReturnsLogits(), JSON)
    module = engine.module
    engine.destroy()
    (module(**BATCHES[0])["logits"].square().mean() + sum((p**2).sum() for p in module.parameters())).backward()
    assert all(p.grad is not None for p in module.parameters())


# What the caller does with the loss


def test_a_loss_of_64_bits_keeps_them() -> None:
    found: list[torch.Tensor] = []
    passes = [[torch.tensor(1e6 + sign * 1e-6, dtype=torch.float64)] for sign in (1, -1)]
    (loss,) = outputs.tie(passes, anchor=torch.zeros((), requires_grad=True), accumulate=found.append)
    loss.backward()
    assert found[0].item() == pytest.approx(2e-6, rel=1e-3)


def norms_of(use: Callable[[Any, torch.Tensor], None], json: dict[str, Any] = JSON) -> list[float]:
    engine = engine_for(Toy(), json)
    norms = []
    for batch in BATCHES[:3]:
        use(engine, engine(**batch))
        engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.module.load_state_dict(Toy().state_dict())  # each step from the same weights
    return norms


def multiplied_in_place(engine: Any, loss: torch.Tensor) -> None:
    loss *= 2
    engine.backward(loss)


@pytest.mark.parametrize(
    ("use", "factor"),
    [
        (lambda engine, loss: engine.backward(2 * loss), 2),
        (lambda engine, loss: engine.backward(-loss), 1),
        (multiplied_in_place, 2),
        (lambda engine, loss: engine.backward(loss.double() / 4), 0.25),
        (lambda engine, loss: engine.backward(loss**2 / (2 * loss.detach())), 1),
        (lambda engine, loss: loss.backward(), 1),
        (lambda engine, loss: (engine.backward(loss, retain_graph=True), engine.backward(loss)), 2),
    ],
    ids=["twice", "negated", "in place", "in double", "a function of it", "bare backward", "two backwards"],
)
def test_the_scale_of_the_caller_reaches_the_update(use: Any, factor: float) -> None:
    plain = norms_of(lambda engine, loss: engine.backward(loss))
    assert min(plain) > 0.05
    assert norms_of(use) == pytest.approx([factor * norm for norm in plain], rel=1e-5)


def test_the_norm_is_that_of_g(passes: Recorder) -> None:
    engine = engine_for(Toy(), JSON)
    for batch in BATCHES[:3]:
        one_step(engine, batch)
        plus, minus = passes.last
        assert engine.get_global_grad_norm() == pytest.approx(abs(plus - minus) / (2 * EPS), rel=1e-3)
    engine = engine_for(Toy(), zo_json(params={"num_directions": 3}))
    one_step(engine, BATCHES[0])
    losses = torch.tensor(passes.last, dtype=torch.float64).view(3, 2)
    assert engine.get_global_grad_norm() == pytest.approx(
        ((losses[:, 0] - losses[:, 1]) / (2 * EPS)).norm().item(), rel=1e-3
    )


# Accumulation


@pytest.mark.parametrize("scale_wrt_gas", [True, False])
def test_a_window_has_one_direction_and_the_mean_of_its_losses(scale_wrt_gas: bool, passes: Recorder) -> None:
    engine = engine_for(Toy(), zo_json(interval=3, gradient_accumulation_steps=4))
    reference = PlainMeZO(Toy())
    for window in range(2):
        before = weights(engine.module)
        reference.model.load_state_dict(before)
        reference.steps = window
        projected = []
        for batch in BATCHES[4 * window : 4 * window + 4]:
            assert_equal(weights(engine.module), before)
            expected = reference.passes(loss_on(batch))
            engine.backward(engine(**batch), scale_wrt_gas=scale_wrt_gas)
            engine.step()
            close(passes.last, expected)
            projected.append((expected[0] - expected[1]).item() / (2 * EPS))
        assert engine.global_steps == window + 1
        g = sum(projected) / (4 if scale_wrt_gas else 1)
        assert engine.get_global_grad_norm() == pytest.approx(abs(g), abs=4e-3)
        moved = before["head.bias"] - weights(engine.module)["head.bias"]
        offset = sum(p.numel() for name, p in Toy().named_parameters() if name != "head.bias")
        z = ops.noise(0, window, 0, offset, moved.numel())
        torch.testing.assert_close(moved, LR * g * z, rtol=1e-2, atol=2e-5)


def test_two_forwards_before_one_backward() -> None:
    window = engine_for(Toy(), zo_json(interval=3, gradient_accumulation_steps=2))
    summed = engine_for(Toy(), JSON)
    for first, second in zip(BATCHES[0:6:2], BATCHES[1:6:2], strict=True):
        for batch in (first, second):
            window.backward(window(**batch))
            window.step()
        late = summed(**first)
        summed.backward((late + summed(**second)) / 2, retain_graph=True)
        summed.step()
        with pytest.raises(RuntimeError, match=r"noise of its own step, got one of step \d in step \d: call"):
            summed.backward(late)
        assert summed.get_global_grad_norm() == pytest.approx(window.get_global_grad_norm(), rel=1e-5)
    for name, value in weights(window.module).items():
        torch.testing.assert_close(value, weights(summed.module)[name], rtol=1e-5, atol=1e-6)


# Steps that are skipped


class Poisoned(Toy):
    """A model whose loss is multiplied by one factor per pass."""

    def __init__(self) -> None:
        super().__init__()
        self.poison((1.0, 1.0))

    def poison(self, factors: tuple[float, float]) -> None:
        self.factors = itertools.cycle(factors)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * next(self.factors)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("factors", "params", "offload"),
    [
        ((NAN, NAN), {}, True),
        ((NAN, 1.0), {"clip_projected_grad": 0.5}, True),
        ((1.0, INF), {}, False),
        ((INF, 1.0), {"clip_projected_grad": 0.5}, False),
        ((-INF, INF), {"clip_projected_grad": 0.5}, True),
    ],
)
def test_a_step_that_overflows_is_skipped(factors: tuple[float, float], params: dict[str, Any], offload: bool) -> None:
    """No weight changes, not even by weight decay. The step is counted, and the lr schedule and training go on."""
    json = zo_json(
        interval=3,
        offload=offload,
        params={"weight_decay": 0.1, **params},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_max_lr": LR, "warmup_num_steps": 20, "warmup_type": "linear"},
        },
    )
    engine = engine_for(Poisoned(), json)
    train(engine, BATCHES[:2])
    assert engine.was_step_applied()
    before, lr = weights(engine.module), engine.get_lr()
    engine.module.poison(factors)
    with log_lines() as lines:
        one_step(engine, BATCHES[2])
        assert not engine.was_step_applied()
    engine.module.poison((1.0, 1.0))
    assert engine.skipped_steps == 1
    assert any("step skipped" in line for line in lines)
    assert engine.global_steps == 3
    assert engine.get_lr() != lr
    assert_equal(weights(engine.module), before)
    for batch in BATCHES[3:6]:
        assert one_step(engine, batch) < 100
        assert engine.was_step_applied()
    assert engine.skipped_steps == 1
    assert not torch.equal(weights(engine.module)["head.bias"], before["head.bias"])


def test_one_bad_micro_batch_skips_its_window() -> None:
    engine = engine_for(Poisoned(), zo_json(gradient_accumulation_steps=2))
    before = weights(engine.module)
    for factors, batch in zip([(1.0, 1.0), (NAN, NAN), (1.0, 1.0), (1.0, 1.0)], BATCHES, strict=False):
        engine.module.poison(factors)
        engine.backward(engine(**batch))
        engine.step()
        if engine.global_steps == 1:
            assert engine.skipped_steps == 1
            assert_equal(weights(engine.module), before)
    assert engine.skipped_steps == 1
    assert not torch.equal(weights(engine.module)["head.bias"], before["head.bias"])


# Clipping


def test_gradient_clipping_never_alters_an_update() -> None:
    found = []
    for clipping in ({}, {"gradient_clipping": 1.0}, {"gradient_clipping": 1e-4}, {"gradient_clipping": 0.0}):
        engine = engine_for(Toy(), zo_json(interval=3, **clipping))
        train(engine, BATCHES[:4])
        assert engine.get_global_grad_norm() > 1e-2
        found.append(weights(engine.module))
    for other in found[1:]:
        assert_equal(found[0], other)


def test_clip_projected_grad_limits_g(passes: Recorder) -> None:
    engine = engine_for(Toy(), zo_json(interval=3, params={"clip_projected_grad": 0.3}))
    offset = sum(p.numel() for name, p in Toy().named_parameters() if name != "head.bias")
    limited = 0
    for step, batch in enumerate(BATCHES):
        before = weights(engine.module)["head.bias"]
        one_step(engine, batch)
        plus, minus = passes.last
        g = (plus - minus) / (2 * EPS)
        limited += abs(g) > 0.3
        assert engine.get_global_grad_norm() == pytest.approx(abs(g), rel=1e-3), "the norm is told as it was"
        expected = LR * max(-0.3, min(0.3, g)) * ops.noise(0, step, 0, offset, before.numel())
        torch.testing.assert_close(before - weights(engine.module)["head.bias"], expected, rtol=1e-3, atol=1e-6)
    assert limited > 0


# Adapters


def lora_model(seed: int = 0) -> nn.Module:
    model = tiny_model("llama", seed=seed)
    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config).train()


@pytest.mark.parametrize(
    "json", [zo_json(interval=2), zo_json(interval=2, bf16={"enabled": True})], ids=["fp32", "bf16"]
)
def test_lora_trains_adapters_and_never_writes_the_frozen_base_back(json: dict[str, Any], passes: Recorder) -> None:
    model = lora_model()
    reference = PlainMeZO(model)
    before = weights(model)
    engine = engine_for(model, json)
    store = engine.backend.store
    assert all(unit.streamed for unit in store.blocks.placement.blocks)
    adapters = [unit for unit in store.blocks.placement.units if unit.trainable]
    assert adapters
    assert not any(unit.streamed for unit in adapters)
    for seed in range(6):
        batch = tiny_batch("llama", seed=seed, batch_size=2, length=8)
        expected = reference.step(loss_on(batch))
        one_step(engine, batch)
        if "bf16" not in json:
            close(passes.last, expected)
    assert store.blocks.runtime.transport.bytes_up > 0
    assert store.blocks.runtime.transport.bytes_down == 0
    after = weights(engine.module)
    for name, value in before.items():
        assert torch.equal(after[name], value.to(after[name].dtype)) == ("lora_" not in name), name


def test_a_loss_of_few_bits_is_warned_of() -> None:
    """Two bf16 losses of one step are mostly equal, and the run would make no progress without a warning."""

    class Narrow(Toy):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).bfloat16()

    for model, warned in ((Narrow(), True), (Toy(), False)):
        with log_lines() as lines:
            train(engine_for(model.train()), toy_batches(2))
        assert sum("compute the loss in float32" in line for line in lines) == warned
