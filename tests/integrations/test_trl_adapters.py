"""TRL's SFT and DPO with LoRA: a streamed base gives the weights of the same trainer without DeepSpeed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from library_runs import engine_of, forget, fresh_libraries  # noqa: F401
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
    "ds_zo": {"backend": "adapter"},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **special)


def run(kind: str, folder: Path, json: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The weights after three steps."""
    forget()
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_length": 16,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
        "deepspeed": json,
        "disable_tqdm": True,
    }
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    common: dict[str, Any] = {"model": tiny_model("llama"), "processing_class": tokenizer(), "peft_config": lora}
    if kind == "sft":
        rows = [{"text": f"w{i} w{i + 1} w{i + 2} w{i + 3}"} for i in range(8)]
        data = datasets.Dataset.from_list(rows)
        trainer = trl.SFTTrainer(args=trl.SFTConfig(**settings), train_dataset=data, **common)
    else:
        rows = [{"prompt": f"w{i} w{i + 1}", "chosen": f" w{i + 2}", "rejected": f" w{i + 9}"} for i in range(8)]
        data = datasets.Dataset.from_list(rows)
        trainer = trl.DPOTrainer(args=trl.DPOConfig(**settings), train_dataset=data, **common)
        assert getattr(trainer, "ref_model", None) is None, "the base with adapters off is the reference"
    trainer.train()
    if json is None:
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}
    engine = engine_of(trainer)
    assert engine.resolved.backend == "adapter" and engine.backend._base.block_store.placement.blocks
    return {name: value.clone() for name, value in engine.module_state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_streamed_base_gives_the_weights_of_plain_trl(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with monkeypatch.context() as patch:
        patch.delenv("LOCAL_RANK")  # as without a launcher; else Accelerate wraps the model for several ranks
        expected = run(kind, tmp_path, None)
    ours = run(kind, tmp_path, JSON)
    trained = [name for name in expected if "lora_B" in name and expected[name].any()]
    assert len(trained) == 6
    assert all(torch.equal(value, expected[name]) for name, value in ours.items())
