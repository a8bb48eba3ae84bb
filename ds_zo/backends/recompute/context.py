"""The state besides arguments and weights on which a block's forward depends.

[Note: the context of a forward] Between a forward and its recomputation a user may evaluate, or call the model in
another mode, with other weights frozen or with other adapters of PEFT. So a recomputation restores the state of the
forward: random generators, autocast, `training` flags, `requires_grad` flags, active adapters, and forward hooks of
modules inside the block. PEFT registers such hooks for one forward, to pass arguments to its layers (aLoRA). A buffer
that the forward changes in place (running statistics, the vectors of a spectral norm) is replaced by a copy of its
value before the forward. The real buffer keeps the value that the forward has left in it. A buffer that the forward
replaces by another tensor is not restored. Its module may have stored results that depend on the new tensor, as lazy
caches do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.random_state import RandomState, generators_of
from ds_zo.versions import OUTPUT_CAPTURING

_ADAPTERS = ("_active_adapter", "_disable_adapters")
"""Attributes of PEFT's layers that tell which adapters they use."""
_HOOKS = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
"""Attributes of a module that hold its forward hooks."""
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


class BlockProfile:
    """What is known about a block from its earlier forwards, so that `ForwardContext` copies only the state that the
    block uses."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.random = RandomState(device)
        self.random.own = generators_of(module)
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.adapted = [m for m in self.modules if all(hasattr(m, name) for name in _ADAPTERS)]
        """PEFT's layers."""
        self.draws = False
        """Whether its forward draws from the global generators of Python or numpy, which are slow to copy."""
        self.changes: set[tuple[int, str]] = set()
        """Buffers that its forward changes or replaces: the module's index in `modules`, and the buffer's name."""
        self.known_flags: set[tuple[bool, ...]] = set()
        """`training` flags of `modules` for which a forward has shown `draws` and `changes`. Norms that were frozen at
        first, for example, change their statistics later."""

    def has_hooks_inside(self) -> bool:
        """Whether a module inside the block has forward or backward hooks other than those of
        [Note: recorded outputs]."""
        kinds = (getattr(m, name, None) or {} for m in self.modules[1:] for name in (*_HOOKS, *_BACKWARD_HOOKS))
        return any(getattr(hook, "__module__", None) != OUTPUT_CAPTURING for hooks in kinds for hook in hooks.values())

    @cached_property
    def keeps_weights_in_lists(self) -> bool:
        """Whether a module inside the block, such as an LSTM, holds parameters in a list, tuple or dict of its own."""
        known = set(map(id, self.parameters))
        kept = (value for m in self.modules for name, value in vars(m).items() if name != "_parameters")
        lists = (v.values() if isinstance(v, dict) else v for v in kept if isinstance(v, (list, tuple, dict)))
        return any(id(found) in known for values in lists for found in values)

    def buffers(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        """The block's buffers by their keys, which are as in `changes`."""
        for number, m in enumerate(self.modules):
            for name, buffer in m._buffers.items():
                if buffer is not None:
                    yield (number, name), buffer


class ForwardContext:
    """The context of one forward ([Note: the context of a forward]). Made before the forward; `begin_tile` is called
    before each of its tiles, and `end_forward` after it."""

    def __init__(self, profile: BlockProfile, device: torch.device) -> None:
        self._profile = profile
        self._random: list[tuple[Any, ...]] = []
        """The random state before each tile."""
        self._training = tuple(m.training for m in profile.modules)
        self._is_known = self._training in profile.known_flags
        self._python = RandomState.python_state() if profile.draws or not self._is_known else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in {device.type, "cpu"}
        ]
        self.trained = [p.requires_grad for p in profile.parameters]
        self._adapters = [[getattr(m, name) for name in _ADAPTERS] for m in profile.adapted]
        self._hooks = {
            (number, name): dict(hooks)
            for number, m in enumerate(profile.modules)
            for name in _HOOKS
            if (hooks := getattr(m, name, {}))
        }
        self._seen = [(key, buffer, _version(buffer)) for key, buffer in profile.buffers()]
        self._buffers = {
            key: buffer.detach().clone()
            for key, buffer, _ in self._seen
            if not self._is_known or key in profile.changes
        }
        """Copies, made before the forward, of the buffers that it changes in place. Until `end_forward`: of those that
        it may change."""

    def begin_tile(self) -> None:
        self._random.append(self._profile.random.get_state())

    def end_forward(self) -> None:
        """Drops the copies of state that the forward has not used, and records in the profile what it has used."""
        profile, now = self._profile, dict(self._profile.buffers())
        stays = {key: buffer for key, buffer, _ in self._seen if now.get(key) is buffer}
        changes = {key for key, _, _ in self._seen if key not in stays}
        changes |= {key for key, buffer, version in self._seen if key in stays and _version(buffer) != version}
        if not self._is_known:  # batch norms do not increase the version counters of their statistics
            changes |= {key for key, buffer in stays.items() if not torch.equal(buffer, self._buffers[key])}
        profile.known_flags.add(self._training)
        changes = profile.changes = changes | profile.changes
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
    def restored(self, *, tile: int) -> Iterator[None]:
        """Context of the recomputation of one tile: the state of the forward is restored, and the present state is put
        back on exit."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=False))
            for m, training in zip(self._profile.modules, self._training, strict=True):
                if m.training is not training:
                    stack.callback(setattr, m, "training", m.training)
                    m.training = training
            for p, trained in zip(self._profile.parameters, self.trained, strict=True):
                if p.requires_grad is not trained:
                    stack.callback(p.requires_grad_, p.requires_grad)
                    p.requires_grad_(trained)
            for m, adapters in zip(self._profile.adapted, self._adapters, strict=True):
                for name, value in zip(_ADAPTERS, adapters, strict=True):
                    stack.callback(setattr, m, name, getattr(m, name))
                    setattr(m, name, value)
            for number, m in enumerate(self._profile.modules):
                for name in _HOOKS:
                    before = self._hooks.get((number, name), {})
                    now = getattr(m, name, {})
                    if now != before:
                        stack.callback(setattr, m, name, now)
                        setattr(m, name, OrderedDict(before))
            for number, name in self._profile.changes:
                held = self._profile.modules[number]._buffers
                if name in held:
                    stack.callback(held.__setitem__, name, held[name])
                    value = self._buffers.get((number, name))
                    held[name] = held[name] if value is None else value.clone()
            if self._python is not None:
                stack.callback(RandomState.set_python_state, RandomState.python_state())
                RandomState.set_python_state(self._python)
            stack.callback(self._profile.random.set_state, self._profile.random.get_state())
            self._profile.random.set_state(self._random[tile])
            yield


def _version(tensor: Any) -> int | None:
    """The version counter of a tensor. None for an inference tensor, which has no counter and cannot be changed in
    place outside of inference mode."""
    return None if tensor.is_inference() else tensor._version
