"""A resumed adapter run: Adam's moments follow the names of parameters, and other settings of PEFT are refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zo.backends.adapter import backend as adapter_backend
from ds_zo.backends.adapter.backend import AdapterBackend
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.snapshot import Snapshot
from ds_zo.plugin import checkpointing
from tests.helpers.adapter_runs import adapter_json, batches, peft, start, train
from tests.helpers.tiny_models import tiny_model
from tests.helpers.weights import weights
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")
SETTINGS: dict[str, dict[str, Any]] = {
    "lora_alpha": {"lora_alpha": 64},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 32}},
    "lora_dropout": {"lora_dropout": 0.25},
    "peft_type": {},
}
CHANGES = ["order", *SETTINGS, "none", "group"]


@dataclass(frozen=True)
class Case:
    change: str
    dtype: torch.dtype
    num_groups: int
    offload: bool
    older: bool
    """The checkpoint has no names of parameters, as those of earlier versions."""


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    change = CHANGES[seed % len(CHANGES)]
    return Case(
        change=change,
        dtype=rng.choice([torch.float32, torch.bfloat16]),
        num_groups=2 if change == "group" else rng.choice([1, 2]),
        offload=rng.random() < 0.5,
        older=rng.random() < 0.4,
    )


def engine_of(case: Case, rng: random.Random | None = None, **changed: Any) -> Any:
    """`rng`: gives the order of the optimizer's parameters. None: the module's order."""
    base = tiny_model("llama").to(case.dtype)
    torch.manual_seed(0)
    settings: Any = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], **changed})
    if changed.get("peft_type") == "IA3":
        settings = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False).train()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [[p for name, p in named if ("lora_B" in name) == (i > 0)] for i in range(case.num_groups)]
    if case.num_groups == 1:
        groups = [[p for _, p in named]]
    if rng is not None:
        for group in groups:
            rng.shuffle(group)
        if case.change == "group":
            groups[0].append(groups[1].pop())
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    bf16 = {"bf16": {"enabled": True}} if case.dtype is torch.bfloat16 else {}
    return start(model, adapter_json(offload=case.offload, **bf16), optimizer=optimizer)


def moments(engine: Any) -> dict[str, torch.Tensor]:
    states = engine.optimizer.state
    return {t.name: states[t.master]["exp_avg"].clone() for t in engine.backend._trained}


def without_names(snapshot: Any) -> Any:
    def older(self: Any, **options: Any) -> Snapshot:
        found = snapshot(self, **options)
        state = {name: value for name, value in found.state().items() if name != "parameters"}
        return Snapshot(found.weights_files, lambda: state)

    return older


def check(seed: int, folder: Path) -> None:
    case, rng = draw(seed), random.Random(seed + 1000)
    engine = engine_of(case)
    train(engine, batches(3))
    with pytest.MonkeyPatch.context() as patch:
        if case.older:
            patch.setattr(AdapterBackend, "snapshot", without_names(AdapterBackend.snapshot))
        engine.save_checkpoint(str(folder))
    at_save = moments(engine)
    losses = train(engine, batches(2, seed=3))

    changed = dict(SETTINGS.get(case.change, {}))
    if case.change == "peft_type":
        changed = {"peft_type": "IA3"} if case.num_groups == 1 else {"lora_alpha": 8}
    resumed = engine_of(case, rng if case.change in ("order", "group") else None, **changed)
    before = weights(resumed.module)
    warned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "warn", warned.append)
        patch.setattr(adapter_backend, "warn", warned.append)
        if changed and case.change != "lora_dropout":
            name = next(iter(changed))
            with pytest.raises(CheckpointError, match=rf"has the settings of PEFT .*{name}.*, got .*{name}"):
                resumed.load_checkpoint(str(folder))
        elif case.change == "group":
            with pytest.raises(CheckpointError, match=r"has the parameters of the saved one, .*, got"):
                resumed.load_checkpoint(str(folder))
        elif case.older and case.change == "order":
            try:
                resumed.load_checkpoint(str(folder))
                assert any("by their order in the optimizer" in text for text in warned), warned
            except CheckpointError as error:
                assert "of shape" in str(error)
        else:
            resumed.load_checkpoint(str(folder))
            assert any("by their order in the optimizer" in text for text in warned) == case.older, warned
            assert any("were trained with" in text for text in warned) == (case.change == "lora_dropout"), warned
            assert all(torch.equal(value, at_save[name]) for name, value in moments(resumed).items())
            if case.change != "lora_dropout":
                assert train(resumed, batches(2, seed=3)) == losses
                assert all(torch.equal(v, weights(engine.module)[n]) for n, v in weights(resumed.module).items())
            before = weights(resumed.module)
    if not warned:
        assert all(torch.equal(value, before[name]) for name, value in weights(resumed.module).items())
    resumed.destroy()
    engine.destroy()


@pytest.mark.parametrize("seed", seeds(30))
def test_a_resumed_run_has_the_states_of_its_parameters(seed: int, tmp_path: Path) -> None:
    print(draw(seed))
    check(seed, tmp_path)
