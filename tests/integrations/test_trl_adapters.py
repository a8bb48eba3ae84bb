"""TRL's trainers: LoRA over a streamed base, and LOMO, give the logs and weights of the trainer without DeepSpeed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from tests.helpers.support_matrix import uploaded_bytes
from tests.helpers.tiny_models import tiny_model
from tests.integrations.library_runs import assert_moved, assert_same, engine_of, forget, fresh_libraries  # noqa: F401
from tests.integrations.trl_data import COMPARED, JUDGED, PAIRS, PROMPTS, SENTENCES, tokenizer

peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
    "ds_zo": {"backend": "adapter"},
}


def reward_of(completions: list[str], **columns: Any) -> list[float]:
    """The mean of the words' numbers: sampled completions of one prompt differ in it."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] or [0] for text in completions]
    return [sum(found) / len(found) / 60 for found in numbers]


ONLINE = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "num_iterations": 2}
KINDS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "SFT": ("trl", SENTENCES, {"max_length": 16}),
    "DPO": ("trl", PAIRS, {"max_length": 16}),
    "KTO": ("trl", JUDGED, {"max_length": 16}),
    "ORPO": ("trl.experimental.orpo", PAIRS, {"max_length": 16}),
    "Reward": ("trl", COMPARED, {"max_length": 16}),
    "GRPO": ("trl", PROMPTS, ONLINE),
    "RLOO": ("trl", PROMPTS, ONLINE),
}
"""The module of each trainer, its examples and its own settings."""


def run(
    kind: str, folder: Path, json: dict[str, Any] | None, *, lora: bool = True
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What the trainer logged, and the weights after three steps. Without LoRA, SGD trains all weights."""
    forget()
    module, examples, own = KINDS[kind]
    trl = pytest.importorskip(module)
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "optim": "adamw_torch",
        "gradient_checkpointing": False,
        "deepspeed": json,
        "disable_tqdm": True,
        **own,
    }
    arguments: dict[str, Any] = {"model": tiny_model("llama"), "processing_class": tokenizer()}
    if kind == "Reward":
        config = arguments["model"].config
        config.num_labels = 1
        torch.manual_seed(0)
        arguments["model"] = LlamaForSequenceClassification(config)
    if own is ONLINE:
        arguments["reward_funcs"] = reward_of
    if lora:
        task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
        arguments["peft_config"] = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type=task)
    else:
        settings |= {"optim": "sgd", "max_grad_norm": 0.0, "beta": 0.0}
    trainer = getattr(trl, f"{kind}Trainer")(
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=datasets.Dataset.from_list(examples),
        **arguments,
    )
    assert getattr(trainer, "ref_model", None) is None, "the base with adapters off is the reference"
    trainer.train()
    logs = [{name: entry[name] for name in entry if "_time" not in name} for entry in trainer.state.log_history[:-1]]
    if json is None:
        return logs, {name: value.clone() for name, value in trainer.model.state_dict().items()}
    engine = engine_of(trainer)
    assert uploaded_bytes(engine.backend)
    return logs, {name: value.clone() for name, value in engine.module_state_dict().items()}


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`run` as without a launcher and DeepSpeed; else Accelerate wraps the model for several ranks."""
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def found(*arguments: Any, **more: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.delenv("LOCAL_RANK")
            return run(*arguments, None, **more)

    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_base_gives_the_logs_and_weights_of_plain_trl(
    kind: str, tmp_path: Path, plain: Callable[..., Any]
) -> None:
    expected_logs, expected = plain(kind, tmp_path)
    logs, weights = run(kind, tmp_path, JSON)
    assert sum("lora_B" in name and bool(value.any()) for name, value in expected.items()) == 6
    assert_same(weights, expected)
    assert logs == expected_logs and all(math.isfinite(entry["loss"]) and entry["grad_norm"] for entry in logs)


@pytest.mark.slow
def test_streamed_lomo_gives_the_logs_and_weights_of_grpo_by_sgd(tmp_path: Path, plain: Callable[..., Any]) -> None:
    expected_logs, expected = plain("GRPO", tmp_path, lora=False)
    json = {**JSON, "ds_zo": {"stream": {"resident_blocks": 0}}, "gradient_clipping": 0.0}
    json["optimizer"] = {"type": "LOMO", "params": {"lr": 1e-2}}
    logs, weights = run("GRPO", tmp_path, json, lora=False)
    assert_moved(weights, tiny_model("llama").state_dict())
    assert_same(weights, expected)
    ours, theirs = ({(i, name): log[i][name] for i in range(3) for name in log[i]} for log in (logs, expected_logs))
    different = {name for (i, name), value in theirs.items() if ours.get((i, name)) != value}
    assert different == {"grad_norm", "learning_rate"}, (
        "LOMO has no norm without clipping; the engine's rate is the next"
    )
