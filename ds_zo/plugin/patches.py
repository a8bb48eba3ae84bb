"""Every attribute of DeepSpeed and transformers that this package replaces, in one table: `PATCHES`.

DeepSpeed has no registry of optimizers. `deepspeed.initialize` (also a copy of it that was imported earlier),
Accelerate and Trainer all call `DeepSpeedEngine.__new__`. The replacement returns a `PluginEngine` when the JSON names
one of our backends, and Python then calls `PluginEngine.__init__`.

[Note: uninstalled patches] `uninstall` puts DeepSpeed's own attributes back. Two kinds of replacement remain reachable:
`DeepSpeedEngine.__new__`, because deleting a `__new__` that was set on a class breaks construction for good, and copies
that other modules imported by name. All replacements therefore read `_installed` at each call, and do what DeepSpeed
does when it is False.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

from ds_zo.backends import backend_class
from ds_zo.config import ConfigError, backend_of, resolve, resolve_for_evaluation, with_section_on_top
from ds_zo.plugin import gathered_parameters, hf_trainer
from ds_zo.plugin.checkpointing import refuse_to_stock
from ds_zo.plugin.checks import check_dtype, check_optimizer_type, check_savable, check_whole
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


class Patch:
    """Replaces one attribute of a class or of a module that belongs to another package."""

    def __init__(self, owner: type | str, name: str, call: Callable[..., Any], *, serves_engines: bool = False) -> None:
        """`owner` is a class, or the name of a module, which is not imported for this.

        `call` gets the original function before the arguments of each call. `serves_engines`: engines that exist need
        it after `uninstall` too.
        """
        self.owner, self.name, self.serves_engines = owner, name, serves_engines
        self._call = call
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
        replacement = _replacement(self._call, original, self.serves_engines)
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
def _replacement(call: Callable[..., Any], original: Callable[..., Any], serves_engines: bool) -> Callable[..., Any]:
    """The function that a patch sets. It is the same whenever `install` is called again."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs) if _installed or serves_engines else original(*args, **kwargs)

    return replacement if original is object.__new__ else functools.update_wrapper(replacement, original)


def _new(original: Callable[..., Any], cls: type[DeepSpeedEngine], *args: Any, **kwargs: Any) -> DeepSpeedEngine:
    """`DeepSpeedEngine.__new__` that returns a `PluginEngine` where the JSON names one of our backends.

    It also does so where the JSON has a `ds_zo` section and no optimizer is given. TRL and Trainer remove the optimizer
    from the JSON of a model that they only evaluate.
    """
    config = _ds_config(args, kwargs) if _installed else None
    model = _argument("model", args, kwargs)
    has_own_optimizer = _argument("optimizer", args, kwargs) is not None
    backend = backend_of(config) if config is not None else None
    if config is None or (backend is None and not config.get("ds_zo")):
        if config is not None and not has_own_optimizer:
            check_optimizer_type(cls, config)
        destroy_engine_of(model)
        if config is not None and model is not None:
            read_all(model)
        stock: DeepSpeedEngine = original(cls) if original is object.__new__ else original(cls, *args, **kwargs)
        return stock
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
    check_dtype(resolved)
    destroy_engine_of(model)
    check_whole(model)
    if trains:
        check_savable(model)
    return engine


def _config_init(original: Callable[..., None], self: DeepSpeedConfig, config: Any, *args: Any, **kwargs: Any) -> None:
    """`DeepSpeedConfig.__init__` that accepts a `ds_zo` section inside `zero_optimization`.

    DeepSpeed reads the JSON before it makes an engine. Where it refuses a JSON that names one of our backends, our own
    error is raised instead if there is one.
    """
    if isinstance(config, (str, os.PathLike)):
        config = load_ds_config(os.fspath(config))
    if isinstance(config, dict):
        config = with_section_on_top(config)
    try:
        original(self, config, *args, **kwargs)
    except Exception:
        if isinstance(config, dict):
            try:
                if backend_of(config) is not None or isinstance(config.get("optimizer"), str):
                    resolve(config)
            except ConfigError as error:
                raise error from None
        raise


def _load_checkpoint(
    original: Callable[..., Any],
    self: DeepSpeedEngine,
    load_dir: str,
    tag: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`DeepSpeedEngine.load_checkpoint` that refuses our checkpoints in DeepSpeed's own engine, and says the remedy.

    DeepSpeed finds none of its files there, and its assertion has no message.
    """
    if load_dir is not None and not isinstance(self, PluginEngine):
        refuse_to_stock(Path(load_dir), tag)
    return original(self, load_dir, tag, *args, **kwargs)


def _export_envs(original: Callable[..., list[str]], self: Any) -> list[str]:
    """`export_envs` of the accelerator that adds the beginning of our variables' names.

    DeepSpeed's launcher sends variables to other hosts if their names begin so. `DS_ZO_AUTOLOAD` must reach them.
    """
    return [*original(self), "DS_ZO_"]


PATCHES = (
    Patch(DeepSpeedEngine, "__new__", _new, serves_engines=True),
    Patch(DeepSpeedEngine, "load_checkpoint", _load_checkpoint),
    Patch(DeepSpeedConfig, "__init__", _config_init),
    Patch(GatheredParameters, "__init__", gathered_parameters.init, serves_engines=True),
    Patch(type(get_accelerator()), "export_envs", _export_envs),
    # Trainer's module has a copy of the function; it is a copy of our replacement if that module is imported later.
    Patch("transformers.integrations.deepspeed", "deepspeed_init", hf_trainer.deepspeed_init),
    Patch("transformers.trainer", "deepspeed_init", hf_trainer.deepspeed_init),
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
