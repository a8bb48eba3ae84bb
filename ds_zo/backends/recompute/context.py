"""What a block's forward depends on besides its arguments and weights, so that it can be made again as it was.

[Note: the same again] Between a forward and its backward anything may happen: an evaluation, a second forward in
another mode or with other weights frozen. A block that is computed again finds the randomness, the autocast state, the
modes and the frozen weights of its first time. A buffer that a forward changes in place (running statistics, the
vectors of a spectral norm) is then a copy of what it was, and the real one keeps what the first time left in it. One
that a forward replaces stays: its owner may remember what it made of it, as lazy caches do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.random_state import RandomState, generators_of


class BlockProfile:
    """What a block has been seen to do, so that only what it does is looked after."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.random = RandomState(device)
        self.random.own = generators_of(module)
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.draws: bool | None = None
        """From Python's or numpy's generators, which are slow to copy. None: it has not been trained yet."""
        self.changes: set[tuple[int, str]] | None = None
        """Buffers that its forward changes, by their owner's number and name. None: it has not been trained yet."""

    def buffers(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, m in enumerate(self.modules):
            for name, buffer in m._buffers.items():
                if buffer is not None:
                    yield (number, name), buffer


class ForwardContext:
    """Those of one forward, taken before it."""

    def __init__(self, habits: BlockProfile, device: torch.device) -> None:
        self._habits = habits
        self._random = habits.random.cheap()
        looks = habits.draws or (habits.draws is None and habits.module.training)
        self._python = RandomState.python() if looks else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        ]
        self._training = [m.training for m in habits.modules]
        self._trained = [p.requires_grad for p in habits.parameters]
        self._seen = [(key, buffer, _version(buffer)) for key, buffer in habits.buffers()]
        self._buffers = {
            key: buffer.detach().clone()
            for key, buffer, _ in self._seen
            if habits.changes is None or key in habits.changes
        }
        """As they were, of those that this forward changes in place."""

    def was_run(self) -> None:
        """The forward has ended: forgets what it had no part in."""
        habits, now = self._habits, dict(self._habits.buffers())
        stays = {key: buffer for key, buffer, _ in self._seen if now.get(key) is buffer}
        changes = {key for key, _, _ in self._seen if key not in stays}
        changes |= {key for key, buffer, version in self._seen if key in stays and _version(buffer) != version}
        if habits.changes is None:  # batch norms write past the counter of versions
            changes |= {key for key, buffer in stays.items() if not torch.equal(buffer, self._buffers[key])}
        changes |= habits.changes or set()
        if habits.module.training:
            habits.changes = changes
        self._buffers = {
            key: self._buffers[key] if key in self._buffers else stays[key].detach().clone()
            for key in changes & stays.keys()
        }
        self._seen = []
        if self._python is not None:
            if RandomState.same_python(self._python, RandomState.python()):
                self._python = None
            habits.draws = habits.draws or self._python is not None

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            for m, training in zip(self._habits.modules, self._training, strict=True):
                if m.training is not training:
                    stack.callback(setattr, m, "training", m.training)
                    m.training = training
            for p, trained in zip(self._habits.parameters, self._trained, strict=True):
                if p.requires_grad is not trained:
                    stack.callback(p.requires_grad_, p.requires_grad)
                    p.requires_grad_(trained)
            for number, name in self._habits.changes or self._buffers:
                held = self._habits.modules[number]._buffers
                if name in held:
                    stack.callback(held.__setitem__, name, held[name])
                    before = self._buffers.get((number, name))
                    held[name] = held[name] if before is None else before.clone()
            if self._python is not None:
                stack.callback(RandomState.set_python, RandomState.python())
                RandomState.set_python(self._python)
            stack.callback(self._habits.random.set_cheap, self._habits.random.cheap())
            self._habits.random.set_cheap(self._random)
            yield


def _version(tensor: Any) -> int | None:
    """None of one that was made in inference mode, which nothing changes in place outside of it."""
    return None if tensor.is_inference() else tensor._version
