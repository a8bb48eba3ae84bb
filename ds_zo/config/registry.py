"""The backends that `optimizer.type` or `ds_zo.backend` can name: one entry a backend.

An entry holds all that the configuration, the plugin and the planner need to know of a backend before its code is
imported. Its traits and the marks of the keys (`ds_zo/config/marks.py`) say which keys it reads. `register_backend`
adds an entry from outside the package.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from pydantic import BaseModel

from ds_zo.config.errors import ConfigError, shown, suggestion
from ds_zo.config.marks import NO_BACKEND, ReadBy, Trait, marks_in
from ds_zo.config.optimizers import AdaLOMOParams, AdamWParams, LOMOParams, LSPParams, OptimizerParams, ZOParams


@dataclass(frozen=True)
class BackendEntry:
    """One backend: how a JSON names it, where its code is, and what it can do."""

    optimizer_type: str
    """The spelling of `optimizer.type` in messages and tables. A JSON may use any letter case."""

    backend: str | type
    """The subclass of `Backend`, or its place as "module:Class". A place is imported when the first engine is made, so
    that the kernels of one backend cost the others nothing."""

    params: type[OptimizerParams] = OptimizerParams
    """Types `optimizer.params`."""

    stock_types: tuple[str, ...] = ()
    """Stock values of `optimizer.type`, in lower case, that a JSON may name beside `ds_zo.backend`. The backend calls
    `step()` of the optimizer that it is given."""

    traits: Trait = NO_BACKEND

    planner: str | None = None
    """Place of the function that estimates memory and time for `ds-zo plan`, as "module:function". It takes a `Model`
    and `Limits`, and the keywords `stream`, `params`, `offload` and `checkpointing`. None: it is not planned."""

    @property
    def name(self) -> str:
        """The key of the entry: the value of `ds_zo.backend`, of `Resolved.backend` and of a checkpoint's manifest."""
        return self.optimizer_type.lower()

    def has(self, traits: Trait) -> bool:
        """Whether the backend has at least one of the traits."""
        return bool(self.traits & traits)

    def reads(self, mark: ReadBy) -> bool:
        """Whether the backend reads a key with this mark."""
        return not self.has(mark.unless) and (mark.traits is None or self.has(mark.traits))

    def unread(self, model: type[BaseModel]) -> list[str]:
        """Dotted keys of which the backend reads no value."""
        return [key for key, mark in marks_in(model, ReadBy) if mark.value is None and not self.reads(mark)]


def _entry(
    optimizer_type: str,
    backend: str | type,
    params: type[OptimizerParams],
    traits: Iterable[str],
    *,
    stock_types: tuple[str, ...] = (),
    planner: str | None = None,
) -> BackendEntry:
    """`traits`: their names in lower case."""
    given = NO_BACKEND if stock_types else Trait.ROUNDS_UPDATES
    for name in traits:
        given |= _trait(name)
    return BackendEntry(optimizer_type, backend, params, stock_types, given, planner)


def _trait(name: str) -> Trait:
    """The trait of a name in lower case."""
    if name.upper() not in Trait.__members__:
        known = [trait.lower() for trait in Trait.__members__]
        raise TypeError(f"a backend has no keyword of this name, got {name}; {suggestion(name, known)} ({name})")
    return Trait[name.upper()]


_LOMO_TRAITS = (
    "streams offloads_activations shards_host shards_device scales_loss clips_gradients updates_in_backward "
    "compiles_blocks rounds_by_kahan"
)
_LSP_TRAITS = "streams offloads_activations offloads_optimizer scales_loss clips_gradients adamw_rates compiles_blocks"
_BUILT_IN = (
    _entry(
        "ZO",
        "ds_zo.backends.zo.backend:ZOBackend",
        ZOParams,
        "streams shards_host zeroth_order replays_updates stores_other_dtypes".split(),
        planner="ds_zo.planner.zo:estimate_zo",
    ),
    _entry(
        "LOMO",
        "ds_zo.backends.lomo.backend:LOMOBackend",
        LOMOParams,
        _LOMO_TRAITS.split(),
        planner="ds_zo.planner.lomo:estimate_lomo",
    ),
    _entry(
        "AdaLOMO",
        "ds_zo.backends.lomo.adalomo:AdaLOMOBackend",
        AdaLOMOParams,
        _LOMO_TRAITS.split(),
        planner="ds_zo.planner.lomo:estimate_adalomo",
    ),
    _entry(
        "LSP",
        "ds_zo.backends.lsp.backend:LSPBackend",
        LSPParams,
        _LSP_TRAITS.split(),
        planner="ds_zo.planner.lsp:estimate_lsp",
    ),
    _entry(
        "Adapter",
        "ds_zo.backends.adapter.backend:AdapterBackend",
        AdamWParams,
        "streams shards_host scales_loss clips_gradients adamw_rates stores_frozen_dtypes offloads_activations".split(),
        stock_types=("adamw", "adam"),
        planner="ds_zo.planner.adapter:estimate_adapter",
    ),
)
_entries = {entry.name: entry for entry in _BUILT_IN}

BACKENDS = tuple(_entries)
"""Names of the backends that this package contains. `backend_names` adds those registered from outside."""


def register_backend(
    optimizer_type: str,
    backend: str | type,
    *,
    params: type[OptimizerParams] = OptimizerParams,
    stock_types: tuple[str, ...] = (),
    planner: str | None = None,
    **traits: bool,
) -> None:
    """Makes a backend available to every JSON that names `optimizer_type`.

    `backend` is a subclass of `ds_zo.backends.Backend`, or its place as "module:Class", imported on first use.
    `params` types its `optimizer.params`. `planner` is the place of its estimate for `ds-zo plan`. `traits` are the
    names of `ds_zo.config.marks.Trait` in lower case, by default False. Call it before `deepspeed.initialize`, in every
    process; to register the same entry twice does nothing.
    """
    given = [name for name, is_given in traits.items() if _trait(name) and is_given]  # a misspelt False raises too
    entry = _entry(optimizer_type, backend, params, given, stock_types=stock_types, planner=planner)
    stock = {name.lower() for name in (*DEEPSPEED_OPTIMIZERS, *dir(torch.optim))}
    if entry.name in stock or _entries.get(entry.name, entry) != entry:
        owner = "DeepSpeed or torch.optim" if entry.name in stock else "another backend"
        raise ValueError(
            f"a backend needs an optimizer type of its own, in any letter case, got {shown(optimizer_type)}, which "
            f"{owner} has; choose another name (register_backend)"
        )
    _entries[entry.name] = entry


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, the package's own first."""
    return tuple(_entries)


def unknown_optimizer(written: Any) -> ConfigError:
    """The error of an `optimizer.type` that neither ds_zo nor DeepSpeed knows."""
    names = (*(entry.optimizer_type for entry in entries()), *DEEPSPEED_OPTIMIZERS)
    text = f"optimizer.type must name an optimizer of ds_zo, DeepSpeed or torch.optim, got {shown(written)}"
    return ConfigError(f"{text}; {suggestion(str(written), names)}", at="optimizer.type")


def entries() -> tuple[BackendEntry, ...]:
    """All registered backends, in the order of their registration."""
    return tuple(_entries.values())


def entry_of(name: str) -> BackendEntry:
    """The entry of a registered backend, by its lower-case name."""
    return _entries[name]


def readers(mark: ReadBy) -> str:
    """Which backends read a key: "ZO and Adapter"."""
    *others, last = [entry.optimizer_type for entry in entries() if entry.reads(mark)] or ["no backend"]
    return f"{', '.join(others)} and {last}" if others else last


def imported(place: Any) -> Any:
    """The object at a place "module:name", imported now. Another value than a string is returned as it is."""
    if not isinstance(place, str):
        return place
    module_name, _, name = place.partition(":")
    return getattr(importlib.import_module(module_name), name)
