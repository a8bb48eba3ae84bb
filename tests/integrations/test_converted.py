"""Trainer on converted JSONs: the "auto" values that stay are those that it fills."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from ds_zo.config.convert import convert
from tests.helpers.client_jsons import OF_CLIENTS
from tests.integrations.library_runs import arguments, engine_of, fresh_libraries, logged, trainer_for  # noqa: F401


@pytest.mark.parametrize(
    ("name", "to", "streams"),
    [
        ("z2_offload", "lsp", False),
        ("z3", "zo", True),
        ("trainer_z3", "adalomo", True),
    ],
)
def test_trainer_fills_what_stayed_auto(name: str, to: str, streams: bool, tmp_path: Path) -> None:
    found = convert(copy.deepcopy(OF_CLIENTS[name]), to=to)
    args = arguments(
        tmp_path, found.config, gradient_accumulation_steps=1, learning_rate=found.lr, max_steps=2, warmup_steps=1
    )
    trainer = trainer_for(args, 2)
    trainer.train()
    engine = engine_of(trainer)
    assert (engine.resolved.backend, engine.resolved.stream) == (to, streams)
    assert engine.resolved.ignored == () and len(logged(trainer, "loss")) == 2
