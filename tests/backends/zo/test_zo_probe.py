"""The first forward of each mode shows how a model uses its weights. Later forwards refuse other uses."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ds_zo.backends.zo.guarded_weights import WeightGuard
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    FunctionalTie,
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

STREAMED, RESIDENT = zo_json(interval=2), zo_json(interval=2, offload=False)
BATCHES = toy_batches(6)


class Unused(Toy):
    """Has weights that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.spare_parameter = nn.Linear(16, 4), nn.Parameter(torch.zeros(5))


class Drops(Toy):
    """Leaves one block out, another one in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        left_out, self.num_forwards = self.num_forwards % 3, self.num_forwards + 1
        for index, block in enumerate(self.blocks):
            x = x if index == left_out else block(x)
        return x


class Dropout(Toy):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(functional.dropout(x, 0.5, self.embed.training))


def freeze_head(engine: Any) -> None:
    engine.module.head.weight.requires_grad_(False)


def flip_embed(engine: Any) -> None:
    engine.module.embed.eval()


@pytest.mark.parametrize("json", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    ("kind", "change"),
    [(Unused, None), (Drops, None), (FunctionalTie, None), (Dropout, flip_embed), (Toy, freeze_head)],
)
def test_later_forwards_of_a_mode_run_each_pass_once_and_under_no_mode(
    kind: type[Toy], change: Callable[[Any], None] | None, json: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of mode is followed: one forward is looked at, and the losses stay those of plain passes."""
    passes, modes, model = Recorder(monkeypatch), list[int](), kind().train()
    model.embed.register_forward_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
    engine = engine_for(model, json)
    for step, batch in enumerate([*BATCHES, *toy_batches(2, length=9)]):
        if change is not None and step == 3:
            change(engine)
        reference = PlainMeZO(engine.module, copies_model=True)
        reference.steps = step
        state = torch.get_rng_state()
        expected = reference.passes(loss_on(batch))
        modes.clear()
        torch.set_rng_state(state)
        one_step(engine, batch)
        close(passes.last, expected)
        if step not in (0, 3 if change is not None else 0):
            assert modes == [0, 0], step


class Later(Toy):
    """Does something else from the second forward on."""

    does_other = False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) if self.does_other else super().middle(x)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class TiesLater(Later):
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return Toy.middle(self, x) + functional.linear(x, self.embed.weight) @ self.embed.weight


class OpensBlocks(Later):
    def other(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block.linear(block.norm(x)))
        return x


class StacksWeights(Later):
    def other(self, x: torch.Tensor) -> torch.Tensor:
        return Toy.middle(self, x) @ torch.stack([block.linear.weight for block in self.blocks]).mean(0)


class Tagged(nn.Parameter):
    """A user's own class of parameters."""


class StacksTagged(StacksWeights):
    def __init__(self) -> None:
        super().__init__()
        for m in self.modules():
            for name, p in m._parameters.items():
                m._parameters[name] = None if p is None else Tagged(p.detach())


class NestsBlocks(Later):
    def other(self, x: torch.Tensor) -> torch.Tensor:
        hook = self.blocks[0].linear.register_forward_hook(lambda m, given, found: found + self.blocks[2](found))
        try:
            return Toy.middle(self, x)
        finally:
            hook.remove()


@pytest.mark.parametrize("json", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (TiesLater, r"parameter embed\.weight was used outside"),
        (OpensBlocks, r"parameter blocks\.0\.norm\.weight was used outside"),
        (StacksWeights, r"parameter blocks\.0\.linear\.weight was used outside"),
        (StacksTagged, r"parameter blocks\.0\.linear\.weight was used outside"),
        (NestsBlocks, r"a block must not run inside another|module blocks\.0 was used while another module ran"),
    ],
)
def test_a_use_that_the_first_step_did_not_show_is_refused_by_name(
    kind: type[Later], said: str, json: dict[str, Any]
) -> None:
    """And changes nothing: the step is made without it. Other blocks are no remedy for a weight outside of them."""
    engine, undisturbed = engine_for(kind(), json), engine_for(Toy(), json)
    train(engine, BATCHES[:2])
    engine.module.does_other = True
    with pytest.raises(ValueError, match=said) as caught:
        engine(**BATCHES[2])
    assert ("ds_zo.stream.blocks" in str(caught.value)) == (kind is not TiesLater)
    engine.module.does_other = False
    train(engine, BATCHES[2:4])
    train(undisturbed, BATCHES[:4])
    assert_equal(weights(engine.module), weights(undisturbed.module))


@pytest.mark.parametrize("json", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_a_hook_that_logs_weights_is_warned_of_once(json: dict[str, Any]) -> None:
    """As experiment trackers register it; their first read comes after many steps. Training goes on as without it."""
    engine, undisturbed = engine_for(Toy(), json), engine_for(Toy(), json)
    train(engine, BATCHES[:2])
    seen = list[float]()

    def log(module: nn.Module, *_: Any) -> None:
        seen.extend(float(p.data.float().norm()) for p in module.parameters())

    engine.module.register_forward_hook(log)
    with log_lines(20) as lines:
        train(engine, BATCHES[2:4])
    assert seen and sum("was read inside a training forward" in line for line in lines) == 1
    train(undisturbed, BATCHES[:4])
    assert_equal(weights(engine.module), weights(undisturbed.module))


def test_a_use_of_another_mode_is_looked_at_in_its_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is used outside its module while one module is in eval mode alone."""

    class TiesInEval(TiesLater):
        @property
        def does_other(self) -> bool:  # type: ignore[override]
            return not self.head.training

    passes = Recorder(monkeypatch)
    model = TiesInEval().train()
    reference, engine = PlainMeZO(model), engine_for(model, STREAMED)
    for step, batch in enumerate(BATCHES):
        engine.module.head.train(step % 3 == 0)
        reference.model.head.train(step % 3 == 0)
        expected = reference.step(loss_on(batch))
        one_step(engine, batch)
        close(passes.last, expected)


def test_shapes_and_dtypes_of_a_weight_may_be_read_anywhere() -> None:
    class Reads(Later):
        def other(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.blocks[0].linear.weight
            return Toy.middle(self, x.to(weight.dtype)) * weight.shape[0] / weight.numel() * weight.dim()

    engine = engine_for(Reads(), STREAMED)
    train(engine, BATCHES[:1])
    engine.module.does_other = True
    train(engine, BATCHES[1:3])


@pytest.mark.parametrize("json", [STREAMED, RESIDENT], ids=["streamed", "resident"])
def test_ctrl_c_at_the_end_of_a_pass_leaves_weights_that_can_be_saved(
    json: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, undisturbed = engine_for(Toy(), json), engine_for(Toy(), json)
    train(engine, BATCHES[:2])
    train(undisturbed, BATCHES[:2])
    lift, num_lifts, last = WeightGuard.lift, 0, 0

    def counted(guard: WeightGuard, unit: Any) -> None:
        nonlocal num_lifts
        num_lifts += 1
        if num_lifts == last:
            signal.raise_signal(signal.SIGINT)
        lift(guard, unit)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WeightGuard, "lift", counted)
        engine(**BATCHES[2])
        num_lifts, last = 0, num_lifts
        engine(**BATCHES[2])
    assert_equal(weights(engine.module), weights(undisturbed.module))
    assert engine.module.eval()(**BATCHES[2]) == undisturbed.module.eval()(**BATCHES[2])
    for each in (engine, undisturbed):
        each.train()
    assert train(engine, BATCHES[2:]) == train(undisturbed, BATCHES[2:])
