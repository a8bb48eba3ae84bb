"""The estimate of QLoRA with PEFT and bitsandbytes, whose base stays on the device in four bits."""

from __future__ import annotations

from dataclasses import replace

from ds_zo.planner.adapter import estimate_adapter
from ds_zo.planner.estimate import Estimate, Limits, base_config, parts
from ds_zo.planner.models import LOW_RANK, Model
from ds_zo.planner.stock import lora_optimizer

_NF4_NBYTES = 0.5625
"""Bytes of a weight in bitsandbytes' NF4: four bits, and a float32 scale for 64 weights."""
_NF4_DECODE_SHARE = 0.2
"""Speed at which bitsandbytes decodes weights, as a share of that of element-wise kernels, from a run of LLaMA-7B on an
H200 (docs/adapters.md)."""


def estimate_qlora(model: Model, limits: Limits, *, checkpointing: bool = True) -> Estimate:
    """Estimates LoRA by PEFT over a base that bitsandbytes keeps on the device in NF4. Forward, recomputation and
    backward decode each matrix again."""
    whole = estimate_adapter(model, limits, offload=False, checkpointing=checkpointing, head_in_chunks=False)
    itemsize, numel = model.itemsize, sum(m * n for m, n in model.matrices)
    largest = max((m * n for m, n in model.matrices), default=0)
    decoded_nbytes = (3 if checkpointing else 2) * (_NF4_NBYTES + itemsize) * numel
    device = {**whole.device, "weights": model.weights_nbytes - int((itemsize - _NF4_NBYTES) * numel)}
    device["gradients"] = itemsize * model.adapters_numel
    return replace(
        whole,
        contender="qlora",
        compute_s=None,
        setting=f"base in NF4 on the device, LoRA of rank {LOW_RANK} trained, PEFT and bitsandbytes",
        device=device | parts(scratch=itemsize * largest),
        step_s=whole.step_s + decoded_nbytes / (_NF4_DECODE_SHARE * model.rates.device_memory_gbps * 1e9),
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": lora_optimizer(model), "zero_optimization": {"stage": 0}},
        notes=("needs PEFT, and a model loaded with BitsAndBytesConfig(load_in_4bit=True)",),
    )
