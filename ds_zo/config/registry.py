"""The backends that `optimizer.type` or `ds_zo.backend` can name: one entry a backend.

An entry holds all that the configuration, the plugin and the planner need to know of a backend before its code is
imported. `register_backend` adds an entry from outside the package.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from ds_zo.config.errors import ConfigError, shown, suggestion
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

    streams: bool = False
    """The backend streams blocks when `offload_param.device` is "cpu". False: the configuration refuses that setting,
    and the whole model is on the device before the backend's constructor runs."""

    shards_host: bool = False
    """Under ZeRO stage 3 and streaming, the ranks of a machine divide its host copy of the weights among them."""

    shards_device: bool = False
    """Under ZeRO stage 3 without streaming, each device keeps a piece of every block."""

    offloads_optimizer: bool = False
    """The backend reads `offload_optimizer`. False: the section is reported as ignored."""

    scales_loss: bool = False
    """The backend scales fp16 losses as the `fp16` section says, or refuses fp16. False: the scaling keys of that
    section are reported as ignored."""

    clips_gradients: bool = False
    """The backend applies `gradient_clipping`. False: the start-up log says that it has no effect."""

    compiles_blocks: bool = False
    """The backend reads `ds_zo.compile_blocks`. False: the configuration refuses true."""

    zeroth_order: bool = False
    """The backend estimates gradients from losses, so that AdamW's learning rates are far too large for it."""

    adamw_rates: bool = False
    """AdamW's learning rates suit the backend. False: a warning says that they may not."""

    updates_in_backward: bool = False
    """Each gradient is applied and freed inside the backward pass. Accumulation is refused by default, and the norm for
    `gradient_clipping` takes a backward pass of its own."""

    refuses_fp16: bool = False
    """The backend does not train in fp16, because it does not scale losses."""

    replays_updates: bool = False
    """The backend can replay past updates: it reads `stream.writeback_interval`, `stream.fuse_update` and
    `checkpoint.trajectory`. False: the configuration refuses them."""

    stores_other_dtypes: bool = False
    """The backend reads `wire_dtype`, `frozen_dtype` and `master` of `stream`. False: weights are stored in the model's
    dtype, except frozen ones under `stores_frozen_dtypes`."""

    stores_frozen_dtypes: bool = False
    """The backend reads `stream.frozen_dtype`, and not the other two keys of `stores_other_dtypes`."""

    offloads_activations: bool = False
    """The backend reads `stream.offload_activations`. False: the configuration refuses true."""

    rounds_by_kahan: bool = False
    """The backend has `rounding` kahan for weights on the device. False: the configuration refuses it."""

    planner: str | None = None
    """Place of the function that estimates memory and time for `ds-zo plan`, as "module:function". It takes a `Model`
    and `Limits`, and the keywords `stream`, `params`, `offload` and `checkpointing`. None: it is not planned."""

    @property
    def name(self) -> str:
        """The key of the entry: the value of `ds_zo.backend`, of `Resolved.backend` and of a checkpoint's manifest."""
        return self.optimizer_type.lower()

    @property
    def unread_stream_keys(self) -> tuple[str, ...]:
        """Keys of `ds_zo.stream` that the backend does not read."""
        unread = {
            "wire_dtype": not self.stores_other_dtypes,
            "frozen_dtype": not self.reads_frozen_dtype,
            "master": not self.stores_other_dtypes,
            "writeback_interval": not self.replays_updates,
            "fuse_update": not self.replays_updates,
            "offload_activations": not self.offloads_activations,
        }
        return tuple(key for key, is_unread in unread.items() if is_unread)

    @property
    def reads_frozen_dtype(self) -> bool:
        return self.stores_other_dtypes or self.stores_frozen_dtypes


_BUILT_IN = (
    BackendEntry(
        "ZO",
        "ds_zo.backends.zo.backend:ZOBackend",
        ZOParams,
        streams=True,
        shards_host=True,
        zeroth_order=True,
        replays_updates=True,
        stores_other_dtypes=True,
        planner="ds_zo.planner.zo:estimate_zo",
    ),
    BackendEntry(
        "LOMO",
        "ds_zo.backends.lomo.backend:LOMOBackend",
        LOMOParams,
        streams=True,
        shards_host=True,
        shards_device=True,
        scales_loss=True,
        clips_gradients=True,
        compiles_blocks=True,
        updates_in_backward=True,
        rounds_by_kahan=True,
        planner="ds_zo.planner.lomo:estimate_lomo",
    ),
    BackendEntry(
        "AdaLOMO",
        "ds_zo.backends.lomo.adalomo:AdaLOMOBackend",
        AdaLOMOParams,
        streams=True,
        shards_host=True,
        shards_device=True,
        scales_loss=True,
        clips_gradients=True,
        compiles_blocks=True,
        updates_in_backward=True,
        rounds_by_kahan=True,
        planner="ds_zo.planner.lomo:estimate_adalomo",
    ),
    BackendEntry(
        "LSP",
        "ds_zo.backends.lsp.backend:LSPBackend",
        LSPParams,
        streams=True,
        offloads_optimizer=True,
        scales_loss=True,
        clips_gradients=True,
        compiles_blocks=True,
        adamw_rates=True,
        planner="ds_zo.planner.lsp:estimate_lsp",
    ),
    BackendEntry(
        "Adapter",
        "ds_zo.backends.adapter.backend:AdapterBackend",
        AdamWParams,
        stock_types=("adamw", "adam"),
        streams=True,
        shards_host=True,
        scales_loss=True,
        clips_gradients=True,
        adamw_rates=True,
        stores_frozen_dtypes=True,
        offloads_activations=True,
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
    planner: str | None = None,
    **capabilities: Any,
) -> None:
    """Makes a backend available to every JSON that names `optimizer_type`.

    `backend` is a subclass of `ds_zo.backends.Backend`, or its place as "module:Class", imported on first use.
    `params` types its `optimizer.params`. `planner` is the place of its estimate for `ds-zo plan`. `capabilities` are
    the other fields of `BackendEntry`, by default False or empty. Call it before `deepspeed.initialize`, in every
    process; to register the same entry twice does nothing.
    """
    entry = BackendEntry(optimizer_type, backend, params, planner=planner, **capabilities)
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


def imported(place: Any) -> Any:
    """The object at a place "module:name", imported now. Another value than a string is returned as it is."""
    if not isinstance(place, str):
        return place
    module_name, _, name = place.partition(":")
    return getattr(importlib.import_module(module_name), name)
