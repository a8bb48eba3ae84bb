"""The estimates of LOMO and AdaLOMO, with all weights on the device or with streamed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ds_zo.config.learning_rates import starting_rate
from ds_zo.config.optimizers import LOMOParams
from ds_zo.config.section import StreamConfig
from ds_zo.planner import recomputed
from ds_zo.planner.estimate import PROCESS_NBYTES, TWO_WORKSPACES_NBYTES, Estimate, Limits, Shards, base_config, parts
from ds_zo.planner.models import Model
from ds_zo.planner.timeline import Cost

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
    section = stream.model_dump(exclude_unset=True)
    config = _config(model, rule, params) | ({"ds_zo": {"stream": section}} if section else {})
    whole = _resident(model, limits, rule, config, checkpointing=checkpointing)
    if offload is False or (offload is None and whole.fits_device):
        return whole
    return _streamed(model, limits, rule, stream, config)


estimate_adalomo = partial(estimate_lomo, rule=_ADALOMO)


def _resident(model: Model, limits: Limits, rule: _Rule, config: dict[str, Any], *, checkpointing: bool) -> Estimate:
    trace = model.backward_trace(checkpointing=checkpointing, loss_in_chunks=True)
    step_s = trace.forward.seconds + (trace.backward + _update(model, model.numel, _num_parameters(model))).seconds
    return Estimate(
        contender=rule.contender,
        setting=f"all on the device, one backward pass{', checkpointing' if checkpointing else ''}",
        device=parts(
            weights=model.weights_nbytes,
            states=rule.state_nbytes(model),
            activations=trace.peak.activations,
            logits=trace.peak.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(process=PROCESS_NBYTES),
        step_s=step_s,
        reduced_nbytes=model.weights_nbytes,
        shared=frozenset({"weights"}),
        shards=_shards(model, rule),
        config=config,
        notes=("activations include the largest gradient that is alive",),
        limits=limits,
    )


def _streamed(model: Model, limits: Limits, rule: _Rule, stream: StreamConfig, config: dict[str, Any]) -> Estimate:
    """The estimate with streamed blocks, which are always recomputed from their inputs."""
    trace = model.backward_trace(checkpointing=True, loss_in_chunks=True)
    states = rule.state_nbytes(model)
    found = recomputed.place(model, limits, stream, other_nbytes=trace.peak.total + TWO_WORKSPACES_NBYTES + states)
    config = config | {"zero_optimization": {"stage": 0, "offload_param": recomputed.OFFLOADED}}
    section = recomputed.section_of(limits, stream)
    if section:
        config["ds_zo"] = {"stream": section}
    return Estimate(
        contender=rule.contender,
        setting=found.setting,
        device=parts(
            weights=found.weights_nbytes,
            slots=found.slots_nbytes,
            states=states,
            activations=trace.peak.activations,
            logits=trace.peak.logits,
            workspace=TWO_WORKSPACES_NBYTES,
        ),
        host=parts(weights=found.store_nbytes, process=PROCESS_NBYTES),
        filling_nbytes=found.filling_nbytes,
        step_s=recomputed.step_s(model, trace, found, update=partial(_update, model), sent_back_forward=False),
        up_nbytes=found.up_nbytes,
        down_nbytes=found.store_nbytes,
        reduced_nbytes=model.weights_nbytes,
        shared=frozenset({"weights"}),
        shards=_shards(model, rule),
        config=config,
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


def _num_parameters(model: Model) -> int:
    return sum(1 for _ in model.module.parameters())


def _config(model: Model, rule: _Rule, params: LOMOParams | None) -> dict[str, Any]:
    config = base_config(batch=model.batch, dtype=model.dtype, gradient_clipping=0.0)
    written = {} if params is None else params.model_dump(exclude_unset=True)
    lr = starting_rate(rule.contender, num_parameters=model.numel, is_clipped=False).lr
    return config | {
        "optimizer": {"type": rule.optimizer_type, "params": {"lr": lr, **written}},
        "zero_optimization": {"stage": 0},
    }
