"""The estimates of LOMO and AdaLOMO, with all weights on the device or with streamed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ds_zo.config.learning_rates import starting_rate
from ds_zo.config.optimizers import LOMOParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import recomputed
from ds_zo.planner.estimate import (
    PROCESS_NBYTES,
    TWO_WORKSPACES_NBYTES,
    Estimate,
    Limits,
    Shards,
    base_config,
    parts,
)
from ds_zo.planner.models import Model
from ds_zo.planner.recomputed import Placed
from ds_zo.planner.timeline import Cost
from ds_zo.planner.units import section_of

_HOOK_LAUNCH_S = 3e-5
"""Host time of the hook and the update of one parameter."""


def _factored_moments_nbytes(model: Model) -> int:
    """Bytes of AdaLOMO's second moments: a float32 value for each row and each column."""
    return sum(
        4 * (p.numel() if p.ndim < 2 else p.numel() // p.shape[-1] + p.numel() // p.shape[-2])
        for p in model.module.parameters()
    )


@dataclass(frozen=True)
class _Rule:
    """An update rule: its name and memory."""

    optimizer_type: str
    state_nbytes: Callable[[Model], int] = lambda model: 0
    reduces_blocks: bool = False
    """Gradients of whole blocks are reduced together, not those of one matrix."""

    @property
    def contender(self) -> str:
        return self.optimizer_type.lower()


_LOMO = _Rule("LOMO")
_ADALOMO = _Rule("AdaLOMO", state_nbytes=_factored_moments_nbytes, reduces_blocks=True)


def estimate_lomo(
    model: Model,
    limits: Limits,
    *,
    rule: _Rule = _LOMO,
    stream: StreamConfig | None = None,
    params: LOMOParams | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
) -> Estimate:
    """Estimates LOMO or AdaLOMO with one backward pass, that is without clipping by the global norm. `offload` None:
    blocks stream only where the whole model does not fit the device. `params` are copied to the JSON; none of them
    takes memory."""
    stream = stream or StreamConfig()
    estimate = partial(_estimate, model, limits, rule, params, checkpointing)
    return recomputed.streaming(estimate, model, limits, stream, offload)


estimate_adalomo = partial(estimate_lomo, rule=_ADALOMO)


def _estimate(
    model: Model,
    limits: Limits,
    rule: _Rule,
    params: LOMOParams | None,
    checkpointing: bool,
    stream: StreamConfig,
    offload: bool,
) -> Estimate:
    """Streamed blocks are always recomputed from their inputs."""
    trace = recomputed.trace_of_all_weights(model, stream, offload=offload, checkpointing=checkpointing)
    beside = {"states": rule.state_nbytes(model), **trace.peak.parts, "workspace": TWO_WORKSPACES_NBYTES}
    if offload:
        placed = recomputed.place(model, limits, stream, trace, beside=beside)
    else:
        how = f"all on the device, one backward pass{', checkpointing' if checkpointing else ''}"
        placed = Placed(how, model.weights_nbytes, beside)
    step_s, compute_s = recomputed.seconds(model, trace, placed, update=partial(_update, model), sent_back="backward")
    written = {} if params is None else params.model_dump(exclude_unset=True)
    lr = starting_rate(rule.contender, num_parameters=model.numel, is_clipped=False).lr
    return Estimate(
        contender=rule.contender,
        setting=placed.setting,
        device=parts(weights=placed.weights_nbytes, slots=placed.slots_nbytes, **placed.beside),
        host=parts(weights=placed.store_nbytes, activations=placed.inputs_nbytes, process=PROCESS_NBYTES),
        filling_nbytes=placed.filling_nbytes,
        step_s=step_s,
        compute_s=compute_s,
        up_nbytes=placed.up_nbytes,
        down_nbytes=placed.store_nbytes + placed.inputs_nbytes,
        reduced_nbytes=model.weights_nbytes,
        shared=frozenset({"weights"}),
        shards=_shards(model, rule),
        config=base_config(batch=model.batch, dtype=model.dtype, gradient_clipping=0.0)
        | {"optimizer": {"type": rule.optimizer_type, "params": {"lr": lr, **written}}}
        | section_of(limits, stream, offload=offload),
        notes=("activations include the largest gradient that is alive",),
        limits=limits,
    )


def _shards(model: Model, rule: _Rule) -> Shards:
    """Device memory at ZeRO stage 3. Two buckets of gradients are alive at once: of whole blocks for AdaLOMO, of one
    matrix for LOMO (`lomo/buckets.py`)."""
    in_blocks = [list(block.parameters()) for block in model.blocks]
    itemsize = model.weights_nbytes / model.numel
    numels = [sum(p.numel() for p in block) for block in in_blocks]
    inside = {id(p) for block in in_blocks for p in block}
    around = [p.numel() for p in model.module.parameters() if id(p) not in inside]
    largest = max((p.numel() for block in in_blocks for p in block), default=0)
    bucket = max(numels, default=0) if rule.reduces_blocks else largest
    return Shards(
        blocks_nbytes=int(itemsize * sum(numels)),
        non_blocks_nbytes=int(itemsize * sum(around)),
        gathered_nbytes=int(itemsize * 2 * max(numels, default=0)),
        reduced_nbytes=int(itemsize * (2 * bucket + max(around, default=0))),
    )


def _update(model: Model, numel: int, num_parameters: int) -> Cost:
    """Cost of the updates: one kernel for each parameter, which reads the gradient and reads and writes the weight."""
    itemsize = model.weights_nbytes / model.numel
    return Cost(0.0, 3 * itemsize * numel / (model.rates.device_memory_gbps * 1e9), num_parameters * _HOOK_LAUNCH_S)
