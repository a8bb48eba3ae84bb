"""The shipped JSONs: comparable, valid, with the learning rate they state, and documented key by key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig

from ds_zo.cli import main
from ds_zo.config import backend_of, resolve
from ds_zo.config.docs import key_tables
from ds_zo.config.learning_rates import far_rate

REPO = Path(__file__).parents[1]
FOLDER = REPO / "ds_configs"
BACKEND_OF_FILE = {"zo": "zo", "lomo": "lomo", "lsp": "lsp", "zero_offload": None, "zero3": None}
MAY_DIFFER = {"optimizer", "zero_optimization"}


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_the_files_are_for_a_large_model_on_a_gpu() -> None:
    """AdamW's learning rate is LSP's too. ZO's and LOMO's are of other orders of magnitude."""
    assert all(load(name)["bf16"] == {"enabled": True} for name in BACKEND_OF_FILE)
    params = {name: load(name)["optimizer"]["params"] for name in BACKEND_OF_FILE}
    assert params["zero_offload"]["lr"] == params["zero3"]["lr"] == params["lsp"]["lr"] == 2e-5
    assert (params["zo"]["lr"], params["zo"]["zo_eps"], params["lomo"]["lr"]) == (1e-6, 1e-3, 0.03)
    assert params["lsp"]["subspace_dim"] == 512


def test_files_differ_only_where_update_paths_do() -> None:
    """ZO has no gradients to clip."""
    clipped = {"gradient_clipping": 1.0}
    files = [load(name) | (clipped if name == "zo" else {}) for name in BACKEND_OF_FILE]
    shared = [{key: value for key, value in file.items() if key not in MAY_DIFFER} for file in files]
    assert all(other == shared[0] for other in shared)
    assert "optimizer" not in shared[0] and "scheduler" in shared[0]


@pytest.mark.parametrize(("name", "backend"), BACKEND_OF_FILE.items())
def test_each_file_is_valid_and_selects_its_backend(name: str, backend: str | None) -> None:
    config = load(name)
    assert '"auto"' not in json.dumps(config), "Accelerate and Trainer refuse it"
    DeepSpeedConfig(config)
    assert backend_of(config) == backend
    if backend is not None:
        resolved = resolve(config)
        assert resolved.ignored == () and resolved.warnings == ()
        assert resolved.stream == (backend == "zo")
        assert resolved.offload_optimizer == (backend == "lsp")


@pytest.mark.parametrize("name", BACKEND_OF_FILE)
def test_the_schedule_peaks_at_the_optimizers_own_lr(name: str) -> None:
    config = load(name)
    lr = config["optimizer"]["params"]["lr"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = config["scheduler"]
    scheduler = getattr(lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    used = []
    for _ in range(2 * schedule["params"]["total_num_steps"]):
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert max(used) == pytest.approx(lr)
    assert used[-1] == pytest.approx(lr)
    assert used[1] == pytest.approx(0.1 * lr)


def test_the_page_of_keys_names_every_file_and_its_key_tables_are_current() -> None:
    text = (REPO / "docs" / "keys.md").read_text()
    assert all(f"`{name}.json`" in text for name in BACKEND_OF_FILE)
    assert key_tables() in text, "run: python -m benchmarks.pages"


def test_every_key_of_the_tables_says_what_it_means() -> None:
    rows = [line for line in key_tables().splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert all(len(row.rstrip(" |").rpartition(" | ")[2]) > 8 for row in rows)


def test_the_command_prints_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out.rstrip() == key_tables()


def test_migration_page_json_is_valid_and_its_edit_is_enough() -> None:
    """What the page says of a stock JSON, done to one."""
    page = (REPO / "docs" / "converting.md").read_text(encoding="utf-8")
    [example] = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)]
    assert resolve(example, client_optimizer=True).optimizer.zo_eps == 1e-3
    stock = load("zero_offload")
    stock["optimizer"]["type"] = "ZO"
    resolved = resolve(stock)
    assert "zero_optimization.offload_optimizer" in resolved.ignored
    assert "AdamW's rates do not suit it" in str(far_rate(resolved, 1e-3, at="optimizer.params.lr"))
