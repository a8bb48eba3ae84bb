"""Checkpoints inside and between accumulation windows, resumed with other numbers of micro-batches per step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from tests.helpers.lsp_runs import lsp_json
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Toy, log_lines, toy_batches, train, zo_json
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")

BATCHES = toy_batches(24)
SEQUENTIAL = {"lr": 0.1, "accumulation": "sequential"}
JSONS: dict[str, dict[str, Any]] = {
    "zo": zo_json(interval=3),
    "lsp": lsp_json(),
    "lomo": {"optimizer": {"type": "LOMO", "params": SEQUENTIAL}, "gradient_clipping": 0.0},
    "adapter": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "ds_zo": {"backend": "adapter"}},
}


def engine_of(kind: str, accumulation: int) -> Any:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    model = Toy()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**JSONS[kind], **sizes})[0]


def saved_after(num: int, kind: str, accumulation: int, folder: Path) -> str:
    engine = engine_of(kind, accumulation)
    train(engine, BATCHES[:num])
    engine.save_checkpoint(str(folder))
    engine.destroy()
    return str(folder)


@pytest.mark.parametrize("seed", seeds(20))
@pytest.mark.parametrize("kind", JSONS)
def test_a_window_that_is_not_continued_begins_anew(kind: str, seed: int, tmp_path: Path) -> None:
    """Each later step has all its micro-batches, and the sums of the saved window are not in it."""
    rng = random.Random(f"{kind} {seed}")
    before, after, num, own = (rng.randint(*ends) for ends in ((1, 4), (1, 4), (1, 9), (0, 3)))
    resumes = before != after and rng.random() < 0.7
    num_whole = num if kind == "lomo" else num - num % before  # LOMO's micro-batches have updated the weights
    found, lines = [], []
    for i, saved in enumerate((num, num_whole)):
        folder = saved_after(saved, kind, before, tmp_path / str(i))
        engine = engine_of(kind, after)
        train(engine, BATCHES[:own])  # the new run's own window ends too
        with log_lines() as logged:
            engine.load_checkpoint(folder, load_optimizer_states=resumes)
        lines.append(any("saved between the micro-batches" in line for line in logged))
        num_steps = engine.global_steps
        for taken, batch in enumerate(BATCHES[12 : 12 + 2 * after], 1):
            train(engine, [batch])
            assert engine.global_steps == num_steps + taken // after
        found.append(weights(engine.module))
        engine.destroy()
    assert_equal(*found)
    assert lines == [num != num_whole, False]


@pytest.mark.parametrize("kind", ["zo", "lsp", "adapter"])
def test_a_resumed_window_says_what_zero_grad_drops(kind: str, tmp_path: Path) -> None:
    folder = saved_after(2, kind, 3, tmp_path)
    engine = engine_of(kind, 3)
    engine.load_checkpoint(folder)
    before = weights(engine.module)
    for drops in (False, True):
        if drops:
            engine.zero_grad()
        engine.save_checkpoint(str(tmp_path / f"{drops}"))
        with log_lines() as lines:
            engine_of(kind, 2).load_checkpoint(str(tmp_path / f"{drops}"))
        assert any("saved between the micro-batches" in line for line in lines) is not drops
    assert all(torch.equal(value, before[name]) for name, value in weights(engine.module).items())
