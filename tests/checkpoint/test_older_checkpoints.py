"""Checkpoints that version 0.1.0 wrote, one a backend, load and go on. `write_fixtures.py` made them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from write_fixtures import PARAMS, start, train, weights

pytestmark = pytest.mark.usefixtures("single_process")

FOLDER = Path(__file__).parent / "fixtures" / "backends"


@pytest.mark.parametrize("kind", PARAMS)
def test_a_checkpoint_of_an_earlier_version_goes_on(kind: str, tmp_path: Path) -> None:
    """On the machine that wrote it the next step has its bits; elsewhere libraries round otherwise."""
    shutil.copytree(FOLDER / kind, tmp_path / kind)
    engine = start(kind)
    engine.load_checkpoint(str(tmp_path / kind))
    assert engine.global_steps == 2
    train(engine, 2)
    if kind == "LSP":  # whose updates have another size than that version's
        found = torch.cat([value.reshape(-1) for value in weights(engine).values()])
        assert found.isfinite().all()
        return
    for name, expected in load_file(FOLDER / kind / "after.safetensors").items():
        torch.testing.assert_close(weights(engine)[name], expected, rtol=1e-5, atol=1e-6, msg=name)
