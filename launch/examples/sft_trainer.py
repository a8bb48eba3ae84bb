#!/usr/bin/env python
"""TRL's SFTTrainer under ds_zo: prompts and completions in, the JSON is all that changes. Needs `pip install trl`.

deepspeed launch/examples/sft_trainer.py
python launch/examples/sft_trainer.py --steps 20
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from embedded import accuracy, load, world_of_one  # makes ds_zo importable from a clone
from transformers import set_seed
from trl import SFTConfig, SFTTrainer

import ds_zo  # noqa: F401  (teaches DeepSpeed the name ZO)
from ds_zo.tasks.embedded_task import CodeOrText

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "optimizer": {"type": "ZO", "params": {"lr": "auto", "weight_decay": "auto", "zo_eps": 1e-3}},
    "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu"}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--output-dir", default="runs/example-sft")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the deepspeed launcher's
    args = parser.parse_args()

    world_of_one()
    set_seed(0)
    model, tokenizer = load()
    choices = CodeOrText().choices("train")
    rows = [{"prompt": choice.prompt, "completion": choice.options[choice.answer]} for choice in choices]
    arguments = SFTConfig(
        output_dir=args.output_dir,
        deepspeed=CONFIG,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        per_device_train_batch_size=16,
        max_length=256,
        gradient_checkpointing=False,  # there is no backward to save activations for
        bf16=False,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    data = Dataset.from_list(rows)
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    before = accuracy(model, tokenizer)
    trainer.train()
    trainer.save_model(f"{args.output_dir}/model")
    if trainer.is_world_process_zero():
        print(f"test {before} before, {accuracy(model, tokenizer)} after; saved in {args.output_dir}/model")


if __name__ == "__main__":
    main()
