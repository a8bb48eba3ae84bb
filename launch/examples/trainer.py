#!/usr/bin/env python
"""HF Trainer under ds_zo: the JSON is all that changes. "auto" is filled from the arguments.

deepspeed launch/examples/trainer.py
python launch/examples/trainer.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
from embedded import accuracy, collator, load, training_rows, world_of_one  # makes ds_zo importable from a clone
from transformers import Trainer, TrainingArguments, set_seed

import ds_zo  # DeepSpeed now knows the optimizer type ZO

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "ZO", "params": {"lr": "auto", "weight_decay": "auto", "zo_eps": 1e-3}},
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--resume", metavar="CHECKPOINT", help="a checkpoint-N folder, or newest: the newest whole one")
    parser.add_argument("--output-dir", default="runs/example-trainer")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher's
    args = parser.parse_args()

    world_of_one()
    set_seed(0)
    model, tokenizer = load()
    rows = training_rows(tokenizer)
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        deepspeed=CONFIG,
        max_steps=args.steps,
        learning_rate=args.lr,
        warmup_steps=10,
        lr_scheduler_type="constant_with_warmup",
        per_device_train_batch_size=16,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        eval_on_start=True,
        save_steps=50,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:64],
        data_collator=collator(tokenizer),
        processing_class=tokenizer,
    )
    before = accuracy(model, tokenizer)
    newest = args.resume == "newest"
    trainer.train(resume_from_checkpoint=ds_zo.newest_complete(args.output_dir) if newest else args.resume)
    trainer.save_model(f"{args.output_dir}/model")
    if trainer.is_world_process_zero():
        print(f"test {before} before, {accuracy(model, tokenizer)} after; saved in {args.output_dir}/model")


if __name__ == "__main__":
    main()
