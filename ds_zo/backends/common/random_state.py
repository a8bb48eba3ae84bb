"""The states of the random generators that a forward draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class RandomState:
    """The generators a forward may draw from. Python's and numpy's cost more to swap than a small block to run, so they
    are swapped only once a forward was seen to use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.swap_python = False
        self.own: list[Any] = []
        """Generators that the module keeps or the caller passed, besides the global ones."""

    def get_state(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        python = (random.getstate(), np.random.get_state()) if self.swap_python else None
        return torch.get_rng_state(), cuda, python, [_state_of(generator) for generator in self.own]

    def set_state(self, state: tuple[Any, ...]) -> None:
        cpu, cuda, python, own = state
        torch.set_rng_state(cpu)
        for generator, value in zip(self.own, own, strict=True):
            _set_state(generator, value)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)
        if python is not None:
            self.set_python_state(python)

    @staticmethod
    def python_state() -> tuple[Any, Any]:
        return random.getstate(), np.random.get_state()

    @staticmethod
    def set_python_state(state: tuple[Any, Any]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])

    @staticmethod
    def equal_python_states(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
        return a[0] == b[0] and a[1][2] == b[1][2] and np.array_equal(a[1][1], b[1][1])


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def generators_of(module: nn.Module) -> list[Any]:
    """Random generators that modules keep for themselves."""
    return [value for m in module.modules() for value in vars(m).values() if is_generator(value)]


def is_generator(value: Any) -> bool:
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)  # which has no state
