"""The row of an embedding at `padding_idx` has no gradient, so ZO does not perturb or update it, in any storage
format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ds_zo.checkpoint.rebuild import replay
from ds_zo.streaming import placement
from tests.helpers.mezo_reference import PlainMeZO, loss_on
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import (
    EPS,
    LR,
    Block,
    FunctionalTie,
    Recorder,
    Toy,
    close,
    engine_for,
    one_step,
    toy_batches,
    train,
    zo_json,
)

pytestmark = pytest.mark.usefixtures("single_process")

BF16 = {"bf16": {"enabled": True}}
JSONS: dict[str, dict[str, Any]] = {
    "streamed": zo_json(interval=3),
    "resident": zo_json(interval=2, offload=False),
    "bf16 split": zo_json(interval=3, **BF16),
    "bf16 wire": zo_json(interval=3, master="wire", **BF16),
    "fp8": zo_json(interval=3, wire_dtype="fp8", **BF16),
    "two directions": zo_json(interval=3, params={"num_directions": 2, "distribution": "rademacher"}),
}
PAD = 5
BATCHES = [{"ids": batch["ids"].clamp(min=PAD + 1)} for batch in toy_batches(6)]
"""Without padding, so that runs with and without the rule meet the same losses."""
PADDED = [{"ids": batch["ids"].masked_fill(batch["ids"] > 20, PAD)} for batch in toy_batches(4)]


class BlockWithTable(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.table = nn.Embedding(7, width, padding_idx=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table(torch.tensor([3, 4])).sum(0)


class Tabled(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockWithTable(16) for _ in range(3))


class Padded(Tabled):
    """A model whose row at `padding_idx` is not zero, as in most pretrained models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.padding_idx = PAD


def row(engine: Any) -> torch.Tensor:
    return weights(engine.module)["embed.weight"][PAD]


@pytest.mark.parametrize("name", JSONS)
def test_the_row_stays_and_everything_else_moves_as_without_it(name: str) -> None:
    engine, without = engine_for(Padded(), JSONS[name]), engine_for(Tabled(), JSONS[name])
    before = row(engine)
    assert train(engine, BATCHES) == train(without, BATCHES)
    assert torch.equal(row(engine), before)
    ours, theirs = weights(engine.module), weights(without.module)
    assert not torch.equal(theirs["embed.weight"][PAD], before)
    theirs["embed.weight"][PAD] = before
    assert_equal(ours, theirs)
    tables = [ours[f"blocks.{block}.table.weight"] for block in range(3)]
    assert all(table[4].any() and not table[3].any() for table in tables)


def test_passes_meet_the_row_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, reference, engine = Recorder(monkeypatch), PlainMeZO(Padded()), engine_for(Padded())
    for batch in PADDED:
        expected = reference.step(loss_on(batch))
        one_step(engine, batch)
        close(passes.last, expected)


@pytest.mark.parametrize("name", ["streamed", "bf16 split"])
def test_the_row_decays_as_in_torch(name: str) -> None:
    json = JSONS[name] | {"optimizer": {"type": "ZO", "params": {"lr": LR, "zo_eps": EPS, "weight_decay": 0.5}}}
    engine = engine_for(Padded(), json)
    before = row(engine).float()
    train(engine, BATCHES)
    tolerance = 1e-6 if name == "streamed" else 1e-2
    torch.testing.assert_close(row(engine).float(), before * (1 - LR * 0.5) ** len(BATCHES), rtol=tolerance, atol=0)
    assert not torch.equal(row(engine).float(), before) or name != "streamed"


class TiedHead(Padded):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class FunctionallyTied(FunctionalTie):
    def __init__(self) -> None:
        super().__init__()
        self.embed.padding_idx = PAD


class TwoEmbeddings(Padded):
    """A model with two embeddings that share one weight."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.other = nn.Embedding(32, 16, padding_idx=padding_idx)
        self.other.weight = self.embed.weight

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return super().middle(x) + self.other(torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("model", "moves"),
    [
        (TiedHead, True),
        (FunctionallyTied, True),
        (lambda: TwoEmbeddings(PAD), False),
        (lambda: TwoEmbeddings(None), True),
    ],
    ids=["tied head", "functional head", "two embeddings", "one without padding"],
)
def test_a_row_that_has_a_gradient_moves(model: Any, moves: bool) -> None:
    engine = engine_for(model())
    before = row(engine)
    train(engine, BATCHES[:3])
    assert torch.equal(row(engine), before) is not moves


# Runs that began without the rule


def test_an_older_run_goes_on_and_replays_as_it_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    json = zo_json(interval=3)
    json["ds_zo"]["checkpoint"] = {"trajectory": True}
    (tmp_path / "base").mkdir()
    save_file(Padded().state_dict(), tmp_path / "base" / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(placement, "_still", lambda p, owners: (0, 0))
        older = engine_for(Padded(), json)
    start = row(older)
    train(older, PADDED[:2])
    older.save_checkpoint(str(tmp_path / "saves"))
    train(older, PADDED[2:3])
    older.backend.recorder.flush()
    resumed = engine_for(Padded(), json)
    resumed.load_checkpoint(str(tmp_path / "saves"))
    assert resumed.global_steps == 3, "the step that was recorded after the checkpoint is made again"
    assert_equal(weights(resumed.module), weights(older.module))
    assert train(resumed, PADDED[3:]) == train(older, PADDED[3:])
    assert_equal(weights(resumed.module), weights(older.module))
    resumed.backend.recorder.flush()
    replay(tmp_path / "base", tmp_path / "saves" / "trajectory.bin", step=4, out=tmp_path / "four")
    replayed = load_file(tmp_path / "four" / "model.safetensors")
    assert_equal(replayed, weights(older.module))
    assert not torch.equal(replayed["embed.weight"][PAD], start)


def test_a_run_with_the_rule_is_recorded_with_it(tmp_path: Path) -> None:
    json = zo_json(interval=3, params={"weight_decay": 0.1})
    json["ds_zo"]["checkpoint"] = {"trajectory": True}
    (tmp_path / "base").mkdir()
    save_file(Padded().state_dict(), tmp_path / "base" / "model.safetensors")
    engine = engine_for(Padded(), json)
    train(engine, PADDED[:2])
    engine.save_checkpoint(str(tmp_path / "saves"))
    resumed = engine_for(Padded(), json)
    resumed.load_checkpoint(str(tmp_path / "saves"))
    assert train(resumed, PADDED[2:]) == train(engine, PADDED[2:])
    assert_equal(weights(resumed.module), weights(engine.module))
    engine.backend.recorder.flush()
    replay(tmp_path / "base", tmp_path / "saves" / "trajectory.bin", step=4, out=tmp_path / "four")
    assert_equal(load_file(tmp_path / "four" / "model.safetensors"), weights(engine.module))
