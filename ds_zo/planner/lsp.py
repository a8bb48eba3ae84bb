"""LSP on paper: weights, projectors and d x d sums on the device, Adam in d x d on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_zo.config.optimizers import LSPParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import recomputed as twice
from ds_zo.planner.estimate import (
    ADAM_THREADS_NBYTES,
    BACKWARD_NBYTES,
    PROCESS_NBYTES,
    TWO_WORKSPACES_NBYTES,
    Estimate,
    Limits,
    base_config,
    parts,
)
from ds_zo.planner.models import Model
from ds_zo.planner.timeline import Cost
from ds_zo.projectors import choose_dims

_PAYLOAD_NBYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_PROJECTOR_ENTRY_NBYTES = 16
"""A position and a float32 value by row, the same by column, and where each column's entries stand by row."""
_VALUE_NBYTES = 4
_NUM_LANDINGS = 3
"""Blocks whose directions may be on the device at once."""
_MAX_HELD_NBYTES = 128 << 20
"""Gradients of a layer that wait for one another."""
_TRIP_LAUNCH_S = 3e-4
"""Host time of a layer's compress, its two copies and its apply."""


@dataclass
class _Counts:
    projector_nbytes: int = 0
    subspace_numel: int = 0
    """Of all d x d matrices."""
    whole_numel: int = 0
    """Of matrices that Adam sees as they are, on the CPU like the d x d ones."""
    vector_numel: int = 0
    """Of parameters whose Adam stays on the device; all are whole where blocks stream."""
    payload_nbytes: int = 0
    """One way, all matrices."""
    largest_payload: int = 0
    """Of one block or module."""
    projected_nbytes: int = 0
    num_trips: int = 0
    largest_scratch: int = 0
    """Of one block's products, in the backward pass and as much again where weights are updated."""
    held_nbytes: int = 0
    """Gradients that wait, besides the last."""


def estimate_lsp(
    model: Model,
    limits: Limits,
    *,
    stream: StreamConfig | None = None,
    params: LSPParams | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """`offload` None: weights stream where the device is too small for them."""
    stream, params = stream or StreamConfig(), params or LSPParams()
    whole = _estimate(model, limits, stream, params, offload=False, checkpointing=checkpointing)
    if offload is False or (offload is None and whole.fits_device):
        return whole
    return _estimate(model, limits, stream, params, offload=True, checkpointing=True)


def _estimate(
    model: Model, limits: Limits, stream: StreamConfig, params: LSPParams, *, offload: bool, checkpointing: bool
) -> Estimate:
    trace = model.backward_trace(checkpointing=checkpointing)
    counts = _count(model, params, streams=offload)
    rates = model.rates
    moved_numel = counts.subspace_numel + counts.whole_numel
    moved = counts.payload_nbytes
    update_s = moved_numel / (rates.cpu_adam_gparams * 1e9)
    is_narrow = params.payload_dtype != "fp32"  # then sums, payloads and the errors of these are apart
    sums = (8 + _PAYLOAD_NBYTES[params.payload_dtype] if is_narrow else 4) * counts.subspace_numel
    errors = 8 * counts.subspace_numel if is_narrow else 0
    # Compress reads every gradient once, apply reads and writes every weight once.
    around = Cost(
        0.0,
        3 * counts.projected_nbytes / (rates.device_memory_gbps * 1e9),
        counts.num_trips * _TRIP_LAUNCH_S,
    )
    num_layers = max(1, len(model.blocks))
    down_s, up_s = moved / (rates.link_down_gbps * 1e9), moved / (rates.link_up_gbps * 1e9)
    device = parts(
        projectors=counts.projector_nbytes,
        subspace=sums + _NUM_LANDINGS * counts.largest_payload + 2 * counts.largest_scratch + counts.held_nbytes,
        states=8 * counts.vector_numel,
        activations=trace.peak.activations,
        logits=trace.peak.logits,
        workspace=TWO_WORKSPACES_NBYTES,
    )
    process = PROCESS_NBYTES + BACKWARD_NBYTES + ADAM_THREADS_NBYTES
    host = parts(states=8 * moved_numel + errors, payload=2 * moved, process=process)
    zero: dict[str, Any] = {"stage": 0, "offload_optimizer": twice.OFFLOADED}
    section = stream.model_dump(exclude_unset=True)
    setting = f"d = {params.subspace_dim}, {params.nonzeros_per_row} non-zeros a row, Adam on the CPU"
    notes = ["activations include the last gradient of those alive", "step by Eq. 4 of the LSP paper"]
    streamed_up = streamed_down = filling = 0
    if offload:
        found = twice.place(model, limits, stream, beside=sum(device.values()))
        compute_s = twice.step_s(
            model,
            trace,
            found,
            update=lambda numel, _: around * (numel / model.numel),
            sent_back_forward=True,  # with the directions that waited for the visit
        )
        device = parts(weights=found.weights_nbytes, slots=found.slots_nbytes) | device
        host = parts(weights=found.store_nbytes) | host
        streamed_up, streamed_down, filling = found.up_nbytes, found.store_nbytes, found.filling_nbytes
        zero["offload_param"] = twice.OFFLOADED
        section = twice.section_of(limits, stream)
        setting = f"{setting}; {found.setting}"
        notes.append("weights stream on one rank only; what it takes of a GPU has not been compared with a run")
    else:
        compute_s = trace.forward.seconds + (trace.backward + around).seconds
        device = parts(weights=model.weights_nbytes) | device
    step_s = lsp_step_s(compute_s, down_s=down_s, up_s=up_s, update_s=update_s, num_layers=num_layers)
    config = base_config(batch=model.batch, dtype=model.dtype) | {
        "optimizer": {"type": "LSP", "params": {"lr": params.lr, **params.model_dump(exclude_unset=True)}},
        "zero_optimization": zero,
    }
    if section:
        config["ds_zo"] = {"stream": section}
    return Estimate(
        contender="lsp",
        setting=setting,
        device=device,
        host=host,
        filling_nbytes=filling,
        step_s=step_s,
        divided_s=step_s - compute_s,
        up_nbytes=moved + streamed_up,
        down_nbytes=moved + streamed_down,
        sharded=frozenset({"states"}),
        reduced_nbytes=4 * (moved_numel + counts.vector_numel),
        config=config,
        notes=tuple(notes),
        limits=limits,
    )


def lsp_step_s(compute_s: float, *, down_s: float, up_s: float, update_s: float, num_layers: int) -> float:
    """Eq. 4: compute and one layer's trip, or whichever of the link's directions and the CPU is the bottleneck."""
    one_layer = (down_s + up_s + update_s) / num_layers
    return max(compute_s + one_layer, down_s, up_s, update_s)


def _count(model: Model, params: LSPParams, *, streams: bool) -> _Counts:
    """`streams`: vectors of blocks travel with them, so their Adam is on the CPU too."""
    counts = _Counts()
    payload = _PAYLOAD_NBYTES[params.payload_dtype]
    block_of = {id(p): i for i, block in enumerate(model.blocks) for p in block.parameters()}
    travels: dict[object, int] = {}
    """Payload of each block or module."""
    scratch: dict[object, int] = {}
    held: dict[object, list[int]] = {}
    for name, p in model.module.named_parameters():
        at_edge = id(p) not in block_of
        if p.ndim < 2 and (at_edge or not streams):
            counts.vector_numel += p.numel()
            continue
        if at_edge and params.edge == "freeze":
            continue
        group = name if at_edge else block_of[id(p)]
        projects = p.ndim == 2 and params.projector != "none" and not (at_edge and params.edge == "dense")
        dims = choose_dims(p.shape[0], p.shape[1], params.subspace_dim) if projects else None
        if dims is None:
            counts.whole_numel += p.numel()
            nbytes = p.numel() * p.element_size()
        else:
            nonzeros = min(params.nonzeros_per_row, *dims)
            counts.projector_nbytes += sum(p.shape) * nonzeros * _PROJECTOR_ENTRY_NBYTES
            counts.projector_nbytes += p.shape[1] * nonzeros * _VALUE_NBYTES  # updates have a Q of their own
            counts.subspace_numel += dims[0] * dims[1]
            counts.projected_nbytes += p.numel() * p.element_size()
            scratch[group] = scratch.get(group, 0) + 4 * dims[0] * p.shape[1]
            held.setdefault(group, []).append(p.numel() * p.element_size())
            nbytes = payload * dims[0] * dims[1]
        counts.payload_nbytes += nbytes
        travels[group] = travels.get(group, 0) + nbytes
    counts.num_trips = len(travels)
    counts.largest_payload = max(travels.values(), default=0)
    counts.largest_scratch = max(scratch.values(), default=0)
    waiting = (min(sum(sizes) - max(sizes), _MAX_HELD_NBYTES) for sizes in held.values())
    counts.held_nbytes = max(waiting, default=0)
    return counts
