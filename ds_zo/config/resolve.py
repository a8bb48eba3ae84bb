"""Turns a DeepSpeed JSON into a checked `Resolved`, or raises a `ConfigError` of one line that says what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ds_zo.config.errors import ConfigError, Errors, is_near, raises_all, shown, suggestion
from ds_zo.config.marks import Trait
from ds_zo.config.optimizers import OptimizerParams
from ds_zo.config.registry import backend_names, entries, entry_of
from ds_zo.config.resolved import Resolved
from ds_zo.config.rules import check_rules, check_top_level, ignored_keys, warnings_for
from ds_zo.config.section import DsZoConfig, StreamConfig
from ds_zo.config.stock import block, optimizer_params, parse, read_stock

_OPTIMIZER_KEYS = ("type", "params", "legacy_fusion")
_GROUP_KEYS = ("lr", "weight_decay")


def backend_of(ds_config: Any) -> str | None:
    """The name of our backend that a DeepSpeed JSON selects; None for a stock JSON. It is cheap and checks little.

    Raises only for an unknown `ds_zo.backend`, for a `ds_zo` section that is misspelt or no object, and for a misspelt
    `optimizer` block. DeepSpeed ignores such keys, and would train with a stock optimizer without a warning.
    """
    if not isinstance(ds_config, dict):
        return None
    for key in ds_config:
        if key != "ds_zo" and is_near(re.sub("[^a-z]", "", str(key).lower()), "dszo"):
            text = f'the section is called ds_zo, got "{key}", which DeepSpeed would ignore; write "ds_zo"'
            raise ConfigError(text, at=str(key))
        is_misspelt = str(key)[:1].isalpha() and key != "optimizer" and is_near(str(key).lower(), "optimizer")
        if is_misspelt and "optimizer" not in ds_config and _backend_in_type(ds_config, key):
            text = f'the block is called optimizer, got "{key}", which DeepSpeed would ignore; write "optimizer"'
            raise ConfigError(text, at=str(key))
    ds_config = with_section_on_top(ds_config)
    return _backend_in_type(ds_config) or _backend_in_section(ds_config)


def with_section_on_top(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The same JSON with its `ds_zo` section at the top level, where all other code reads it.

    A user may write the section inside `zero_optimization`. Without this package DeepSpeed refuses unknown keys there,
    and ignores unknown keys at the top level.
    """
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, dict) or "ds_zo" not in zero:
        return ds_config
    if "ds_zo" in ds_config:
        text = f"the ds_zo section must stand in one place, got {shown(zero['ds_zo'])} beside one at the top level"
        raise ConfigError(f"{text}; remove one of them", at="zero_optimization.ds_zo")
    rest = {key: value for key, value in zero.items() if key != "ds_zo"}
    return {**ds_config, "zero_optimization": rest, "ds_zo": zero["ds_zo"]}


def with_section_in_zero(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The same JSON with its `ds_zo` section inside `zero_optimization`, where DeepSpeed without this package refuses
    it."""
    if "ds_zo" not in ds_config:
        return ds_config
    rest = {key: value for key, value in ds_config.items() if key != "ds_zo"}
    return {**rest, "zero_optimization": {**(rest.get("zero_optimization") or {}), "ds_zo": ds_config["ds_zo"]}}


def resolve(
    ds_config: dict[str, Any], *, client_optimizer: bool = False, world_size: int | None = None, trains: bool = True
) -> Resolved:
    """Checks a JSON before any memory is allocated.

    `client_optimizer` says that the script passes its own optimizer object. `world_size` is used only where the
    accumulation steps follow from batch sizes; None reads it from the running process group. `trains` False: the engine
    will only evaluate.
    """
    if not isinstance(ds_config, dict):
        raise ConfigError(f"the configuration must be an object, got {shown(ds_config)}; pass a dict", at="top level")
    ds_config = with_section_on_top(ds_config)
    backend = _select(ds_config, client_optimizer=client_optimizer)
    entry, errors = entry_of(backend), Errors()
    with errors:
        check_top_level(ds_config)
    in_type, section_params = _backend_in_type(ds_config) is not None, block(ds_config, "ds_zo").get("params")
    params_at = "optimizer.params" if in_type else "ds_zo.params"
    with errors:
        section = parse(DsZoConfig, block(ds_config, "ds_zo"), at="ds_zo")
    with errors:
        _check_section_params(section_params, in_type=in_type)
    with errors:
        _check_optimizer_keys(block(ds_config, "optimizer"), entry.params)
        written = optimizer_params(ds_config["optimizer"]) if in_type else section_params
        foreign = entry.params.foreign_keys() if in_type else frozenset()
        own = {key: value for key, value in written.items() if key not in foreign} if isinstance(written, dict) else {}
        optimizer = parse(entry.params, own, at=params_at)
    with errors:
        stock = read_stock(ds_config, world_size=world_size)
    errors.raise_all()
    clipping = 0.0 if optimizer.clips_by_value and not stock.clipping_explicit else stock.gradient_clipping
    offloads = stock.offload_optimizer and entry.has(Trait.OFFLOADS_OPTIMIZER)
    config = Resolved(
        **{**vars(stock), "gradient_clipping": clipping, "offload_optimizer": offloads},
        backend=backend,
        optimizer=optimizer,
        section=section,
        params_at=params_at,
        trains=trains,
    )
    check_rules(ds_config, config)
    ignored = ignored_keys(ds_config, config)
    return replace(config, ignored=tuple(ignored), warnings=tuple(warnings_for(ds_config, config)))


def resolve_for_evaluation(ds_config: dict[str, Any]) -> Resolved:
    """Checks the JSON of an engine that has no optimizer and only evaluates, such as the reference model of DPO.

    Only `stream` of the `ds_zo` section has an effect. A backend that knows all formats of `wire_dtype` evaluates
    streamed blocks, and one that shards blocks at stage 3 evaluates blocks on devices.
    """
    ds_config = with_section_on_top(ds_config)
    section = parse(DsZoConfig, block(ds_config, "ds_zo"), at="ds_zo")
    if section.params is not None:
        _select(ds_config, client_optimizer=False)  # refuses params without a backend
    streams = read_stock(ds_config, world_size=None).stream
    entry = next(e for e in entries() if e.has(Trait.STORES_OTHER_DTYPES if streams else Trait.SHARDS_DEVICE))
    unread = {*entry.unread(StreamConfig)} - {"wire_dtype", "frozen_dtype"}  # refused without streaming
    used = {"backend": entry.name, "stream": section.stream.model_dump(exclude_unset=True, exclude=unread)}
    # The profiler and the scheduler are for training, and a backend may refuse them.
    kept = {key: value for key, value in ds_config.items() if key not in ("flops_profiler", "scheduler")}
    return replace(resolve({**kept, "ds_zo": used}, trains=False), ignored=())


def _backend_in_type(ds_config: dict[str, Any], key: str = "optimizer") -> str | None:
    """The backend that `optimizer.type` names: by its own name, or by a stock one that the backend of `ds_zo.backend`
    uses."""
    optimizer = ds_config.get(key)
    name = optimizer.get("type") if isinstance(optimizer, dict) else None
    if not isinstance(name, str):
        return None
    if name.lower() in backend_names():
        return name.lower()
    in_section = _backend_in_section(ds_config)
    return in_section if in_section is not None and name.lower() in entry_of(in_section).stock_types else None


def _backend_in_section(ds_config: dict[str, Any]) -> str | None:
    name = block(ds_config, "ds_zo").get("backend")
    if name is None or name == "auto":
        return None
    known = backend_names()
    if not isinstance(name, str) or name.lower() not in known:
        text = f"backend must be one of {', '.join(known)}, got {shown(name)}; {suggestion(str(name), known)}"
        raise ConfigError(text, at="ds_zo.backend")
    return name.lower()


def _select(ds_config: dict[str, Any], *, client_optimizer: bool) -> str:
    """The one backend that the JSON names, in `optimizer.type` or in `ds_zo.backend`."""
    in_type, in_section = _backend_in_type(ds_config), _backend_in_section(ds_config)
    optimizer = block(ds_config, "optimizer")
    written = optimizer.get("type")
    if in_type is None and in_section is None:
        text = (
            f"one of {', '.join(backend_names())} must be named, got optimizer.type {shown(written)} and no "
            "ds_zo.backend; set optimizer.type, or ds_zo.backend where the script makes its optimizer"
        )
        raise ConfigError(text, at="optimizer.type")
    if in_type is None and optimizer:
        types = entry_of(in_section).stock_types if in_section is not None else ()
        takes = (
            f"takes an optimizer block of type {' or '.join(types)}" if types else "selects without an optimizer block"
        )
        remedy = f"write {types[0]}" if types else "remove ds_zo.backend and edit optimizer.type"
        text = (
            f"ds_zo.backend {takes}, got {shown(in_section)} beside optimizer.type {shown(written)}; remove the "
            f"optimizer block, so that the script makes its optimizer, or {remedy}"
        )
        raise ConfigError(text, at="ds_zo.backend")
    if in_type is not None and in_section not in (None, in_type):
        text = (
            f"one backend must be named, got optimizer.type {shown(written)} and ds_zo.backend {shown(in_section)}; "
            "remove ds_zo.backend"
        )
        raise ConfigError(text, at="ds_zo.backend")
    if in_type is not None and client_optimizer:
        text = (
            f"one optimizer must be given, got optimizer.type {shown(written)} and the script's own object; remove "
            f'one of them: to keep the script, replace the optimizer block by "ds_zo": {{"backend": "{in_type}"}}'
        )
        raise ConfigError(text, at="optimizer.type")
    return in_type or in_section or ""


@raises_all
def _check_section_params(params: Any, *, in_type: bool) -> Iterator[ConfigError]:
    """Refuses `ds_zo.params` beside an `optimizer` block, and keys in it that belong to the script's own optimizer."""
    if not isinstance(params, dict):
        return
    if in_type:
        text = f"params goes with ds_zo.backend, got {shown(params)} beside an optimizer block"
        yield ConfigError(f"{text}; move its keys into optimizer.params", at="ds_zo.params")
        return
    for key in _GROUP_KEYS:
        if params.get(key) is not None:
            text = f"{key} belongs to the optimizer that the script makes, got {shown(params[key])}; set it there, or "
            text += "write an optimizer block instead of ds_zo.backend"
            yield ConfigError(text, at=f"ds_zo.params.{key}")


@raises_all
def _check_optimizer_keys(optimizer: dict[str, Any], model: type[OptimizerParams]) -> Iterator[ConfigError]:
    for key, value in optimizer.items():
        if key not in _OPTIMIZER_KEYS:
            known_param = key in model.model_fields
            remedy = "move it into optimizer.params" if known_param else suggestion(str(key), _OPTIMIZER_KEYS)
            yield ConfigError(f'unknown key "{key}" with value {shown(value)}; {remedy}', at=f"optimizer.{key}")
