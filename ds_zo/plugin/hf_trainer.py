"""HF Trainer's evaluation before training, and its second training, with our engines.

Trainer calls `deepspeed_init` before it makes an engine. For an evaluation before training, that function refuses every
JSON below stage 3. At stage 3 it deletes the JSON's optimizer block, which names our backend. For a second training,
Trainer destroys its engine and then uses it again, because `trainer.model_wrapped` still refers to it. Our engines have
neither limit, so the function is replaced for JSONs that name one of our backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_zo.config import backend_of, with_section_on_top


def deepspeed_init(original: Callable[..., Any], trainer: Any, num_training_steps: int, inference: bool = False) -> Any:
    """Replaces the function of the same name. `original` is that function."""
    config = trainer.accelerator.state.deepspeed_plugin.hf_ds_config
    if not _is_ours(config.config, inference=inference):
        return original(trainer, num_training_steps, inference)
    if inference:
        _make_engine_to_evaluate(trainer, config)
        return None, None
    if isinstance(trainer.model_wrapped, DeepSpeedEngine):  # the destroyed engine of an earlier training
        trainer.model_wrapped = trainer.model
    return original(trainer, num_training_steps)


def _is_ours(ds_config: dict[str, Any], *, inference: bool) -> bool:
    """Whether the JSON names one of our backends, or is one of an evaluation and has a `ds_zo` section."""
    return backend_of(ds_config) is not None or (inference and bool(with_section_on_top(ds_config).get("ds_zo")))


def _make_engine_to_evaluate(trainer: Any, config: Any) -> None:
    """Makes an engine as Trainer does for training, but without the JSON's scheduler.

    The scheduler's "auto" values depend on the number of steps, which is not known yet.
    """
    logger.setLevel(trainer.args.get_process_log_level())
    scheduler = config.config.pop("scheduler", None)
    try:
        config.trainer_config_finalize(trainer.args, trainer.model, 0)
        trainer.model_wrapped = trainer.deepspeed = trainer.accelerator.prepare(trainer.model)
    finally:
        if scheduler is not None:
            config.config["scheduler"] = scheduler
