"""HF Trainer's evaluation before training, and its training again, on our engines.

Trainer asks `deepspeed_init` before it makes an engine. To evaluate without having trained, that function refuses every
JSON below stage 3, and at stage 3 takes out the optimizer block, which names our backend, for good. To train a second
time, Trainer first destroys its engine, then goes on with it, because `model_wrapped` still holds it. Both are
DeepSpeed's own engines' limits and not ours, so the function is replaced for our JSONs. transformers is not loaded for
that: the function is replaced as its module is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_zo.config import backend_of

_DEFINED_IN = "transformers.integrations.deepspeed"
_IMPORTED_BY = "transformers.trainer"
_NAME = "deepspeed_init"


def install(is_active: Callable[[], bool]) -> None:
    """`is_active`: asked at each call, whether our JSONs are ours to serve."""
    if _DEFINED_IN not in sys.modules:
        sys.meta_path.insert(0, _WhenImported(is_active))
        return
    for name in (_DEFINED_IN, _IMPORTED_BY):
        if name in sys.modules:
            _replace(sys.modules[name], is_active)


class _WhenImported(MetaPathFinder):
    """Finds the module as any other, once, and has it changed after it has run."""

    def __init__(self, is_active: Callable[[], bool]) -> None:
        self._is_active = is_active

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _DEFINED_IN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                _replace(module, self._is_active)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType, is_active: Callable[[], bool]) -> None:
    stock = getattr(module, _NAME, None)
    if stock is None:
        return  # another transformers: Trainer then does with our engines what it does with any

    @wraps(stock)
    def deepspeed_init(trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
        config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
        if not is_active() or backend_of(config.config) is None:
            return stock(trainer, num_training_steps, inference)
        if inference:
            _make_engine_to_evaluate(trainer, config)
            return None, None
        if isinstance(trainer.model_wrapped, DeepSpeedEngine):  # of an earlier run, and destroyed
            trainer.model_wrapped = trainer.model
        return stock(trainer, num_training_steps)

    setattr(module, _NAME, deepspeed_init)


def _make_engine_to_evaluate(trainer: Any, config: Any) -> None:
    """As training does, but for the scheduler: what is "auto" there depends on a number of steps not known yet."""
    logger.setLevel(trainer.args.get_process_log_level())
    scheduler = config.config.pop("scheduler", None)
    try:
        config.trainer_config_finalize(trainer.args, trainer.model, 0)
        trainer.model_wrapped = trainer.deepspeed = trainer.accelerator.prepare(trainer.model)
    finally:
        if scheduler is not None:
            config.config["scheduler"] = scheduler
