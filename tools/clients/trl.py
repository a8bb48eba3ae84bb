"""TRL's command line: `trl sft`, also with LoRA, and `trl dpo`."""

from __future__ import annotations

from clients.client import Client

_ARGUMENTS = """\
model_name_or_path: model
dtype: float32
output_dir: out
deepspeed: ds_config.json
learning_rate: LEARNING_RATE
per_device_train_batch_size: 4
max_length: 64
max_steps: 4
save_steps: 2
logging_steps: 1
bf16: false
gradient_checkpointing: false
report_to: none
"""

CLIENT = Client(
    title="TRL",
    requires=(
        "trl==1.16.0",
        "accelerate==1.15.0",
        "datasets==5.2.0",
        "deepspeed==0.19.8",
        "peft==0.21.2",
        "torch==2.13.0",
        "transformers==5.22.2",
    ),
    commands={
        "sft": "trl sft --config sft.yaml --use_deepspeed --num_processes 1",
        "dpo": "trl dpo --config dpo.yaml --use_deepspeed --num_processes 1",
        "sft_lora": "trl sft --config sft.yaml --use_deepspeed --num_processes 1 --use_peft",
    },
    backends={"sft_lora": ("zo",)},
    files={
        "sft.yaml": "dataset_name: data/sft\n" + _ARGUMENTS,
        "dpo.yaml": "dataset_name: data/dpo\n" + _ARGUMENTS,
    },
    resume="--resume_from_checkpoint out/checkpoint-2",
    cpu_only="--use_cpu true --main_process_port 0",
    about="`trl` starts `accelerate launch`. With `--use_deepspeed`, that sets up the ranks for DeepSpeed.",
    limits=(
        "With `--use_peft`, ZO trains the adapters of LoRA, and `ds-zo export` writes them to `exported/adapter`.",
        "LOMO and AdaLOMO need `gradient_accumulation_steps: 1`, which is TRL's default.",
        "ZO's update is exact for a loss that is linear in the measured outputs, such as that of `trl sft` with\n"
        "  `loss_type: nll`. For other losses, such as that of `trl dpo`, it is exact to first order in `zo_eps`.",
    ),
)
