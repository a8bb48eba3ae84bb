"""Backends: the training methods that DeepSpeed's engine calls for forward, backward and step."""

from __future__ import annotations

from ds_zo.backends.common.backend import Backend, GroupedOptimizer, StepOutcome, backend_class

__all__ = ["Backend", "GroupedOptimizer", "StepOutcome", "backend_class"]
