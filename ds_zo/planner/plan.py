"""`plan`: estimates of every method that can train a model, side by side, before anything is allocated."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ds_zo.config.learning_rates import has_rates, starting_rate
from ds_zo.config.marks import Needs, Trait, written_with
from ds_zo.config.registry import BackendEntry, backend_names, entries, entry_of, imported
from ds_zo.config.resolve import resolve, with_section_in_zero
from ds_zo.config.section import StreamConfig
from ds_zo.config.stock import parse
from ds_zo.planner.estimate import Estimate, Limits
from ds_zo.planner.models import Dtype, Model, load_model
from ds_zo.planner.qlora import estimate_qlora
from ds_zo.planner.rates import Rates
from ds_zo.planner.stock import (
    estimate_low_rank,
    estimate_on_device,
    estimate_torch_adamw,
    estimate_zero3,
    estimate_zero_offload,
)

_IN_BF16 = ("zero-offload-bf16", "zero-3-bf16", "zero-3-gpu-params-bf16")
_BF16_ONLY = "its states are in bf16, as the weights must be: plan it in bf16 (--dtype)"
IN_4_BITS_FORMS: tuple[dict[str, Any], ...] = (
    {"frozen_dtype": "nf4"},
    {"frozen_dtype": "nf4", "offload_activations": True},
    {"frozen_dtype": "nf4_nested", "offload_activations": True},
)
"""Stored forms of a frozen base that are suggested where the model's dtype does not fit, with the fewest bits last."""
_NARROWER: tuple[dict[str, Any], ...] = (
    {"master": "wire"},
    {"wire_dtype": "bf12", "master": "wire"},
    {"wire_dtype": "fp8", "master": "wire"},
    {"offload_activations": True},
    {"frozen_dtype": "bf12"},
    {"frozen_dtype": "fp8"},
    *IN_4_BITS_FORMS,
)
"""Stored forms that are suggested where the asked one does not fit, with the fewest bits last."""
DOES_NOT_FIT = "does not fit"
"""How the note of such a suggestion begins."""
_NO_FP16 = "it does not scale losses, which fp16 needs: plan it in bf16 (--dtype)"


@dataclass(frozen=True)
class Options:
    """The user's settings of a plan, besides the model and the memory limits."""

    stream: StreamConfig
    params: dict[str, Any]
    """`optimizer.params` of the one backend that is planned; empty where several are."""
    offload: bool | None
    """Whether blocks stream. None: only where the device is too small."""
    checkpointing: bool
    is_only: bool
    """Whether one backend is planned. It then refuses keys of `stream` that it does not read; several ignore them."""
    native_pins: bool = False
    """Whether DeepSpeed pins in exact sizes (DS_PIN_MEMORY_BACKEND=native)."""


def _own(entry: BackendEntry, model: Model, limits: Limits, options: Options) -> Estimate:
    """The estimate of one of our backends. If it does not fit, a note names a stored form that would. Raises if
    `deepspeed.initialize` would refuse its JSON."""
    found = _own_estimate(entry, model, limits, options)
    if found.fits:
        return found
    written = options.stream.model_dump(exclude_unset=True)
    for form in (form for form in _NARROWER if not form.keys() & set(entry.unread(StreamConfig))):
        stream = StreamConfig(**{**written, **form})
        try:
            asked = replace(options, stream=stream, offload=_streams(stream, options.offload))
            other = _own_estimate(entry, model, limits, asked)
        except ValueError:
            continue  # the user's other settings refuse this form
        if other.fits:
            adapters = " and LoRA adapters" if "frozen_dtype" in form else ""
            note = (
                f"{DOES_NOT_FIT}; with {json.dumps(form)} in ds_zo.stream{adapters} it would: "
                f"{other.device_peak_nbytes / 1e9:.1f} GB on the GPU, {other.host_peak_nbytes / 1e9:.1f} GB on the host"
            )
            return replace(found, notes=(*found.notes, note))
    return found


def _streams(stream: StreamConfig, offload: bool | None) -> bool | None:
    """Whether blocks stream, where the user says `offload`: also if a key of `stream` needs it and None is said."""
    needs = any(value is not False for _, value in written_with(stream, Needs.STREAMING))
    return True if offload is None and needs else offload


def _own_estimate(entry: BackendEntry, model: Model, limits: Limits, options: Options) -> Estimate:
    found: Estimate = imported(entry.planner)(
        model,
        _limited(limits, options.stream),
        stream=options.stream if options.is_only else _without(options.stream, entry.unread(StreamConfig)),
        params=parse(entry.params, _rate(entry, model) | options.params, at="optimizer.params"),
        offload=options.offload,
        checkpointing=options.checkpointing,
    )
    resolve(dict(found.config), world_size=1)
    return replace(found, config=with_section_in_zero(dict(found.config)))


def _rate(entry: BackendEntry, model: Model) -> dict[str, float]:
    if not has_rates(entry.name):
        return {}
    is_clipped = not entry.has(Trait.UPDATES_IN_BACKWARD)
    return {"lr": starting_rate(entry.name, num_parameters=model.numel, is_clipped=is_clipped).lr}


def _limited(limits: Limits, stream: StreamConfig) -> Limits:
    """The limits, with the device memory cut to `stream.device_memory_gb` if that is less."""
    limits_nbytes = [n for n in (limits.device_nbytes, _nbytes(stream.device_memory_gb)) if n is not None]
    return replace(limits, device_nbytes=min(limits_nbytes, default=None))


def _stock(estimate: Callable[..., Estimate], model: Model, limits: Limits, options: Options, **fixed: Any) -> Estimate:
    return estimate(model, limits, checkpointing=options.checkpointing, **fixed)


def _zero(estimate: Callable[..., Estimate], model: Model, limits: Limits, options: Options, **fixed: Any) -> Estimate:
    return _stock(estimate, model, limits, options, native_pins=options.native_pins, **fixed)


_STOCK: dict[str, Callable[[Model, Limits, Options], Estimate]] = {
    "zero-offload": partial(_zero, estimate_zero_offload),
    "zero-3": partial(_zero, estimate_zero3, offload_param=True),
    "zero-3-gpu-params": partial(_zero, estimate_zero3, offload_param=False),
    "zero-offload-bf16": partial(_zero, estimate_zero_offload, bf16_states=True),
    "zero-3-bf16": partial(_zero, estimate_zero3, offload_param=True, bf16_states=True),
    "zero-3-gpu-params-bf16": partial(_zero, estimate_zero3, offload_param=False, bf16_states=True),
    "adamw": partial(_stock, estimate_on_device, optimizer="adamw"),
    "torch-adamw": partial(_stock, estimate_torch_adamw),
    "sgd": partial(_stock, estimate_on_device, optimizer="sgd"),
    "lora": partial(_stock, estimate_low_rank, method="lora"),
    "qlora": partial(_stock, estimate_qlora),
    "galore": partial(_stock, estimate_low_rank, method="galore"),
}
"""The estimates of methods that our backends are compared with."""


IN_4_BITS = "adapter-nf4"
"""The row of the backend adapter over a base that is stored and streamed in four bits."""


def _in_4_bits(model: Model, limits: Limits, options: Options) -> Estimate:
    stream = StreamConfig(**options.stream.model_dump(exclude_unset=True) | {"frozen_dtype": "nf4"})
    whole = replace(options, stream=stream, offload=True)
    return replace(_own(entry_of("adapter"), model, limits, whole), contender=IN_4_BITS)


def contenders() -> dict[str, Callable[[Model, Limits, Options], Estimate]]:
    """The estimate of each backend and of each method that it is compared with, in the order of the table's rows."""
    own = {entry.name: partial(_own, entry) for entry in entries() if entry.planner is not None}
    return {**own, IN_4_BITS: _in_4_bits, **_STOCK}


ADAPTERS = ("lora", "qlora", "adapter", IN_4_BITS)
"""Methods that train LoRA adapters over a frozen base."""
ORDER: tuple[tuple[str, ...], ...] = (
    ("adamw",),
    ("adalomo",),
    ("lomo",),
    ("lsp",),
    ("zero-offload", "zero-offload-bf16", "zero-3", "zero-3-bf16"),
    ADAPTERS,
    ("zo",),
)
"""Methods in the order in which they are recommended, all weights with gradients first. The fastest of a group."""


@dataclass(frozen=True)
class Plan:
    """The estimates of one call of `plan`, and what they are for."""

    model: str
    architecture: str
    """Name of the model's class."""
    num_parameters: int
    num_blocks: int
    batch: int
    seq: int
    dtype: str
    limits: Limits
    rates: Rates
    estimates: tuple[Estimate, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Methods without an estimate, each with the reason. If no method has one, `plan` raises the last reason."""

    def __getitem__(self, contender: str) -> Estimate:
        return next(e for e in self.estimates if e.contender == contender)

    @property
    def recommended(self) -> Estimate | None:
        """The method to use: the first of `ORDER` that fits, with memory to spare if any does; None if none fits."""
        return self._first(ORDER)

    @property
    def recommended_adapter(self) -> Estimate | None:
        """The same among methods that train LoRA adapters alone."""
        return self._first((ADAPTERS,))

    def _first(self, order: Sequence[Collection[str]]) -> Estimate | None:
        for may_be_tight in (False, True):
            for methods in order:
                found = [e for e in self.estimates if e.contender in methods and e.fits and e.is_tight <= may_be_tight]
                if found:
                    return min(found, key=lambda e: e.step_s)
        return None

    def tokens_per_s(self, estimate: Estimate) -> float:
        return self.batch * self.seq / estimate.step_s

    def to_json(self) -> dict[str, Any]:
        about = ("model", "architecture", "num_parameters", "num_blocks", "batch", "seq", "dtype")
        return {name: getattr(self, name) for name in about} | {
            "device_memory_nbytes": self.limits.device_nbytes,
            "host_memory_nbytes": self.limits.host_nbytes,
            "rates": self.rates.to_json(),
            "estimates": [e.to_json() | {"tokens_per_s": self.tokens_per_s(e)} for e in self.estimates],
            "left_out": dict(self.left_out),
            "recommended": None if self.recommended is None else self.recommended.contender,
        }


def plan(
    model: str | Model,
    *,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    batch: int = 1,
    seq: int = 2048,
    dtype: Dtype = "bf16",
    backends: Sequence[str] | None = None,
    stream: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    offload: bool | None = None,
    checkpointing: bool = True,
    native_pins: bool | None = None,
    rates: Rates | None = None,
    experts_rank: int = 0,
) -> Plan:
    """Estimates memory and speed of the methods named by `backends` (None: all of them).

    Memory is in GB of 10**9 bytes; None means unlimited. `stream` is the `ds_zo.stream` section. `params` are the
    `optimizer.params` of the one backend that `backends` names. `offload` None: blocks stream where the device is too
    small, or where `stream` has a key that needs streaming. `checkpointing` is activation checkpointing.
    `native_pins`: stock DeepSpeed pins in exact sizes; None: as DS_PIN_MEMORY_BACKEND says. `experts_rank`: LoRA also
    trains experts, by adapters of this rank."""
    known = contenders()
    chosen = list(dict.fromkeys(backends or known))
    _check_names(chosen, known, has_params=bool(params))
    for option, value in (("--device-memory-gb", device_memory_gb), ("--host-memory-gb", host_memory_gb)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"memory must be > 0 GB, or left out for any amount, got {value:g} ({option})")
    if batch < 1 or seq < 2:
        raise ValueError(f"batch must be >= 1 and seq >= 2, got {batch} and {seq} (--batch, --seq)")
    section = parse(StreamConfig, dict(stream or {}), at="ds_zo.stream")
    options = Options(
        section,
        dict(params or {}),
        _streams(section, offload),
        checkpointing,
        is_only=len(chosen) == 1,
        native_pins=_pins_natively() if native_pins is None else native_pins,
    )
    if isinstance(model, str):
        model = load_model(model, batch=batch, seq=seq, dtype=dtype, rates=rates, experts_rank=experts_rank)
    limits = Limits(_nbytes(device_memory_gb), _nbytes(host_memory_gb))
    estimates: list[Estimate] = []
    left_out: dict[str, str] = {}
    for name in chosen:
        try:
            if why := _refused_dtype(name, model.dtype):
                raise ValueError(f"{name} can't train in {model.dtype}: {why}")
            estimates.append(known[name](model, limits, options))
        except ValueError as error:
            left_out[name] = str(error)
            if len(left_out) == len(chosen):
                raise
    return Plan(
        model=model.name,
        architecture=type(model.module).__name__,
        num_parameters=model.numel,
        num_blocks=len(model.blocks),
        batch=model.batch,
        seq=model.seq,
        dtype=model.dtype,
        limits=limits,
        rates=model.rates,
        estimates=tuple(estimates),
        left_out=left_out,
    )


def _check_names(chosen: Sequence[str], known: Collection[str], *, has_params: bool) -> None:
    """Raises unless all chosen methods have an estimate, and `params` those of one backend of ours."""
    for name in chosen:
        if name in known:
            continue
        if name in backend_names():
            raise ValueError(
                f"the planner has no estimate for a backend registered from outside ds_zo, got {name!r}; it plans "
                f"{', '.join(known)} (--backend)"
            )
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(known)} (--backend)")
    own = [name for name in known if name not in (*_STOCK, IN_4_BITS)]
    if has_params and len(chosen) != 1:
        raise ValueError(f"params belong to one backend, got {len(chosen)}: name it (--backend)")
    if has_params and chosen[0] not in own:
        raise ValueError(f"params are planned for {', '.join(own)}, got some of {chosen[0]}: leave them out (--params)")


def _refused_dtype(name: str, dtype: Dtype) -> str | None:
    """Why a method cannot train in a dtype; None if it can."""
    if name in (*_STOCK, IN_4_BITS):
        return _BF16_ONLY if name in _IN_BF16 and dtype != "bf16" else None
    return _NO_FP16 if dtype == "fp16" and entry_of(name).has(Trait.REFUSES_FP16) else None


def _without(stream: StreamConfig, keys: Collection[str]) -> StreamConfig:
    return StreamConfig(**{k: v for k, v in stream.model_dump(exclude_unset=True).items() if k not in keys})


def _pins_natively() -> bool:
    """Whether DeepSpeed would pin in exact sizes in this environment."""
    return os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native"


def _nbytes(gb: float | None) -> int | None:
    return None if gb is None else int(gb * 1e9)
