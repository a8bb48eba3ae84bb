"""What ds_zo is compared with: DeepSpeed's own optimizers on the GPU and offloaded, and low-rank training.

Bytes a parameter are those of DeepSpeed 0.19's bf16/fp16 optimizers: 16-bit weights and gradients, float32 master,
gradient and two moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_zo.planner.estimate import (
    BACKWARD_NBYTES,
    PROCESS_NBYTES,
    TWO_WORKSPACES_NBYTES,
    Estimate,
    Limits,
    base_config,
    parts,
)
from ds_zo.planner.models import Model
from ds_zo.planner.timeline import Cost, Trace

_REDUCE_BUCKET_NUMEL = 500_000_000
_LIVE_NUMEL = 1_000_000_000
_SUB_GROUP_NUMEL = 1_000_000_000
_PERSISTENT_NUMEL = 100_000
"""DeepSpeed's defaults for `reduce_bucket_size`, `stage3_max_live_parameters`, `sub_group_size` and
`stage3_param_persistence_threshold`."""
_NORM_NBYTES = 8
_NORM_NUMEL = 250_000_000
"""Gradients are widened to float64 to be measured: at stage 2 each as a whole, at stage 3 so many elements at once."""
_ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.0}}
_PINNED: dict[str, Any] = {"device": "cpu", "pin_memory": True}
LOW_RANK = 16
_PARAMETER_LOOP_S = 1.2e-4
"""Host time that DeepSpeed's bf16 optimizer takes for one parameter, while the device waits."""
_PAGEABLE_GBPS = 5.7
"""Weights that go up from memory that is neither pinned nor there yet."""
_HOST_PASSES = 14 / 28
"""Of ZeRO-3's step beside Adam, in bytes of what Adam moves: gradients are unscaled, then weights made narrow."""


def estimate_on_device(
    model: Model, limits: Limits, *, optimizer: str = "adamw", checkpointing: bool = True
) -> Estimate:
    """Everything on the GPU: AdamW (16 bytes of float32 a parameter) or SGD without momentum (8)."""
    trace = model.backward_trace(checkpointing=checkpointing)
    mixed = model.dtype != "fp32"
    moments = 8 if optimizer == "adamw" else 0
    states = (moments + (8 if mixed else 0)) * model.numel
    # Read gradient, weights and moments, write all but the gradient. In 16 bits also: widen the gradient (6), add it to
    # the float32 one (12), measure that (4), clear it (4), and make the weights narrow (6).
    swept = (2 * moments + 12 + (32 if mixed else 0)) * model.numel
    update_s = swept / (model.rates.device_memory_gbps * 1e9)
    update_s += _PARAMETER_LOOP_S * sum(1 for _ in model.module.parameters()) if mixed else 0.0
    chosen = _ADAM if optimizer == "adamw" else {"type": "SGD", "params": {"lr": 1e-2}}
    return Estimate(
        contender=optimizer,
        setting=f"all on the device, float32 {'master, gradient' if mixed else 'weights'}"
        f"{' and moments' if moments else ''}",
        device=parts(
            weights=model.weights_nbytes,
            states=states,
            gradients=trace.peak_keeping.gradients,
            activations=trace.peak_keeping.activations,
            logits=trace.peak_keeping.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(process=PROCESS_NBYTES + BACKWARD_NBYTES),
        step_s=trace.forward.seconds + trace.backward.seconds + update_s,
        reduced_nbytes=model.weights_nbytes,
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": chosen, "zero_optimization": {"stage": 0}},
        limits=limits,
    )


def estimate_torch_adamw(model: Model, limits: Limits, *, checkpointing: bool = True) -> Estimate:
    """torch.optim.AdamW on the 16-bit weights themselves: no master, moments as wide as the weights, and one temporary
    as large as a moment while it steps."""
    trace = model.backward_trace(checkpointing=checkpointing)
    weights = model.weights_nbytes
    in_step = 2 * weights
    at_peak = max(in_step, trace.peak_keeping.total)
    update = Cost(0.0, 14 * weights / (model.rates.device_memory_gbps * 1e9))
    return Estimate(
        contender="torch-adamw",
        setting=f"all on the device, everything in {model.dtype}",
        device=parts(
            weights=weights,
            states=2 * weights,
            **{"gradients" if at_peak == in_step else "activations": at_peak},
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(process=PROCESS_NBYTES),
        step_s=trace.forward.seconds + trace.backward.seconds + update.seconds,
        reduced_nbytes=weights,
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": _ADAM, "zero_optimization": {"stage": 0}},
        notes=("outside DeepSpeed, whose own AdamW keeps float32 states",),
        limits=limits,
    )


def estimate_zero_offload(
    model: Model, limits: Limits, *, checkpointing: bool = True, native_pins: bool = False
) -> Estimate:
    """ZeRO-Offload (stage 2): gradients down, Adam on the CPU, weights up, one after the other. Gradients travel as
    float32, on the stream that computes. `native_pins`: under DS_PIN_MEMORY_BACKEND=native."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize = model.weights_nbytes // model.numel
    largest = max(p.numel() for p in model.module.parameters()) * itemsize
    # Two buckets where reducing overlaps, from a pass's first gradient to its end; gradients that do not fit one wait.
    buckets = 2 * _REDUCE_BUCKET_NUMEL * itemsize
    reducing = max(b.alive + itemsize * b.oversize_numel + _NORM_NBYTES * b.largest_numel for b in full_buckets(trace))
    peak = _Reducing.of(trace, at_all_times=0, from_first_gradient=buckets, reducing=reducing)
    flat = 4 * model.numel
    rates = model.rates
    forward_s, backward_s = trace.forward.seconds, trace.backward.seconds
    down_s, up_s = flat / (rates.link_down_gbps * 1e9), model.weights_nbytes / (rates.link_up_gbps * 1e9)
    step_s = forward_s + backward_s + down_s + model.numel / (rates.cpu_adam_gparams * 1e9) + up_s
    pin = int if native_pins else _pinned
    return Estimate(
        contender="zero-offload",
        setting="stage 2, Adam on the CPU, pinned, overlap_comm",
        device=parts(
            weights=model.weights_nbytes,
            gradients=largest + peak.gradients,
            activations=peak.activations,
            logits=peak.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(
            master=pin(flat),
            gradients=pin(flat) + pin(largest),
            staging=pin(model.weights_nbytes),
            states=2 * flat,
            process=PROCESS_NBYTES + BACKWARD_NBYTES,
        ),
        step_s=step_s,
        starting_nbytes=2 * model.weights_nbytes,  # they are cloned there on the way to the float32 master
        divided_s=step_s - forward_s - backward_s,
        up_nbytes=model.weights_nbytes,
        down_nbytes=flat,
        reduced_nbytes=model.weights_nbytes,
        sharded=frozenset({"master", "gradients", "staging", "states"}),
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": _ADAM, "zero_optimization": {"stage": 2, "offload_optimizer": _PINNED, "overlap_comm": True}},
        notes=(_at_best(model, forward_s, backward_s), _exactly(18 * model.numel)),
        limits=limits,
    )


def estimate_zero3(
    model: Model,
    limits: Limits,
    *,
    offload_param: bool = True,
    checkpointing: bool = True,
    native_pins: bool = False,
) -> Estimate:
    """ZeRO-3 with Adam on the CPU, and the parameters there too if `offload_param`. Gradients go down as they are, come
    up again and go down in float32; new weights come up through pageable memory."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize = model.weights_nbytes // model.numel
    # One bucket at all times, of whose gradients a copy is made to reduce them; each then comes up from the host again.
    bucket = _REDUCE_BUCKET_NUMEL * itemsize
    reducing = max(
        b.alive
        + itemsize * (b.oversize_numel + b.copied_numel + b.largest_numel)
        + max(_NORM_NBYTES * min(b.largest_numel, _NORM_NUMEL), 4 * b.largest_numel)
        for b in full_buckets(trace)
    )
    peak = _Reducing.of(trace, at_all_times=bucket, from_first_gradient=0, reducing=reducing)
    flat = 4 * model.numel
    sub_groups = _sub_groups(model)
    uploads = 3 if checkpointing else 2  # each use of a layer gathers it again once more than fits is in between
    there = min(model.numel, _LIVE_NUMEL) * itemsize if offload_param else model.weights_nbytes
    gathers = uploads * model.weights_nbytes if offload_param and model.numel > _LIVE_NUMEL else 0
    rates = model.rates
    forward_s = max(trace.forward.seconds, gathers / uploads / (rates.link_up_gbps * 1e9))
    backward_s = max(trace.backward.seconds, gathers * (uploads - 1) / uploads / (rates.link_duplex_gbps * 1e9))
    backward_s += (model.weights_nbytes + flat) / (rates.link_down_gbps * 1e9)
    step_s = forward_s + backward_s + (1 + _HOST_PASSES) * model.numel / (rates.cpu_adam_gparams * 1e9)
    step_s += 0.0 if offload_param else model.weights_nbytes / (min(_PAGEABLE_GBPS, rates.link_up_gbps) * 1e9)
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": _PINNED}
    if offload_param:
        zero["offload_param"] = _PINNED
    pin = int if native_pins else _pinned
    # Parameters are pinned one by one before they move to one buffer, and PyTorch keeps what it has pinned.
    one_by_one = (p.numel() * itemsize for p in model.module.parameters() if p.numel() > _PERSISTENT_NUMEL)
    kept = sum(map(_pinned, one_by_one)) if offload_param and not native_pins else 0
    return Estimate(
        contender="zero-3" if offload_param else "zero-3-gpu-params",
        setting=f"stage 3, Adam{' and parameters' if offload_param else ''} on the CPU, pinned",
        device=parts(
            weights=there,
            gradients=peak.gradients,
            activations=peak.activations,
            logits=peak.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(
            weights=pin(model.weights_nbytes) + kept if offload_param else 0,
            master=flat,
            gradients=sum(pin(4 * numel) for numel in sub_groups),
            # New weights are made narrow a sub-group at a time, where they don't stay on the host.
            staging=pin(model.weights_nbytes) + (0 if offload_param else itemsize * max(sub_groups)),
            states=2 * flat,
            process=PROCESS_NBYTES + BACKWARD_NBYTES,
        ),
        step_s=step_s,
        divided_s=step_s - trace.forward.seconds - trace.backward.seconds,
        up_nbytes=gathers + (1 if offload_param else 2) * model.weights_nbytes,
        down_nbytes=model.weights_nbytes + flat,
        reduced_nbytes=3 * model.weights_nbytes // 2,  # gathered twice and reduced once, not summed and sent around
        sharded=frozenset({"weights", "master", "gradients", "staging", "states"}),
        config=base_config(batch=model.batch, dtype=model.dtype) | {"optimizer": _ADAM, "zero_optimization": zero},
        notes=(
            _at_best(model, trace.forward.seconds, trace.backward.seconds),
            _exactly((20 if offload_param else 18) * model.numel),
        ),
        limits=limits,
    )


@dataclass(frozen=True)
class FullBucket:
    """Of gradients, as it is reduced: when the next one has no room in it, and at the end of the pass."""

    alive: int
    largest_numel: int
    copied_numel: int
    """Of several gradients in one: a single one is reduced where it is."""
    oversize_numel: int
    """Of one that is larger than the bucket, and waits beside it."""


def full_buckets(trace: Trace) -> Iterator[FullBucket]:
    inside: list[int] = []
    for gradient in (*trace.gradients, None):
        if inside and (gradient is None or sum(inside) + gradient.numel > _REDUCE_BUCKET_NUMEL):
            yield FullBucket(
                alive=0 if gradient is None else gradient.alive,
                largest_numel=max(inside),
                copied_numel=sum(inside) if len(inside) > 1 else 0,
                oversize_numel=sum(inside) if sum(inside) > _REDUCE_BUCKET_NUMEL else 0,
            )
            inside.clear()
        if gradient is not None:
            inside.append(gradient.numel)


@dataclass(frozen=True)
class _Reducing:
    """The peak of a pass whose gradients are reduced bucket by bucket, by part."""

    activations: int
    logits: int
    gradients: int

    @classmethod
    def of(cls, trace: Trace, *, at_all_times: int, from_first_gradient: int, reducing: int) -> _Reducing:
        """`reducing`: most that is alive while a bucket is, the buckets themselves aside."""
        before = trace.peak.total + at_all_times
        after = max(trace.peak_from_first_gradient, reducing) + at_all_times + from_first_gradient
        if before >= after:
            return cls(trace.peak.activations, trace.peak.logits, at_all_times)
        return cls(trace.peak_from_first_gradient, 0, after - trace.peak_from_first_gradient)


def _sub_groups(model: Model) -> list[int]:
    """Elements of each part that stage 3 updates as one."""
    found = [0]
    for p in model.module.parameters():
        if found[-1] >= _SUB_GROUP_NUMEL:
            found.append(0)
        found[-1] += p.numel()
    return found


def zero_step_s(model: Model, forward_s: float, backward_s: float) -> float:
    """Eq. 1: gradients go down beside the backward pass, weights come up beside the CPU's update."""
    rates = model.rates
    down_s = model.weights_nbytes / (rates.link_down_gbps * 1e9)
    up_s = model.weights_nbytes / (rates.link_up_gbps * 1e9)
    return forward_s + max(backward_s, down_s) + max(model.numel / (rates.cpu_adam_gparams * 1e9), up_s)


def estimate_low_rank(
    model: Model, limits: Limits, *, method: str, rank: int = LOW_RANK, checkpointing: bool = True
) -> Estimate:
    """LoRA or GaLore on the blocks' matrices, by Table 2 of the LSP paper (beta = 3 for Adam, in elements): LoRA holds
    beta (m + n) r beside the weights, GaLore (m + beta n) r. Adam's share of them is in float32."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize = model.weights_nbytes // model.numel
    long = sum(max(shape) for shape in model.matrices) * rank
    short = sum(min(shape) for shape in model.matrices) * rank
    trained = long + short if method == "lora" else long
    if method == "lora":
        extra, states = itemsize * trained, 8 * trained
        setting = f"rank {rank}, weights frozen"
    else:
        extra, states = itemsize * short, 8 * trained
        setting = f"rank {rank}, gradients projected, weights trained"
    backward = trace.backward * (2 / 3 if method == "lora" else 1.0)  # no gradients of frozen matrices
    update = Cost(
        0.0, (24 * trained + 3 * model.weights_nbytes * (method != "lora")) / (model.rates.device_memory_gbps * 1e9)
    )
    return Estimate(
        contender=method,
        setting=setting,
        device=parts(
            weights=model.weights_nbytes,
            projectors=extra,
            states=states,
            activations=trace.peak.activations,
            logits=trace.peak.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(process=PROCESS_NBYTES),
        step_s=trace.forward.seconds + backward.seconds + update.seconds,
        reduced_nbytes=itemsize * trained,
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": _ADAM, "zero_optimization": {"stage": 0}},
        notes=("extra memory by Table 2 of the LSP paper; needs its own library (PEFT, galore-torch)",),
        limits=limits,
    )


def _at_best(model: Model, forward_s: float, backward_s: float) -> str:
    best_s = zero_step_s(model, forward_s, backward_s)
    return f"{best_s:.3g} s a step by Eq. 1 of the LSP paper, which hides more copies than DeepSpeed does"


def _exactly(nbytes: int) -> str:
    return f"PyTorch pins in powers of two; DS_PIN_MEMORY_BACKEND=native needs {nbytes / 1e9:.1f} GB of host memory"


def _pinned(nbytes: int) -> int:
    """PyTorch's pinned allocator rounds each request up to a power of two; DeepSpeed makes one for each flat buffer."""
    return 1 << (nbytes - 1).bit_length()
