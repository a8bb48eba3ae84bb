"""ms-swift's command line: `swift sft`."""

from __future__ import annotations

from clients.client import Client

CLIENT = Client(
    title="ms-swift",
    requires=(
        "ms-swift==4.6.0",
        "accelerate==1.15.0",
        "datasets==4.8.4",
        "deepspeed==0.19.8",
        "peft==0.20.0",
        "torch==2.13.0",
        "transformers==5.19.0",
        "trl==0.29.1",
    ),
    commands={"sft": "swift sft sft.yaml"},
    files={
        "sft.yaml": """\
model: model
model_type: llama
template: dummy
torch_dtype: float32
fp16: false
tuner_type: full
deepspeed: ds_config.json
dataset: data/messages/train.jsonl
max_length: 64
output_dir: out
add_version: false
learning_rate: LEARNING_RATE
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
gradient_checkpointing: false
max_steps: 4
save_steps: 2
logging_steps: 1
report_to: none
"""
    },
    resume="--resume_from_checkpoint out/checkpoint-2",
    environment={"NPROC_PER_NODE": "1"},
    about="""\
The JSON must not have an `optimizer` block. With one, even for DeepSpeed's own types, Trainer makes a placeholder
instead of an optimizer. ms-swift reads its parameter groups and stops with `'DummyOptim' object has no attribute
'param_groups'`. Name the backend in the `ds_zo` section instead. Learning rate and weight decay then come from
ms-swift's AdamW, whose states are not created.""",
    limits=(
        "`NPROC_PER_NODE` has ms-swift start torchrun. Without torchrun's variables DeepSpeed asks for `mpi4py`.",
        "`model_type` and `template` are needed because ms-swift does not know the tiny model.",
        "`fp16: false` is needed with `torch_dtype: float32`, for which ms-swift turns fp16 on.",
        "ms-swift writes no final model beside its checkpoints. The test takes the weights in `out/checkpoint-4`.",
    ),
    saved="out/checkpoint-4",
    own_optimizer=True,
)
