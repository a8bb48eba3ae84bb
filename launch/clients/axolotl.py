"""Axolotl's command line: `axolotl train`."""

from __future__ import annotations

from clients.client import Client

CLIENT = Client(
    title="Axolotl",
    # The extra axolotl[deepspeed] also asks for deepspeed-kernels, which has no release for aarch64.
    requires=("axolotl==0.19.0", "deepspeed==0.18.9", "torch==2.13.0"),
    commands={"sft": "axolotl train sft.yaml"},
    files={
        "sft.yaml": """\
base_model: model
deepspeed: ds_config.json
datasets:
  - path: data/alpaca/train.jsonl
    ds_type: json
    type: alpaca
sequence_len: 256
output_dir: out
optimizer: adamw_torch
learning_rate: LEARNING_RATE
lr_scheduler: cosine
micro_batch_size: 2
gradient_accumulation_steps: 1
attn_implementation: sdpa
bf16: false
max_steps: 4
save_steps: 2
logging_steps: 1
"""
    },
    resume="--resume-from-checkpoint out/checkpoint-2",
    environment={"AXOLOTL_DO_NOT_TRACK": "1"},
    # For one process Axolotl asks DeepSpeed for NCCL, which a CPU build of torch lacks. For two it takes gloo.
    cpu_only="--launcher torchrun -- --nproc_per_node 2 --standalone",
)
