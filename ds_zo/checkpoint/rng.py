"""Reads and sets the random states of a process, so that dropout and data order continue exactly after a resume."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def check_random_states(states: Mapping[str, Any]) -> None:
    """Raises where `set_random_states` would, and changes no state."""
    torch.Generator().set_state(states["torch"])
    random.Random().setstate(states["python"])
    np.random.RandomState().set_state(states["numpy"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.Generator("cuda").set_state(states["cuda"])


def set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
