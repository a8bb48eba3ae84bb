"""What storing blocks in fewer bits does to a pretrained model's loss, before any training.

python -m benchmarks.wire_loss --model FOLDER --text FILE.jsonl --out rows.jsonl

One row a wire format: the mean loss of a token of the texts, by the streamed ZO engine in evaluation. FILE has one JSON
object a line, whose string fields, joined, are a text.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ds_zo.bench.runner import single_process
from ds_zo.records.environment import environment
from ds_zo.records.rows import append_row

WIRES = ("fp32", "bf16", "fp16", "bf12", "fp8")


def read_texts(path: Path, *, limit: int) -> list[str]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    return ["\n".join(value for value in row.values() if isinstance(value, str) and value) for row in rows]


@torch.no_grad()
def mean_loss(model: Any, tokenizer: Any, texts: Sequence[str], *, length: int, batch: int) -> float:
    """The mean loss of a token, of a model or an engine."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    total, num_tokens = 0.0, 0
    for start in range(0, len(texts), batch):
        chosen = list(texts[start : start + batch])
        inputs = tokenizer(chosen, return_tensors="pt", padding=True, truncation=True, max_length=length)
        inputs = inputs.to(model.device)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        here = int((labels[:, 1:] != -100).sum())
        total += float(model(**inputs, labels=labels).loss) * here
        num_tokens += here
    return total / num_tokens


def loss_of(model: str, texts: Sequence[str], *, wire: str, length: int, batch: int) -> float:
    """Of a token, with the blocks stored as `wire` and nothing kept of what that drops."""
    import deepspeed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ds_zo  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "ZO", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
        "ds_zo": {"stream": {"wire_dtype": wire, "master": "wire", "resident_blocks": 0}},
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    engine.eval()
    loss = mean_loss(engine, tokenizer, texts, length=length, batch=batch)
    engine.destroy()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a pretrained causal model: folder or Hub name")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    parser.add_argument("--limit", type=int, default=64, help="texts to read")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text to keep")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    os.environ.update(single_process() | os.environ)
    texts = read_texts(args.text, limit=args.limit)
    clean = None
    for wire in WIRES:
        loss = loss_of(args.model, texts, wire=wire, length=args.length, batch=args.batch)
        clean = loss if clean is None else clean
        row = {
            "case": "wire_loss",
            "model": Path(args.model).name,
            "texts": len(texts),
            "wire": wire,
            "loss": loss,
            "change": loss / clean - 1,
        }
        print(json.dumps(row), flush=True)
        if args.out is not None:
            append_row(args.out, row | environment())


if __name__ == "__main__":
    main()
