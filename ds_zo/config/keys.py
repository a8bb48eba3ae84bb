"""The table of keys that not every backend reads: who reads each key, and what becomes of it under other backends.

Rows of DeepSpeed's keys are here. Those of the `ds_zo` section are the marks of its fields (`ds_zo/config/section.py`).
A key without a row is read by every backend or by the engine, or it is the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ds_zo.config.marks import NO_BACKEND, ReadBy, Trait, marks_in
from ds_zo.config.registry import BackendEntry
from ds_zo.config.section import DsZoConfig, StreamConfig
from ds_zo.config.stock import LossScale, is_on
from ds_zo.versions import REMOVED_FEATURES

SECTION_AT = "zero_optimization.ds_zo"
"""Place of the `ds_zo` section where DeepSpeed without ds_zo refuses it. At the top level DeepSpeed ignores it."""

Marks = tuple[ReadBy, ...]


def _refused(why: str, remedy: str) -> Marks:
    """The mark of a feature that no backend has."""
    refusal = f"{{path}} does not work with this backend, got {{value}}: {why}; {remedy}"
    return (ReadBy(NO_BACKEND, is_feature=True, refusal=refusal, removal=why),)


def _ignored(why: str | None, by: Trait = NO_BACKEND, **arguments: Any) -> Marks:
    """The mark of a key that has no effect without the trait `by`."""
    return (ReadBy(by, refusal=None, removal=why, **arguments),)


_SHARDS = "ds_zo places whole parameters, not shards"
_REMOVED = (
    ReadBy(
        NO_BACKEND,
        is_feature=True,
        refusal="{path} is a feature that ds_zo does not have, got {value}; remove the key",
        removal=None,
    ),
    *_ignored("DeepSpeed 0.19.8 removed the feature, and {type} does not have it", is_told=False),
)
_NO_NVME = ReadBy(
    NO_BACKEND,
    value="nvme",
    refusal='{path} must be "cpu" or "none" with this backend, got {value}; write "cpu"',
    removal=None,
)
_REDUCTION = _ignored("it belongs to DeepSpeed's own reduction of gradients, which {type} does not use")
_GATHERED = _ignored("weights are always gathered when they are saved")
_MASTERS = _ignored("it belongs to ZeRO's master weights and gradients", is_told=False)
_SCALING = _ignored("{type} does not scale losses", Trait.SCALES_LOSS, without=("auto",))
_READ: Marks = ()

KEYS: dict[str, Marks] = {
    "pipeline": _refused("pipeline stages split the model before ds_zo gets it", "remove the section"),
    "hybrid_engine": _refused("the hybrid engine replaces the engine that ds_zo extends", "set its enabled to false"),
    "tensor_parallel": _refused(_SHARDS, "remove the section"),
    "expert_parallel": _refused(f"{_SHARDS} of experts", "set its enabled to false"),
    "sequence_parallel_size": _refused("a rank needs whole sequences", "set it to 1"),
    "checkpoint.load_universal": _refused(
        "a universal checkpoint has weights only as states of ZeRO's optimizers",
        "set it to false, and load the checkpoint that it was made of",
    ),
    "compile.deepcompile": _refused("DeepCompile schedules the copies of ZeRO alone", "set it to false"),
    "flops_profiler": (
        ReadBy(
            unless=Trait.ZEROTH_ORDER,
            is_feature=True,
            refusal="{path} cannot follow the interleaved passes of {type}, got {value}; set its enabled to false and "
            "use wall_clock_breakdown",
            removal="it cannot follow the interleaved passes of {type}",
        ),
    ),
    **dict.fromkeys(REMOVED_FEATURES, _REMOVED),
    "zero_allow_untested_optimizer": _ignored("no optimizer is wrapped by ZeRO here", is_told=False),
    "aio": _ignored("it configures NVMe, which no backend of ds_zo uses"),
    "autotuning": _ignored("it searches settings of ZeRO"),
    "communication_data_type": _REDUCTION,
    "data_types": _REDUCTION,
    "disable_allgather": _REDUCTION,
    "gradient_allreduce_op": _REDUCTION,
    "gradient_predivide_factor": _REDUCTION,
    "prescale_gradients": _REDUCTION,
    "gradient_clipping": _ignored(
        "{type} has no gradients to clip; its own limit is clip_projected_grad", Trait.CLIPS_GRADIENTS, is_told=False
    ),
    "fp16.enabled": _READ,
    "fp16.auto_cast": _READ,
    **{f"fp16.{field.name}": _SCALING for field in fields(LossScale) if field.name != "written"},
    "fp16.*": _ignored("{type} does not read it", is_told=False),
    "bf16.enabled": _READ,
    "bf16.*": _MASTERS,
    "bfloat16.enabled": _READ,
    "bfloat16.*": _MASTERS,
    "zero_optimization.stage": _ignored(None, Trait.OFFLOADS_OPTIMIZER, without=(0, 3, "auto")),
    "zero_optimization.offload_param": _READ,
    "zero_optimization.offload_param.device": (
        _NO_NVME,
        ReadBy(
            Trait.STREAMS,
            value="cpu",
            refusal='{path} must be "none" under {backend}, which does not stream blocks, got {value}; leave '
            "offload_param out",
            removal=None,
        ),
    ),
    "zero_optimization.offload_param.pin_memory": _READ,
    "zero_optimization.offload_param.*": _ignored("buffers of ZeRO's swapping; ds_zo.stream has those of blocks"),
    "zero_optimization.offload_optimizer": _ignored(
        "{type} offloads no optimizer states", Trait.OFFLOADS_OPTIMIZER, is_feature=True
    ),
    "zero_optimization.offload_optimizer.device": (_NO_NVME,),
    "zero_optimization.offload_optimizer.pin_memory": _READ,
    "zero_optimization.offload_optimizer.*": _ignored("{type} has no use for it"),
    "zero_optimization.zenflow": _refused(
        "ZenFlow updates weights in its own way", "remove it, or use a stock optimizer.type"
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _GATHERED,
    "zero_optimization.gather_16bit_weights_on_model_save": _GATHERED,
    "zero_optimization.sub_group_size": _ignored("it divides the work of ZeRO's optimizer, which {type} does not run"),
    "zero_optimization.*": _ignored("a setting of ZeRO itself, which {type} does not run"),
}
"""The marks of each key, by dotted name. `.*` stands for all other keys of an object."""
_SECTION_KEYS = {path for path, _ in marks_in(DsZoConfig, ReadBy)}
KEYS |= {f"ds_zo.stream.{key}": _ignored(why) for key, (why, _) in StreamConfig.retired.items()}
KEYS |= {f"ds_zo.{at}": tuple(m for path, m in marks_in(DsZoConfig, ReadBy) if path == at) for at in _SECTION_KEYS}


def unread_keys(ds_config: dict[str, Any], entry: BackendEntry, at: str = "") -> Iterator[tuple[str, ReadBy, Any]]:
    """Each key of the JSON that the backend does not read, or of which it does not read each value: its dotted name,
    its mark and its value. The inner keys of an object without effect are left out. In the `ds_zo` section "auto"
    means the same as null."""
    for key, value in ds_config.items():
        path = f"{at}{key}"
        name = path.replace(SECTION_AT, "ds_zo")
        value = None if value == "auto" and name.startswith("ds_zo.") else value
        marks = KEYS.get(name, KEYS.get(f"{name.rpartition('.')[0]}.*", _READ))
        unread = [mark for mark in marks if not entry.reads(mark)]
        yield from ((path, mark, value) for mark in unread)
        if isinstance(value, dict) and not (unread and is_on(value)):
            yield from unread_keys(value, entry, f"{path}.")
