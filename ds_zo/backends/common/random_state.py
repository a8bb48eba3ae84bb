"""The states of the random generators from which a forward may draw."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class RandomState:
    """The random generators from which a forward may draw.

    Copying the states of Python's and numpy's global generators takes longer than running a small block. So `get_state`
    contains them only where the caller has set `swap_python`, after a forward that used them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.swap_python = False
        """`get_state` contains the states of Python's and numpy's global generators."""
        self.own: list[Any] = []
        """Further generators: attributes of the module, or arguments of the caller."""

    def get_state(self) -> tuple[Any, ...]:
        """The states of torch's global generators and of `own`, and of Python's and numpy's with `swap_python`."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        python = self.python_state() if self.swap_python else None
        return torch.get_rng_state(), cuda, python, [_state_of(generator) for generator in self.own]

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Restores what `get_state` returned."""
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
        """The states of Python's and of numpy's global generator."""
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
    """The random generators that `module` and its submodules hold in attributes, also inside containers."""
    return [generator for m in module.modules() for generator in own_generators(m)]


def own_generators(module: nn.Module) -> list[Any]:
    """The random generators in the attributes of one module."""
    due, found, seen = list(vars(module).values()), [], set()
    while due:
        value = due.pop()
        if is_generator(value):
            found.append(value)
        elif isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            due += value.values() if isinstance(value, Mapping) else value
    return found


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator with a state. `random.SystemRandom` has none."""
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)
