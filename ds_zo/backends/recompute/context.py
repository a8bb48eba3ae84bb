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

    def __init__(self, profile: BlockProfile, device: torch.device) -> None:
        self._profile = profile
        self._random = profile.random.get_state()
        records_python = profile.draws or (profile.draws is None and profile.module.training)
        self._python = RandomState.python_state() if records_python else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        ]
        self._training = [m.training for m in profile.modules]
        self._trained = [p.requires_grad for p in profile.parameters]
        self._seen = [(key, buffer, _version(buffer)) for key, buffer in profile.buffers()]
        self._buffers = {
            key: buffer.detach().clone()
            for key, buffer, _ in self._seen
            if profile.changes is None or key in profile.changes
        }
        """As they were, of those that this forward changes in place."""

    def end_forward(self) -> None:
        """The forward has ended: forgets what it had no part in."""
        profile, now = self._profile, dict(self._profile.buffers())
        stays = {key: buffer for key, buffer, _ in self._seen if now.get(key) is buffer}
        changes = {key for key, _, _ in self._seen if key not in stays}
        changes |= {key for key, buffer, version in self._seen if key in stays and _version(buffer) != version}
        if profile.changes is None:  # batch norms write past the counter of versions
            changes |= {key for key, buffer in stays.items() if not torch.equal(buffer, self._buffers[key])}
        changes |= profile.changes or set()
        if profile.module.training:
            profile.changes = changes
        self._buffers = {
            key: self._buffers[key] if key in self._buffers else stays[key].detach().clone()
            for key in changes & stays.keys()
        }
        self._seen = []
        if self._python is not None:
            if RandomState.equal_python_states(self._python, RandomState.python_state()):
                self._python = None
            profile.draws = profile.draws or self._python is not None

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            for m, training in zip(self._profile.modules, self._training, strict=True):
                if m.training is not training:
                    stack.callback(setattr, m, "training", m.training)
                    m.training = training
            for p, trained in zip(self._profile.parameters, self._trained, strict=True):
                if p.requires_grad is not trained:
                    stack.callback(p.requires_grad_, p.requires_grad)
                    p.requires_grad_(trained)
            for number, name in self._profile.changes or self._buffers:
                held = self._profile.modules[number]._buffers
                if name in held:
                    stack.callback(held.__setitem__, name, held[name])
                    before = self._buffers.get((number, name))
                    held[name] = held[name] if before is None else before.clone()
            if self._python is not None:
                stack.callback(RandomState.set_python_state, RandomState.python_state())
                RandomState.set_python_state(self._python)
            stack.callback(self._profile.random.set_state, self._profile.random.get_state())
            self._profile.random.set_state(self._random)
            yield


def _version(tensor: Any) -> int | None:
    """None of one that was made in inference mode, which nothing changes in place outside of it."""
    return None if tensor.is_inference() else tensor._version
