"""Parameters that intercept reads and writes of their values outside a step.

[Note: direct access to parameters] While a unit is not materialised, its stored weights may lack pending updates. A
copy of them may be under way, or their format may not be the parameter's. `state_dict()` and `GatheredParameters`
handle this. User code that reads `p.data`, averages weights or merges PEFT adapters does not. So the parameters of a
unit that is not materialised are of a subclass whose `__torch_function__` provides the current weights before torch
uses them. While a step runs, they are plain parameters, so that the forward's operations have no overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

_HARMLESS = frozenset(
    """__set__ __len__ __hash__ size dim numel nelement element_size is_floating_point is_complex data_ptr stride
    get_device requires_grad_ register_hook register_post_accumulate_grad_hook""".split()
)
"""Names of methods that do not read a parameter's values: a placeholder gives the same answer."""
_CONTENTS = frozenset("data T mT H mH real imag".split())
"""Names of properties that do read its values."""
OWNER = "_ds_zo_owner"
"""The attribute of a parameter that holds its owner, which stores its weights. `Intercepted` calls the owner's
`refresh(parameter)` before a torch function uses the parameter. Where user code assigns to `parameter.data`, it calls
`replace(parameter, value)`, which returns False if torch is to make the assignment."""


class Intercepted:
    """Makes a class of parameters call the owner before torch functions use a parameter's values. See [Note: direct
    access to parameters]."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_interception():
            if not _needs_no_owner(func) and _call_owners(func, args, kwargs):
                return None
            return func(*args, **kwargs)


@cache
def _intercepted_class(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    return type(f"Intercepted{plain.__name__}", (Intercepted, plain), {})


def check_class(parameter: nn.Parameter, *, name: str) -> None:
    """Raises if access to the parameter cannot be intercepted: its class changes what torch functions do."""
    cls = plain_class(parameter)
    if cls.__torch_function__ is not torch._C._disabled_torch_function_impl and not issubclass(cls, Intercepted):
        raise ValueError(
            "a stored parameter is a plain nn.Parameter, or of a subclass that keeps torch's functions, got "
            f"{name} of {cls.__name__}, which defines __torch_function__: replace it by nn.Parameter before "
            "deepspeed.initialize"
        )


@lru_cache(maxsize=1024)
def _needs_no_owner(func: Any) -> bool:
    """Whether no owner needs to be called for `func`. Cached, because loops over parameters ask for shapes and flags at
    every step."""
    # Kernels read memory at `data_ptr`, so its owner is called.
    return is_harmless(func) and not _sets_data(func) and getattr(func, "__name__", "") != "data_ptr"


def _call_owners(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Calls the owners of the parameters in the arguments. Returns True if an owner has executed `func`, an assignment
    to `.data`, itself."""
    if _sets_data(func):
        owner = owner_of(args[0]) if isinstance(args[0], Intercepted) else None
        return owner is not None and bool(owner.replace(args[0], args[1]))
    for parameter in parameters_in((*args, *kwargs.values())):
        if isinstance(parameter, Intercepted) and (owner := owner_of(parameter)) is not None:
            owner.refresh(parameter)
    return False


def with_interception() -> AbstractContextManager[None]:
    """The opposite of `without_interception`, inside it."""
    found: AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return found


def owner_of(parameter: Any) -> Any:
    """The parameter's owner; None without one."""
    return getattr(parameter, "__dict__", {}).get(OWNER)


def without_interception() -> AbstractContextManager[None]:
    """Inside, torch functions use parameters as they are, and owners are not called."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


def intercept(parameters: Iterable[nn.Parameter]) -> None:
    """Makes plain parameters intercepted ones: same object, same memory."""
    for p in parameters:
        if not isinstance(p, Intercepted):
            p.__class__ = _intercepted_class(type(p))  # type: ignore[assignment]


def stop_intercepting(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        if isinstance(p, Intercepted):
            p.__class__ = plain_class(p)  # type: ignore[assignment]


def plain_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class of the parameter while it is not intercepted."""
    found = type(parameter)
    return found.__mro__[2] if issubclass(found, Intercepted) else found  # after the class itself and `Intercepted`


def is_harmless(func: Any) -> bool:
    """Whether a torch function does not read the values of its arguments."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return property_of(func) not in _CONTENTS
    return name in _HARMLESS


def _sets_data(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__set__" and property_of(func) == "data"


def property_of(func: Any) -> str:
    """The name of the property that a torch function gets or sets; an empty string for other functions."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    """The parameters among `values`, and in lists and tuples among them, as `cat` and `stack` take them."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from parameters_in(value)
