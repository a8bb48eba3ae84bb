"""Every attribute of DeepSpeed and transformers that this package replaces, in one table: `PATCHES`.

DeepSpeed has no registry of optimizers. `deepspeed.initialize` (also a copy of it that was imported earlier),
Accelerate and Trainer all call `DeepSpeedEngine.__new__`. The replacement returns a `PluginEngine` when the JSON names
one of our backends, and Python then calls `PluginEngine.__init__`.

[Note: uninstalled patches] `uninstall` puts DeepSpeed's own attributes back. Two kinds of replacement remain reachable:
`DeepSpeedEngine.__new__`, because deleting a `__new__` that was set on a class breaks construction for good, and copies
that other modules imported by name. All replacements therefore ask `is_installed` at each call, and do what DeepSpeed
does when it is False.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from ds_zo.backends import backend_class
from ds_zo.checkpoint.files import SAFETENSORS_DTYPES
from ds_zo.checkpoint.snapshot import persistent_buffers
from ds_zo.config import ConfigError, Resolved, backend_of, resolve, resolve_for_evaluation, with_section_on_top
from ds_zo.config.registry import unknown_optimizer
from ds_zo.plugin import gathered_parameters, hf_trainer
from ds_zo.plugin.checkpointing import refuse_to_stock
from ds_zo.plugin.engine import ENGINE_SIGNATURE, PluginEngine, destroy_engine_of, has_live_engines
from ds_zo.streaming.loading import read_all
from ds_zo_autoload import AfterImport

_installed = False
_originals: dict[Callable[..., Any], Callable[..., Any]] = {}
"""The function that each of our replacements stands for."""


def install() -> None:
    """Makes our backends known to DeepSpeed. `import ds_zo` calls it; call it again to undo `uninstall`."""
    global _installed
    _installed = True
    for patch in PATCHES:
        patch.apply()


def uninstall() -> None:
    """Gives every JSON DeepSpeed's own engine from now on. Engines of ours that exist keep working.

    `GatheredParameters` serves the parameters of such engines, so it stays replaced while there is one.
    """
    global _installed
    _installed = False
    for patch in PATCHES:
        if not (patch.serves_engines and has_live_engines()):
            patch.undo()


def is_installed() -> bool:
    return _installed


class Patch:
    """Replaces one attribute of a class or of a module that belongs to another package."""

    def __init__(
        self,
        owner: type | str,
        name: str,
        replace: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        serves_engines: bool = False,
    ) -> None:
        """`owner` is a class, or the name of a module, which is not imported for this.

        `replace` returns the replacement of a function, always the same for the same function. `serves_engines` says
        that engines that exist need the replacement.
        """
        self.owner, self.name, self.serves_engines = owner, name, serves_engines
        self._replace = replace
        self._finder: AfterImport | None = None

    def __str__(self) -> str:
        owner = self.owner if isinstance(self.owner, str) else f"{self.owner.__module__}.{self.owner.__qualname__}"
        return f"{owner}.{self.name}"

    def apply(self) -> None:
        """Replaces the attribute, or has it replaced when its module is imported."""
        owner = self._loaded_owner()
        if owner is None:
            if self._finder not in sys.meta_path:
                self._finder = AfterImport(str(self.owner), self.apply)
                sys.meta_path.insert(0, self._finder)
            return
        original = getattr(owner, self.name, None)
        if original is None or original in _originals:  # another version of that package, or replaced already
            return
        replacement = self._replace(original)
        _originals[replacement] = original
        setattr(owner, self.name, staticmethod(replacement) if self.name == "__new__" else replacement)

    def undo(self) -> None:
        """Puts the original back, unless another package has replaced our replacement."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        owner = self._loaded_owner()
        current: Any = getattr(owner, self.name, None)
        if current in _originals and self.name != "__new__":  # see [Note: uninstalled patches]
            setattr(owner, self.name, _originals[current])

    def _loaded_owner(self) -> Any:
        return sys.modules.get(self.owner) if isinstance(self.owner, str) else self.owner


@functools.cache
def _replace_new(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DeepSpeedEngine.__new__` that returns a `PluginEngine` where the JSON names one of our backends.

    It also does so where the JSON has a `ds_zo` section and no optimizer is given. TRL and Trainer remove the optimizer
    from the JSON of a model that they only evaluate.
    """

    def new(cls: type[DeepSpeedEngine], *args: Any, **kwargs: Any) -> DeepSpeedEngine:
        config = _ds_config(args, kwargs) if _installed else None
        model = _argument("model", args, kwargs)
        has_own_optimizer = _argument("optimizer", args, kwargs) is not None
        backend = backend_of(config) if config is not None else None
        if config is None or (backend is None and not config.get("ds_zo")):
            if config is not None and not has_own_optimizer:
                _check_optimizer_type(cls, config)
            destroy_engine_of(model)
            if config is not None and model is not None:
                read_all(model)
            return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        trains = has_own_optimizer or bool(config.get("optimizer"))
        if not issubclass(PluginEngine, cls) and (backend is not None or not trains):
            raise ConfigError(
                f"{f'backend {backend}' if backend else 'a ds_zo section'} replaces DeepSpeedEngine, and this model or "
                f"JSON asks for {cls.__name__}: pass a plain nn.Module and leave hybrid_engine out",
                at="optimizer.type" if "optimizer" in config else "ds_zo.backend" if backend else "ds_zo",
            )
        engine = object.__new__(PluginEngine)
        engine.__dict__["_process"] = os.getpid()
        # The JSON is checked here, not in __init__: when it is refused, no engine is half made and no weight has moved.
        resolved = resolve(config, client_optimizer=has_own_optimizer) if trains else resolve_for_evaluation(config)
        engine.__dict__["resolved"] = resolved
        engine.__dict__["_backend_class"] = backend_class(resolved.backend)
        _check_dtype(resolved)
        destroy_engine_of(model)
        _check_whole(model)
        if trains:
            _check_savable(model)
        return engine

    return new


@functools.cache
def _replace_config_init(original: Callable[..., None]) -> Callable[..., None]:
    """`DeepSpeedConfig.__init__` that accepts a `ds_zo` section inside `zero_optimization`.

    DeepSpeed reads the JSON before it makes an engine. Where it refuses a JSON that names one of our backends, our own
    error is raised instead if there is one.
    """

    @functools.wraps(original)
    def config_init(self: DeepSpeedConfig, config: Any, *args: Any, **kwargs: Any) -> None:
        if _installed and isinstance(config, (str, os.PathLike)):
            config = load_ds_config(os.fspath(config))
        if _installed and isinstance(config, dict):
            config = with_section_on_top(config)
        try:
            original(self, config, *args, **kwargs)
        except Exception:
            if _installed and isinstance(config, dict):
                try:
                    if backend_of(config) is not None or isinstance(config.get("optimizer"), str):
                        resolve(config)
                except ConfigError as error:
                    raise error from None
            raise

    return config_init


@functools.cache
def _replace_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DeepSpeedEngine.load_checkpoint` that refuses our checkpoints in DeepSpeed's own engine, and says the remedy.

    DeepSpeed finds none of its files there, and its assertion has no message.
    """

    @functools.wraps(original)
    def load_checkpoint(self: DeepSpeedEngine, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if _installed and load_dir is not None and not isinstance(self, PluginEngine):
            refuse_to_stock(Path(load_dir), tag)
        return original(self, load_dir, tag, *args, **kwargs)

    return load_checkpoint


@functools.cache
def _replace_export_envs(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`export_envs` of the accelerator that adds the beginning of our variables' names.

    DeepSpeed's launcher sends variables to other hosts if their names begin so. `DS_ZO_AUTOLOAD` must reach them.
    """

    @functools.wraps(original)
    def export_envs(self: Any) -> list[str]:
        return [*original(self), "DS_ZO_"] if _installed else original(self)

    return export_envs


_replace_deepspeed_init = functools.partial(hf_trainer.replace, is_installed)

PATCHES = (
    Patch(DeepSpeedEngine, "__new__", _replace_new),
    Patch(DeepSpeedEngine, "load_checkpoint", _replace_load_checkpoint),
    Patch(DeepSpeedConfig, "__init__", _replace_config_init),
    Patch(GatheredParameters, "__init__", gathered_parameters.replace_init, serves_engines=True),
    Patch(type(get_accelerator()), "export_envs", _replace_export_envs),
    # Trainer's module has a copy of the function; it is a copy of our replacement if that module is imported later.
    Patch("transformers.integrations.deepspeed", "deepspeed_init", _replace_deepspeed_init),
    Patch("transformers.trainer", "deepspeed_init", _replace_deepspeed_init),
)


def _check_dtype(resolved: Resolved) -> None:
    """Refuses fp16 on a device without it. DeepSpeed refuses it after it has moved the model, and gives no remedy."""
    if resolved.dtype is torch.float16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16 needs FP16 instructions, which this machine's {get_accelerator().device_name()} does not have; "
            "use bf16.enabled, or neither for float32, or a GPU",
            at="fp16.enabled",
        )


def _check_optimizer_type(cls: type[DeepSpeedEngine], config: Mapping[str, Any]) -> None:
    """Refuses an optimizer name that DeepSpeed does not know. DeepSpeed's own error does not list our names."""
    block = config.get("optimizer")
    written = block.get("type") if isinstance(block, dict) else None
    if not isinstance(written, str) or any(cls._is_supported_optimizer(cls, n) for n in (written, written.lower())):
        return
    raise unknown_optimizer(written)


def _check_whole(model: nn.Module) -> None:
    """Refuses a model whose parameters have lost their values to an earlier engine."""
    for name, p in model.named_parameters():
        if getattr(p, "_ds_zo_left", False) and not p.numel():
            raise RuntimeError(
                f"an engine needs whole weights, got parameter {name} without values: each rank had a piece of it "
                "(LOMO at stage 3) in an engine that was destroyed. Save the weights before the engine is destroyed "
                "and load them into a new model; with Trainer, make a new Trainer for each train() and evaluate before "
                "training by eval_on_start=True"
            )
        if p.numel() > 1 and not any(p.stride()):
            raise RuntimeError(
                f"an engine needs whole weights, got parameter {name} without memory: an earlier engine had stored its "
                "values in another form when making that engine failed. Load the model again"
            )


def _check_savable(model: nn.Module) -> None:
    """Refuses a model that no checkpoint could hold, before hours of training."""
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        if tensor.dtype not in SAFETENSORS_DTYPES or tensor.layout is not torch.strided:
            raise ValueError(
                f"a checkpoint holds dense tensors of the dtypes that safetensors has, got {name} of {tensor.dtype}, "
                f"{tensor.layout}: give it another dtype, or register it by register_buffer(persistent=False) ({name})"
            )


def _argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument of that name in a call of `DeepSpeedEngine`; None if it is not given."""
    return ENGINE_SIGNATURE.bind_partial(None, *args, **kwargs).arguments.get(name)


def _ds_config(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON of the engine that is being made. None where `__new__` has no arguments, as in copying or unpickling."""
    config = _argument("config", args, kwargs)
    if not isinstance(config, dict):
        config = getattr(_argument("config_class", args, kwargs), "_param_dict", None)
    return with_section_on_top(config) if isinstance(config, dict) else None
