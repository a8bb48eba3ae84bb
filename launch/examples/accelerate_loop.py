#!/usr/bin/env python
"""A plain Accelerate loop under ds_zo: the script builds its own AdamW, the JSON's ds_zo section replaces its update.

    accelerate launch --config_file ds_configs/accelerate_own_optimizer.yaml launch/examples/accelerate_loop.py
    accelerate launch --use_deepspeed --deepspeed_config_file launch/examples/zo.json launch/examples/accelerate_loop.py
    python launch/examples/accelerate_loop.py

The second names an optimizer in the JSON, so the script passes Accelerate's dummies instead of its own objects.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, InitProcessGroupKwargs, set_seed
from embedded import accuracy, collator, load, training_rows, world_of_one  # makes ds_zo importable from a clone
from torch.utils.data import DataLoader
from tqdm import tqdm

import ds_zo  # noqa: F401  (teaches DeepSpeed the name ZO)

CONFIG = Path(__file__).parent / "own_optimizer.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4, help="of the script's AdamW (default: %(default)s)")
    parser.add_argument("--output-dir", default="runs/example-accelerate")
    args = parser.parse_args()

    world_of_one()
    set_seed(0)
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # then the launcher's JSON counts
    gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    plugin = None if launched else DeepSpeedPlugin(hf_ds_config=str(CONFIG))
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=gloo)
    config = accelerator.state.deepspeed_plugin.deepspeed_config

    model, tokenizer = load()
    model.train()
    size = config["train_micro_batch_size_per_gpu"]
    rows: Any = training_rows(tokenizer)
    loader: Any = DataLoader(rows, size, shuffle=True, drop_last=True, collate_fn=collator(tokenizer))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    if "optimizer" in config:
        optimizer, schedule = DummyOptim(model.parameters()), DummyScheduler(None)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    before = accuracy(model, tokenizer)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    total = args.steps * config["gradient_accumulation_steps"]
    for batch in tqdm(itertools.islice(epochs, total), total=total, disable=not accelerator.is_main_process):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.3f}, test {before} before, {accuracy(model, tokenizer)} after")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.output_dir, state_dict=state)
        tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
