"""An evaluation replays pending updates once while the weights stand, and gives the outputs of an evaluation that
replays them in every forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_zo import ops
from ds_zo.backends.zo import store
from tests.helpers.loaded_models import lora_over
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import weights
from tests.helpers.zo_runs import (
    Block,
    FunctionalTie,
    Toy,
    engine_for,
    log_lines,
    one_step,
    toy_batches,
    train,
    zo_json,
)
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

PLENTY, NOTHING = 1 << 40, 0
MODELS: dict[bool, list[str]] = {False: ["whole", "tied"], True: ["whole", "frozen", "lora"]}
"""By whether the model is in bf16."""
FORMATS = [
    (False, "auto", "split"),
    (False, "bf16", "split"),
    (False, "fp16", "wire"),
    (False, "fp8", "wire"),
    (True, "auto", "split"),
    (True, "auto", "wire"),
    (True, "fp32", "split"),
    (True, "bf12", "split"),
    (True, "fp8", "split"),
]
"""Whether the model is in bf16, `wire_dtype`, `master`."""
Change = Callable[[Any, Path], None]


def free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(store, "free_nbytes", lambda *_, **__: nbytes)


def copies_of(engine: Any) -> Any:
    return engine.backend.store.materialiser.copies


def model_of(kind: str) -> nn.Module:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 12}
    model = tiny_model("llama", **sizes, tie_word_embeddings=kind == "tied")
    if kind == "lora":
        model = lora_over(model, target_modules=["q_proj", "down_proj"])
    if kind == "frozen":  # most are trained, so all of a block's parameters are in one unit
        for name, p in model.named_parameters():
            p.requires_grad = "k_proj" not in name and "o_proj" not in name
    return model.train()


@pytest.fixture
def num_replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Its one number counts launches that replay updates."""
    count, plain = [0], ops.replay_perturb

    def counted(*args: Any, pending: ops.Pending | None = None, **keywords: Any) -> None:
        count[0] += pending is not None and pending.num_entries > 0
        plain(*args, pending=pending, **keywords)

    monkeypatch.setattr(ops, "replay_perturb", counted)
    yield count


def change_gathered(engine: Any, folder: Path) -> None:
    p = next(p for p in engine.module.parameters() if p.requires_grad)
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
        p.data.mul_(1.5)


def change_data(engine: Any, folder: Path) -> None:
    p = [p for p in engine.module.parameters() if p.requires_grad][-2]
    p.data = p.data * 1.5


def load_state(engine: Any, folder: Path) -> None:
    engine.module.load_state_dict({name: value * 1.5 for name, value in engine.module.state_dict().items()})


def load_checkpoint(engine: Any, folder: Path) -> None:
    engine.load_checkpoint(str(folder))


def read_state(engine: Any, folder: Path) -> None:
    engine.module.state_dict()


CHANGES: list[Change] = [change_gathered, change_data, load_state, load_checkpoint, read_state]


def story(seed: int, folder: Path, json: dict[str, Any], kind: str, count: list[int]) -> tuple[list[Any], list[int]]:
    """A run that evaluates and changes weights at random moments: all losses and logits, and the launches that replay
    updates in an evaluation's forwards after its first one."""
    rng = random.Random(seed)
    engine = engine_for(model_of(kind), json)
    found: list[Any] = []
    later: list[int] = []

    def evaluate() -> None:
        engine.eval()
        with torch.inference_mode(rng.random() < 0.5), torch.no_grad():
            for i in range(2):
                count[0] = 0
                found.append(engine.module(**tiny_batch("llama", seed=i, batch_size=1, length=4)).logits.clone())
                later.extend([count[0]] * (i > 0))
        engine.train()

    seen: list[int] = []
    handle = engine.module.register_forward_pre_hook(
        lambda module, _: seen.append(copies_of(engine).nbytes) if module.training else None
    )
    for step in range(2):
        found.append(one_step(engine, tiny_batch("llama", seed=step, batch_size=2, length=4)))
        if step == 0:
            engine.save_checkpoint(str(folder))
        evaluate()
        if rng.random() < 0.7:
            rng.choice(CHANGES)(engine, folder)
            evaluate()
    handle.remove()
    assert not any(seen), "a training forward frees the copies"
    found += weights(engine.module).values()
    engine.destroy()
    return found, later


CASES = [(form, seed) for seed in seeds(5) for form in FORMATS]


@pytest.mark.parametrize(("form", "seed"), CASES)
def test_outputs_are_those_of_a_replay_in_every_forward(
    form: tuple[bool, str, str], seed: int, tmp_path: Path, num_replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_bf16, wire, master = form
    rng, number = random.Random(f"{seed} {form}"), FORMATS.index(form) + seed
    kind, interval = MODELS[is_bf16][number % len(MODELS[is_bf16])], rng.choice([1, 3, 8])
    frozen = {"frozen_dtype": ["nf4", "fp8", "bf12", "auto"][number % 4]} if kind in ("frozen", "lora") else {}
    form_keys = {"wire_dtype": wire, "master": master, "interval": interval, **frozen}
    json = zo_json(resident_blocks=rng.choice([0, 1]), **form_keys, **({"bf16": {"enabled": True}} if is_bf16 else {}))
    print(kind, json["ds_zo"])
    free(monkeypatch, NOTHING)
    expected, launches = story(seed, tmp_path / "replayed", json, kind, num_replays)
    assert any(launches)
    free(monkeypatch, PLENTY)
    found, launches = story(seed, tmp_path / "kept", json, kind, num_replays)
    assert not any(launches)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_a_checkpoint_of_another_run_at_the_same_step(tmp_path: Path) -> None:
    engine, other = engine_for(Toy(), zo_json(interval=7)), engine_for(Toy(), zo_json(interval=7))
    train(engine, toy_batches(2))
    train(other, reversed(toy_batches(2)))
    other.save_checkpoint(str(tmp_path))
    with torch.no_grad():
        before = engine.module(**toy_batches(1)[0])
        engine.load_checkpoint(str(tmp_path))
        assert before != engine.module(**toy_batches(1)[0]) == other.module(**toy_batches(1)[0])


def test_copies_take_no_more_than_they_leave_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an evaluation's own activations fill the memory later. One line says that some units have no copy."""
    engine = engine_for(Toy(), zo_json(interval=7))
    train(engine, toy_batches(2))
    copies, batch, total = copies_of(engine), toy_batches(1)[0], [4 * 6000]
    monkeypatch.setattr(store, "free_nbytes", lambda *_, **__: total[0] - copies.nbytes)
    with log_lines(20) as lines, torch.no_grad():
        loss = engine.module(**batch)
        assert 0 < copies.nbytes <= total[0] / 2
        assert engine.module(**batch) == loss
        total[0] = copies.nbytes
        assert engine.module(**batch) == loss == engine.module(**batch)
    assert copies.nbytes == 0
    assert len([line for line in lines if "no room" in line]) == 1


def test_the_budget_counts() -> None:
    """Slots, scratch and weights outside of the blocks take a part of it."""
    found = []
    for budget_gb in (None, 2.2e-5):
        json = zo_json(interval=7, resident_blocks=0)
        json["ds_zo"]["stream"]["device_memory_gb"] = budget_gb
        engine = engine_for(Toy(), json)
        train(engine, toy_batches(2))
        with torch.no_grad():
            engine.module(**toy_batches(1)[0])
        found.append(copies_of(engine).nbytes)
    assert 0 < found[1] < found[0]


class Halving(Block):
    """Its forward writes to its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.linear.weight.data.mul_(0.5)
        return super().forward(x)


class Returning(FunctionalTie):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(ids)
        return loss if self.training else self.embed.weight.detach()


def test_forwards_that_write_to_their_weights() -> None:
    """Each of them starts from the weights of the step, as without kept copies."""
    model = Toy()
    model.blocks = nn.ModuleList(Halving(16) for _ in range(3))
    engine = engine_for(model, zo_json(interval=7))
    train(engine, toy_batches(2))
    engine.eval()
    with torch.no_grad():
        assert len({engine.module(**toy_batches(1)[0]).item() for _ in range(3)}) == 1


def test_outputs_do_not_lie_in_a_kept_copy() -> None:
    """Not even those that are views of a weight, which the caller then changes."""
    engine = engine_for(Returning(), zo_json(interval=7))
    train(engine, toy_batches(2))
    engine.eval()
    with torch.no_grad():
        first = engine.module(**toy_batches(1)[0]).clone()
        for _ in range(3):
            found = engine.module(**toy_batches(1)[0])
            assert torch.equal(found, first)
            found.zero_()
