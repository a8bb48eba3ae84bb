"""Typed models of our JSON keys, and `resolve`, which checks a whole DeepSpeed JSON."""

from __future__ import annotations

from ds_zo.config.errors import ConfigError
from ds_zo.config.optimizers import (
    AdaLOMOParams,
    AdamWParams,
    AdapterParams,
    LOMOParams,
    LSPParams,
    OptimizerParams,
    ZOParams,
)
from ds_zo.config.registry import BACKENDS, BackendEntry, register_backend
from ds_zo.config.resolve import backend_of, resolve, resolve_for_evaluation, with_section_on_top
from ds_zo.config.resolved import Resolved
from ds_zo.config.section import CheckpointConfig, DsZoConfig, StreamConfig
from ds_zo.config.stock import LossScale

__all__ = [
    "BACKENDS",
    "AdaLOMOParams",
    "AdamWParams",
    "AdapterParams",
    "BackendEntry",
    "CheckpointConfig",
    "ConfigError",
    "DsZoConfig",
    "LOMOParams",
    "LSPParams",
    "LossScale",
    "OptimizerParams",
    "Resolved",
    "StreamConfig",
    "ZOParams",
    "backend_of",
    "register_backend",
    "resolve",
    "resolve_for_evaluation",
    "with_section_on_top",
]
