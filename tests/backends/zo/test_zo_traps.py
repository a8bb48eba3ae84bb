"""Things that a user's forward may do and that passes in lockstep would get wrong without special care.

Each case is compared with `PlainMeZO`: whole passes over perturbed deep copies, one after the other, from one random
state.
"""

from __future__ import annotations

import contextvars
import copy
import random
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

from ds_zo import ops
from ds_zo.backends.zo.store import ZOStore
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.thread_state import PassingMode, thread_state
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    EPS,
    LR,
    Block,
    FunctionalTie,
    Recorder,
    Toy,
    break_off,
    close,
    engine_for,
    log_lines,
    one_step,
    same_snapshot,
    snapshot,
    toy_batches,
    train,
    zo_json,
)

pytestmark = pytest.mark.usefixtures("single_process")

STREAMED = zo_json(interval=2)
RESIDENT = zo_json(offload=False, interval=2)
LOW_PLANES = zo_json(interval=3, resident_blocks=1, bf16={"enabled": True})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def assert_follows(
    model: nn.Module,
    batches: list[dict[str, Any]],
    loss: Callable[[dict[str, Any]], Callable[[nn.Module], torch.Tensor]],
    passes: Recorder,
    *,
    json: dict[str, Any] = STREAMED,
    plain: Callable[[Callable[[], Any]], Any] = lambda call: call(),
) -> Any:
    """Checks that both losses of every step, the weights and the random states equal those of plain passes. Returns the
    engine."""
    reference = PlainMeZO(model, copies_model=True)
    engine = engine_for(model, json)
    for step, batch in enumerate(batches):
        start = snapshot()
        expected = plain(lambda batch=batch: reference.step(loss(batch)))
        after = snapshot()
        torch.set_rng_state(start[0])
        random.setstate(start[1])
        np.random.set_state(start[2])
        outside = thread_state()
        one_step(engine, batch)
        assert thread_state() == outside
        close(passes.last, expected)
        assert same_snapshot(snapshot(), after), f"step {step} left the generators elsewhere than one forward does"
    assert_near(engine.module, reference, num_steps=len(batches))
    return engine


def assert_near(module: nn.Module, reference: PlainMeZO, *, num_steps: int) -> None:
    """A loss that differs in its last digits changes g by 1e-6 |l| / zo_eps per step, and a weight by lr times that
    times z."""
    bound = num_steps * LR * (5 * 2e-6 / 2e-3) * 5 + 1e-6
    ours, theirs = weights(module), weights(reference.model)
    for name in ours:
        assert (ours[name] - theirs[name]).abs().max() <= bound, name


# Autocast


class AutocastInside(Toy):
    cache: bool | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.cache):
            return super().middle(x)


class AutocastKept(Toy):
    """The autocast context is made once, while its cache is enabled: entering it enables the cache again inside a
    pass."""

    def __init__(self) -> None:
        super().__init__()
        self.amp = torch.autocast("cpu", dtype=torch.bfloat16)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with self.amp:
            return super().middle(x)


class AutocastCached(AutocastInside):
    cache = True


@pytest.mark.parametrize("json", [STREAMED, RESIDENT])
@pytest.mark.parametrize("kind", [AutocastInside, AutocastCached, AutocastKept])
def test_autocast_inside_the_forward(kind: type[Toy], json: dict[str, Any], passes: Recorder) -> None:
    engine = assert_follows(kind(), toy_batches(3), loss_on, passes, json=json)
    assert engine.get_global_grad_norm() > 1e-2, "the second pass met the first one's casts"


def test_autocast_by_deepspeed(passes: Recorder) -> None:
    name = "opt"
    json = zo_json(interval=2, torch_autocast={"enabled": True, "dtype": "bfloat16"})

    def plain(call: Callable[[], Any]) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return call()

    batches = [tiny_batch(name, seed=i, batch_size=2, length=8) for i in range(3)]
    engine = assert_follows(tiny_model(name), batches, loss_on, passes, json=json, plain=plain)
    assert engine.get_global_grad_norm() > 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):  # and one that the user keeps open over several steps
        first, second = (one_step(engine, batches[0]) for _ in range(2))
        assert engine.get_global_grad_norm() > 1e-2
        assert first != second


# State that outlives a block


class Sets(Toy):
    """Enters a context around its blocks."""

    def __init__(self, enter: Callable[[], Any]) -> None:
        super().__init__()
        self.enter = [enter]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with self.enter[0]():
            return super().middle(x)


@pytest.mark.parametrize(
    ("enter", "json"),
    [(lambda: torch.device("cpu"), STREAMED), (PassingMode, RESIDENT), (torch.inference_mode, STREAMED)],
)
def test_a_mode_around_blocks_runs_one_pass_after_the_other(
    enter: Callable[[], Any], json: dict[str, Any], passes: Recorder
) -> None:
    with log_lines() as lines:
        assert_follows(Sets(enter), toy_batches(4), loss_on, passes, json=json)
    assert len([line for line in lines if "one pass after the other" in line]) == 1


class KeepsElsewhere(Toy):
    """Passes the embedding to its last block through an object of another class, whose contents are not tracked.
    `strength` scales its effect on the loss."""

    strength = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere = SimpleNamespace()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.elsewhere.kept = x
        for block in self.blocks:
            x = block(x)
        return x + self.strength * self.elsewhere.kept


class KeepsALittle(KeepsElsewhere):
    strength = 0.05


class InAThread(Toy):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(super().middle), x).result()


@pytest.mark.parametrize(
    ("kind", "json"), [(KeepsElsewhere, STREAMED), (KeepsALittle, RESIDENT), (InAThread, RESIDENT)]
)
def test_state_that_passes_share_is_found_out(kind: type[Toy], json: dict[str, Any], passes: Recorder) -> None:
    with log_lines() as lines:
        assert_follows(kind(), toy_batches(4), loss_on, passes, json=json)
    assert len([line for line in lines if "one pass after the other" in line]) == 1


class DataDependentOrder(Toy):
    """The next block depends on the weights, and so on the pass."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        order = [0, 1, 2] if int((x.double().sum() * 1e7).item()) % 2 else [2, 0]
        for i in order:
            x = self.blocks[i](x)
        return x


def test_block_order_that_depends_on_the_data(passes: Recorder) -> None:
    with log_lines() as lines:
        assert_follows(DataDependentOrder(), toy_batches(8), loss_on, passes)
    assert any("different blocks" in line for line in lines)


class Wide(Toy):
    """A module larger than two blocks runs after one of the blocks. Later blocks may be left out."""

    def __init__(self, *, after: int, num_run: int = 3) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 160)
        self.after, self.num_run = after, num_run

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks[: self.num_run]):
            x = block(x)
            if i == self.after:
                x = x + self.wide(x).unflatten(-1, (10, 16)).mean(-2)
        return x


@pytest.mark.parametrize(
    "where", [{"after": 2}, {"after": 0}, {"after": 1, "num_run": 2}], ids=["at the end", "between", "last left out"]
)
@pytest.mark.parametrize("num_directions", [1, 2])
def test_a_large_module_lies_where_second_copies_do(
    num_directions: int, where: dict[str, int], passes: Recorder
) -> None:
    """Passes stay in lockstep for every order of modules, and none overwrites a copy that another pass needs."""
    if num_directions == 1:
        engine = assert_follows(Wide(**where), toy_batches(4), loss_on, passes, json=RESIDENT)
    else:
        engine, other = (  # streamed: no second copies
            engine_for(Wide(**where), zo_json(offload=offload, params={"num_directions": num_directions}))
            for offload in (False, True)
        )
        for batch in toy_batches(4):
            one_step(engine, batch)
            one_step(other, batch)
        assert_equal(weights(engine.module), weights(other.module))
    store = engine.backend.store
    wide, block = (
        unit.scratch_nbytes for unit in (store.blocks.placement.leaf_units[-1], store.blocks.placement.blocks[0])
    )
    assert store.materialiser.scratch.numel() == max(wide, 2 * block) == wide
    assert engine.backend._passes.runner.interleave


# Errors in the user's forward


class Fails(Toy):
    """Raises in one pass of one forward. `plan.fail_at` is (pass, place)."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = SimpleNamespace(fail_at=None, num_calls=0)
        """An object of its own: a forward that fails leaves attributes as they were."""
        self.blocks[1].register_forward_hook(lambda *_: self._maybe("in a block"))

    def _maybe(self, place: str) -> None:
        if self.plan.fail_at == (self.running, place):
            self.plan.fail_at = None
            raise KeyError("the user's own")

    @property
    def running(self) -> int:
        return self.order.get()

    order: contextvars.ContextVar[int] = contextvars.ContextVar("order")

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.order.set(self.plan.num_calls % 2)
        self.plan.num_calls += 1
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
            self._maybe("before any block")
            x = super().middle(x)
        self._maybe("after the blocks")
        return x


@pytest.mark.parametrize("json", [STREAMED, RESIDENT, LOW_PLANES], ids=["streamed", "resident", "low planes"])
@pytest.mark.parametrize("place", ["before any block", "in a block", "after the blocks"])
def test_an_error_surfaces_and_the_next_step_is_as_if_it_had_not_been(place: str, json: dict[str, Any]) -> None:
    """In the first or the second pass: every pair of pass, place and storage, not every triple."""
    failing = int((place == "in a block") != (json is RESIDENT))
    batches = toy_batches(7)
    undisturbed = engine_for(Fails(), json)
    expected = train(undisturbed, batches)
    engine = engine_for(Fails(), json)
    losses = []
    for step, batch in enumerate(batches):
        if step in (0, 3, 4):
            engine.module.plan.num_calls = 0
            engine.module.plan.fail_at = (failing, place)
            outside, generators = thread_state(), snapshot()
            with pytest.raises(KeyError, match="the user's own"):
                engine(**batch)
            assert thread_state() == outside
            assert same_snapshot(snapshot(), generators)
        losses.append(one_step(engine, batch))
    assert losses == expected
    assert_equal(weights(engine.module), weights(undisturbed.module))


@pytest.mark.parametrize("wire_dtype", ["auto", "fp8"])
def test_an_engine_that_could_not_be_made_is_made_again_of_what_is_there(
    wire_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were already stored in another form when it failed are lost, and must not be read as zeros."""
    json, model = zo_json(wire_dtype=wire_dtype), Toy()

    def no_memory(self: Any) -> None:
        raise torch.OutOfMemoryError("no room for slots")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(ZOStore, "make", no_memory)
        engine_for(model, json)
    if wire_dtype == "fp8":
        with pytest.raises(RuntimeError, match="Load the model again"):
            engine_for(model, json)
    else:
        assert train(engine_for(model, json), toy_batches(2)) == train(engine_for(Toy(), json), toy_batches(2))


def test_a_fold_that_breaks_off_is_as_if_it_had_not_been(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel has changed the copies on the device, and nothing was downloaded."""
    json = zo_json(interval=1, bf16={"enabled": True})
    undisturbed, engine = engine_for(Toy().bfloat16(), json), engine_for(Toy().bfloat16(), json)
    expected = train(undisturbed, toy_batches(5))
    losses = train(engine, toy_batches(5)[:3])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_off(patch, KeyboardInterrupt())
        engine.backend.store.materialiser.fold_now(*engine.backend.store.blocks.placement.blocks)
    losses += train(engine, toy_batches(5)[3:])
    assert losses == expected
    assert_equal(weights(engine.module), weights(undisturbed.module))


class WideNorms(Toy):
    """Each block has parameters of two dtypes, which take two launches."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.bfloat16().blocks:
            block.norm.float()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=repr)
@pytest.mark.parametrize(("num_whole", "name"), [(0, "embed"), (2, "blocks.0"), (3, "blocks.0")])
def test_a_fold_in_place_that_breaks_off_is_named_until_a_checkpoint_is_loaded(
    num_whole: int, name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights of the unit include the updates and others do not."""
    batches, engine = toy_batches(5), engine_for(WideNorms(), zo_json(offload=False))
    expected, last_weights = unbroken_run()
    losses = train(engine, batches[:3])
    engine.save_checkpoint(str(tmp_path / "whole"))
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        break_off(patch, error, num_whole=num_whole)
        engine(**batches[3])
    for use in (
        lambda: engine(**batches[3]),
        lambda: engine.step(),
        lambda: engine.module.state_dict(),
        lambda: engine.save_checkpoint(str(tmp_path / "partial")),
    ):
        with pytest.raises(RuntimeError, match=f"a part of the last ones in {name}, .*: load the last checkpoint"):
            use()
    engine.load_checkpoint(str(tmp_path / "whole"))
    losses += train(engine, batches[3:])
    assert losses == expected
    assert_equal(weights(engine.module), last_weights)


@cache
def unbroken_run() -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_for(WideNorms(), zo_json(offload=False))
    return train(engine, toy_batches(5)), weights(engine.module)


# Randomness


def test_opt_with_dropout_and_layer_drop(passes: Recorder) -> None:
    model = tiny_model("opt", dropout=0.2, attention_dropout=0.1, layerdrop=0.4)
    torch.manual_seed(0)
    batches = [tiny_batch("opt", seed=i, batch_size=2, length=8) for i in range(8)]
    skipped: list[int] = []
    layers = list(model.model.decoder.layers)
    for layer in layers:
        layer.register_forward_hook(lambda *_: skipped.append(1))
    assert_follows(model, batches, loss_on, passes)
    assert 0 < len(skipped) < 2 * len(layers) * (len(batches) + 1), "layer drop never happened"


class Remembers(Toy):
    """Each forward reads state that the last one left: counts, a table it replaced, its own generators, its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(16))
        self.torchs = torch.Generator().manual_seed(1)
        self.numpys, self.older = np.random.default_rng(2), np.random.RandomState(3)
        self.pythons = random.Random(4)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.table = self.table * 1.01
        for block in self.blocks:
            drawn = self.numpys.random() + self.older.rand() + self.pythons.random()
            x = block(x * self.table + 0.1 * self.count + torch.rand(16, generator=self.torchs)) + drawn
        return x

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        shift, given = batch.pop("shift").mul_(2.0), batch.pop("given")
        return super().forward(batch["ids"]) * (shift.sum() + torch.rand((), generator=given))

    def state(self) -> list[Any]:
        """Of everything that a forward leaves behind."""
        own = [self.torchs.get_state().tolist(), self.pythons.getstate()]
        numpys = [self.numpys.bit_generator.state, self.older.get_state()[2]]
        return [self.count.item(), self.table.tolist(), *own, *numpys]


@pytest.mark.parametrize(
    ("json", "container"),
    [(STREAMED, dict), (RESIDENT, UserDict), (zo_json(params={"num_directions": 2}), hf.BatchEncoding)],
)
def test_what_a_forward_leaves_behind_is_as_of_one_pass(
    json: dict[str, Any], container: Callable[..., Any], passes: Recorder
) -> None:
    """Passes start from the same buffers, generators and inputs. A forward leaves the state that one pass leaves."""

    def batch(ids: torch.Tensor) -> Any:
        return container({"ids": ids, "shift": torch.ones(3), "given": torch.Generator().manual_seed(5)})

    engine = engine_for(Remembers(), json)
    with torch.inference_mode():
        engine.module(batch(toy_batches(1)[0]["ids"]))
    for step, ids in enumerate(b["ids"] for b in toy_batches(3)):
        reference, one = PlainMeZO(engine.module, copies_model=True), copy.deepcopy(engine.module)
        reference.steps = step
        expected = reference.passes(lambda model, ids=ids: model(batch(ids)))
        with torch.no_grad():
            one(batch(ids))
        one_step(engine, {"batch": batch(ids)})
        close(passes.last[:2], expected)
        assert engine.module.state() == one.state()
    assert engine.backend._passes.runner.interleave
    count = engine.module.count.item()
    with pytest.raises(RuntimeError):
        engine(batch(torch.zeros(2, 3, 1)))
    assert engine.module.count.item() == count, "of a forward that failed"


# Architectures with something of their own


def test_no_kv_cache_in_a_step_and_the_config_is_given_back(passes: Recorder) -> None:
    model = tiny_model("llama")
    assert model.config.use_cache is True
    caches: list[Any] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(kwargs.get("past_key_values")), with_kwargs=True
    )
    engine = engine_for(model)
    batch = tiny_batch("llama", batch_size=2, length=8)
    output = engine(**batch)
    assert caches
    assert set(caches) == {None}
    assert output.past_key_values is None
    assert model.config.use_cache is True
    engine.eval()
    with torch.no_grad():
        assert engine(**batch).past_key_values is not None
    engine.train()
    assert engine(**batch, use_cache=True).past_key_values is not None, "asked for by the caller, so his"


@pytest.mark.parametrize(("name", "use_reentrant"), [("llama", True), ("gpt2", False)])
def test_gradient_checkpointing(name: str, use_reentrant: bool, passes: Recorder) -> None:
    model = tiny_model(name)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert model.is_gradient_checkpointing
    batches = [tiny_batch(name, seed=i, batch_size=2, length=8) for i in range(3)]
    assert_follows(model, batches, loss_on, passes)


@pytest.mark.parametrize("when", ["before", "after", "wrapped"])
def test_a_compiled_model(when: str, passes: Recorder) -> None:
    """backend "eager" traces and guards like any other backend, and compiles nothing."""
    torch.compiler.reset()
    model, reference = Toy(), PlainMeZO(Toy())
    if when == "before":
        model.compile(backend="eager")
    engine = engine_for(torch.compile(model, backend="eager") if when == "wrapped" else model, STREAMED)
    if when == "after":
        model.compile(backend="eager")
    for batch in toy_batches(4):
        expected = reference.step(loss_on(batch))
        one_step(engine, batch)
        close(passes.last, expected)
        with torch.no_grad():
            assert engine.module(**batch).item() == pytest.approx(reference.model(**batch).item(), rel=1e-6)
    torch.compiler.reset()


def hooks_of(module: nn.Module) -> list[int]:
    every = (value for m in module.modules() for name, value in vars(m).items() if "_hooks" in name)
    return [len(hooks) for hooks in every if isinstance(hooks, dict)]


@pytest.mark.parametrize("json", [STREAMED, RESIDENT, zo_json(params={"num_directions": 2})])
def test_hooks_that_a_forward_installs_are_installed_once(json: dict[str, Any]) -> None:
    """transformers registers hooks that capture hidden states in the first forward that asks for them."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    batch = {**tiny_batch("llama", batch_size=2, length=8), "output_hidden_states": True}
    assert len(plain(**batch).hidden_states) == 4
    engine = engine_for(model, json)
    for _ in range(2):
        output = engine(**batch)
        assert len(output.hidden_states) == 4
        engine.backward(output.loss)
        engine.step()
    engine.eval()
    assert len(engine(**batch).hidden_states) == 4
    engine.destroy()
    assert len(model(**batch).hidden_states) == 4
    assert hooks_of(model) == hooks_of(plain)


@pytest.mark.parametrize("first", ["long", "short"])
def test_dynamic_rope_beyond_the_trained_length_keeps_lockstep(first: str, passes: Recorder) -> None:
    """Its table of frequencies is a buffer, and the length that the table is for is an attribute."""
    rope = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 20.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=8, initializer_range=0.5)
    lengths = [12, 6, 12, 16] if first == "long" else [6, 12, 16, 6]  # history plays no part in these
    batches = [tiny_batch("llama", seed=i, batch_size=2, length=length) for i, length in enumerate(lengths)]
    engine = assert_follows(model, batches, loss_on, passes)
    assert engine.backend._passes.runner.interleave


def test_hidden_states_are_those_of_one_pass(passes: Recorder) -> None:
    model = tiny_model("llama")
    reference = PlainMeZO(model)
    engine = engine_for(model)
    batch = tiny_batch("llama", batch_size=2, length=8)
    apart = reference.passes(lambda m: m(**batch, use_cache=False, output_hidden_states=True))
    output = engine(**batch, output_hidden_states=True)
    assert len(output.hidden_states) == 4
    states = [(*each.hidden_states, each.logits) for each in (output, *apart)]
    near = [
        [torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(states[0], other, strict=True)]
        for other in states[1:]
    ]
    assert sorted(map(set, near), key=str) == [{False}, {True}], "not all of one pass"


# Weights used elsewhere than in their module's forward


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.child = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x) * self.scale


class OnContainers(Toy):
    """Parameters of modules that contain other modules: they are needed while the blocks inside run."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(16))
        self.inner = Scaled()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.inner(block(x) + self.shift)
        return x


class OnABlock(nn.Module):
    """A parameter of the block itself, beside its children's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(16))
        self.inside = Block(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate * self.inside(x)


class Gated(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OnABlock() for _ in range(3))


class Unused(Toy):
    """MeZO also moves weights that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(16, 4)
        self.spare_parameter = nn.Parameter(torch.zeros(5))
        self.blocks.append(Block(16))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        return x


class Unnamed(Toy):
    """Weights reach functions through properties and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.shifts = nn.ParameterList(torch.randn(16) for _ in range(2))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x @ torch.cat([self.one.weight, self.other.weight], dim=1)
        x = x + torch.stack(list(self.shifts)).sum(0)
        return super().middle(x) @ self.embed.weight.T @ self.embed.weight.data


class Runs(nn.Module):
    """Calls a module that PyTorch does not register as its child."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(16))
        self.others = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.others[0](x) * self.gate


class Rows(nn.Module):
    """Returns views of weights: some rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 16))

    def forward(self, num: int) -> dict[str, torch.Tensor]:
        return {"rows": self.table[:num]}


class GivenAnother(Block):
    def __init__(self, *, shared: nn.Module) -> None:
        super().__init__(16)
        self.shared = shared

    def forward(self, x: torch.Tensor, *, first: nn.Module) -> tuple[torch.Tensor, None, torch.Tensor]:
        return super().forward(self.shared(first(x)) + x), None, self.linear.weight[0]


class Entangled(Toy):
    """Blocks contain the same module, and call a module passed to them, which calls another. The blocks, and the module
    before them, return views of their weights."""

    def __init__(self) -> None:
        super().__init__()
        shared, self.inner = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(GivenAnother(shared=shared) for _ in range(2))
        self.outer, self.rows = Runs(self.inner), Rows()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        rows, weights = self.rows(x.shape[1])["rows"], []
        for block in self.blocks:
            x, _, weight = block(x, first=self.outer)
            weights.append(weight)
        return x + rows + sum(weights)


@pytest.mark.parametrize("json", [STREAMED, RESIDENT])
@pytest.mark.parametrize("kind", [FunctionalTie, OnContainers, Gated, Unused, Unnamed, Entangled])
def test_weights_in_unusual_places(kind: type[Toy], json: dict[str, Any], passes: Recorder) -> None:
    engine = assert_follows(kind(), toy_batches(5), loss_on, passes, json=json)
    plain, batch = copy.deepcopy(engine.module), toy_batches(1)[0]
    with torch.no_grad():
        assert engine.module(**batch).item() == plain(**batch).item(), "evaluated with other weights"


def test_a_unit_that_is_unused_for_longer_than_the_log(passes: Recorder) -> None:
    """The ring of pending updates holds 64: a unit that no forward calls must fold before its entries are
    overwritten."""
    model = Unused()
    start, offsets, offset = weights(model), {}, 0
    for name, p in model.named_parameters():
        offsets[name], offset = offset, offset + p.numel()
    engine = engine_for(model, zo_json(interval=8))
    train(engine, toy_batches(70))
    end = weights(engine.module)
    coefficients = [LR * (plus - minus).item() / (2 * EPS) for plus, minus in passes.passes]
    for name in ("spare_parameter", "spare.weight", "blocks.3.linear.weight"):
        noise = [ops.noise(0, step, 0, offsets[name], start[name].numel()) for step in range(70)]
        moved = sum(c * z.double() for c, z in zip(coefficients, noise, strict=True)).view(start[name].shape)
        torch.testing.assert_close(start[name] - end[name], moved.float(), rtol=1e-4, atol=1e-5)


class InsideOut(Toy):
    """Calls modules inside its blocks, never the blocks."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block.linear(block.norm(x)))
        return x


class Then:
    """A hook of which each copy of the model has its own."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return self.inner(output)


class RunsBlocks(Toy):
    """Blocks call one another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_hook(Then(self.blocks[2]))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("kind", [InsideOut, RunsBlocks])
def test_blocks_on_the_device_need_not_be_run_whole_and_in_turn(
    kind: type[Toy], interval: int, passes: Recorder
) -> None:
    json = zo_json(offload=False, interval=interval)
    assert_follows(kind(), toy_batches(5), loss_on, passes, json=json)


def test_the_remedy_for_blocks_whose_insides_are_called(passes: Recorder) -> None:
    assert_follows(InsideOut(), toy_batches(3), loss_on, passes, json=zo_json(blocks=[]))
