"""DeepSpeed JSONs in the form of the examples of LLaMA-Factory, Trainer and Accelerate."""

from __future__ import annotations

from typing import Any

BATCHES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
PRECISION = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
}
ON_HOST = {"device": "cpu", "pin_memory": True}
BUCKETS = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500000000.0,
    "reduce_scatter": True,
    "reduce_bucket_size": "auto",
}
STAGE3 = {
    "overlap_comm": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
Z3_OFFLOAD = {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST, **STAGE3}
ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
OF_CLIENTS: dict[str, dict[str, Any]] = {
    # without an optimizer block: the script's own optimizer
    "z0": {**BATCHES, **PRECISION, "zero_optimization": {"stage": 0, **BUCKETS, "round_robin_gradients": True}},
    "z2": {**BATCHES, **PRECISION, "zero_optimization": {"stage": 2, **BUCKETS, "round_robin_gradients": True}},
    "z2_offload": {**BATCHES, **PRECISION, "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST, **BUCKETS}},
    "z3": {**BATCHES, **PRECISION, "zero_optimization": {"stage": 3, **STAGE3}},
    "z3_offload": {**BATCHES, **PRECISION, "zero_optimization": Z3_OFFLOAD},
    # with an optimizer block
    "trainer_z3": {
        **BATCHES,
        **PRECISION,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
        "zero_optimization": Z3_OFFLOAD,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "accelerate_z2": {
        **BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}},
    },
}
