"""Backends: what a training step does once DeepSpeed's engine has handed it over."""

from __future__ import annotations

from ds_zo.backends.common.backend import Backend, GroupedOptimizer, StepOutcome, backend_class

__all__ = ["Backend", "GroupedOptimizer", "StepOutcome", "backend_class"]
