"""Finds activations that outlive a training forward, and refuses losses that depend on one.

[Note: activations that outlive a forward] A forward hook, an attribute or a list may keep an activation, of which the
caller then makes a term of the loss. The passes keep no graph, so ZO would drop the term. A torch-function mode notes
the tensors that a forward makes, by weak references. Tensors that are alive after the forward, and are not part of its
output, get `requires_grad`. They are then leaves in the graph of every loss that depends on them.

The mode takes a few microseconds for each torch function. So it runs in the first forward, and in the forward after a
loss whose graph has another form than all losses before. A term that begins in a later step is refused one step later.
A term may also replace a constant, so a model that keeps activations is watched again in forwards 2, 4, 8 and so on.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ds_zo.backends.common.plain_copies import Hook
from ds_zo.backends.zo.loss_terms import refusal

_REMEDY = "compute the term in the model's forward and return the whole loss, or detach a constant"
_MAX_FORMS = 20
"""Forms of losses for which a forward is watched."""
_DETACHING = frozenset(("detach", "detach_"))
_TORCH_WRAPPERS = frozenset(("torch.overrides", "torch.functional", "torch._tensor"))
"""Modules whose functions call a torch function for the code that called them."""
_OF_THE_MODEL = ("ds_zo.backends.common.chunked_loss", "ds_zo.backends.zo.cuda_graphs")
"""Modules of this package that make activations. The rest makes weights and buffers of the engine."""


class _Tensors:
    """A set of tensors, by identity, that keeps none of them alive."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        self._refs[id(tensor)] = weakref.ref(tensor)

    def discard(self, tensor: torch.Tensor) -> None:
        self._refs.pop(id(tensor), None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The tensors that are alive. Forgets the dead ones."""
        self._refs = {key: ref for key, ref in self._refs.items() if ref() is not None}
        return (tensor for ref in list(self._refs.values()) if (tensor := ref()) is not None)


class _Watch(TorchFunctionMode):
    """Notes the floating-point tensors that the model's code makes, apart from constants. A constant is made from
    constants alone, or is detached."""

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        """`constants`: tensors that exist already and do not depend on trained weights."""
        super().__init__()
        self.made = _Tensors()
        self._constants = _Tensors()
        self._found = {id(tensor): tensor for tensor in constants}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x for x in _floats((result,)) if id(x) not in self._found and not isinstance(x, nn.Parameter)]
        if made and not _called_by_engine():
            is_constant = _detaches(func) or all(map(self._is_constant, _floats((*args, *(kwargs or {}).values()))))
            kind, other = (self._constants, self.made) if is_constant else (self.made, self._constants)
            for x in made:
                kind.add(x)
                other.discard(x)
        return result

    def _is_constant(self, x: torch.Tensor) -> bool:
        return id(x) in self._found or x in self._constants


def _detaches(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _DETACHING or (name == "__get__" and getattr(func.__self__, "__name__", "") == "data")


def _floats(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among `values`, and in lists and tuples among them, that can have gradients."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() or value.is_complex():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _floats(value)


def _called_by_engine() -> bool:
    """Whether the engine, and not the model, called the torch function that a mode has intercepted."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _TORCH_WRAPPERS:
        frame = frame.f_back
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name.startswith("ds_zo.") and name not in _OF_THE_MODEL


class Activations:
    """Marks the activations of a model that outlive its forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._watch: _Watch | None = None
        self._marked = _Tensors()
        self._handles: list[Any] = []
        self._forms: set[Any] = set()
        """Forms of losses of watched forwards."""
        self._is_new_form = self._keeps_some = True
        self._num_forwards = 0
        self._is_watched = False
        """Whether the last training forward was watched."""

    @contextmanager
    def watched(self, inputs: Callable[[], Iterable[torch.Tensor]], *, is_new_mode: bool) -> Iterator[None]:
        """Context of the passes of one forward, which are watched if their loss may have a new form. `inputs` returns
        the arguments that are constants."""
        self._watch = None
        self._num_forwards += 1
        is_due = self._keeps_some and self._num_forwards.bit_count() == 1
        self._is_watched = is_new_mode or is_due or (self._is_new_form and len(self._forms) < _MAX_FORMS)
        if not self._is_watched:
            yield
            return
        self._watch = _Watch([*inputs(), *self._constants()])
        # The mode does not see compiled code, and torch would compile the code again under it.
        with self._watch, torch.compiler.set_stance("force_eager"):
            yield

    def _constants(self) -> Iterator[torch.Tensor]:
        yield from (p for p in self._module.parameters() if not p.requires_grad)
        for m in self._module.modules():
            yield from (x for held in (m._buffers, vars(m)) for x in held.values() if isinstance(x, torch.Tensor))

    def mark(self) -> None:
        """Marks activations that are alive. Called once the output is complete and the passes' own tensors are
        freed."""
        if self._watch is None:
            return
        kept = [x for x in self._watch.made if not x.requires_grad and not x.is_inference()]
        for x in kept:
            x.requires_grad_()
            self._handles.append(x.register_hook(Hook(partial(self._refuse, weakref.ref(x)))))
            self._marked.add(x)
        self._keeps_some, self._watch = bool(kept), None

    def unmark(self) -> None:
        """Ends the marks of the last forward: the next one may write to the same tensors."""
        while self._handles:
            self._handles.pop().remove()
        for x in self._marked:
            x.requires_grad_(False)

    def check(self, nodes: Sequence[Any]) -> None:
        """Raises if one of a loss's autograd nodes is a marked activation. `nodes` are all nodes of the loss's
        graph."""
        for node in nodes:
            variable = getattr(node, "variable", None)
            if variable is not None and variable in self._marked:
                raise self._refusal(variable)
        form = tuple((node.name(), tuple(before is None for before, _ in node.next_functions)) for node in nodes)
        if self._is_watched:
            self._forms.add(form)
        self._is_new_form = form not in self._forms

    def _refuse(self, ref: weakref.ref[torch.Tensor], grad: torch.Tensor) -> None:
        """Hook of a marked activation: raises in a direct `loss.backward()`."""
        raise self._refusal(ref())

    def _refusal(self, activation: torch.Tensor | None) -> ValueError:
        shape = None if activation is None else tuple(activation.shape)
        where = ", ".join(_holders(self._module, activation) or _hooked(self._module))
        where = f", see {where}" if where else ""
        return refusal(f"an activation that the forward left behind (of shape {shape}{where})", _REMEDY)


def _holders(module: nn.Module, activation: torch.Tensor | None) -> list[str]:
    """Names of the attributes of modules that hold the activation."""
    held = (
        (f"{path}.{name}".lstrip("."), value) for path, m in module.named_modules() for name, value in vars(m).items()
    )
    return [name for name, value in held if any(x is activation for x in _flat(value))]


def _flat(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)


def _hooked(module: nn.Module) -> list[str]:
    """Names of the modules on which the user has registered forward hooks."""
    return [
        f"the hook on {path or 'the model'}"
        for path, m in module.named_modules()
        if any(
            not isinstance(hook, Hook) for hooks in (m._forward_hooks, m._forward_pre_hooks) for hook in hooks.values()
        )
    ]
