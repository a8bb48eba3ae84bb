#!/usr/bin/env python
"""Fine-tune a language model, or one with a classification head, through DeepSpeed, by the optimizer in its JSON.

With nothing but a JSON, the embedded model learns the embedded task, offline, on CPU or GPU:

    deepspeed launch/train.py --deepspeed ds_configs/zo.json

A real job names its model and data:

    deepspeed launch/train.py --deepspeed ds_configs/zo.json --steps 5000 \\
        --model facebook/opt-1.3b --task sst2 --data-dir DIR
    deepspeed launch/train.py --deepspeed ds_configs/lomo.json --model ./folder --task text --data notes.txt

With `--eval-every`, the state that is best on dev is tested and saved. `--max-seconds` ends training after that many
seconds, without evaluation and saving. `--results FILE` adds the run's row to a JSONL file.

The learning rates in ds_configs suit models of billions of parameters, in bf16 on a GPU. For the embedded model, which
has a million, the script replaces them by the rates of `EMBEDDED_PARAMS` and trains in float32. It prints one line
about that. It keeps a rate given by --lr, a dtype given by --dtype, and an optimizer section that is not a shipped one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import runpy
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_log_level_from_string
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ds_zo  # makes DeepSpeed know ZO, LOMO, AdaLOMO and LSP
from ds_zo import Preemption
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.adapters import FILE as PEFT_FILE
from ds_zo.checkpoint.adapters import Adapters, description
from ds_zo.checkpoint.files import replace_text
from ds_zo.config import ConfigError, backend_of
from ds_zo.records.environment import commit, host_peak_gb, versions
from ds_zo.records.rows import append_row
from ds_zo.records.run_summary import Best, Point, Summary
from ds_zo.reference.galore import TYPE as GALORE
from ds_zo.reference.galore import galore_engine
from ds_zo.reference.mezo_engine import MeZOEngine
from ds_zo.tasks import (
    TASKS,
    DataSource,
    Draw,
    Evaluator,
    GroupedOrder,
    HeadTask,
    Score,
    SeededOrder,
    TaskError,
    make_task,
)
from ds_zo.tasks import pad_token_id as padding_token
from ds_zo.tasks.data import Split
from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED_FOLDER
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.tasks.encoding import num_label_positions, position_ids
from ds_zo.tasks.hub import check_reachable
from ds_zo.tasks.sampling import NUM_DEV, NUM_TEST, NUM_TRAIN
from ds_zo.tasks.scoring import accepts_argument, needs_position_ids, num_reserved_positions

EMBEDDED_TASK = "code_or_text"
EMBEDDED_STEPS = 200
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_EVERY = 10
"""Steps between two readings of the loss: each reading waits for the device."""
PROGRESS = "progress.json"
KEPT = ("task", "seed", "data_seed", "num_train", "group_by_length")
"""Arguments that decide which examples come in which order. A resumed run must have the checkpoint's values."""
REFERENCE = "mezo"
"""The optimizer.type of in-memory MeZO, which ZO is compared with. DeepSpeed does not know it."""
_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
EMBEDDED_PARAMS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}}, {"lr": 5e-4}),
    ({"type": "LOMO", "params": {"lr": 0.03, "weight_decay": 0.0}}, {"lr": 0.01}),
    ({"type": "LSP", "params": {"lr": 2e-5, **_ADAM, "subspace_dim": 512}}, {"lr": 3e-3, "subspace_dim": 64}),
    ({"type": "AdamW", "params": {"lr": 2e-5, **_ADAM}}, {"lr": 5e-4}),
)
"""Pairs of a shipped `optimizer` section, for a large model, and the parameters that suit the embedded model instead.
They apply to a JSON whose section is equal to a shipped one: an edited section is the user's choice and stays."""


class UserError(ValueError):
    """A mistake of the user. `main` shows it as one line, without a traceback."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    what = parser.add_argument_group("what to train")
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
    what.add_argument("--hub", action="store_true", help="the task's public copy, through the package datasets")
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
        "--padding-side", choices=["right", "left"], default="right", help="of batches (default: %(default)s)"
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

    how = parser.add_argument_group("how to train (batch size, optimizer and schedule are in the JSON)")
    default_json = Path(__file__).resolve().parent.parent / "ds_configs" / "zo.json"
    how.add_argument(
        "--deepspeed",
        type=Path,
        default=default_json,
        metavar="FILE",
        help="DeepSpeed JSON (default: ds_configs/zo.json)",
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
        "of a shipped JSON is replaced for the embedded model, and the script says so)",
    )
    how.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="of DeepSpeed's logger; debug: all settings"
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
    how.add_argument("--seed", type=int, default=0, help="of the data order and of torch (default: %(default)s)")
    how.add_argument("--lora-rank", type=int, metavar="R", help="train LoRA adapters of this rank (needs peft)")
    how.add_argument("--lora-alpha", type=float, default=16.0, metavar="A", help="their scale (default: %(default)s)")
    how.add_argument(
        "--lora-targets",
        default="q_proj,v_proj",
        metavar="NAMES",
        help="modules that get one, or all-linear (default: %(default)s)",
    )
    how.add_argument("--train-base", action="store_true", help="with LoRA: train the base weights beside the adapters")

    when = parser.add_argument_group("evaluating, saving, resuming")
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
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)

    args = parser.parse_args(argv)
    if args.task is None:
        args.task = EMBEDDED_TASK if args.data is None and args.data_dir is None else "text"
    if args.steps is not None and args.steps < 0:
        parser.error(f"--steps must not be negative, got {args.steps}")
    if args.train_base and args.lora_rank is None:
        parser.error("--train-base says what LoRA does with the base: it needs --lora-rank")
    counts = ("max_length", "pad_multiple", "epochs", "num_eval", "eval_batch_size", "max_seconds", "lora_rank")
    for name in (*counts, "num_train", "num_dev", "num_test"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if args.output_dir is None:
        args.output_dir = Path("runs") / f"{args.deepspeed.stem}-{args.task}"
    return args


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the JSON. Writes the command line's overrides into it, and what the embedded model or a CPU needs."""
    if not args.deepspeed.is_file():
        raise UserError(f"looked for a DeepSpeed JSON at {args.deepspeed}: not found (--deepspeed)")
    try:
        config = json.loads(args.deepspeed.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{args.deepspeed} is not JSON: {error} (--deepspeed)") from None
    if not isinstance(config, dict):
        raise UserError(f"{args.deepspeed} must hold a JSON object, got a {type(config).__name__} (--deepspeed)")
    replaced, dtype = adapted(args, config)
    if replaced:
        config["optimizer"]["params"] |= replaced
    if args.lr is not None:
        optimizer = config.get("optimizer")
        if not isinstance(optimizer, dict):
            raise UserError(f"--lr overrides optimizer.params.lr, but {args.deepspeed} has no optimizer section")
        optimizer["params"] = {**(optimizer.get("params") or {}), "lr": args.lr}
        schedule = (config.get("scheduler") or {}).get("params") or {}
        if "warmup_max_lr" in schedule:  # such a schedule rises to this rate, not to the optimizer's
            schedule["warmup_max_lr"] = args.lr
    if dtype != "auto":
        for name in ("bf16", "fp16"):
            if name in config or name == dtype:
                config[name] = {**(config.get(name) or {}), "enabled": name == dtype}
    return config


def adapted(args: argparse.Namespace, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the optimizer parameters that replace the JSON's, and the dtype: "auto" is that of the JSON.

    The first rank prints one line if either differs from the JSON. What the command line names is never replaced.
    """
    optimizer = config.get("optimizer") or {}
    is_embedded = Path(folder_of(args.model)).resolve() == EMBEDDED_FOLDER.resolve()
    suited = next((params for shipped, params in EMBEDDED_PARAMS if is_embedded and shipped == optimizer), {})
    replaced = suited if args.lr is None else {}
    changes = [f"{name} {value:g} instead of {optimizer['params'][name]:g}" for name, value in replaced.items()]
    keep = [f"--lr {optimizer['params']['lr']:g}"] if replaced else []
    written, dtype = model_dtype(config), args.dtype
    if dtype == "auto" and written != "fp32" and (suited or get_accelerator().device_name() == "cpu"):
        dtype = "fp32"
        changes.append(f"float32 instead of {written}")
        keep.append(f"--dtype {written}")
    if changes and os.environ.get("RANK", "0") == "0":
        reason = "the embedded model" if suited else "no GPU"
        print(f"{reason}: {', '.join(changes)} (to keep the JSON's: {' '.join(keep)})", flush=True)
    return replaced, dtype


def model_dtype(config: dict[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled") is True), "fp32")


def run_task_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"looked for a Python file at {path}: not found (--task-file)")
    runpy.run_path(str(path))


def data_source(args: argparse.Namespace) -> DataSource:
    asked = {"num_train": args.num_train, "num_dev": args.num_dev, "num_test": args.num_test}
    given = {name: number for name, number in asked.items() if number is not None}
    draw = Draw(seed=args.data_seed, **given) if given or args.data_seed else None
    return DataSource(folder=args.data_dir, file=args.data, from_hub=args.hub, draw=draw)


def load_model(name: str, *, dtype: torch.dtype, lazily: bool, num_labels: int | None = None) -> tuple[Any, Any]:
    """Loads (model, tokenizer) of a Hub name, a folder, or the embedded model.

    `lazily`: the engine reads the weights itself, block by block. The host then never holds two copies of a model that
    is larger than the GPU. `num_labels`: outputs of a new classification head; None: the language model's own head.
    """
    path = folder_of(name)
    looks_local = Path(path).is_absolute() or path.startswith((".", "~"))
    if looks_local and not Path(path).is_dir():
        raise UserError(f"looked for a model folder at {path}: not found (--model)")
    try:
        check_reachable(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        if num_labels is not None:
            model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=num_labels)
            model.config.pad_token_id = padding_token(tokenizer)  # a decoder's head reads the last real token
        elif lazily:
            model = ds_zo.load_pretrained(AutoModelForCausalLM, path, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        where = f"the folder {path}" if Path(path).is_dir() else f"a folder named {path}, then a Hub model of that name"
        first_line = str(error).strip().splitlines()[0]
        lacks_tokenizer = Path(path).is_dir() and not any(Path(path).glob("*token*"))
        hint = "; it has no tokenizer, which `ds-zo export --tokenizer NAME` adds" if lacks_tokenizer else ""
        text = f"could not load a language model; looked for {where}: {first_line}{hint} (--model)"
        raise UserError(text) from error
    return model, tokenizer


def add_lora(model: Any, args: argparse.Namespace) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("--lora-rank needs the package peft: pip install peft") from None
    targets = args.lora_targets if args.lora_targets == "all-linear" else args.lora_targets.split(",")
    kind = "CAUSAL_LM" if args.head == "lm" else "SEQ_CLS"
    lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets, task_type=kind)
    try:
        model = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"{str(error).splitlines()[0]} (--lora-targets)") from error
    if args.train_base:
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point())
    return model


def base_weights(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of the model that a PEFT model wraps, by their names in the wrapped model."""
    adapters = Adapters.read(description(model)[PEFT_FILE].decode())
    assert adapters is not None
    placed = ((adapters.place(name), tensor) for name, tensor in state.items())
    return {name: tensor for (is_adapter, name), tensor in placed if not is_adapter}


def make_engine(model: Any, config: dict[str, Any]) -> Any:
    kind = str((config.get("optimizer") or {}).get("type", "")).lower()
    if kind == GALORE:
        return galore_engine(model, config)
    if kind == REFERENCE:
        deepspeed.init_distributed()
        return MeZOEngine(model, config, device=torch.device(get_accelerator().current_device_name()))
    trainable = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def ensure_distributed_environment() -> None:
    """Makes `python launch/train.py` a world of one process, on a free port. A launcher has set these variables."""
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def find_checkpoints(args: argparse.Namespace) -> Path | None:
    """Finds the folder to resume from, before anything is loaded; None without --resume."""
    if args.resume is None:
        return None
    folder: Path = args.output_dir / "checkpoints" if args.resume == "latest" else Path(args.resume)
    if not (folder / "latest").is_file():
        raise UserError(f"looked for a checkpoint in {folder} (its file `latest`): not found (--resume)")
    return folder


class Trainer:
    """Trains one engine on one task, and saves in one folder."""

    def __init__(self, args: argparse.Namespace, config: dict[str, Any]) -> None:
        self.args = args
        self.config = config
        self.dtype = model_dtype(config)
        if args.task_file is not None:
            run_task_file(args.task_file)
        self.task = make_task(args.task, data_source(args), head=args.head)
        self.task.check()
        model, self.tokenizer = load_model(
            args.model,
            dtype=DTYPES[self.dtype],
            lazily=backend_of(config) is not None and args.lora_rank is None,
            num_labels=self.task.num_labels if isinstance(self.task, HeadTask) else None,
        )
        if isinstance(self.task, HeadTask) and args.padding_side == "left" and self.tokenizer.cls_token_id is not None:
            raise UserError(f"the head of {args.model} reads the first token, not padding: right (--padding-side)")
        self.pad_token_id = padding_token(self.tokenizer)
        most = getattr(model.config, "max_position_embeddings", None)
        self.max_length = min(args.max_length, most - num_reserved_positions(model)) if most else args.max_length
        if args.lora_rank is not None:
            model = add_lora(model, args)
        if args.gradient_checkpointing:
            # Only the non-reentrant kind calls LOMO's hooks on each gradient, and works with a frozen embedding.
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.sequences = self.task.sequences("train", self.tokenizer, max_length=self.max_length)
        self.engine = make_engine(model, config)
        self.engine.train()  # `from_pretrained` leaves dropout off, and a run may begin without an evaluation
        self.order = self.make_order()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        alone = self.world_size == 1 and not isinstance(self.task, HeadTask)
        self.keeps_answers = alone and accepts_argument(self.engine, "logits_to_keep")
        """Whether the head computes logits only at the positions of labels. Several ranks may share one batch and must
        agree on its shape, so that they compute all logits."""
        self.checkpoints = args.output_dir / "checkpoints"
        self.model_folder: Path | None = None
        self.step = 0
        self.num_seen = 0
        """Examples that all ranks have consumed: the position in the data order."""
        self.num_tokens = 0
        self.train_s = 0.0
        self.curve: list[Point] = []
        self.best: Best | None = None

    def make_order(self) -> SeededOrder:
        if not self.args.group_by_length:
            return SeededOrder(len(self.sequences), seed=self.args.seed)
        lengths = [len(sequence.input_ids) for sequence in self.sequences]
        size = self.engine.train_micro_batch_size_per_gpu()
        try:
            return GroupedOrder(lengths, batch_size=size, seed=self.args.seed)
        except ValueError as error:
            raise UserError(f"{error} (--group-by-length)") from None

    @property
    def samples_per_step(self) -> int:
        return int(self.engine.train_batch_size())

    def num_steps(self) -> int:
        if self.args.steps is not None:
            return int(self.args.steps)
        if self.args.epochs is None and self.args.task == EMBEDDED_TASK:
            return EMBEDDED_STEPS
        epochs = 1.0 if self.args.epochs is None else self.args.epochs
        return max(1, round(epochs * len(self.sequences) / self.samples_per_step))

    def evaluate(self, split: Split) -> Score:
        evaluator = Evaluator(
            self.engine,
            device=self.engine.device,
            pad_token_id=self.pad_token_id,
            batch_size=self.args.eval_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            padding_side=self.args.padding_side,
        )
        self.engine.eval()
        score = self.task.evaluate(
            evaluator, split, self.tokenizer, max_length=self.max_length, num_examples=self.args.num_eval
        )
        self.engine.train()
        if self.world_size == 1:  # a process group of one rank would take seconds to set up
            return score
        sums = torch.tensor(score.sums, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(sums)
        return score.with_sums(sums.tolist())

    def train_step(self) -> torch.Tensor:
        """Makes one optimizer step. Returns the mean loss of its micro-batches, on the device."""
        size = self.engine.train_micro_batch_size_per_gpu()
        losses = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            indices = self.order.batch(self.num_seen + self.rank * size, size)
            batch = self.task.collate(
                [self.sequences[i] for i in indices],
                pad_token_id=self.pad_token_id,
                side=self.args.padding_side,
                multiple=self.args.pad_multiple,
            )
            self.num_seen += size * self.world_size
            self.num_tokens += int(batch["attention_mask"].sum()) * self.world_size
            options: dict[str, Any] = {} if isinstance(self.task, HeadTask) else {"use_cache": False}
            if self.keeps_answers:
                options["logits_to_keep"] = num_label_positions(batch["labels"])
                batch["labels"] = batch["labels"][:, -options["logits_to_keep"] :]
            inputs = {name: tensor.to(self.engine.device) for name, tensor in batch.items()}
            if self.args.padding_side == "left" and needs_position_ids(self.engine):
                inputs["position_ids"] = position_ids(inputs["attention_mask"])
            loss = self.engine(**inputs, **options).loss
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        self.step += 1
        return torch.stack(losses).mean()

    def train(self, preemption: Preemption) -> bool:
        """Makes all steps. Returns False if SIGTERM came first, and a checkpoint was saved instead."""
        args, num_steps = self.args, self.num_steps()
        bar = tqdm(
            total=num_steps, initial=self.step, desc="train", unit="step", disable=self.rank != 0, mininterval=0.5
        )
        finished, before = True, (self.num_tokens, self.train_s)
        while self.step < num_steps:
            start = time.perf_counter()
            loss = self.train_step()
            if self.step % LOSS_EVERY == 0 or self.step in (1, num_steps):
                self.curve.append(Point(self.step, 0.0, loss.item()))
            due = [every for every in (args.eval_every, args.save_every) if every and self.step % every == 0]
            if due or self.step == num_steps:  # work still queued on the device belongs to the training time
                get_accelerator().synchronize()
            self.train_s += time.perf_counter() - start
            if self.curve and self.curve[-1].step == self.step:
                self.curve[-1].train_s = round(self.train_s, 3)
                bar.set_postfix_str(self.progress_text(*before), refresh=False)
                before = self.num_tokens, self.train_s
            bar.update()
            over = args.max_seconds is not None and self.any_rank(self.train_s >= args.max_seconds)
            if args.eval_every and (self.step % args.eval_every == 0 or over or self.step == num_steps):
                self.keep_best(bar)
            preempted = preemption.requested()
            if preempted or (args.save_every and self.step % args.save_every == 0):
                self.save_checkpoint()
            if preempted or over:
                finished = over or self.step == num_steps
                break
        bar.close()
        return finished

    def progress_text(self, num_tokens: int, train_s: float) -> str:
        """The last loss, the rate of all ranks' tokens since the given counts, and this rank's memory peaks so far."""
        rate = (self.num_tokens - num_tokens) / max(self.train_s - train_s, 1e-9)
        memory = f"host {host_peak_gb():.1f} GB"
        if get_accelerator().device_name() != "cpu":
            memory = f"GPU {get_accelerator().max_memory_allocated() / 1e9:.1f} GB, {memory}"
        return f"loss {self.curve[-1].loss:.3f}, {rate:,.0f} tokens/s, {memory}"

    def any_rank(self, flag: bool) -> bool:
        """Returns whether any rank's flag is set: clocks differ, and one rank past the limit stops all ranks."""
        if self.world_size == 1:
            return flag
        found = torch.tensor(int(flag), device=self.engine.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def keep_best(self, bar: Any) -> None:
        """Scores dev. If the score is the best so far, scores test and saves the model."""
        score = self.evaluate("dev")
        self.curve.append(Point(self.step, round(self.train_s, 3), dev=score.values))
        better = score.is_better_than(self.best.value if self.best else None)
        if better:
            test = self.evaluate("test")
            self.best = Best(self.step, score.metric, score.values, test.values)
            if not self.args.no_save:
                self.model_folder = self.save_model()
        self.note_progress()
        if self.rank == 0:
            bar.write(f"step {self.step}: dev {score}{', the best so far' if better else ''}")

    def client_state(self) -> dict[str, Any]:
        return {
            **{name: getattr(self.args, name) for name in KEPT},
            "step": self.step,
            "num_seen": self.num_seen,
            "num_tokens": self.num_tokens,
            "train_s": self.train_s,
            "best": asdict(self.best) if self.best else None,
            "curve": [asdict(point) for point in self.curve],
            "random": random_states(),
        }

    def save_checkpoint(self) -> None:
        self.engine.save_checkpoint(str(self.checkpoints), tag=f"step{self.step}", client_state=self.client_state())
        self.note_progress()

    def note_progress(self) -> None:
        """Writes the run's progress beside its checkpoints. After a kill, a trajectory brings the weights further than
        the last checkpoint, past evaluations that are not repeated; their scores are read from this file."""
        if self.rank == 0 and self.checkpoints.is_dir():
            replace_text(self.checkpoints / PROGRESS, json.dumps(self.client_state()))

    def resume(self, folder: Path) -> None:
        """Restores weights, optimizer, schedule, step count and data position from a folder's newest checkpoint."""
        path, state = self.engine.load_checkpoint(str(folder))
        if path is None:
            raise UserError(f"the checkpoint in {folder} could not be loaded (--resume)")
        if not {"task", "seed", "step", "num_seen"} <= state.keys():
            raise UserError(f"{path} was not written by this script: pass a folder of weights as --model (--resume)")
        for name in KEPT:
            if name in state and state[name] != getattr(self.args, name):
                flag = name.replace("_", "-")
                raise UserError(
                    f"a run resumes with the {flag} it began with: the checkpoint has {state[name]!r}, "
                    f"got {getattr(self.args, name)!r} (--{flag})"
                )
        # A trajectory may have brought the engine further than the checkpoint.
        further = self.engine.global_steps - state.get("global_steps", self.engine.global_steps)
        self.step = state["step"] + further
        self.num_seen = state["num_seen"] + further * self.samples_per_step
        if not further and "random" in state:
            set_random_states(state["random"])
        if further and (folder / PROGRESS).is_file():
            noted = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
            state = noted if state["step"] < noted["step"] <= self.step else state
        self.num_tokens = state.get("num_tokens", 0)
        self.train_s = state.get("train_s", 0.0)
        self.best = Best(**state["best"]) if state.get("best") else None
        self.curve = [Point(**point) for point in state.get("curve", [])]
        folder = self.args.output_dir / "model"
        # A resumed run with another output folder has no best model there.
        if self.best is not None and not self.args.no_save and folder.is_dir():
            self.model_folder = folder

    def save_model(self) -> Path:
        """Writes a folder that `from_pretrained` loads, and gathers weights that ZeRO-3 partitioned for it.

        If the base of adapters was trained, the folder holds the base, and its subfolder `adapter` the adapters, as
        `ds-zo export` writes them. PEFT alone would save the adapters without the base.
        """
        folder = self.args.output_dir / "model"
        partitioned = self.engine.zero_optimization_partition_weights()
        state = self.engine._zero3_consolidated_16bit_state_dict() if partitioned else None
        if self.rank == 0:
            module = self.engine.module
            if self.args.train_base:
                base = base_weights(module, module.state_dict() if state is None else state)
                module.get_base_model().save_pretrained(folder, state_dict=base)
            module.save_pretrained(folder / "adapter" if self.args.train_base else folder, state_dict=state)
            self.tokenizer.save_pretrained(folder)
        dist.barrier()
        return folder


def random_states() -> list[str]:
    """Returns the random states of host and device, which dropout needs after a resume. DeepSpeed's checkpoints have
    none."""
    return [state.numpy().tobytes().hex() for state in (torch.get_rng_state(), get_accelerator().get_rng_state())]


def set_random_states(states: list[str]) -> None:
    host, device = (torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states)
    get_accelerator().set_rng_state(device)
    torch.set_rng_state(host)


def summarise(trainer: Trainer, before: Score | None, after: Score | None) -> Summary:
    """Collects the run's summary. `after` is the test score of the last step; None if a best state was kept."""
    accelerator = get_accelerator()
    on_device = accelerator.device_name() != "cpu"
    args, config, best = trainer.args, trainer.config, trainer.best
    optimizer = config.get("optimizer") or {}
    losses = [point.loss for point in trainer.curve if point.loss is not None]
    after_values = best.test if best else after.values if after else None
    metric = next((found.metric for found in (best, after, before) if found is not None), None)
    return Summary(
        model=args.model,
        task=args.task,
        head=args.head,
        config=str(args.deepspeed),
        config_hash=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12],
        optimizer=str(optimizer.get("type", backend_of(config) or "")),
        lr=(optimizer.get("params") or {}).get("lr"),
        seed=args.seed,
        batch_size=trainer.samples_per_step,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else accelerator.device_name(),
        dtype=trainer.dtype,
        steps=trainer.step,
        train_s=round(trainer.train_s, 2),
        tokens_per_s=round(trainer.num_tokens / trainer.train_s, 1) if trainer.train_s else 0.0,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        metric=metric or "",
        before=before.value if before else None,
        after=after_values[metric] if after_values is not None and metric is not None else None,
        before_values=before.values if before else None,
        after_values=after_values,
        dev=best.value if best else None,
        best_step=best.step if best else None,
        peak_device_gb=round(accelerator.max_memory_allocated() / 1e9, 3) if on_device else 0.0,
        peak_host_gb=round(host_peak_gb(), 3),
        model_folder=str(trainer.model_folder) if trainer.model_folder else None,
        checkpoint_folder=str(trainer.checkpoints) if trainer.checkpoints.is_dir() else None,
        versions=versions(),
        commit=commit(),
        curve=trainer.curve,
    )


def run(args: argparse.Namespace) -> Summary | None:
    """Trains and evaluates. Returns None if the run was stopped before its end."""
    if args.log_level:
        set_log_level_from_string(args.log_level)
    config = read_config(args)
    checkpoints = find_checkpoints(args)
    ensure_distributed_environment()
    torch.manual_seed(args.seed)
    if args.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(args, config)
    before = None if args.skip_zero_shot else trainer.evaluate("test")
    if trainer.rank == 0 and before is not None:
        print(f"before: test {before}", flush=True)
    if checkpoints is not None:  # after the zero-shot score, which is of the model before any training
        trainer.resume(checkpoints)
    with Preemption() as preemption:
        finished = trainer.train(preemption)
    if not finished:
        if trainer.rank == 0:
            where = f"--output-dir {args.output_dir} --resume latest"
            print(f"stopped by SIGTERM after step {trainer.step}; go on with {where}", flush=True)
        return None
    after = None
    if trainer.best is None:
        after = trainer.evaluate("test") if trainer.step else before
        if not args.no_save:
            trainer.model_folder = trainer.save_model()
    summary = summarise(trainer, before, after)
    if trainer.rank == 0:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        replace_text(args.output_dir / "summary.json", json.dumps(asdict(summary), indent=2) + "\n")
        if args.results is not None:
            append_row(args.results, asdict(summary))
        print(f"\n{summary}", flush=True)
    return summary


def main() -> None:
    args = parse_args()
    try:
        run(args)
    except (UserError, TaskError, ConfigError, CheckpointError) as error:
        sys.exit(f"error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
