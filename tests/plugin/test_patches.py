"""The attributes of other packages that `import ds_zo` replaces: those in `PATCHES`, and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import ds_zo
from ds_zo.plugin import patches
from ds_zo.plugin.gathered_parameters import EngineParameters
from ds_zo.plugin.patches import PATCHES, Patch
from tests.helpers.tiny_models import tiny_batch, tiny_model

SNAPSHOTS = """
import json, sys, types
import accelerate, deepspeed, transformers.trainer

def attributes():
    found = {}
    for where, module in list(sys.modules.items()):
        if where.split(".")[0] not in ("accelerate", "deepspeed", "transformers"):
            continue
        for name, value in list(vars(module).items()):
            found[f"{where}.{name}"] = value
            if isinstance(value, type) and value.__module__ == where:
                found.update({f"{where}.{name}.{inner}": v for inner, v in vars(value).items()})
    return found

def differing(before, after):
    for name, value in after.items():
        owner, _, attribute = name.rpartition(".")
        is_new_submodule = name not in before and isinstance(value, types.ModuleType)
        if (owner in modules or owner in before) and before.get(name) is not value and not is_new_submodule:
            yield name

modules = set(sys.modules)
before = attributes()
import ds_zo
installed = attributes()
ds_zo.uninstall()
uninstalled = attributes()
ds_zo.install()
again = attributes()
pairs = [(before, installed), (before, uninstalled), (installed, again)]
print("OUT", json.dumps([sorted(differing(*pair)) for pair in pairs] + [len(before)]))
"""


def test_the_import_replaces_the_attributes_of_the_table_and_uninstall_puts_them_back(run_python: Any) -> None:
    output = run_python(SNAPSHOTS)
    (line,) = (line for line in output.splitlines() if line.startswith("OUT "))
    installed, uninstalled, again, num_attributes = json.loads(line.removeprefix("OUT "))
    assert num_attributes > 10_000
    assert installed == sorted(map(str, PATCHES))
    assert uninstalled == ["deepspeed.runtime.engine.DeepSpeedEngine.__new__"]
    assert again == []


def add_one(original: Callable[[], int]) -> int:
    return original() + 1


def test_a_patch_of_a_patch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_originals", {})
    owner: Any = SimpleNamespace(value=lambda: 1)
    patch = Patch(owner, "value", add_one)
    patch.apply()
    patch.apply()
    assert owner.value() == 2
    ours = owner.value
    owner.value = lambda: ours() * 10
    patch.undo()
    assert owner.value() == 20
    owner.value = ours
    patch.undo()
    assert owner.value() == 1


def test_a_module_is_patched_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_originals", {})
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    for name, undone in (("patched_when_imported", False), ("imported_after_undo", True)):
        (tmp_path / f"{name}.py").write_text("def value():\n    return 1\n")
        patch = Patch(name, "value", add_one)
        patch.apply()
        patch.apply()
        assert len(sys.meta_path) == len(finders) + 1
        if undone:
            patch.undo()
        imported = __import__(name)
        monkeypatch.delitem(sys.modules, name)
        assert sys.meta_path == finders
        assert imported.value() == (1 if undone else 2)


def test_gathered_parameters_serve_engines_that_uninstall_leaves(single_process: None) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "ZO", "params": {"lr": 1e-2}}}
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    batch = {name: value.to(engine.device) for name, value in tiny_batch("llama").items()}
    engine.backward(engine(**batch).loss)
    engine.step()
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    ds_zo.uninstall()
    try:
        context = GatheredParameters(engine.module.parameters())
        assert type(context) is EngineParameters
        with context:
            assert all(torch.equal(p, expected[name]) for name, p in engine.module.named_parameters())
        stock = GatheredParameters(torch.nn.Linear(2, 2).parameters())
        assert type(stock) is GatheredParameters
    finally:
        ds_zo.install()


class OwnContext(GatheredParameters):
    def __enter__(self) -> Any:
        self.entered = True
        return super().__enter__()


def test_a_subclass_of_gathered_parameters_serves_too(single_process: None) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "ZO", "params": {"lr": 1e-2}}}
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    p = next(engine.module.parameters())
    with OwnContext([p], modifier_rank=0) as _, torch.no_grad():
        p.fill_(0.5)
    context = OwnContext([p])
    with context:
        assert bool((p == 0.5).all())
    assert context.entered and isinstance(context, EngineParameters)
