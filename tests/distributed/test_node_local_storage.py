"""DeepSpeed's `use_node_local_storage`: the first rank of each machine writes a whole checkpoint, and loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.node_local_cases import JSONS, save_and_load
from tests.helpers.ranks import run_job


@pytest.mark.parametrize("name", JSONS)
def test_every_machine_has_a_whole_checkpoint(name: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run_job(save_and_load, 2, tmp_path, name)):
        assert isinstance(found, dict), f"rank {rank}: {found}"
        assert found["after"] == found["before"]
    first, second = (json.loads((tmp_path / rank / "global_step2" / "manifest.json").read_text()) for rank in "01")
    weights = [name for name in first["files"] if name.startswith("weights-")]
    assert weights
    assert all(first["files"][name]["sha256"] == second["files"][name]["sha256"] for name in weights)
