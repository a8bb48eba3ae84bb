"""Estimates of the methods that ds_zo is compared with: DeepSpeed's own optimizers and low-rank training.

The bytes of a parameter are those of DeepSpeed 0.19's bf16 and fp16 optimizers: a 16-bit weight and gradient, and in
float32 the master weight, the gradient and two moments. `bf16_states` puts these four in bf16, as DeepSpeed does with
`bf16_master_weights_and_grads` and `bf16_optimizer_states`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ds_zo.config.learning_rates import starting_rate
from ds_zo.planner.estimate import (
    BACKWARD_NBYTES,
    PROCESS_NBYTES,
    TWO_WORKSPACES_NBYTES,
    Estimate,
    Limits,
    Shards,
    base_config,
    parts,
)
from ds_zo.planner.models import LOW_RANK, Model
from ds_zo.planner.timeline import LiveBytes, Trace
from ds_zo.planner.units import PINNED

_REDUCE_BUCKET_NUMEL = 500_000_000
_LIVE_NUMEL = 1_000_000_000
_SUB_GROUP_NUMEL = 1_000_000_000
_PERSISTENT_NUMEL = 100_000
"""DeepSpeed's defaults for `reduce_bucket_size`, `stage3_max_live_parameters`, `sub_group_size` and
`stage3_param_persistence_threshold`."""
_NORM_NBYTES = 8
_NORM_NUMEL = 250_000_000
"""DeepSpeed converts gradients to float64 to compute their norm: at stage 2 one gradient at a time, at stage 3
`_NORM_NUMEL` elements at a time."""
_ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.0}}
_BF16_STATES = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
_PARAMETER_LOOP_S = 1.2e-4
"""Host time of one parameter in DeepSpeed's bf16 optimizer. The device is idle meanwhile."""
_PAGEABLE_GBPS = 5.7
"""Rate of uploads from host memory that is not pinned and is touched for the first time."""
_HOST_PASSES = 14 / 28
"""Host memory traffic of ZeRO-3's step besides Adam, as a share of Adam's 28 bytes a parameter: 14 bytes, to unscale
gradients and to convert weights to 16 bits."""
_BF16_HOST_PASSES = 4 / 28
"""The same with states in bf16, where weights need no conversion."""


def estimate_on_device(
    model: Model, limits: Limits, *, optimizer: str = "adamw", checkpointing: bool = True
) -> Estimate:
    """Estimates DeepSpeed's optimizer with all states on the GPU: AdamW (16 bytes of float32 states a parameter in
    mixed precision) or SGD without momentum (8 bytes)."""
    trace = model.backward_trace(checkpointing=checkpointing)
    mixed = model.dtype != "fp32"
    moments = 8 if optimizer == "adamw" else 0
    states = (moments + (8 if mixed else 0)) * model.numel
    # The update reads gradient, weights and moments, and writes weights and moments. In mixed precision DeepSpeed also
    # converts the gradient to float32 (6 bytes), adds it to the float32 gradient (12), computes the norm of that (4),
    # clears it (4), and converts the weights to 16 bits (6).
    swept = (2 * moments + 12 + (32 if mixed else 0)) * model.numel
    update_s = swept / (model.rates.device_memory_gbps * 1e9)
    update_s += _PARAMETER_LOOP_S * sum(1 for _ in model.module.parameters()) if mixed else 0.0
    chosen = _ADAM if optimizer == "adamw" else {"type": "SGD", "params": {"lr": 1e-2}}
    return _on_device(
        model,
        limits,
        contender=optimizer,
        setting=f"all on the device, float32 {'master, gradient' if mixed else 'weights'}"
        f"{' and moments' if moments else ''}",
        device={"states": states, **trace.peak_keeping.parts},
        process_nbytes=PROCESS_NBYTES + BACKWARD_NBYTES,
        step_s=trace.forward.seconds + trace.backward.seconds + update_s,
        reduced_nbytes=model.weights_nbytes,
        optimizer=chosen,
    )


def estimate_torch_adamw(model: Model, limits: Limits, *, checkpointing: bool = True) -> Estimate:
    """Estimates torch.optim.AdamW on the 16-bit weights: no master copy, moments in the dtype of the weights, and one
    temporary of the size of a moment during the step."""
    trace = model.backward_trace(checkpointing=checkpointing)
    weights = model.weights_nbytes
    in_step = 2 * weights
    at_peak = max(in_step, trace.peak_keeping.total)
    update_s = 14 * weights / (model.rates.device_memory_gbps * 1e9)
    return _on_device(
        model,
        limits,
        contender="torch-adamw",
        setting=f"all on the device, everything in {model.dtype}",
        device={"states": 2 * weights, "gradients" if at_peak == in_step else "activations": at_peak},
        step_s=trace.forward.seconds + trace.backward.seconds + update_s,
        reduced_nbytes=weights,
        optimizer=_ADAM,
        notes=("outside DeepSpeed, whose own AdamW keeps float32 states",),
    )


def _on_device(
    model: Model,
    limits: Limits,
    *,
    device: dict[str, int],
    optimizer: dict[str, Any],
    process_nbytes: int = PROCESS_NBYTES,
    **figures: Any,
) -> Estimate:
    """An estimate with weights and states on the GPU."""
    return Estimate(
        device=parts(weights=model.weights_nbytes, **device, workspace=TWO_WORKSPACES_NBYTES),
        host=parts(process=process_nbytes),
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": optimizer, "zero_optimization": {"stage": 0}},
        limits=limits,
        **figures,
    )


def estimate_zero_offload(
    model: Model,
    limits: Limits,
    *,
    checkpointing: bool = True,
    native_pins: bool = False,
    bf16_states: bool = False,
) -> Estimate:
    """Estimates ZeRO-Offload (stage 2): the download of gradients, Adam on the CPU and the upload of weights follow one
    another. Gradients are downloaded in the dtype of the states on the compute stream. Adam is planned at the rate of
    float32 states.

    DeepSpeed's `stage_1_and_2.py` pins four buffers: `single_partition_of_fp32_groups`, its gradient,
    `param_buffer_of_bit16_for_cpu_offload_groups`, and `temp_grad_buffer_for_cpu_offload` for the largest gradient."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize = model.itemsize
    largest = max(p.numel() for p in model.module.parameters()) * itemsize
    # With overlap_comm there are two buckets, from the first gradient to the end of the backward pass. A gradient that
    # is larger than a bucket is kept besides.
    buckets = 2 * _REDUCE_BUCKET_NUMEL * itemsize
    reducing = max(b.alive + itemsize * b.oversize_numel + _NORM_NBYTES * b.largest_numel for b in full_buckets(trace))
    peak = _reduction_peak(trace, at_all_times=0, from_first_gradient=buckets, reducing=reducing)
    flat = _flat_nbytes(model, bf16_states=bf16_states)
    rates = model.rates
    down_s, up_s = flat / (rates.link_down_gbps * 1e9), model.weights_nbytes / (rates.link_up_gbps * 1e9)
    forward_s, backward_s = trace.forward.seconds, trace.backward.seconds
    return _on_host(
        model,
        limits,
        trace,
        contender="zero-offload",
        setting="stage 2, Adam on the CPU, pinned, overlap_comm",
        device={"weights": model.weights_nbytes} | (peak + LiveBytes(largest, gradients=largest)).parts,
        host=lambda pin: {
            "master": pin(flat),
            "gradients": pin(flat) + pin(largest),
            "staging": pin(model.weights_nbytes),
        },
        native_pins=native_pins,
        bf16_states=bf16_states,
        step_s=forward_s + backward_s + down_s + model.numel / (rates.cpu_adam_gparams * 1e9) + up_s,
        starting_nbytes=2 * model.weights_nbytes,  # cloned on the device to make the float32 master
        up_nbytes=model.weights_nbytes,
        down_nbytes=flat,
        reduced_nbytes=model.weights_nbytes,
        zero={"stage": 2, "offload_optimizer": PINNED, "overlap_comm": True},
    )


def estimate_zero3(
    model: Model,
    limits: Limits,
    *,
    offload_param: bool = True,
    checkpointing: bool = True,
    native_pins: bool = False,
    bf16_states: bool = False,
) -> Estimate:
    """Estimates ZeRO-3 with Adam on the CPU, and with the parameters in host memory too if `offload_param`.

    Gradients are downloaded in 16 bits, uploaded again, and downloaded in the dtype of the states. New weights are
    uploaded from pageable memory. Adam and that upload are planned at the rates of float32 states."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize, weights = model.itemsize, model.weights_nbytes
    # There is one bucket at all times. DeepSpeed copies its gradients to reduce them; each is then uploaded again.
    reducing = max(
        b.alive
        + itemsize * (b.oversize_numel + b.copied_numel + b.largest_numel)
        + max(_NORM_NBYTES * min(b.largest_numel, _NORM_NUMEL), 4 * b.largest_numel)
        for b in full_buckets(trace)
    )
    bucket = _REDUCE_BUCKET_NUMEL * itemsize
    peak = _reduction_peak(trace, at_all_times=bucket, from_first_gradient=0, reducing=reducing)
    flat = _flat_nbytes(model, bf16_states=bf16_states)
    sub_groups = _sub_groups(model)
    uploads = 3 if checkpointing else 2  # each use gathers a layer anew, above the limit of live parameters
    gathers = uploads * weights if offload_param and model.numel > _LIVE_NUMEL else 0
    rates = model.rates
    forward_s = max(trace.forward.seconds, gathers / uploads / (rates.link_up_gbps * 1e9))
    backward_s = max(trace.backward.seconds, gathers * (uploads - 1) / uploads / (rates.link_duplex_gbps * 1e9))
    backward_s += (weights + flat) / (rates.link_down_gbps * 1e9)
    passes = 1 + (_BF16_HOST_PASSES if bf16_states else _HOST_PASSES)
    step_s = forward_s + backward_s + passes * model.numel / (rates.cpu_adam_gparams * 1e9)
    step_s += 0.0 if offload_param else weights / (min(_PAGEABLE_GBPS, rates.link_up_gbps) * 1e9)
    # DeepSpeed pins parameters one by one before it copies them to one buffer, and PyTorch never frees pinned memory.
    one_by_one = [p.numel() * itemsize for p in model.module.parameters() if p.numel() > _PERSISTENT_NUMEL]

    def host(pin: Callable[[int], int]) -> dict[str, int]:
        kept = sum(map(pin, one_by_one)) if pin is _pinned else 0
        # Where weights are on the GPU, new ones are converted to 16 bits one sub-group at a time.
        converted = 0 if offload_param or bf16_states else itemsize * max(sub_groups)
        return {
            "weights": pin(weights) + kept if offload_param else 0,
            "master": flat,
            "gradients": sum(pin(flat // model.numel * numel) for numel in sub_groups),
            "staging": pin(weights) + converted,
        }

    return _on_host(
        model,
        limits,
        trace,
        contender="zero-3" if offload_param else "zero-3-gpu-params",
        setting=f"stage 3, Adam{' and parameters' if offload_param else ''} on the CPU, pinned",
        device={"weights": min(model.numel, _LIVE_NUMEL) * itemsize if offload_param else weights} | peak.parts,
        host=host,
        native_pins=native_pins,
        bf16_states=bf16_states,
        shards=None if offload_param else _shards(model),
        step_s=step_s,
        up_nbytes=gathers + (1 if offload_param else 2) * weights,
        down_nbytes=weights + flat,
        reduced_nbytes=3 * weights // 2,  # two all-gathers and a reduce-scatter, of 1/2 all-reduce each
        zero={"stage": 3, "offload_optimizer": PINNED} | ({"offload_param": PINNED} if offload_param else {}),
    )


def _shards(model: Model) -> Shards:
    """Each GPU keeps a shard of all weights, and two gathered blocks."""
    weights = model.weights_nbytes
    gathered = 2 * weights // max(1, len(model.blocks))
    return Shards(blocks_nbytes=weights, non_blocks_nbytes=0, gathered_nbytes=gathered, reduced_nbytes=0)


def _on_host(
    model: Model,
    limits: Limits,
    trace: Trace,
    *,
    device: dict[str, int],
    host: Callable[[Callable[[int], int]], dict[str, int]],
    native_pins: bool,
    bf16_states: bool,
    zero: dict[str, Any],
    **figures: Any,
) -> Estimate:
    """An estimate of Adam on the CPU. `host` returns the buffers besides Adam's moments, and takes the function that
    gives a pinned buffer its size.

    `native_pins`: DS_PIN_MEMORY_BACKEND=native is set, so that pinned buffers are not rounded up to powers of two."""
    config: dict[str, Any] = base_config(batch=model.batch, dtype=model.dtype)
    if bf16_states:
        config["bf16"] = {**config["bf16"], **_BF16_STATES}
    beside = {
        "states": 2 * _flat_nbytes(model, bf16_states=bf16_states),
        "process": PROCESS_NBYTES + BACKWARD_NBYTES,
    }
    exact, rounded = (host(pin) | beside for pin in (int, _pinned))
    forward_s, backward_s = trace.forward.seconds, trace.backward.seconds
    best_s = zero_step_s(model, forward_s, backward_s)
    notes = [f"{best_s:.3g} s a step by Eq. 1 of the LSP paper, which hides more copies than DeepSpeed does"]
    if not native_pins:
        native = f"DS_PIN_MEMORY_BACKEND=native needs {sum(exact.values()) / 1e9:.1f} GB of host memory"
        notes.append(f"PyTorch pins in powers of two; {native}")
    found = Estimate(
        device=parts(**device, workspace=TWO_WORKSPACES_NBYTES),
        host=parts(**exact if native_pins else rounded),
        sharded=frozenset({"weights", "master", "gradients", "staging", "states"}),
        config=config | {"optimizer": _ADAM, "zero_optimization": zero},
        notes=tuple(notes),
        limits=limits,
        **figures,
    )
    found = replace(found, divided_s=found.step_s - forward_s - backward_s)
    if not bf16_states:
        return found
    return replace(found, contender=f"{found.contender}-bf16", setting=f"{found.setting}, bf16 states")


def _flat_nbytes(model: Model, *, bf16_states: bool) -> int:
    """Bytes of one flat buffer in the dtype of the states: the master, its gradient, or a moment."""
    return (2 if bf16_states else 4) * model.numel


@dataclass(frozen=True)
class FullBucket:
    """A bucket of gradients that is about to be reduced: the next gradient does not fit, or the backward pass ends."""

    alive: int
    """Bytes that are alive on the device then, the bucket and the parameters aside."""
    largest_numel: int
    """Elements of its largest gradient."""
    copied_numel: int
    """Elements that are copied to be reduced. 0 for a bucket with one gradient, which is reduced in place."""
    oversize_numel: int
    """Elements of a gradient that is larger than the bucket and is kept besides; 0 if there is none."""


def full_buckets(trace: Trace) -> Iterator[FullBucket]:
    """The buckets of a backward pass, in the order in which they are reduced."""
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


def _reduction_peak(trace: Trace, *, at_all_times: int, from_first_gradient: int, reducing: int) -> LiveBytes:
    """Bytes at the peak of a pass whose gradients are reduced bucket by bucket. `at_all_times` and
    `from_first_gradient` are bytes of buckets. `reducing` are the most bytes that are alive while a bucket is reduced,
    the buckets aside."""
    before = trace.peak.total + at_all_times
    after = max(trace.peak_from_first_gradient, reducing) + at_all_times + from_first_gradient
    if before >= after:
        return trace.peak + LiveBytes(at_all_times, gradients=at_all_times)
    return LiveBytes(after, gradients=after - trace.peak_from_first_gradient)


def _sub_groups(model: Model) -> list[int]:
    """Number of elements of each sub-group, which is the unit that stage 3 updates at once."""
    found = [0]
    for p in model.module.parameters():
        if found[-1] >= _SUB_GROUP_NUMEL:
            found.append(0)
        found[-1] += p.numel()
    return found


def zero_step_s(model: Model, forward_s: float, backward_s: float) -> float:
    """Seconds of a ZeRO-Offload step by Eq. 1 of the LSP paper, in which the download of gradients overlaps with the
    backward pass, and the upload of weights with the update on the CPU."""
    rates = model.rates
    down_s = model.weights_nbytes / (rates.link_down_gbps * 1e9)
    up_s = model.weights_nbytes / (rates.link_up_gbps * 1e9)
    return forward_s + max(backward_s, down_s) + max(model.numel / (rates.cpu_adam_gparams * 1e9), up_s)


def estimate_low_rank(model: Model, limits: Limits, *, method: str, checkpointing: bool = True) -> Estimate:
    """Estimates LoRA or GaLore on the matrices of the blocks, by Table 2 of the LSP paper.

    For an m x n matrix, rank r and beta = 3 for Adam, LoRA stores beta (m + n) r elements besides the weights, and
    GaLore (m + beta n) r elements. Adam's moments among them are in float32."""
    trace = model.backward_trace(checkpointing=checkpointing)
    itemsize = model.itemsize
    long = sum(max(shape) for shape in model.matrices) * LOW_RANK
    short = sum(min(shape) for shape in model.matrices) * LOW_RANK
    trained = long + short if method == "lora" else long
    if method == "lora":
        extra, states = itemsize * trained, 8 * trained
        setting = f"rank {LOW_RANK}, weights frozen"
    else:
        extra, states = itemsize * short, 8 * trained
        setting = f"rank {LOW_RANK}, gradients projected, weights trained"
    backward = trace.backward * (2 / 3 if method == "lora" else 1.0)  # no gradients of frozen matrices
    swept = 24 * trained + 3 * model.weights_nbytes * (method != "lora")
    update_s = swept / (model.rates.device_memory_gbps * 1e9)
    return _on_device(
        model,
        limits,
        contender=method,
        setting=setting,
        device={"projectors": extra, "states": states, **trace.peak.parts},
        step_s=trace.forward.seconds + backward.seconds + update_s,
        reduced_nbytes=itemsize * trained,
        optimizer=lora_optimizer(model),
        notes=("extra memory by Table 2 of the LSP paper; needs its own library (PEFT, galore-torch)",),
    )


def lora_optimizer(model: Model) -> dict[str, Any]:
    """Stock AdamW, at a learning rate of adapters."""
    rate = starting_rate("adapter", num_parameters=model.numel).lr
    return {**_ADAM, "params": {**_ADAM["params"], "lr": rate}}


def _pinned(nbytes: int) -> int:
    """PyTorch's pinned allocator rounds each request up to a power of two; DeepSpeed makes one for each flat buffer."""
    return 1 << (nbytes - 1).bit_length()
