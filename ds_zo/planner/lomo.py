"""LOMO and AdaLOMO on paper: gradients that live as long as one update, resident or streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ds_zo.config.section import StreamConfig
from ds_zo.planner import pricing
from ds_zo.planner.estimate import PROCESS_NBYTES, WORKSPACE_NBYTES, Estimate, Limits, Shards, base_config, parts
from ds_zo.planner.models import Model
from ds_zo.planner.trace import Cost, Trace
from ds_zo.streaming.budget import device_bytes, most_resident
from ds_zo.streaming.placement import plan_units, spread
from ds_zo.streaming.schedule import Action, Kind

_LR = {"lomo": 1e-2, "adalomo": 5e-4}
_HOOK_LAUNCH_S = 3e-5
"""Host time of one parameter's update."""


def estimate_lomo(
    model: Model,
    limits: Limits,
    *,
    backend: Literal["lomo", "adalomo"] = "lomo",
    stream: StreamConfig | None = None,
    params: Mapping[str, Any] | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """One backward pass (no clipping by the global norm). `offload` None: only where the device is too small. `params`
    go into the JSON: none of them takes memory."""
    stream = stream or StreamConfig()
    section = stream.model_dump(exclude_unset=True)
    config = _config(model, backend, params or {}) | ({"ds_zo": {"stream": section}} if section else {})
    whole = _resident(model, limits, backend, config, checkpointing=checkpointing)
    if offload is False or (offload is None and whole.fits_device):
        return whole
    return _streamed(model, limits, backend, stream, config)


def _resident(model: Model, limits: Limits, backend: str, config: dict[str, Any], *, checkpointing: bool) -> Estimate:
    trace = model.backward_trace(checkpointing=checkpointing, loss_in_chunks=True)
    step_s = trace.forward.seconds + (trace.backward + _update(model, model.numel, _num_parameters(model))).seconds
    return Estimate(
        contender=backend,
        setting=f"all on the device, one backward pass{', checkpointing' if checkpointing else ''}",
        device=parts(
            weights=model.weights_nbytes,
            states=_state_nbytes(model, backend),
            activations=trace.peak.activations,
            logits=trace.peak.logits,
            workspace=WORKSPACE_NBYTES,
        ),
        host=parts(process=PROCESS_NBYTES),
        step_s=step_s,
        reduced_nbytes=model.weights_nbytes,
        shards=_shards(model, backend),
        config=config,
        notes=("activations include the largest gradient that is alive",),
        limits=limits,
    )


def _streamed(model: Model, limits: Limits, backend: str, stream: StreamConfig, config: dict[str, Any]) -> Estimate:
    """Blocks are recomputed from their inputs whatever the model's own checkpointing says."""
    placement = plan_units(
        model.module, [{"params": list(model.module.parameters())}], block_paths=stream.blocks, split=False
    )
    trace = model.backward_trace(checkpointing=True, loss_in_chunks=True)
    num_blocks = len(placement.blocks)
    num_slots = stream.device_slots if stream.overlap else 1
    none_of_zo: dict[str, Any] = {"num_low_slots": 0, "num_passes": 0, "num_benches": 0, "pairs": False}
    sizes = {"num_slots": num_slots, **none_of_zo}
    states = _state_nbytes(model, backend)
    # The scratch that `device_bytes` counts is ZO's.
    beside = trace.peak.total + WORKSPACE_NBYTES + states - placement.scratch_nbytes
    if stream.resident_blocks is not None:
        num_resident = min(stream.resident_blocks, num_blocks)
    elif limits.device_nbytes is None:
        num_resident = 0
    else:
        budget = limits.device_nbytes
        num_resident = most_resident(
            placement, budget_nbytes=budget, activations_nbytes=beside, sizes=lambda num_resident: sizes
        )
        num_resident = max(0, num_resident)
    there = device_bytes(placement, num_resident=num_resident, **sizes)
    stays = spread(num_blocks, num_resident)
    streamed = [i for i in range(num_blocks) if i not in stays]
    store = sum(placement.blocks[i].nbytes for i in streamed)
    # The last blocks of the forward pass are still in their slots when it turns, and so are the first at the next step.
    ends = [*streamed[-num_slots:], *streamed[:num_slots]] if stream.overlap else []
    still_there = min(2 * store, sum(placement.blocks[i].nbytes for i in ends))
    config = config | {"zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}}}
    if limits.device_nbytes is not None and stream.resident_blocks is None:
        told = {"device_memory_gb": limits.device_nbytes / 1e9}
        config["ds_zo"] = {"stream": stream.model_dump(exclude_unset=True) | told}
    return Estimate(
        contender=backend,
        setting=f"{len(streamed)} of {num_blocks} blocks streamed, recomputed from their inputs",
        device=parts(
            weights=there.edges + there.blocks,
            slots=there.slots,
            states=states,
            activations=trace.peak.activations,
            logits=trace.peak.logits,
            workspace=WORKSPACE_NBYTES,
        ),
        host=parts(weights=store, process=PROCESS_NBYTES),
        step_s=_streamed_step_s(model, trace, streamed, [u.nbytes for u in placement.blocks], num_slots=num_slots),
        up_nbytes=2 * store - still_there,
        down_nbytes=store,
        reduced_nbytes=model.weights_nbytes,
        shards=_shards(model, backend),
        config=config,
        notes=("activations include the largest gradient that is alive",),
        limits=limits,
    )


def _shards(model: Model, backend: str) -> Shards:
    """Two buckets of gradients at once: AdaLOMO's of whole blocks, LOMO's of a matrix (ds_zo/engines/lomo_ranks.py)."""
    in_blocks = [list(block.parameters()) for block in model.blocks]
    itemsize = model.weights_nbytes / model.numel
    numels = [sum(p.numel() for p in block) for block in in_blocks]
    inside = {id(p) for block in in_blocks for p in block}
    around = [p.numel() for p in model.module.parameters() if id(p) not in inside]
    largest = max((p.numel() for block in in_blocks for p in block), default=0)
    bucket = max(numels, default=0) if backend == "adalomo" else largest
    return Shards(
        blocks_nbytes=int(itemsize * sum(numels)),
        edges_nbytes=int(itemsize * sum(around)),
        gathered_nbytes=int(itemsize * 2 * max(numels, default=0)),
        reduced_nbytes=int(itemsize * (2 * bucket + max(around, default=0))),
    )


def _streamed_step_s(model: Model, trace: Trace, streamed: list[int], nbytes: list[int], *, num_slots: int) -> float:
    """Blocks come up in order, then in reverse; the last ones of the forward pass are still there."""
    rates, num_blocks = model.rates, len(nbytes)
    per_block = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    forward = {(i, Kind.COMPUTE): trace.block[i].seconds for i in range(num_blocks)}
    backward_edge = trace.edge * 2.0
    share = (trace.backward - backward_edge) * (1.0 / max(1, num_blocks))
    backward = {
        (num_blocks + i, Kind.COMPUTE): (
            share + _update(model, per_block[i], _num_parameters(model) // num_blocks)
        ).seconds
        for i in range(num_blocks)
    }
    edge_numel = model.numel - sum(per_block)
    seconds = forward | backward
    seconds[pricing.EDGE, Kind.COMPUTE] = (trace.edge * 3.0 + _update(model, edge_numel, 4)).seconds
    for i in range(num_blocks):
        seconds[i, Kind.UPLOAD] = nbytes[i] / (rates.link_up_gbps * 1e9)
        # In the backward pass blocks go down while others come up.
        seconds[num_blocks + i, Kind.UPLOAD] = nbytes[i] / (rates.link_duplex_gbps * 1e9)
        seconds[num_blocks + i, Kind.DOWNLOAD] = nbytes[i] / (rates.link_duplex_gbps * 1e9)
    moving = set(streamed)
    order = list(range(num_blocks))
    up, _ = pricing.pass_over(order, streamed=moving, num_slots=num_slots)
    last = {a.slot: a.block for a in up if a.kind is Kind.COMPUTE and a.slot >= 0}
    down, _ = pricing.pass_over(
        order[::-1],
        streamed=moving,
        num_slots=num_slots,
        downloads=moving,
        loaded={block: slot for slot, block in last.items()},
    )
    # A block of the backward pass is another piece of work than the same block's forward.
    later = [Action(a.block + num_blocks, a.kind, a.slot) for a in down]
    return pricing.seconds([*up, pricing.edge(), *later], seconds)


def _update(model: Model, numel: int, num_parameters: int) -> Cost:
    """One kernel a parameter: the gradient is read, the weight read and written."""
    itemsize = model.weights_nbytes / model.numel
    return Cost(0.0, 3 * itemsize * numel / (model.rates.device_memory_gbps * 1e9), num_parameters * _HOOK_LAUNCH_S)


def _num_parameters(model: Model) -> int:
    return sum(1 for _ in model.module.parameters())


def _state_nbytes(model: Model, backend: str) -> int:
    """AdaLOMO's mean squares of rows and columns, in float32."""
    if backend == "lomo":
        return 0
    return sum(
        4 * (p.numel() if p.ndim < 2 else p.numel() // p.shape[-1] + p.numel() // p.shape[-2])
        for p in model.module.parameters()
    )


def _config(model: Model, backend: str, params: Mapping[str, Any]) -> dict[str, Any]:
    config = base_config(batch=model.batch, dtype=model.dtype, gradient_clipping=0.0)
    names = {"lomo": "LOMO", "adalomo": "AdaLOMO"}
    return config | {
        "optimizer": {"type": names[backend], "params": {"lr": _LR[backend], **params}},
        "zero_optimization": {"stage": 0},
    }
