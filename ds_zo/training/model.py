"""The model of a run: loaded, with LoRA adapters where asked for, and saved."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ds_zo.checkpoint.adapters import FILE as PEFT_FILE
from ds_zo.checkpoint.adapters import Adapters, description
from ds_zo.streaming.loading import load_pretrained
from ds_zo.tasks import pad_token_id
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.tasks.hub import check_reachable
from ds_zo.training.errors import UserError


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
            model.config.pad_token_id = pad_token_id(tokenizer)  # a decoder's head reads the last real token
        elif lazily:
            model = load_pretrained(AutoModelForCausalLM, path, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
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
    targets: Any = args.lora_targets
    if targets != "all-linear":
        targets = [name for word in targets.split(",") if (name := word.strip())]
        paths = [f".{path}" for path, _ in model.named_modules()]
        missing = [name for name in targets if not any(path.endswith(f".{name}") for path in paths)]
        if missing:  # PEFT refuses names only if the model has none of them
            raise UserError(f"the model has no module named {', '.join(missing)}: correct the names (--lora-targets)")
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


def save_model(engine: Any, folder: Path, *, tokenizer: Any, train_base: bool, writes: bool) -> None:
    """Makes a folder that `from_pretrained` loads, and gathers weights that ZeRO-3 partitioned for it. All ranks must
    call it; the rank that `writes` makes the files.

    `train_base`: the folder holds the base of the adapters, and its subfolder `adapter` the adapters, as `ds-zo export`
    writes them. PEFT alone would save the adapters without the base.
    """
    partitioned = engine.zero_optimization_partition_weights()
    state = engine._zero3_consolidated_16bit_state_dict() if partitioned else None
    if not writes:
        return
    module = engine.module
    if train_base:
        base = base_weights(module, module.state_dict() if state is None else state)
        module.get_base_model().save_pretrained(folder, state_dict=base)
    module.save_pretrained(folder / "adapter" if train_base else folder, state_dict=state)
    tokenizer.save_pretrained(folder)


def base_weights(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of the model that a PEFT model wraps, by their names in the wrapped model."""
    adapters = Adapters.read(description(model)[PEFT_FILE].decode())
    assert adapters is not None
    placed = ((adapters.place(name), tensor) for name, tensor in state.items())
    return {name: tensor for (is_adapter, name), tensor in placed if not is_adapter}
