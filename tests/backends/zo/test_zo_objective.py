"""`engine.zo_step`: ZO trains on a score of a forward's outputs, in place of the model's loss."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import CausalLMOutput

from ds_zo.backends.common import chunked_head
from ds_zo.backends.zo.pass_inputs import PassInputs
from tests.helpers.checkpoint_runs import JSONS, assert_same_bits, planes, with_checkpoint
from tests.helpers.lomo_runs import config_for
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, parameters_of, weights
from tests.helpers.zo_runs import Toy, engine_for, log_lines, one_step, same_snapshot, snapshot, toy_batches, zo_json

pytestmark = pytest.mark.usefixtures("single_process")

BATCHES = toy_batches(10)
JSON = zo_json(interval=3)


class WithLogits(Toy):
    """Returns loss and logits, draws random numbers and counts its calls in a buffer."""

    def __init__(self, *, has_loss: bool = True) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("num_calls", torch.zeros(()))
        self.has_loss = has_loss

    def forward(self, ids: torch.Tensor) -> CausalLMOutput:
        self.num_calls += 1
        logits = self.head(self.dropout(self.middle(self.embed(ids)))).float()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) if self.has_loss else None
        return CausalLMOutput(loss=loss, logits=logits)


def gain(outputs: Any, batch: Any) -> torch.Tensor:
    return -outputs.loss


def per_sequence(outputs: Any, batch: Any) -> torch.Tensor:
    """Minus the loss of each sequence."""
    logs = outputs.logits[:, :-1].log_softmax(-1)
    return logs.gather(-1, batch["ids"][:, 1:, None])[..., 0].mean(1)


def engine_of(json: dict[str, Any] = JSON, **model: Any) -> Any:
    engine = engine_for(WithLogits(**model).train(), json)
    torch.manual_seed(3)
    return engine


def state_of(engine: Any) -> dict[str, Any]:
    return {**planes(engine), "num_calls": int(engine.module.num_calls), "steps": engine.global_steps}


# The same steps as by the loss


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "maximised": lambda engine, batch: -engine.zo_step(batch, objective=gain),
    "minimised": lambda engine, batch: engine.zo_step(batch, lambda o, b: o.loss.item(), minimise=True),
    "without one": lambda engine, batch: engine.zo_step(batch),
    "of arguments": lambda engine, batch: -engine.zo_step((batch["ids"],), gain),
}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("fp32", [*STEPS]),
        ("fp32 some resident", ["maximised"]),
        ("fp32 resident", ["minimised"]),
        ("bf16 split", ["maximised"]),
        ("two directions", ["of arguments"]),
    ],
)
def test_minus_the_loss_makes_the_same_steps_as_the_loss(name: str, ways: list[str]) -> None:
    engine = engine_of(JSONS[name])
    expected = [one_step(engine, batch) for batch in BATCHES[:5]]
    for how in ways:
        other = engine_of(JSONS[name])
        with torch.no_grad():
            assert [STEPS[how](other, batch).item() for batch in BATCHES[:5]] == expected, how
        assert_same_bits(state_of(other), state_of(engine))
        assert other.get_global_grad_norm() == engine.get_global_grad_norm()


def test_a_resumed_and_a_replayed_run_go_on_with_the_same_bits(tmp_path: Path) -> None:
    json = with_checkpoint(JSONS["bf16 split"], trajectory=True)
    whole = engine_of(json)
    expected = [whole.zo_step(batch, gain).item() for batch in BATCHES[:8]]
    first = engine_of(json)
    for batch in BATCHES[:3]:
        first.zo_step(batch, gain)
    first.save_checkpoint(str(tmp_path))
    for batch in BATCHES[3:6]:
        first.zo_step(batch, gain)
    first.backend.recorder.flush()
    randomness = snapshot()
    resumed = engine_for(WithLogits().train(), json)
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.global_steps == 6
    torch.set_rng_state(randomness[0])
    assert [resumed.zo_step(batch, gain).item() for batch in BATCHES[6:8]] == expected[6:]
    assert_equal(parameters_of(resumed), parameters_of(whole))


def test_accumulation_schedule_and_monitor_are_those_of_a_loss(tmp_path: Path) -> None:
    found = []
    for name in ("loss", "score"):
        json = zo_json(
            interval=3,
            gradient_accumulation_steps=2,
            scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 9}},
            csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": name},
        )
        engine = engine_of(json)
        for batch in BATCHES[:6]:
            engine.zo_step(batch, gain) if name == "score" else one_step(engine, batch)
        assert engine.global_steps == 3
        assert engine.global_samples == 12
        rows = list(csv.reader(next((tmp_path / name).rglob("*train_loss.csv")).open()))
        found.append((rows, engine.get_lr(), state_of(engine)))
    assert found[0][:2] == found[1][:2]
    assert_same_bits(found[0][2], found[1][2])


# The function


def test_the_function_is_called_once_in_each_pass_with_the_outputs_of_the_pass() -> None:
    engine = engine_of(zo_json(interval=3, params={"num_directions": 2}), has_loss=False)
    seen: list[float] = []

    def score(outputs: CausalLMOutput, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        assert outputs.loss is None
        assert batch.pop("ids").shape == outputs.logits.shape[:2]
        seen.append(outputs.logits.sum().item())
        return outputs.logits.mean()

    for step in range(1, 4):
        engine.zo_step(dict(BATCHES[0]), score)
        assert len(seen) == len(set(seen)) == 4 * step, "also in the first step, which runs more passes"


def test_one_score_for_each_sequence_is_averaged() -> None:
    engine = engine_of()
    losses = [one_step(engine, batch) for batch in BATCHES[:3]]
    other = engine_of()
    for batch, expected in zip(BATCHES[:3], losses, strict=True):
        assert other.zo_step(batch, per_sequence).item() == pytest.approx(-expected, rel=1e-6)
    for name, value in weights(other.module).items():
        torch.testing.assert_close(value, weights(engine.module)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [4, 2**20], ids=["deferred logits", "whole logits"])
@pytest.mark.parametrize("offload", [True, False], ids=["streamed", "resident"])
def test_a_score_reads_the_logits_of_a_language_model(
    offload: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its loss alone would need no whole logits."""
    monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", num_tokens * VOCAB)

    def likelihood(outputs: Any, batch: Any) -> torch.Tensor:
        logs = outputs.logits[:, :-1].log_softmax(-1)
        return logs.gather(-1, batch["labels"][:, 1:, None]).mean()

    json = zo_json(interval=3, offload=offload)
    by_loss, by_score = (engine_for(tiny_model("llama"), json) for _ in range(2))
    for seed in range(3):
        batch = tiny_batch("llama", seed=seed, batch_size=2, length=8)
        assert by_score.zo_step(batch, likelihood).item() == pytest.approx(-one_step(by_loss, batch), rel=1e-5)
    for name, value in weights(by_score.module).items():
        torch.testing.assert_close(value, weights(by_loss.module)[name], rtol=1e-3, atol=1e-4)


SCORES: dict[str, tuple[Any, float]] = {
    "a float": (0.5, 0.5),
    "an integer": (3, 3.0),
    "a bool": (True, 1.0),
    "a tensor": (torch.tensor(0.25, dtype=torch.bfloat16), 0.25),
    "an integer tensor": (torch.tensor([4]), 4.0),
    "a number of numpy": (np.float32(0.5), 0.5),
    "a list": ([1, 0], 0.5),
    "a tuple of tensors": ((torch.tensor(1.0), torch.tensor(2.0)), 1.5),
    "flags": (torch.tensor([True, False]), 0.5),
    "an array": (np.array([0.0, 3.0]), 1.5),
}


def test_every_form_of_score() -> None:
    engine = engine_of()
    for form, (value, expected) in SCORES.items():
        assert engine.zo_step(BATCHES[0], lambda outputs, batch, value=value: value).item() == expected, form
        assert engine.get_global_grad_norm() == 0.0, "both passes have the same score"
        assert engine.was_step_applied()


# Scores that cannot be used


def raises(outputs: Any, batch: Any) -> float:
    raise KeyError("answer")


FAILURES: dict[str, tuple[Any, str]] = {
    "raises": (raises, r"because the objective raised KeyError\('answer'\): correct .* pass the score .* as on_error"),
    "nan": (lambda outputs, batch: math.nan, "because the objective returned NaN: correct .* as on_error"),
    "one nan": (lambda outputs, batch: torch.tensor([1.0, math.nan]), "because the objective returned NaN"),
    "too many": (lambda outputs, batch: [1.0] * 3, r"got shape \(3,\) for a batch of 2 sequences: correct the obj"),
    "logits": (lambda outputs, batch: outputs.logits, r"for each sequence, got shape \(2, 6, 32\) for a batch of 2"),
    "none": (lambda outputs, batch: None, "must return one number, or one for each sequence, got NoneType"),
}


@cache
def four_steps() -> tuple[list[float], dict[str, Any]]:
    """The scores of a run, and what it ends with."""
    engine = engine_of()
    return [engine.zo_step(batch, gain).item() for batch in BATCHES[:4]], state_of(engine)


@pytest.mark.parametrize(("name", "at"), [*((name, 0) for name in FAILURES), ("raises", 2), ("nan", 2)])
def test_a_score_that_cannot_be_used_makes_no_step(name: str, at: int) -> None:
    """The next call makes the step that a run without the failure makes, from the same noise and the same dropout."""
    function, said = FAILURES[name]
    expected, last_state = four_steps()
    engine = engine_of()
    assert [engine.zo_step(batch, gain).item() for batch in BATCHES[:at]] == expected[:at]
    before, randomness = weights(engine.module), snapshot()
    calls = []

    def fails_once(outputs: Any, batch: Any) -> Any:
        calls.append(1)
        return function(outputs, batch) if len(calls) == 2 else gain(outputs, batch)

    with pytest.raises(RuntimeError, match=said) as caught:
        engine.zo_step(BATCHES[at], fails_once)
    assert "\n" not in str(caught.value)
    assert_equal(weights(engine.module), before)
    assert engine.global_steps == at
    assert same_snapshot(snapshot(), randomness)
    assert engine.failed_scores == 0
    assert [engine.zo_step(batch, gain).item() for batch in BATCHES[at:4]] == expected[at:]
    assert_same_bits(state_of(engine), last_state)


@pytest.mark.parametrize("name", ["raises", "nan", "one nan"])
def test_a_failed_score_counts_as_told(name: str) -> None:
    """Passes alternate, so each difference is that of a pass with its score and a pass with `on_error`."""
    function = FAILURES[name][0]
    engine = engine_of()
    num_calls = 0

    def alternating(failing: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def score(outputs: Any, batch: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return failing(outputs, batch) if num_calls % 2 else gain(outputs, batch)

        return score

    with log_lines() as lines:
        for batch in BATCHES[:3]:
            engine.zo_step(batch, alternating(function), on_error=-4.0)
    assert engine.failed_scores == 3
    assert len([line for line in lines if "1 score(s) of this step became -4, as on_error says, because" in line]) == 3
    reference = engine_of()
    for batch in BATCHES[:3]:
        reference.zo_step(batch, alternating(lambda o, b: -1.5 if name == "one nan" else -4.0))
    assert_equal(weights(engine.module), weights(reference.module))
    with pytest.raises(RuntimeError, match=r"got shape \(3,\)"):
        engine.zo_step(BATCHES[0], FAILURES["too many"][0], on_error=0.0)


def test_a_narrow_score_takes_any_number_in_its_place() -> None:
    engine = engine_of()
    engine.zo_step(BATCHES[0], lambda outputs, batch: torch.tensor([1.0, math.nan]).half(), on_error=-1e6)
    assert engine.failed_scores == 2


def test_a_wrong_score_is_named_before_another_error() -> None:
    calls: list[int] = []

    def score(outputs: Any, batch: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("answer")

    with pytest.raises(RuntimeError, match="because the objective must return one number"):
        engine_of().zo_step(BATCHES[0], score)


def test_an_objective_that_calls_the_engine_is_told_what_to_call() -> None:
    engine = engine_of()
    for call in (lambda outputs, batch: engine(**batch), torch.enable_grad()(lambda outputs, batch: engine(**batch))):
        with pytest.raises(RuntimeError, match=r"must not run the engine, got a call: call engine\.module"):
            engine.zo_step(BATCHES[0], call, on_error=0.0)
    assert engine.zo_step(BATCHES[0], lambda outputs, batch: engine.module(**batch)["loss"]).isfinite()


def test_any_tensor_of_the_batch_tells_the_number_of_sequences() -> None:
    inputs = PassInputs((), {"position_ids": torch.zeros(1, 6), "ids": torch.zeros(2, 6)}, copies=False)
    assert inputs.lengths() == {1, 2}


def test_an_infinite_score_is_skipped_and_counted_as_an_infinite_loss_is() -> None:
    engine = engine_of()
    before = parameters_of(engine)
    engine.zo_step(BATCHES[0], lambda outputs, batch: math.inf)
    assert (engine.skipped_steps, engine.global_steps) == (1, 1)
    assert_equal(parameters_of(engine), before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"objective": "accuracy"}, r"objective must be a function of \(outputs, batch\), got str"),
        ({"objective": gain, "on_error": math.nan}, 'on_error must be "raise" or a finite float32, got nan'),
        ({"objective": gain, "on_error": 1e300}, "a finite float32, got 1e[+]300"),
        ({"objective": gain, "on_error": "skip"}, "got 'skip'"),
        ({"batch": BATCHES[0]["ids"]}, "a mapping of keywords or a tuple of arguments, got Tensor: put it into a tup"),
        ({"has_loss": False}, "got a model that returned no loss: put labels into the batch, or pass objective"),
    ],
)
def test_a_wrong_call_is_refused(arguments: dict[str, Any], said: str) -> None:
    engine = engine_of(has_loss=arguments.pop("has_loss", True))
    with pytest.raises((TypeError, ValueError), match=said):
        engine.zo_step(**{"batch": BATCHES[0], **arguments})
    assert engine.global_steps == 0


def test_an_evaluation_is_refused() -> None:
    engine = engine_of()
    engine.eval()
    with pytest.raises(RuntimeError, match="needs a model in train mode, got one in eval mode: call"):
        engine.zo_step(BATCHES[0], gain)
    engine.train()
    engine.zo_step(BATCHES[0], gain)
    assert engine(**BATCHES[0]).loss.requires_grad, "the next forward is measured by its loss again"


@pytest.mark.parametrize(("kind", "json"), [("LOMO", config_for("LOMO")), ("LSP", lsp_json())])
def test_other_optimizers_refuse_by_name(kind: str, json: dict[str, Any]) -> None:
    engine = engine_for(Toy(), json)
    with pytest.raises(RuntimeError, match=f'engine.zo_step needs the optimizer "ZO", .* got "{kind}": set it, or'):
        engine.zo_step(BATCHES[0])


# Learning


class Majority(nn.Module):
    """Tells whether more than half of a sequence's tokens are large, by two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, 2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return {"logits": self.head(x)}


def majority(num: int, seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 8, (num, 7), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": (ids >= 4).sum(1).gt(3).long()}


def is_right(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs["logits"].argmax(-1) == batch["labels"]


def test_zero_one_accuracy_teaches_a_task_and_random_scores_do_not() -> None:
    scores = torch.Generator().manual_seed(0)

    def at_random(outputs: Any, batch: Any) -> torch.Tensor:
        return torch.rand(len(batch["labels"]), generator=scores)

    found = {}
    for objective in (is_right, at_random):
        params = {"lr": 0.1, "zo_eps": 0.1, "num_directions": 2}
        engine = engine_for(Majority().train(), zo_json(offload=False, blocks=["blocks"], params=params))
        for step in range(100):
            engine.zo_step(majority(64, seed=step), objective)
        engine.eval()
        test = majority(512, seed=10_000)
        found[objective] = is_right(engine(**test), test).float().mean().item()
    assert found[is_right] > 0.8 and found[at_random] < 0.7, found
