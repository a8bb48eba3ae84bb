"""Memory and speed of LoRA over a frozen base with random weights, streamed and resident, by AdamW and by ZO.

Methods: `adapter` (AdamW) and `zo` are ours, `peft` is PyTorch with gradient checkpointing, `bitsandbytes` the same in
NF4, `zero3` that under DeepSpeed's ZeRO-3 with `offload_param`.

Weights are drawn and quantised on the GPU, one tensor at a time. With 70B parameters and more, all blocks have the
weights of the first one, so that the model loads in less time: `repeated` in the row. A cap of GPU memory is enforced
by PyTorch's allocator. All linear layers of the blocks have adapters of rank 16. The resident NF4 base has all blocks
on the GPU and recomputes them in the backward pass as the streamed one does. `7b/bf16-peft` is plain PEFT in PyTorch
with gradient checkpointing. `7b/nf4-bitsandbytes` is the same over a base of bitsandbytes. The cases `zero3` are that
base under DeepSpeed's ZeRO-3 with `offload_param`, which needs the whole base on the GPU when it starts, so that they
have no cap. Cases of bitsandbytes are skipped where that is missing.
`link_busy` is the share of a step in which uploads occupy the link, at the rate that uploads have alone. The cases
`link` have so few tokens that uploads take longer than the computation.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.lora_models import has_peft, repeat_first_block, with_lora
from benchmarks.training_case import TrainingCase, block_store_of, token_ids
from ds_zo.backends.adapter.streamed import FrozenBlockStore
from ds_zo.bench.measure import measure_steps, start_device, synchronize
from ds_zo.bench.shapes import materialise
from ds_zo.planner import plan
from ds_zo.planner.models import DTYPES
from ds_zo.planner.shapes import RANDOM
from ds_zo.records.rows import Row
from ds_zo.streaming.block_store import BlockStore

_LR = 1e-4
_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adapter": ("AdamW", {"lr": _LR}),
    "zo": ("ZO", {"lr": 1e-7, "zo_eps": 1e-3}),
}
_NUM_TIMED_UPLOADS = 8

Step = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[Step, BlockStore | None]


def measure(**settings: Any) -> Row:
    """Measures one case in this process."""
    case = TrainingCase(**settings)
    if case.method in ("bitsandbytes", "zero3") and importlib.util.find_spec("bitsandbytes") is None:
        return {"fits": False, "why": "bitsandbytes is not installed"}
    device = start_device(case.device, cap_gb=case.cap_gb)
    start = time.perf_counter()
    model: Any = case.lazy_model(device)
    methods = {"adapter": _engine, "zo": _engine, "peft": _plain, "bitsandbytes": _bitsandbytes, "zero3": _zero3}
    step, store = methods[case.method](case, model, device)
    load_s = time.perf_counter() - start
    ids = token_ids(model, case.batch, case.length, device)
    first = time.perf_counter()
    first_loss = float(step(ids))
    first_step_s = time.perf_counter() - first
    for _ in range(case.warmup - 1):  # blocks move to the device after the second step
        step(ids)
    up_before = 0 if store is None else store.runtime.bytes_up
    row = measure_steps(partial(step, ids), warmup=0, steps=case.steps, device=device)
    row |= {
        "shape": case.shape,
        "method": case.method,
        "stream": case.stream,
        "cap_gb": case.cap_gb,
        "rank": case.rank,
        "adapters": "peft" if has_peft() else "plain",
        "layers": model.config.num_hidden_layers,
        "batch": case.batch,
        "length": case.length,
        "tokens_per_s": ids.numel() / row["step_s"],
        "load_s": load_s,
        "first_step_s": first_step_s,
        "first_loss": first_loss,
        "finite": all(map(math.isfinite, [first_loss, *row["losses"]])),
        "repeated": case.repeated,
    }
    if store is not None:
        blocks = store.placement.blocks
        row["blocks_streamed"] = sum(unit.streamed for unit in blocks)
        row["blocks"] = len(blocks)
        row["store_gb"] = store.store.nbytes / 1e9
        row["pinned_gb"] = store.store.pinned_nbytes / 1e9
        host_inputs = store.host_inputs if isinstance(store, FrozenBlockStore) else None
        row["inputs_gb"] = 0.0 if host_inputs is None else host_inputs.nbytes / 1e9
        row["up_gb_a_step"] = (store.runtime.bytes_up - up_before) / case.steps / 1e9
        row["up_gbps"] = _up_gbps(store, device)
        if row["up_gbps"] is not None:
            row["link_busy"] = row["up_gb_a_step"] / row["up_gbps"] / row["step_s"]
        row |= _planned(case)
    return row


def _up_gbps(store: BlockStore, device: torch.device) -> float | None:
    """GB/s of uploads of stored blocks into a slot, with nothing beside them. None without streamed blocks or a GPU."""
    units = [unit for unit in store.placement.blocks if unit.streamed][:_NUM_TIMED_UPLOADS]
    if device.type != "cuda" or not units:
        return None
    store.runtime.invalidate_slots()
    slot = store.runtime.slots[0].buffer
    synchronize(device)
    start = time.perf_counter()
    for unit in units:
        slot[: unit.nbytes].copy_(unit.store_buffer, non_blocking=True)
    synchronize(device)
    return float(sum(unit.nbytes for unit in units)) / 1e9 / (time.perf_counter() - start)


def _planned(case: TrainingCase) -> Row:
    """The peaks and seconds that `ds-zo plan` states for the case, whose adapters have rank 16."""
    settings: dict[str, Any] = {"batch": case.batch, "seq": case.length, "dtype": case.dtype}
    settings |= {"device_memory_gb": case.cap_gb, "stream": dict(case.stream or {}), "offload": True}
    found = plan(f"{RANDOM}{case.shape}", backends=[case.method], **settings)[case.method]
    return {
        "planned_device_gb": found.device_peak_nbytes / 1e9,
        "planned_host_gb": found.host_peak_nbytes / 1e9,
        "planned_step_s": found.step_s,
    }


def _engine(case: TrainingCase, model: nn.Module, device: torch.device) -> Made:
    """The backend `adapter` or `zo`, and its block store."""
    import deepspeed

    import ds_zo  # noqa: F401

    kept = repeat_first_block(model) if case.repeated else {}
    optimizer, params = _OPTIMIZERS[case.method]
    model = with_lora(model, rank=case.rank, dtype=DTYPES[case.dtype], device=torch.device("cpu"))
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0 if case.method == "adapter" else 0.0,
        "optimizer": {"type": optimizer, "params": {**params, "lr": case.lr or params["lr"]}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
        "ds_zo": {"backend": case.method, "stream": dict(case.stream or {})},
    }
    if case.dtype != "fp32":
        ds_config[case.dtype] = {"enabled": True}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]
    engine.train()
    kept.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _step_of(engine), block_store_of(engine)


def _step_of(engine: Any) -> Step:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _plain(case: TrainingCase, model: nn.Module, device: torch.device) -> Made:
    """PyTorch with gradient checkpointing, the base on the device in its own dtype."""
    whole = materialise(model, device)
    return _loop(case, with_lora(whole, rank=case.rank, dtype=DTYPES[case.dtype], device=device))


def _bitsandbytes(case: TrainingCase, model: nn.Module, device: torch.device) -> Made:
    """The same with the linear layers of blocks in NF4 by bitsandbytes."""
    return _loop(case, _with_lora4bit(case, model, device))


def _zero3(case: TrainingCase, model: nn.Module, device: torch.device) -> Made:
    """The same under DeepSpeed's ZeRO-3, with parameters in pinned host memory and uploads ahead of their use."""
    import deepspeed

    adapted: Any = _with_lora4bit(case, model, device)
    adapted.train()
    adapted.gradient_checkpointing_enable({"use_reentrant": False})
    offload: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    offload["offload_param"] = {"device": "cpu", "pin_memory": True}
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.batch,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": case.lr or _LR, "torch_adam": True}},
        "zero_optimization": offload,
        "zero_force_ds_cpu_optimizer": False,
    }
    if case.dtype != "fp32":
        ds_config[case.dtype] = {"enabled": True}
    trained = [p for p in adapted.parameters() if p.requires_grad]
    return _step_of(deepspeed.initialize(model=adapted, model_parameters=trained, config=ds_config)[0]), None


def _with_lora4bit(case: TrainingCase, model: nn.Module, device: torch.device) -> nn.Module:
    """Adapters over linear layers in NF4 by bitsandbytes, which are drawn and quantised one at a time."""
    import bitsandbytes as bnb  # type: ignore[import-not-found,unused-ignore]

    source: Any = model._ds_zo_source
    inner: Any = model.model
    for name, m in [(n, m) for n, m in inner.layers.named_modules() if isinstance(m, nn.Linear)]:
        owner = inner.layers.get_submodule(name.rpartition(".")[0])
        sizes = {"input_features": m.in_features, "output_features": m.out_features, "bias": False}
        # On the meta device, or the layer would first draw float32 values on the CPU.
        new = bnb.nn.Linear4bit(**sizes, compute_dtype=DTYPES[case.dtype], quant_type="nf4", device="meta")
        value = source(f"model.layers.{name}.weight")
        new.weight = bnb.nn.Params4bit(value, requires_grad=False, quant_type="nf4")
        setattr(owner, name.rpartition(".")[2], new.to(device))
    whole: Any = materialise(model, device)
    whole.is_loaded_in_4bit = True  # PEFT chooses its adapters for bitsandbytes by it
    return with_lora(whole, rank=case.rank, dtype=DTYPES[case.dtype], device=device)


def _loop(case: TrainingCase, model: Any) -> Made:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=case.lr or _LR, fused=trained[0].is_cuda or None)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, None
