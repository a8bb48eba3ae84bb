"""The command line of a training job."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch

from ds_zo.tasks import TASKS
from ds_zo.tasks.order import MAX_SEED
from ds_zo.tasks.sampling import NUM_DEV, NUM_TEST, NUM_TRAIN

DESCRIPTION = """Fine-tune a language model, or one with a classification head, through DeepSpeed.

Without options, ZO trains the embedded model on the embedded task, offline, on CPU or GPU:

    ds-zo train

A real job names its method, model and data:

    ds-zo train --method lomo --model ./folder --data notes.txt
    ds-zo train --method adapter --model ./folder --task chat --data conversations.jsonl
    ds-zo train --method zo --model facebook/opt-1.3b --task sst2 --hub --steps 5000
    ds-zo train --deepspeed my.json --model ./folder --task alpaca --data rows.jsonl

ds-zo train is one process on one device. For several GPUs, DeepSpeed's launcher takes the same options:

    deepspeed --module ds_zo.training --method lomo --model ./folder --data notes.txt

With --eval-every, the state that is best on dev is tested and saved. The learning rates of the methods suit models of
billions of parameters, in bf16 on a GPU. The embedded model is trained by rates of its own and in float32; one printed
line says so.
"""
EMBEDDED_TASK = "code_or_text"
EMBEDDED_STEPS = 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONFIGS = Path(__file__).parent / "configs"
METHODS = {
    "zo": "zo.json",
    "lomo": "lomo.json",
    "adalomo": "adalomo.json",
    "lsp": "lsp.json",
    "adapter": "adapter.json",
    "adamw": "zero_offload.json",
    "adamw-zero3": "zero3.json",
}
"""The JSON in `CONFIGS` of each --method."""
_LORA_RANK = 16


def parse_args(argv: list[str] | None = None, *, description: str = DESCRIPTION) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return complete(parser.parse_args(argv), parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_what(parser.add_argument_group("what to train"))
    _add_how(parser.add_argument_group("how to train (schedule and all other settings are in the JSON)"))
    _add_when(parser.add_argument_group("evaluating, saving, resuming"))
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it


def _add_what(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--model",
        default="embedded",
        metavar="NAME_OR_PATH",
        help="Hub name or local folder (default: the embedded model)",
    )
    what.add_argument(
        "--task", metavar="NAME", help=f"one of {', '.join(TASKS)} (default: {EMBEDDED_TASK}; with --data, text)"
    )
    what.add_argument("--task-file", type=Path, metavar="FILE", help="a Python file that registers a task of your own")
    what.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder with train.jsonl, dev.jsonl and test.jsonl, or a suite's own train.jsonl and validation.jsonl",
    )
    what.add_argument("--data", type=Path, metavar="FILE", help="one .jsonl or text file, cut into train, dev and test")
    what.add_argument(
        "--hub", action="store_true", help="download the task's public data set (needs the package datasets)"
    )
    for split, number in (("train", NUM_TRAIN), ("dev", NUM_DEV), ("test", NUM_TEST)):
        what.add_argument(
            f"--num-{split}",
            type=int,
            metavar="N",
            help=f"rows drawn for {split} (default: {number} of a suite's own splits, all of splits that are ready)",
        )
    what.add_argument("--data-seed", type=int, default=0, metavar="N", help="seed of that draw (default: %(default)s)")
    what.add_argument(
        "--head",
        choices=["lm", "classifier"],
        default="lm",
        help="lm: words after a prompt; classifier: a new head on the model, and regression for STS-B",
    )
    what.add_argument(
        "--padding-side",
        choices=["right", "left"],
        default="right",
        help="side on which batches are padded (default: %(default)s)",
    )
    what.add_argument(
        "--pad-multiple",
        type=int,
        default=1,
        metavar="N",
        help="pad batches to a multiple of this many tokens: fewer shapes, so that ZO reuses its CUDA graphs",
    )
    what.add_argument("--group-by-length", action="store_true", help="batches of texts of similar length: less padding")
    what.add_argument(
        "--max-length",
        type=int,
        default=512,
        help="tokens a sequence; longer prompts lose their beginning (default: %(default)s)",
    )


def _add_how(how: argparse._ArgumentGroup) -> None:
    how.add_argument("--method", choices=METHODS, help="the shipped JSON of this method (default: zo)")
    how.add_argument(
        "--deepspeed", type=Path, metavar="FILE", help="a DeepSpeed JSON of your own; it overrides --method"
    )
    how.add_argument(
        "--objective",
        metavar="NAME",
        help="a score that ZO raises, in place of lowering the loss: accuracy or f1 of the task's labels, or "
        "FILE.py:function, a function of (outputs, batch) that returns one number, or one for each sequence",
    )
    length = how.add_mutually_exclusive_group()
    length.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps (default: {EMBEDDED_STEPS} for the embedded task, else one epoch; 0: zero-shot only)",
    )
    length.add_argument("--epochs", type=float, help="passes over the training data")
    how.add_argument(
        "--max-seconds",
        type=float,
        metavar="S",
        help="stop training after S seconds, evaluations and saves not counted",
    )
    how.add_argument(
        "--lr",
        type=float,
        help="instead of the JSON's optimizer.params.lr and its scheduler's warmup_max_lr (default: the JSON's; that "
        "of a shipped JSON is replaced for the embedded model, and a printed line says so)",
    )
    how.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="sequences of a GPU in a micro-batch, instead of the JSON's train_micro_batch_size_per_gpu",
    )
    how.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="level of DeepSpeed's logger; debug shows all settings",
    )
    how.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="auto: the dtype that the JSON enables; on a CPU float32, because 16 bit is emulated there; also float32 "
        "if a shipped JSON trains the embedded model",
    )
    how.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="keep only the inputs of layers, and compute layers again in the backward pass (ZO has none; LOMO and LSP "
        "with offload_param do so without this flag)",
    )
    how.add_argument("--tf32", action="store_true", help="float32 models multiply matrices in TF32 on a GPU")
    how.add_argument("--seed", type=int, default=0, help="seed of the data order and of torch (default: %(default)s)")
    how.add_argument(
        "--lora-rank",
        type=int,
        metavar="R",
        help=f"train LoRA adapters of this rank (needs peft; default with --method adapter: {_LORA_RANK})",
    )
    how.add_argument(
        "--lora-alpha", type=float, default=16.0, metavar="A", help="scale of the adapters (default: %(default)s)"
    )
    how.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="modules that get an adapter, or all-linear, which may include experts and routers (default: "
        "q_proj,v_proj; with --method adapter all-linear)",
    )
    how.add_argument("--train-base", action="store_true", help="with LoRA: train the base weights beside the adapters")


def _add_when(when: argparse._ArgumentGroup) -> None:
    when.add_argument("--num-eval", type=int, metavar="N", help="evaluate on the first N examples (default: all)")
    when.add_argument("--eval-batch-size", type=int, default=16, help="sequences a forward pass (default: %(default)s)")
    when.add_argument(
        "--eval-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="score the dev split every so many steps and keep the best state (default: never)",
    )
    when.add_argument("--skip-zero-shot", action="store_true", help="do not score the model before training")
    when.add_argument("--no-save", action="store_true", help="do not write the trained model")
    when.add_argument("--results", type=Path, metavar="FILE", help="add the run's row to this JSONL file")
    when.add_argument(
        "--save-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="write a checkpoint every so many steps (default: never)",
    )
    when.add_argument(
        "--resume", metavar="DIR|latest", help="continue from the newest checkpoint in DIR, or in this run's own folder"
    )
    when.add_argument("--output-dir", type=Path, metavar="DIR", help="default: runs/<JSON's name>-<task>")


def complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Checks the values and fills in the defaults that depend on other options. `parser` reports a mistake."""
    if args.task is None:
        args.task = EMBEDDED_TASK if args.data is None and args.data_dir is None else "text"
    for name in ("steps", "eval_every", "save_every", "lr"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be finite and not negative, got {value}")
    if abs(args.seed) > MAX_SEED:
        parser.error(f"--seed must be from -{MAX_SEED} to {MAX_SEED}, got {args.seed}")
    if args.train_base and args.lora_rank is None:
        parser.error("--train-base says what LoRA does with the base: it needs --lora-rank")
    if args.method == "adapter" and args.deepspeed is None:
        args.lora_rank = args.lora_rank or _LORA_RANK
        args.lora_targets = args.lora_targets or "all-linear"
    for name in ("lora_alpha", "lora_targets"):
        if args.lora_rank is None and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is a setting of LoRA adapters: it needs --lora-rank")
    counts = ("max_length", "pad_multiple", "epochs", "num_eval", "eval_batch_size", "max_seconds", "lora_rank")
    for name in (*counts, "lora_alpha", "num_train", "num_dev", "num_test", "batch_size"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive and finite, got {value}")
    args.lora_targets = args.lora_targets or "q_proj,v_proj"
    if args.deepspeed is None:
        args.deepspeed = CONFIGS / METHODS[args.method or "zo"]
    elif args.method is not None and os.environ.get("RANK", "0") == "0":
        print(f"--deepspeed {args.deepspeed} overrides --method {args.method}", flush=True)
    if args.output_dir is None:
        args.output_dir = Path("runs") / f"{args.deepspeed.stem}-{args.task}"
    return args
