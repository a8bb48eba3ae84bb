"""The estimate of LSP: weights, projectors and d x d sums on the device, Adam on d x d matrices on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ds_zo.config.optimizers import LSPParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import recomputed
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
from ds_zo.planner.recomputed import Placed
from ds_zo.planner.timeline import Cost
from ds_zo.planner.units import PINNED, section_of
from ds_zo.projectors import choose_dims

_PROJECTOR_ENTRY_NBYTES = 16
"""Device memory of one non-zero: its position and float32 value in the order of rows, the same in the order of columns,
and the index that maps one order to the other."""
_VALUE_NBYTES = 4
_NUM_DIRECTION_BUFFERS = 3
"""Buffers on the device for uploaded directions, each large enough for any block or module that needs one."""
_MAX_HELD_NBYTES = 128 << 20
"""Most bytes of gradients of a layer that wait to be compressed together."""
_GROUP_LAUNCH_S = 3e-4
"""Host time of one block or module in a step: compression, download, upload and update."""


@dataclass
class _UpdateGroup:
    """A block, or a module outside the blocks, whose Adam runs on the CPU."""

    payload_nbytes: int = 0
    """Bytes of its download in a step; its upload has as many."""
    projected_nbytes: int = 0
    """The part of them that is projected."""
    scratch_nbytes: int = 0
    """Scratch bytes of its products."""
    gradients: list[int] = field(default_factory=list)
    """Bytes of the gradients of its projected matrices, which are compressed together."""

    @property
    def direction_buffer_nbytes(self) -> int:
        """Bytes of the buffer for its directions, where more of it is whole than projected. The directions of other
        groups take the place of their sums."""
        return self.payload_nbytes if self.payload_nbytes > 2 * self.projected_nbytes else 0

    @property
    def held_nbytes(self) -> int:
        """Bytes of gradients that wait for the last one, without that one."""
        return min(sum(self.gradients) - max(self.gradients, default=0), _MAX_HELD_NBYTES)


@dataclass
class _Counts:
    """Sizes that follow from the shapes of a model's parameters."""

    groups: dict[object, _UpdateGroup] = field(default_factory=dict)
    """By the index of a block, or the name of a parameter outside the blocks."""
    projector_nbytes: int = 0
    subspace_numel: int = 0
    """Elements of all d x d matrices."""
    whole_numel: int = 0
    """Elements of parameters that are not projected and whose Adam runs on the CPU too."""
    vector_numel: int = 0
    """Elements of parameters whose Adam runs on the device: vectors, unless blocks stream and they are inside one."""
    projected_nbytes: int = 0
    """Bytes of the weights of projected matrices."""

    def largest(self, size: Callable[[_UpdateGroup], int]) -> int:
        return max(map(size, self.groups.values()), default=0)


def estimate_lsp(
    model: Model,
    limits: Limits,
    *,
    stream: StreamConfig | None = None,
    params: LSPParams | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """Estimates LSP. `offload` None: blocks stream only where the whole model does not fit the device."""
    stream, params = stream or StreamConfig(), params or LSPParams()
    estimate = partial(_estimate, model, limits, params, checkpointing)
    return recomputed.streaming(estimate, model, limits, stream, offload)


def _estimate(
    model: Model, limits: Limits, params: LSPParams, checkpointing: bool, stream: StreamConfig, offload: bool
) -> Estimate:
    trace = recomputed.trace_of_all_weights(model, stream, offload=offload, checkpointing=checkpointing)
    counts = _count(model, params, streams=offload)
    rates = model.rates
    moved_numel = counts.subspace_numel + counts.whole_numel
    moved = sum(group.payload_nbytes for group in counts.groups.values())
    update_s = moved_numel / (rates.cpu_adam_gparams * 1e9)
    # Compression reads every gradient once; the update reads and writes every weight once.
    around = Cost(
        0.0,
        3 * counts.projected_nbytes / (rates.device_memory_gbps * 1e9),
        len(counts.groups) * _GROUP_LAUNCH_S,
    )
    num_layers = max(1, len(model.blocks))
    down_s, up_s = moved / (rates.link_down_gbps * 1e9), moved / (rates.link_up_gbps * 1e9)
    beside = parts(
        projectors=counts.projector_nbytes,
        subspace=4 * counts.subspace_numel
        + _NUM_DIRECTION_BUFFERS * counts.largest(lambda group: group.direction_buffer_nbytes)
        # The backward pass needs a block's products, and the update as many again.
        + 2 * counts.largest(lambda group: group.scratch_nbytes)
        + counts.largest(lambda group: group.held_nbytes)
        # Loss scaling keeps whole gradients until the step.
        + (counts.whole_numel * 2 if model.dtype == "fp16" else 0),
        states=8 * counts.vector_numel,
        **trace.peak.parts,
        workspace=TWO_WORKSPACES_NBYTES,
    )
    setting = f"d = {params.subspace_dim}, {params.nonzeros_per_row} non-zeros a row, Adam on the CPU"
    notes = ["activations include the last gradient of those alive", "step by Eq. 4 of the LSP paper"]
    if offload:
        placed = recomputed.place(model, limits, stream, trace, beside=beside)
        setting = f"{setting}; {placed.setting}"
        notes.append("blocks stream on one rank only; the estimate of GPU memory has not been compared with a run")
    else:
        placed = Placed("", model.weights_nbytes, beside)
    passes_s, compute_s = recomputed.seconds(
        model,
        trace,
        placed,
        update=lambda numel, _: around * (numel / model.numel),
        sent_back="forward",  # the forward pass applies the directions of the last step
    )
    step_s = lsp_step_s(passes_s, down_s=down_s, up_s=up_s, update_s=update_s, num_layers=num_layers)
    written = {"lr": params.lr, **params.model_dump(exclude_unset=True)}
    return Estimate(
        contender="lsp",
        setting=setting,
        device=parts(weights=placed.weights_nbytes, slots=placed.slots_nbytes, **placed.beside),
        host=parts(
            weights=placed.store_nbytes,
            activations=placed.inputs_nbytes,
            states=8 * moved_numel,
            payload=2 * moved,
            process=PROCESS_NBYTES + BACKWARD_NBYTES + ADAM_THREADS_NBYTES,
        ),
        filling_nbytes=placed.filling_nbytes,
        step_s=step_s,
        compute_s=lsp_step_s(compute_s, down_s=0.0, up_s=0.0, update_s=update_s, num_layers=num_layers),
        divided_s=step_s - passes_s,
        up_nbytes=moved + placed.up_nbytes,
        down_nbytes=moved + placed.store_nbytes + placed.inputs_nbytes,
        sharded=frozenset({"states"}),
        streams_on_one_rank=offload,
        reduced_nbytes=4 * (moved_numel + counts.vector_numel),
        config=base_config(batch=model.batch, dtype=model.dtype)
        | {"optimizer": {"type": "LSP", "params": written}}
        | section_of(limits, stream, offload=offload, offload_optimizer=PINNED),
        notes=tuple(notes),
        limits=limits,
    )


def lsp_step_s(compute_s: float, *, down_s: float, up_s: float, update_s: float, num_layers: int) -> float:
    """Seconds of a step by Eq. 4 of the LSP paper: compute plus one layer's download, update and upload; or the total
    of the downloads, of the uploads or of the updates, if one of these is longer."""
    one_layer = (down_s + up_s + update_s) / num_layers
    return max(compute_s + one_layer, down_s, up_s, update_s)


def _count(model: Model, params: LSPParams, *, streams: bool) -> _Counts:
    """`streams`: blocks stream, so that Adam of the vectors inside them runs on the CPU too."""
    counts = _Counts()
    block_of = {id(p): i for i, block in enumerate(model.blocks) for p in block.parameters()}
    for name, p in model.module.named_parameters():
        is_outside = id(p) not in block_of
        if p.ndim < 2 and (is_outside or not streams):
            counts.vector_numel += p.numel()
            continue
        if is_outside and params.edge == "freeze":
            continue
        group = counts.groups.setdefault(block_of.get(id(p), name), _UpdateGroup())
        projects = p.ndim == 2 and params.projector != "none" and not (is_outside and params.edge == "dense")
        dims = choose_dims(p.shape[0], p.shape[1], params.subspace_dim) if projects else None
        nbytes = p.numel() * p.element_size()
        if dims is None:
            counts.whole_numel += p.numel()
            group.payload_nbytes += nbytes
            continue
        nonzeros = min(params.nonzeros_per_row, *dims)
        counts.projector_nbytes += sum(p.shape) * nonzeros * _PROJECTOR_ENTRY_NBYTES
        counts.projector_nbytes += p.shape[1] * nonzeros * _VALUE_NBYTES  # values of `Q_update`
        counts.subspace_numel += dims[0] * dims[1]
        counts.projected_nbytes += nbytes
        group.payload_nbytes += 4 * dims[0] * dims[1]
        group.projected_nbytes += 4 * dims[0] * dims[1]
        group.scratch_nbytes += 4 * dims[0] * p.shape[1]
        group.gradients.append(nbytes)
    return counts
