"""Loss of a pretrained model whose linear layers are in NF4: by this package, by bitsandbytes, and the gap to bf16.

python -m benchmarks.nf4_loss --model FOLDER --data-root DIR --out ROWS

One row a task and a form of the base: the mean loss of a token of held-out texts (`test.jsonl` of each task). All forms
have the same weights, rounded to bf16, and compute in float32. `nf4` is the backend `adapter` with
`stream.frozen_dtype: nf4` and a new LoRA adapter, which adds zero. `bitsandbytes` has `Linear4bit` in every block, and
`bitsandbytes-double` also its double quantisation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.wire_loss import mean_loss, read_texts
from ds_zo.bench.runner import single_process
from ds_zo.records.environment import environment
from ds_zo.records.rows import append_row
from ds_zo.streaming.blocks import find_blocks

FORMS = ("bf16", "nf4", "bitsandbytes", "bitsandbytes-double")


def in_form(model: nn.Module, form: str) -> Any:
    """The model with its blocks stored as `form`, in evaluation mode."""
    if form == "bf16":
        return model.eval()
    if form == "nf4":
        return _engine(model)
    for block in find_blocks(model).values():
        for name, linear in [(n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear)]:
            owner = block.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], _linear4bit(linear, double=form == "bitsandbytes-double"))
    return model.eval()


def _engine(model: Any) -> Any:
    import deepspeed
    from peft import LoraConfig, get_peft_model

    import ds_zo  # noqa: F401

    adapted = get_peft_model(model, LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM"))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
        "ds_zo": {"backend": "adapter", "stream": {"frozen_dtype": "nf4", "resident_blocks": 0}},
    }
    engine = deepspeed.initialize(model=adapted, model_parameters=list(adapted.parameters()), config=config)[0]
    engine.eval()
    return engine


def _linear4bit(linear: nn.Linear, *, double: bool) -> nn.Module:
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    found = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype,
        quant_type="nf4",
        compress_statistics=double,
    )
    found.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=double
    )
    found.bias = linear.bias
    moved: nn.Module = found.to(linear.weight.device)  # quantises
    return moved


def losses_of(folder: str, texts: dict[str, list[str]], form: str, *, length: int, batch: int) -> dict[str, float]:
    """The mean loss of a token, by task."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = in_form(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float(), form)
    return {task: mean_loss(model, tokenizer, mine, length=length, batch=batch) for task, mine in texts.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a pretrained causal model")
    parser.add_argument("--data-root", type=Path, required=True, help="holds a folder of JSONL files for each task")
    parser.add_argument("--tasks", default="sst2,alpaca")
    parser.add_argument("--forms", default=",".join(FORMS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    parser.add_argument("--limit", type=int, default=64, help="texts of a task")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text to keep")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args(argv)
    os.environ.update(single_process() | os.environ)
    texts = {task: read_texts(args.data_root / task / "test.jsonl", limit=args.limit) for task in args.tasks.split(",")}
    for form in args.forms.split(","):
        for task, loss in losses_of(args.model, texts, form, length=args.length, batch=args.batch).items():
            row: dict[str, Any] = {"case": "nf4_loss", "model": Path(args.model).name, "task": task, "form": form}
            row |= {"loss": loss, "texts": len(texts[task]), "length": args.length}
            if form.startswith("bitsandbytes"):
                row["bitsandbytes"] = importlib.metadata.version("bitsandbytes")
            print(json.dumps(row), flush=True)
            if args.out is not None:
                append_row(args.out, row | environment())


if __name__ == "__main__":
    main()
