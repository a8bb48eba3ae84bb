"""DeepSpeed's `use_node_local_storage`: the first rank of each machine writes a whole checkpoint, and loads it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.node_local_cases import JSONS, save_and_load
from tests.helpers.ranks import job


def test_every_machine_has_a_whole_checkpoint(tmp_path: Path) -> None:
    for found in job(save_and_load, 2, tmp_path):
        for name, losses in found.items():
            assert losses["after"] == losses["before"], name
    for name in JSONS:
        folders = [tmp_path / name / rank / "global_step2" / "manifest.json" for rank in "01"]
        first, second = (json.loads(path.read_text())["files"] for path in folders)
        weights = [file for file in first if file.startswith("weights-")]
        assert weights
        assert all(first[file]["sha256"] == second[file]["sha256"] for file in weights), name
