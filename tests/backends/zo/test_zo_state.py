"""Weights are written and parameters changed under a running engine. The run then equals one that always had them, or
the change is refused."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from ds_zo import ops
from ds_zo.config import ConfigError
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    EPS,
    LR,
    Recorder,
    Toy,
    break_off,
    close,
    engine_for,
    one_step,
    toy_batches,
    train,
    zo_json,
)

pytestmark = pytest.mark.usefixtures("single_process")

JSONS = {
    "streamed": zo_json(interval=5),
    "some resident": zo_json(interval=5, resident_blocks=1),
    "resident": zo_json(interval=5, offload=False),
    "streamed bf16": zo_json(interval=5, bf16={"enabled": True}),
    "resident bf16": zo_json(interval=5, offload=False, bf16={"enabled": True}),
}
FP32 = ["streamed", "some resident", "resident"]
BATCHES = toy_batches(8)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def other_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {name: torch.randn_like(value) for name, value in Toy().state_dict().items()}


def assert_goes_on_from(engine: Any, start: dict[str, torch.Tensor], passes: Recorder, *, steps_done: int) -> None:
    """The next steps equal plain MeZO's from these float32 weights at this step."""
    model = Toy()
    model.load_state_dict(start)
    for ours, theirs in zip(engine.module.parameters(), model.parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)
    reference = PlainMeZO(model)
    reference.steps = steps_done
    for batch in BATCHES[:3]:
        expected = reference.step(loss_on(batch))
        one_step(engine, batch)
        close(passes.last, expected)


# Loading


@pytest.mark.parametrize(("name", "num_steps"), [*((name, 3) for name in JSONS), ("streamed", 0), ("resident bf16", 0)])
def test_load_state_dict_into_a_running_engine(name: str, num_steps: int, passes: Recorder) -> None:
    engine = engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[:num_steps])
    loaded = other_weights()
    dtype = next(engine.module.parameters()).dtype
    assert str(engine.module.load_state_dict(loaded)) == "<All keys matched successfully>"
    assert_equal(weights(engine.module), {name: value.to(dtype) for name, value in loaded.items()})
    if dtype is torch.float32:
        assert_goes_on_from(engine, loaded, passes, steps_done=num_steps)
    else:
        one_step(engine, BATCHES[0])
        moved = {n: (v.float() - loaded[n]).abs().max().item() for n, v in weights(engine.module).items()}
        assert max(moved.values()) < 0.1


@pytest.mark.parametrize("name", FP32)
def test_part_of_a_state_dict_leaves_the_rest_at_the_current_step(name: str, passes: Recorder) -> None:
    engine, same = engine_for(Toy(), JSONS[name]), engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[:4])
    train(same, BATCHES[:4])
    new, expected = other_weights(), weights(same.module)
    part = {key: new[key] for key in ("blocks.1.linear.weight", "blocks.2.norm.bias", "head.bias")}
    engine.module.load_state_dict(part, strict=False)
    assert_equal(weights(engine.module), {**expected, **part})
    block = {key.removeprefix("blocks.0."): new[key] for key in new if key.startswith("blocks.0.")}
    engine.module.blocks[0].load_state_dict(block)
    expected |= {**part, **{f"blocks.0.{key}": value for key, value in block.items()}}
    assert_equal(weights(engine.module), expected)
    assert_goes_on_from(engine, expected, passes, steps_done=4)


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    engine, same = engine_for(Toy(), JSONS["streamed"]), engine_for(Toy(), JSONS["streamed"])
    train(engine, BATCHES[:3])
    train(same, BATCHES[:3])
    wrong = {"blocks.1.linear.weight": torch.zeros(3, 3)}
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks\.1\.linear\.weight"):
        engine.module.load_state_dict(wrong, strict=False)
    assert train(engine, BATCHES[3:]) == train(same, BATCHES[3:])
    assert_equal(weights(engine.module), weights(same.module))


# One parameter, in float32


@pytest.mark.parametrize("name", JSONS)
def test_one_parameter_read_and_written(name: str, passes: Recorder) -> None:
    engine = engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[:3])
    before = weights(engine.module)
    for key, p in engine.module.named_parameters():
        full = safe_get_full_fp32_param(p)
        assert full.dtype is torch.float32
        assert torch.equal(full.to(p.dtype), before[key])
    new = other_weights()
    written = {key: new[key] for key in ("embed.weight", "blocks.0.norm.weight", "blocks.2.linear.weight")}
    for key, value in written.items():
        safe_set_full_fp32_param(engine.module.get_parameter(key), value)
        assert torch.equal(safe_get_full_fp32_param(engine.module.get_parameter(key)), value)
    dtype = next(engine.module.parameters()).dtype
    expected = {**before, **{key: value.to(dtype) for key, value in written.items()}}
    assert_equal(weights(engine.module), expected)
    if dtype is torch.float32:
        assert_goes_on_from(engine, expected, passes, steps_done=3)


# Groups and flags


FREEZABLE = ["embed.weight", "head.bias", "blocks.1.linear.weight", "blocks.0."]


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        *(("streamed", frozen) for frozen in FREEZABLE),
        *(("some resident", frozen) for frozen in FREEZABLE[::3]),
        *(("resident", frozen) for frozen in FREEZABLE[1:3]),
    ],
)
def test_freezing_in_the_middle_of_a_run(name: str, frozen: str, passes: Recorder) -> None:
    engine = engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[:3])
    before = weights(engine.module)
    for key, p in engine.module.named_parameters():
        if key.startswith(frozen):
            p.requires_grad_(False)
    assert_goes_on_from(engine, before, passes, steps_done=3)
    after = weights(engine.module)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in after if not key.startswith(frozen)}
    for p in engine.module.parameters():
        p.requires_grad_(True)
    assert_goes_on_from(engine, after, passes, steps_done=6)


def replayed(start: dict[str, torch.Tensor], passes: Recorder, rates: Any) -> dict[str, torch.Tensor]:
    """Start weights plus the measured updates. `rates(step, name)` is (lr, weight decay)."""
    weights = {name: value.double() for name, value in start.items()}
    for step, (plus, minus) in enumerate(passes.passes):
        g = (plus - minus).item() / (2 * EPS)
        offset = 0
        for name, value in weights.items():
            lr, decay = rates(step, name)
            z = ops.noise(0, step, 0, offset, value.numel()).view(value.shape).double()
            weights[name] = value * (1 - lr * decay) - lr * g * z
            offset += value.numel()
    return {name: value.float() for name, value in weights.items()}


@pytest.mark.parametrize("name", FP32)
def test_rates_of_a_group_change_between_steps(name: str, passes: Recorder) -> None:
    """Pending updates keep the rates of their own step."""
    model = Toy()
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    blocks = [p for key, p in model.named_parameters() if "blocks" in key]
    rest = [p for key, p in model.named_parameters() if "blocks" not in key]
    groups = [{"params": blocks, "lr": 1e-3, "weight_decay": 0.1}, {"params": rest, "lr": 2e-3, "weight_decay": 0.0}]
    engine = engine_for(model, JSONS[name], model_parameters=groups)

    def change(step: int) -> None:
        engine.optimizer.param_groups[0]["lr"] = 1e-3 * (step + 2)
        engine.optimizer.param_groups[1]["weight_decay"] = 0.05 * (step + 1)

    train(engine, BATCHES, after=change)

    def rates(step: int, key: str) -> tuple[float, float]:
        return (1e-3 * (step + 1), 0.1) if "blocks" in key else (2e-3, 0.05 * step)

    expected = replayed(start, passes, rates)
    for key, value in weights(engine.module).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)


def test_a_parameter_may_change_its_group() -> None:
    model = Toy()
    moved, rest = model.head.bias, [p for p in model.parameters() if p is not model.head.bias]
    groups = [{"params": rest, "lr": LR}, {"params": [moved], "lr": 0.0}]
    engine = engine_for(model, JSONS["streamed"], model_parameters=groups)
    before = weights(engine.module)["head.bias"]
    train(engine, BATCHES[:2])
    assert torch.equal(weights(engine.module)["head.bias"], before)
    first, second = engine.optimizer.param_groups
    first["params"].append(second["params"].pop())
    train(engine, BATCHES[2:4])
    assert not torch.equal(weights(engine.module)["head.bias"], before)


def test_weights_of_64_bits_are_refused_by_name() -> None:
    model = Toy()
    model.head.double()
    with pytest.raises(ConfigError, match=r"head\.weight in torch\.float64.*model\.float\(\)"):
        engine_for(model)


def test_complex_weights_are_refused_by_name() -> None:
    model = Toy()
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"phase in torch\.complex64: freeze it"):
        engine_for(model)


def test_unfreezing_what_was_frozen_from_the_start_is_refused() -> None:
    model = Toy()
    model.blocks[0].linear.weight.requires_grad_(False)
    engine = engine_for(model, JSONS["streamed"])
    before = weights(engine.module)
    train(engine, BATCHES[:2])
    assert torch.equal(weights(engine.module)["blocks.0.linear.weight"], before["blocks.0.linear.weight"])
    model.blocks[0].linear.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.0\.linear\.weight was frozen .* unfreeze it before initialize"):
        engine(**BATCHES[0])
    model.blocks[0].linear.weight.requires_grad_(False)
    train(engine, BATCHES[:1])


def test_a_new_group_is_refused() -> None:
    model = Toy()
    engine = engine_for(model, JSONS["streamed"])
    train(engine, BATCHES[:2])
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": LR})
    with pytest.raises(ValueError, match=r"had 1 parameter groups .* has 2 now: add groups before initialize"):
        one_step(engine, BATCHES[0])


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *(("streamed", seed) for seed in range(4)),
        *(("some resident", 0), ("some resident", 1), ("resident", 2), ("resident", 3)),
    ],
)
def test_a_write_through_a_parameter_is_read_whatever_was_read_before(name: str, seed: int) -> None:
    """Reads of single parameters and writes to others of the same block, in any order."""
    rng = random.Random(seed)
    engine = engine_for(Toy(), JSONS[name])
    train(engine, BATCHES[: rng.randint(1, 6)])
    block = engine.module.blocks[1]
    parameters = dict(block.named_parameters())
    views = {n: p.data for n, p in parameters.items() if rng.random() < 0.5}
    written: dict[str, float] = {}
    for _ in range(12):
        n = rng.choice(list(parameters))
        action = rng.randrange(4)
        if action == 0:
            with deepspeed.zero.GatheredParameters([parameters[n]]):
                pass
        elif action == 1:
            copy.deepcopy(parameters[n])
        else:
            written[n] = rng.random()
            with torch.no_grad():
                (views[n] if n in views and action == 2 else parameters[n]).fill_(written[n])
        owner, _, own_name = rng.choice(list(written) or [n]).rpartition(".")
        found = block.get_submodule(owner).state_dict()[own_name]
        expected = written.get(f"{owner}.{own_name}")
        assert expected is None or torch.equal(found, torch.full_like(found, expected))


def test_parameters_that_were_replaced_are_refused() -> None:
    engine = engine_for(Toy(), JSONS["streamed"])
    train(engine, BATCHES[:2])
    engine.module.load_state_dict(other_weights(), assign=True)
    with pytest.raises(ValueError, match=r"embed\.weight is not the one that deepspeed\.initialize placed"):
        one_step(engine, BATCHES[0])


def replace_forward(model: nn.Module, path: str) -> None:
    module = model.get_submodule(path)
    forward = module.forward
    module.forward = lambda *given: forward(*given)


def remove_block(model: nn.Module, path: str) -> None:
    del model.blocks[1]


CHANGES = [
    *((replace_forward, path, "forward of module {} was replaced") for path in ("blocks.1", "head", "blocks.0.linear")),
    (remove_block, "blocks.1", r"parameter {}\.norm\.weight was removed"),
]


@pytest.mark.parametrize(
    ("name", "change", "path", "said"),
    [*(("streamed", *change) for change in CHANGES), *(("resident", *change) for change in CHANGES[1::2])],
)
def test_another_structure_after_the_first_step_is_refused(name: str, change: Any, path: str, said: str) -> None:
    """And no step is lost: training goes on once the change is undone."""
    engine = engine_for(Toy(), JSONS[name])
    expected, last_weights = undisturbed(name)
    losses = train(engine, BATCHES[:2])
    kept, attributes = list(engine.module.blocks), vars(engine.module.get_submodule(path))
    before = attributes.get("forward")
    change(engine.module, path)
    with pytest.raises(ValueError, match=said.format(path) + r".* before deepspeed\.initialize"):
        engine(**BATCHES[2])
    engine.module.blocks = nn.ModuleList(kept)
    attributes.pop("forward", None)
    if before is not None:
        attributes["forward"] = before
    losses += train(engine, BATCHES[2:4])
    assert losses == expected
    assert_equal(weights(engine.module), last_weights)


@cache
def undisturbed(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of four steps, and the weights after them."""
    engine = engine_for(Toy(), JSONS[name])
    return train(engine, BATCHES[:4]), weights(engine.module)


def test_a_forward_that_is_set_to_what_it_is_goes_on() -> None:
    """As code does that wraps a forward for one call and puts it back."""
    engine = engine_for(Toy(), JSONS["streamed"])
    train(engine, BATCHES[:1])
    for module in engine.module.modules():
        module.forward = module.forward
    train(engine, BATCHES[1:2])


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings_are_refused(tied: bool) -> None:
    engine = engine_for(tiny_model("llama", tie_word_embeddings=tied), JSONS["streamed"])
    batch = tiny_batch("llama", batch_size=2, length=6)
    one_step(engine, batch)
    with pytest.raises(ValueError, match=r"from 67 to 80 rows: call it before deepspeed.initialize"):
        engine.module.resize_token_embeddings(80)
    one_step(engine, batch)
    type(engine.module).resize_token_embeddings(engine.module, 80)  # past the engine's refusal
    with pytest.raises(ValueError, match=r"embed_tokens\.weight .*before deepspeed\.initialize"):
        one_step(engine, batch)


@pytest.mark.parametrize("read", range(3))
@pytest.mark.parametrize("resident_blocks", [0, 2])
def test_reading_weights_inside_a_training_forward_changes_nothing(resident_blocks: int, read: int) -> None:
    """As hooks that record norms do. The read uses up none of the folds that are due when a unit is materialised. Every
    pair of block that is read, residency and interval, not every triple."""
    interval = 1 if (read == 1) == (resident_blocks == 2) else 2
    json = zo_json(interval=interval, resident_blocks=resident_blocks, bf16={"enabled": True})
    found, seen = [], []
    for looks in (False, True):
        model = Toy().train()
        engine = engine_for(model, json)
        weight = model.blocks[read].linear.weight
        if looks:
            model.embed.register_forward_hook(lambda *hooked, p=weight: seen.append(safe_get_full_fp32_param(p)))
        train(engine, toy_batches(6))
        found.append({name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()})
    assert_equal(*found)
    assert len(seen) > 6


@pytest.mark.parametrize("num_whole", range(5))
@pytest.mark.parametrize(("what", "reads"), [("an evaluation", False), ("an evaluation", True), ("state_dict", True)])
def test_ctrl_c_in_a_look_at_the_weights_changes_nothing(
    what: str, num_whole: int, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever Ctrl-C arrives, the next forward replays the pending updates of the units that it materialises. Weights
    that are read bare before that are the step's."""
    model = Toy().train()
    engine = engine_for(model, zo_json(interval=4))
    for step, batch in enumerate(toy_batches(6)):
        one_step(engine, batch)
        if step != 2:
            continue
        held, expected = dict(model.named_parameters()), weights(model) if reads else {}
        with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(KeyboardInterrupt):
            break_off(patch, KeyboardInterrupt(), num_whole=num_whole)
            model(**batch) if what == "an evaluation" else model.state_dict()
        if reads:
            assert_equal({name: p.data.clone() for name, p in held.items()}, expected)
    assert_equal(weights(model), weights_after_six_steps())


@cache
def weights_after_six_steps() -> dict[str, torch.Tensor]:
    engine = engine_for(Toy().train(), zo_json(interval=4))
    train(engine, toy_batches(6))
    return weights(engine.module)
