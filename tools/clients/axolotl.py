"""Axolotl's command line: `axolotl train`."""

from __future__ import annotations

from clients.client import Client

CLIENT = Client(
    title="Axolotl",
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
seed: 0
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
    about="""\
Install DeepSpeed beside Axolotl: `pip install axolotl==0.19.0 "deepspeed<0.19"`. Axolotl's extra `deepspeed` also wants
`deepspeed-kernels`, which has no release for aarch64.""",
    limits=(
        "The test runs two processes. For one process Axolotl asks DeepSpeed for NCCL, which a CPU build of torch\n"
        "  lacks.",
        "Without `seed`, Axolotl shuffles the data in another order each time that it prepares them.",
        "`optimizer` of Axolotl's file is not used: the JSON names the optimizer. `learning_rate`, `lr_scheduler` and\n"
        "  `weight_decay` are.",
    ),
    # Axolotl places the model of each of several processes on a GPU, unless no memory of it may be used.
    cpu_only="--gpu-memory-limit 0GiB --launcher torchrun -- --nproc_per_node 2 --standalone",
)
