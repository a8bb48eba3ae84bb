"""LLaMA-Factory's command line: `llamafactory-cli train`."""

from __future__ import annotations

from clients.client import Client

CLIENT = Client(
    title="LLaMA-Factory",
    requires=(
        "llamafactory==0.9.5",
        "accelerate==1.11.0",
        "datasets==4.0.0",
        "deepspeed==0.19.8",
        "peft==0.18.1",
        "torch==2.10.0",
        "torchaudio==2.10.0",
        "torchvision==0.25.0",
        "transformers==5.6.0",
        "trl==0.24.0",
    ),
    commands={"sft": "llamafactory-cli train sft.yaml"},
    files={
        "sft.yaml": """\
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
deepspeed: ds_config.json
dataset_dir: data
dataset: alpaca
template: default
cutoff_len: 64
output_dir: out
learning_rate: LEARNING_RATE
per_device_train_batch_size: 4
max_steps: 4
save_steps: 2
logging_steps: 1
report_to: none
""",
        "data/dataset_info.json": '{"alpaca": {"file_name": "alpaca/train.jsonl"}}\n',
    },
    resume="resume_from_checkpoint=out/checkpoint-2",
    environment={"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"},
    cpu_only="use_cpu=true",
    about="LLaMA-Factory accepts a DeepSpeed config only under `torchrun`, which `FORCE_TORCHRUN=1` makes it start.",
    limits=(
        "LOMO and AdaLOMO need `gradient_accumulation_steps: 1`, which is LLaMA-Factory's default.",
        "Tested with torch 2.10.0: LLaMA-Factory needs torchvision, and PyPI's later builds for aarch64 need CUDA.",
        "`finetuning_type: full` was tested, LoRA was not.",
    ),
)
