"""The DeepSpeed JSON of a run: read from its file, overridden by options, adapted to the embedded model or a CPU."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_zo.config import backend_of, with_section_on_top
from ds_zo.config.convert import autos_of, check_stock, without_auto
from ds_zo.config.json_text import read_object
from ds_zo.config.schedulers import PEAK_RATES
from ds_zo.config.stock import block, optimizer_params, read_stock
from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED_FOLDER
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.training.errors import UserError

_ADAM = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
EMBEDDED_PARAMS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}}, {"lr": 5e-4}),
    ({"type": "LOMO", "params": {"lr": 0.03, "weight_decay": 0.0}}, {"lr": 0.01}),
    ({"type": "AdaLOMO", "params": {"lr": 5e-4, "weight_decay": 0.0}}, {"lr": 2e-3}),
    (
        {"type": "LSP", "params": {"lr": 2e-5, **_ADAM, "subspace_dim": 512, "edge": "dense"}},
        {"lr": 3e-3, "subspace_dim": 64},
    ),
    ({"type": "AdamW", "params": {"lr": 1e-4, **_ADAM}}, {"lr": 3e-3}),
    ({"type": "AdamW", "params": {"lr": 2e-5, **_ADAM}}, {"lr": 5e-4}),
)
"""Pairs of a shipped `optimizer` section, for a large model, and the parameters that suit the embedded model instead.
They apply to a JSON whose section is equal to a shipped one: an edited section is the user's choice and stays."""

_OWN_RATES = {kind: key for kind, key in PEAK_RATES.items() if key != "warmup_max_lr"}
_OWN_RATES["LRRangeTest"] = "lr_range_test_min_lr"
"""Schedulers that replace the optimizer's learning rate by their own, each with the key of that rate."""

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the JSON. Writes the command line's overrides into it, and what the embedded model or a CPU needs."""
    config = with_section_on_top(_read_json(args.deepspeed))
    if config.get("bf16") is None and "bfloat16" in config:  # DeepSpeed's old name of the key
        config["bf16"] = config.pop("bfloat16")
    _check(config, args)
    replaced, dtype = _adapted(args, config)
    if replaced:
        config["optimizer"]["params"] |= replaced
    if args.lr is not None:
        _set_lr(config, args)
    if args.batch_size is not None:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    if dtype != "auto":
        for name in ("bf16", "fp16"):
            if name in config or name == dtype:
                config[name] = {**(config.get(name) or {}), "enabled": name == dtype}
    _refuse_auto(config, args)
    _check_batch(config, args)
    return config


def model_dtype(config: dict[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if (config.get(name) or {}).get("enabled") is True), "fp32")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"looked for a DeepSpeed JSON at {path}: not found (--deepspeed)")
    try:
        return read_object(path)
    except ValueError as error:
        raise UserError(f"{path} must be a JSON object without repeated keys: {error} (--deepspeed)") from None


def _check(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Raises for an error in DeepSpeed's keys before other code reads them."""
    optimizer = block(config, "optimizer")
    if not optimizer and args.steps != 0:
        raise UserError(
            f"training needs an optimizer, got none in {args.deepspeed}: add an optimizer section (--deepspeed)"
        )
    if args.objective is not None and backend_of(config) != "zo":
        raise UserError(
            f"an objective needs ZO, which trains without gradients, got {optimizer.get('type')} in {args.deepspeed}: "
            "take --method zo (--objective)"
        )
    optimizer_params(optimizer)
    for key in ("bf16", "fp16", "scheduler"):
        block(config, key)
    if backend_of(config) is None:
        check_stock(config)
    else:
        read_stock(without_auto(config), world_size=1)


def _refuse_auto(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Raises if DeepSpeed would read an "auto". In ZeRO's keys and in ours it means the default."""
    kept = ("zero_optimization.", "ds_zo.", *(() if backend_of(config) is None else ("optimizer.params.",)))
    found = [path for path in autos_of(config) if not path.startswith(kept)]
    if found:
        raise UserError(
            f'only Trainer and Accelerate replace "auto", got it in {", ".join(found)}: write values in '
            f"{args.deepspeed}, or leave these keys out (--deepspeed)"
        )


def _check_batch(config: dict[str, Any], args: argparse.Namespace) -> None:
    """Raises for batch sizes that DeepSpeed refuses."""
    total, micro, steps = (config.get(key) for key in _BATCH_KEYS)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if total is None and micro is None:
        raise UserError(
            f"training needs a batch size, got none in {args.deepspeed}: write train_micro_batch_size_per_gpu, or name "
            "it (--batch-size)"
        )
    if total is None:
        return
    steps = steps or (max(1, total // (micro * num_ranks)) if micro else 1)
    micro = micro or max(1, total // (num_ranks * steps))
    if total != micro * steps * num_ranks:
        raise UserError(
            f"train_batch_size must be micro-batch x accumulation steps x ranks, got {total} with {micro} x {steps} x "
            f"{num_ranks}: leave train_batch_size out of {args.deepspeed}, or change one of them (--batch-size)"
        )


def _set_lr(config: dict[str, Any], args: argparse.Namespace) -> None:
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict):
        raise UserError(f"--lr overrides optimizer.params.lr, but {args.deepspeed} has no optimizer section")
    optimizer["params"] = {**(optimizer.get("params") or {}), "lr": args.lr}
    scheduler = config.get("scheduler") or {}
    kind, params = scheduler.get("type"), scheduler.get("params") or {}
    if "warmup_max_lr" in params or kind == "WarmupDecayLR":  # it rises to this rate, not to the optimizer's
        config["scheduler"] = {**scheduler, "params": {**params, "warmup_max_lr": args.lr}}
    elif kind in _OWN_RATES:
        raise UserError(
            f"--lr overrides the optimizer's learning rate, which scheduler {kind} does not use, got {args.lr:g}: set "
            f"scheduler.params.{_OWN_RATES[kind]} in {args.deepspeed} (--lr)"
        )


def _adapted(args: argparse.Namespace, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
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
