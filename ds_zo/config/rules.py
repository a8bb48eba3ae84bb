"""Rules that span sections of the JSON: combinations that are refused, keys that have no effect, and warnings."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from ds_zo.config.errors import ConfigError, is_near, keys_of, shown, suggestion
from ds_zo.config.optimizers import LOMOParams, LSPParams, ZOParams
from ds_zo.config.resolved import Resolved
from ds_zo.config.section import CheckpointConfig, DsZoConfig, StreamConfig
from ds_zo.config.stock import known_keys
from ds_zo.versions import REMOVED_FEATURES, refuses_removed_features

REFUSED = {
    "pipeline": "pipeline stages split the model before ds_zo gets it; remove the section",
    "hybrid_engine": "the hybrid engine replaces the engine that ds_zo extends; set its enabled to false",
    "tensor_parallel": "ds_zo places whole parameters, not shards; remove the section",
    "expert_parallel": "ds_zo places whole parameters, not shards of experts; set its enabled to false",
    "sequence_parallel_size": "a rank needs whole sequences; set it to 1",
    "compression_training": "an update applies to weights that are not compressed; remove the section",
    "zero_optimization.zenflow": "ZenFlow updates weights in its own way; remove it, or use a stock optimizer.type",
    "compile.deepcompile": "DeepCompile schedules the copies of ZeRO alone; set it to false",
}
"""Features of DeepSpeed that are refused, by dotted key: the reason and the remedy."""
_PLACES = {
    key: place
    for place, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("ds_zo.checkpoint", CheckpointConfig),
        ("ds_zo.stream", StreamConfig),
        ("ds_zo", DsZoConfig),
    )
    for key in keys_of(model)
}
"""The section of each key that has no effect at the top level."""
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_ABSOLUTE_SCHEDULERS = ("WarmupLR", "WarmupDecayLR")
_MOMENTUM_SCHEDULERS = ("OneCycleLR", "CyclicLR")
LARGEST_ZO_LR = 5e-4
"""Learning rate of ZO for the embedded model of a million parameters. No larger one is known to train a language model
by ZO."""


def check_top_level(ds_config: dict[str, Any]) -> None:
    """Refuses a misspelt or misplaced top-level key. DeepSpeed ignores top-level keys that it does not know."""
    known = {*known_keys(), "ds_zo"}
    own = 'a key of your own may begin with "_"'
    for key in map(str, ds_config):
        if key in known or not key[:1].isalpha():
            continue
        if key in _PLACES:
            text = f"{key} belongs inside {_PLACES[key]}, got it at the top level, where it is ignored; move it"
            raise ConfigError(f"{text} ({own})", at=key)
        near = [name for name in sorted(known) if is_near(key.lower(), name)]
        if near:
            text = f'unknown key "{key}" with value {shown(ds_config[key])}, which DeepSpeed would ignore'
            raise ConfigError(f"{text}; {suggestion(key, near)} ({own})", at=key)


def check_rules(ds_config: dict[str, Any], config: Resolved) -> None:
    """Raises for the first combination that cannot work."""
    _check_refused_features(ds_config)
    check_removed_features(ds_config)
    _check_placement(ds_config, config)
    _check_dtypes(config)
    _check_streaming(config)
    _check_momentum(ds_config, config)
    if isinstance(config.optimizer, ZOParams):
        _check_zo(ds_config, config)
    else:
        _check_only_zo_replays(config)
    if isinstance(config.optimizer, LOMOParams):
        _check_lomo(config, config.optimizer)
    elif config.section.rounding == "kahan":
        text = f"kahan rounding belongs to LOMO and AdaLOMO, got it under {config.backend}; write stochastic"
        raise ConfigError(text, at="ds_zo.rounding")
    if isinstance(config.optimizer, LSPParams):
        _check_lsp(config)
    if not isinstance(config.optimizer, ZOParams):
        _check_storage(config)
    if config.section.compile_blocks and not config.entry.compiles_blocks:
        text = f"compile_blocks needs a backend that compiles blocks, got true under {config.backend}; leave it out"
        raise ConfigError(text, at="ds_zo.compile_blocks")


def ignored_keys(ds_config: dict[str, Any], config: Resolved) -> list[str]:
    """Dotted names of keys that are accepted and have no effect: stock keys, and ours for streaming where it is off."""
    ignored = []
    if not config.entry.offloads_optimizer and _device(ds_config, "offload_optimizer") != "none":
        ignored.append("zero_optimization.offload_optimizer")
    if not config.entry.scales_loss:
        ignored += [f"fp16.{key}" for key in config.loss_scale.written]
    if not config.stream and not config.shards_device:
        streaming_only = ("device_slots", "overlap", "reuse_buffers")
        ignored += [f"ds_zo.stream.{key}" for key in streaming_only if key in config.section.stream.model_fields_set]
    return ignored


def warnings_for(ds_config: dict[str, Any], config: Resolved, *, foreign_params: list[str]) -> list[str]:
    """Sentences about legal settings that probably do not do what their author expects."""
    found = []
    optimizer = config.optimizer
    usual_lr = type(optimizer).model_fields["lr"].default
    if config.entry.zeroth_order and config.params_at == "optimizer.params" and optimizer.lr > LARGEST_ZO_LR:
        found.append(large_zo_lr(optimizer.lr, at="optimizer.params.lr"))
    elif foreign_params and optimizer.lr != usual_lr and not isinstance(optimizer, LSPParams):
        found.append(
            f"a learning rate chosen for AdamW does not transfer to {config.backend}: optimizer.params.lr is "
            f"{optimizer.lr:g}, about {usual_lr:g} is usual"
        )
    if config.params_at == "optimizer.params":
        found += scheduler_warning(ds_config, optimizer.lr, at="optimizer.params.lr")
    shards_host = config.stream and config.entry.shards_host
    if config.zero_stage == 3 and not (shards_host or config.shards_device):
        but = ", and a part of Adam's states" if config.entry.offloads_optimizer else ""
        remedy = "; offload_param.device cpu streams it instead" if config.entry.streams else ""
        where = "in its host memory" if config.stream else f"on its device{remedy}"
        found.append(f"zero_optimization.stage 3 shards no weights here: every rank keeps the whole model{but} {where}")
    if isinstance(optimizer, LSPParams) and optimizer.clip_scope == "global" and optimizer.schedule == "layerwise":
        found.append(
            f"{config.params_at}.clip_scope global needs the whole backward pass before the first update, so the "
            "layerwise schedule overlaps nothing; clip_scope matrix does not"
        )
    return found


def largest_zo_lr(num_trainable: int) -> float:
    """Ten times the advised learning rate for a model of this size. Larger ones are warned of."""
    return min(LARGEST_ZO_LR, max(1e-5, 1e4 / max(1, num_trainable)))


def large_zo_lr(lr: float, *, at: str) -> str:
    """The warning of a large learning rate. A gradient estimate along one random direction is longer than the
    gradient, by more the more parameters there are."""
    return (
        f"ZO needs a learning rate 100 to 1,000 times smaller than AdamW's, got {lr:g}: use 1e-7 to 1e-6 for billions "
        f"of parameters, and at most 1e-5 for some hundred million; larger ones diverge ({at})"
    )


def _check_refused_features(ds_config: dict[str, Any]) -> None:
    for path, why in REFUSED.items():
        found = lookup(ds_config, path)
        if is_on(found):
            raise ConfigError(f"{path} does not work with this backend, got {shown(found)}: {why}", at=path)
    for path in REMOVED_FEATURES:
        if is_on(lookup(ds_config, path)):
            text = f"{path} is a feature that ds_zo does not have, got {shown(lookup(ds_config, path))}; remove the key"
            raise ConfigError(text, at=path)


def check_removed_features(ds_config: dict[str, Any]) -> None:
    """Refuses keys that the installed DeepSpeed refuses, even if the feature is switched off."""
    for path in REMOVED_FEATURES if refuses_removed_features() else ():
        found = lookup(ds_config, path)
        if found is not None:
            raise ConfigError(f"DeepSpeed 0.19.8 removed {path}, got {shown(found)}; remove the key", at=path)


def _check_placement(ds_config: dict[str, Any], config: Resolved) -> None:
    places = ["offload_param"] + (["offload_optimizer"] if config.entry.offloads_optimizer else [])
    for place in places:
        if _device(ds_config, place) == "nvme":
            text = f'{place}.device must be "cpu" or "none" with this backend, got "nvme"; write "cpu"'
            raise ConfigError(text, at=f"zero_optimization.{place}.device")
    if config.stream and not config.entry.streams:
        text = (
            f'offload_param.device must be "none" under {config.backend}, which does not stream blocks, got "cpu"; '
            "leave offload_param out"
        )
        raise ConfigError(text, at="zero_optimization.offload_param.device")


def _check_dtypes(config: Resolved) -> None:
    model = _DTYPE_NAMES[config.dtype]
    if config.autocast is not None and config.dtype is not torch.float32:
        text = (
            f"torch_autocast casts from a float32 model, got it enabled beside {model}.enabled; disable one of the two"
        )
        raise ConfigError(text, at="torch_autocast.enabled")
    if not isinstance(config.optimizer, ZOParams) or config.optimizer.compute_dtype == "auto":
        return
    wanted = config.optimizer.compute_dtype
    at = f"{config.params_at}.compute_dtype"
    if config.dtype is not torch.float32 and wanted != model:
        text = f'compute_dtype must be "auto" or "{model}" with {model}.enabled, got "{wanted}"; leave it out'
        raise ConfigError(text, at=at)
    if config.autocast is not None and wanted != _DTYPE_NAMES[config.autocast]:
        text = f'compute_dtype must be "auto" when torch_autocast is enabled, got "{wanted}"; leave it out'
        raise ConfigError(text, at=at)


def _check_streaming(config: Resolved) -> None:
    """Refuses keys that limit memory only with streaming where streaming is off."""
    if config.stream:
        return
    stream = config.section.stream
    for key in ("device_memory_gb", "resident_blocks", "wire_dtype", "frozen_dtype"):
        value = getattr(stream, key)
        if value not in (None, "auto"):
            text = (
                f"{key} needs block streaming, got {shown(value)} without it; set "
                'zero_optimization.offload_param.device to "cpu", or leave the key out'
            )
            raise ConfigError(text, at=f"ds_zo.stream.{key}")


def _check_zo(ds_config: dict[str, Any], config: Resolved) -> None:
    if is_on(lookup(ds_config, "flops_profiler")):
        text = (
            "flops_profiler cannot follow the interleaved passes of ZO, got it enabled; set it to false and use "
            "wall_clock_breakdown"
        )
        raise ConfigError(text, at="flops_profiler.enabled")
    if config.section.compile_blocks:
        text = (
            "compile_blocks belongs to LOMO, AdaLOMO and LSP, got true under ZO, which uses CUDA graphs instead "
            "(compiled too, it ran at 0.88 to 1.00 of its speed on an H200); leave it out"
        )
        raise ConfigError(text, at="ds_zo.compile_blocks")


def _check_only_zo_replays(config: Resolved) -> None:
    stream, checkpoint = config.section.stream, config.section.checkpoint
    broken = {
        "stream.writeback_interval": (stream.writeback_interval, stream.writeback_interval not in (None, 1)),
        "stream.fuse_update": (stream.fuse_update, not stream.fuse_update),
        "checkpoint.trajectory": (checkpoint.trajectory, checkpoint.trajectory),
    }
    for key, (value, is_broken) in broken.items():
        if is_broken:
            text = f"{key} belongs to ZO, whose updates can be replayed, got {shown(value)} under {config.backend}"
            raise ConfigError(f"{text}; leave it out", at=f"ds_zo.{key}")


def _check_lomo(config: Resolved, optimizer: LOMOParams) -> None:
    if optimizer.clip_grad_value is not None and config.clipping_explicit and config.gradient_clipping > 0:
        text = (
            f"clip_grad_value excludes gradient_clipping, got {optimizer.clip_grad_value:g} beside "
            f"{config.gradient_clipping:g}; set gradient_clipping to 0 (HF Trainer: max_grad_norm=0), or leave "
            "clip_grad_value out"
        )
        raise ConfigError(text, at=f"{config.params_at}.clip_grad_value")
    if config.gradient_accumulation_steps > 1 and optimizer.accumulation == "refuse":
        text = (
            "gradient_accumulation_steps must be 1, because a gradient is freed once its update is made, got "
            f"{config.gradient_accumulation_steps}; use a larger micro-batch with activation checkpointing, or set "
            f'{config.params_at}.accumulation to "sequential" for one small update for each micro-batch'
        )
        raise ConfigError(text, at="gradient_accumulation_steps")


def _check_lsp(config: Resolved) -> None:
    if config.stream and not config.offload_optimizer:
        text = (
            'LSP with weights on the host must run Adam on the host too, got offload_param.device "cpu" without '
            'offload_optimizer; add "offload_optimizer": {"device": "cpu"}, or remove offload_param'
        )
        raise ConfigError(text, at="zero_optimization.offload_optimizer.device")
    if torch.float16 in (config.dtype, config.autocast):
        text = "LSP does not scale losses, which fp16 needs, got fp16; use bf16, whose range needs no loss scaling"
        raise ConfigError(text, at="fp16.enabled" if config.dtype is torch.float16 else "torch_autocast.dtype")


def _check_storage(config: Resolved) -> None:
    """Refuses storage formats of ZO. LOMO and LSP store weights in the dtype that they compute in."""
    stream, model = config.section.stream, _DTYPE_NAMES[config.dtype]
    if stream.wire_dtype not in ("auto", model):
        text = (
            f"wire_dtype must be auto or the model's {model} under {config.backend}, which updates weights in the "
            f"model's dtype, got {shown(stream.wire_dtype)}; leave it out"
        )
        raise ConfigError(text, at="ds_zo.stream.wire_dtype")
    if stream.frozen_dtype != "auto":
        text = f"frozen_dtype belongs to ZO, got {shown(stream.frozen_dtype)} under {config.backend}; leave it out"
        raise ConfigError(text, at="ds_zo.stream.frozen_dtype")
    if stream.master == "split" and "master" in stream.model_fields_set:
        text = (
            f"master split belongs to ZO, got it under {config.backend}, which stores no low bits; leave it out, and "
            "choose the rounding of updates by ds_zo.rounding"
        )
        raise ConfigError(text, at="ds_zo.stream.master")
    if config.stream and config.section.rounding == "kahan":
        text = (
            "kahan rounding keeps its rounding errors on the device, so it excludes block streaming, got both; write "
            "stochastic, or remove zero_optimization.offload_param"
        )
        raise ConfigError(text, at="ds_zo.rounding")


def scheduler_warning(ds_config: dict[str, Any], lr: float, *, at: str) -> list[str]:
    """A warning that WarmupLR and WarmupDecayLR raise the rate to their own `warmup_max_lr`, not to the optimizer's.

    Where `warmup_max_lr` is left out, WarmupLR uses the optimizer's rate, and WarmupDecayLR a number.
    """
    kind = lookup(ds_config, "scheduler.type")
    if kind not in _ABSOLUTE_SCHEDULERS:
        return []
    default = inspect.signature(getattr(lr_schedules, kind)).parameters["warmup_max_lr"].default
    peak = (lookup(ds_config, "scheduler.params") or {}).get("warmup_max_lr", default)
    if peak in (lr, "auto", None):
        return []
    return [
        f"scheduler {kind} raises the learning rate to its own warmup_max_lr {shown(peak)}, not to {at} {lr:g}; set "
        "warmup_max_lr to the rate you want, or use WarmupCosineLR, which scales lr"
    ]


def _check_momentum(ds_config: dict[str, Any], config: Resolved) -> None:
    """Refuses cycled momentum before the model is moved. torch's cyclic schedulers fail without momentum after that."""
    kind = lookup(ds_config, "scheduler.type")
    cycles = lookup(ds_config, "scheduler.params.cycle_momentum")
    if kind not in _MOMENTUM_SCHEDULERS or cycles is False or config.params_at != "optimizer.params":
        return
    has_betas = "betas" in type(config.optimizer).model_fields
    owner = config.entry.optimizer_type
    why = f"{owner}'s betas stay those of optimizer.params" if has_betas else "this backend has no momentum"
    text = f"cycle_momentum of {kind} must be false, because {why}, got {shown(cycles)}"
    raise ConfigError(f"{text}; set cycle_momentum to false", at="scheduler.params.cycle_momentum")


def lookup(ds_config: dict[str, Any], path: str) -> Any:
    """The value at a dotted key; None where it is left out."""
    found: Any = ds_config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def is_on(value: Any) -> bool:
    """Whether a section or switch is on: by its `enabled`, by its parallel sizes, or else by not being empty."""
    if isinstance(value, dict):
        if "enabled" in value:
            return value["enabled"] is True
        sizes = [size for key, size in value.items() if key in ("autotp_size", "tp_size", "stages")]
        inner = [part for key, part in value.items() if key in ("tp", "tensor_parallel")]
        if sizes or inner:
            return any(is_on(part) for part in sizes + inner)
        return bool(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value > 1
    return False


def _device(ds_config: dict[str, Any], place: str) -> str:
    found = lookup(ds_config, f"zero_optimization.{place}.device")
    return "none" if found in (None, "auto") else str(getattr(found, "value", found))
