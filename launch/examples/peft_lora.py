#!/usr/bin/env python
"""LoRA by ZO through Trainer: adapters alone move; the base is frozen, streamed from the host and never written back.

deepspeed launch/examples/peft_lora.py
python launch/examples/peft_lora.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
from embedded import accuracy, collator, load, training_rows, world_of_one  # makes ds_zo importable from a clone
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments, set_seed

import ds_zo  # noqa: F401  (teaches DeepSpeed the name ZO)

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "ZO", "params": {"lr": "auto", "zo_eps": 1e-2}},
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
}
"""A larger zo_eps than for whole models: a few thousand adapter weights move the loss far less than all of them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--output-dir", default="runs/example-lora")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher's
    args = parser.parse_args()

    world_of_one()
    set_seed(0)
    base, tokenizer = load()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        deepspeed=CONFIG,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=training_rows(tokenizer), data_collator=collator(tokenizer)
    )
    before = accuracy(model, tokenizer)
    trainer.train()
    trainer.save_model(f"{args.output_dir}/adapter")
    if trainer.is_world_process_zero():
        print(f"test {before} before, {accuracy(model, tokenizer)} after; saved in {args.output_dir}/adapter")


if __name__ == "__main__":
    main()
