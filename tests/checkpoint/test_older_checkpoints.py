"""Checkpoints that version 0.1.0 wrote, one a backend, load and go on. `write_fixtures.py` made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.write_fixtures import PARAMS, start, train, weights
from tests.helpers.recorded_runs import record_all

pytestmark = pytest.mark.usefixtures("single_process")

FOLDER = Path(__file__).parent / "fixtures" / "backends"
FORMATS = Path(__file__).parent / "fixtures" / "formats"


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


def test_checkpoints_of_each_format_and_of_two_ranks_go_on(tmp_path: Path, run_ranks: Callable[..., list[str]]) -> None:
    """Losses of the two steps after the checkpoint: the second one depends on the optimizer's restored state."""

    def in_forks(arguments: list[str], *, num_ranks: int) -> None:
        run_ranks("from tests.helpers.recorded_runs import main\nmain()", *arguments, num_ranks=num_ranks)

    expected = json.loads((FORMATS / "losses.json").read_text(encoding="utf-8"))
    saved = tmp_path / "saved"
    shutil.copytree(FORMATS, saved)
    rows = [
        row for row in record_all(list(expected), tmp_path / "runs", saved=saved, start=in_forks) if row["rank"] == 0
    ]
    assert len(rows) == 11
    found = {row["run"]: row.get("losses", row.get("error")) for row in rows}
    assert found == {name: pytest.approx(losses, rel=1e-3) for name, losses in expected.items()}
