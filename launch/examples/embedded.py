"""What the examples share: the embedded model, its task as rows, and a world of one where no launcher made one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone works without being installed

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_zo import EMBEDDED_MODEL
from ds_zo.tasks import DataSource, Encoded, Evaluator, Score, collate, make_task, pad_token_id

TASK = "code_or_text"
MAX_LENGTH = 256


def world_of_one() -> None:
    """`python example.py` without a launcher: Accelerate and Trainer look for these before they turn to DeepSpeed."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load() -> tuple[Any, Any]:
    """(model, tokenizer), from a folder of this package: nothing is downloaded."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype="float32")
    return model, AutoTokenizer.from_pretrained(EMBEDDED_MODEL)


def training_rows(tokenizer: Any) -> list[Encoded]:
    return make_task(TASK, DataSource()).sequences("train", tokenizer, max_length=MAX_LENGTH)


def collator(tokenizer: Any) -> Callable[[Sequence[Encoded]], dict[str, torch.Tensor]]:
    return lambda rows: collate(rows, pad_token_id=pad_token_id(tokenizer))


def accuracy(model: Any, tokenizer: Any, *, num_examples: int = 100) -> Score:
    """On the first test examples: which of two words the model finds likelier."""
    was_training, device = model.training, getattr(model, "device", None) or next(model.parameters()).device
    model.eval()
    evaluator = Evaluator(model, device=device, pad_token_id=pad_token_id(tokenizer))
    score = make_task(TASK, DataSource()).evaluate(
        evaluator, "test", tokenizer, max_length=MAX_LENGTH, num_examples=num_examples
    )
    model.train(was_training)
    return score
