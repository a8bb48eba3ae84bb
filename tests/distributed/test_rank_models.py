"""Models that differ between ranks: every rank names the first difference and one of the ranks that have it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("peft")

SCRIPT = """
import json, random, sys
from pathlib import Path
import deepspeed, torch
import ds_zo.config
from tests.helpers.adapter_runs import adapter_json, peft
from ds_zo.checkpoint.reader import open_folder
from tests.helpers.tiny_models import tiny_model
from transformers import AutoModelForCausalLM

folder = Path(sys.argv[1])
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank = torch.distributed.get_rank()
for seed in range(2) if rank == 0 else ():
    tiny_model("llama", seed=seed, tie_word_embeddings=False).save_pretrained(folder / f"model{seed}")
torch.distributed.barrier()
TRAINED = {"lomo": {"type": "LOMO", "params": {"lr": 1e-2}}, "zo": {"type": "ZO", "params": {"lr": 1e-5}},
    "lsp": {"type": "LSP", "params": {"lr": 1e-2, "subspace_dim": 2, "nonzeros_per_row": 1}}}
CHANGES = {
    "rank of LoRA": "parameter ", "name": "parameter ", "frozen": "parameter ", "alpha": "setting default.lora_alpha",
    "dropout": "setting default.lora_dropout", "order": "param_groups[", "base": "value of ", "none": None,
}

def model_of(backend, change, by_files):
    differs = rank == 1
    source = folder / ("model1" if differs and change == "base" else "model0")
    if by_files:
        base = ds_zo.load_pretrained(AutoModelForCausalLM, str(source))
    else:
        base = AutoModelForCausalLM.from_pretrained(source)
    if backend in ("lomo", "lsp"):
        return base
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(
        r=4 if differs and change == "rank of LoRA" else 2,
        target_modules=["q_proj", "k_proj" if differs and change == "name" else "o_proj"],
        lora_alpha=64 if differs and change == "alpha" else 4,
        lora_dropout=0.5 if differs and change == "dropout" else 0.0,
    ))

def case(seed):
    rng = random.Random(seed)
    change = list(CHANGES)[seed % len(CHANGES)]
    backend = "adapter" if change == "order" else rng.choice(["adapter", "zo"])
    if change in ("base", "none"):
        backend = ["adapter", "lomo", "zo"][seed // len(CHANGES) % 3]
    stage = 3 if change == "none" else rng.choice([0, 3])
    form = rng.choice(["auto", "nf4"]) if backend == "adapter" and change != "none" else "auto"
    form = "nf4" if (change, backend) == ("none", "adapter") else form
    by_files = change == "base" or rng.random() < 0.5
    return dict(change=change, backend=backend, stage=stage, form=form, by_files=by_files)

def run(change, backend, stage, form, by_files):
    model = model_of(backend, change, by_files).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    if rank == 1 and change == "frozen":
        trained.pop().requires_grad_(False)
    if rank == 1 and change == "order":
        trained[3], trained[5] = trained[5], trained[3]
    config = adapter_json(frozen_dtype=form)
    config["zero_optimization"]["stage"] = stage
    given = {"optimizer": torch.optim.AdamW(trained, lr=1e-2)}
    if backend != "adapter":
        config |= {"optimizer": TRAINED[backend], "ds_zo": {}}
        given = {"model_parameters": trained}
    try:
        engine = deepspeed.initialize(model=model, config=config, **given)[0]
    except ds_zo.config.ConfigError as error:
        return str(error)
    if backend == "adapter":
        engine.save_checkpoint(str(folder / "saved"), tag="a")
        sums = open_folder(folder / "saved" / "a").backend_state["base"]["sums"]
        frozen = {name for name, p in engine.module.named_parameters() if not p.requires_grad}
        assert sums.keys() == frozen and all(sums.values()), sums
    engine.destroy()
    return "made"

for seed in range(int(sys.argv[2])):
    print("OUT" + json.dumps([CHANGES[case(seed)["change"]], case(seed)["stage"], run(**case(seed)), str(case(seed))]))
"""


def test_ranks_with_other_models_are_refused(run_ranks: Callable[..., list[str]], tmp_path: Path) -> None:
    outs = run_ranks(SCRIPT, str(tmp_path), "24")
    found, other = ([json.loads(line[3:]) for line in out.splitlines() if line.startswith("OUT")] for out in outs)
    assert found == other and len(found) == 24
    for expected, stage, text, case in found:
        if expected is None:
            assert text == "made", (case, text)
            continue
        starts = [expected, "folder of the model on "] if expected == "value of " and stage == 3 else [expected]
        assert text.startswith(tuple(f"all ranks need the same {start}" for start in starts)), (case, text)
        assert " on rank 0 and " in text and " on rank 1: start every rank with" in text, (case, text)
