"""Parameters that tell when somebody reads or writes them between steps.

[Note: direct access to parameters] Between visits stored weights may lag, be on their way, or have another form than the parameter's.
`state_dict()` and `GatheredParameters` know that. `p.data`, an average of weights and PEFT's merge do not ask. So a
parameter that no visit has bound is of a class whose `__torch_function__` brings its weights up to date before torch
uses them. While an engine works, parameters are plain: a forward's operations take the way they always take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

_HARMLESS = frozenset(
    """__set__ __len__ __hash__ size dim numel nelement element_size is_floating_point is_complex data_ptr stride
    get_device requires_grad_ register_hook register_post_accumulate_grad_hook""".split()
)
"""Questions about a parameter that its placeholder answers as well."""
_CONTENTS = frozenset("data T mT H mH real imag".split())
"""Of its properties, those that it does not."""


class Owner(Protocol):
    """What keeps a parameter's weights. The parameter has it as `_hp_mapping`."""

    def refresh(self, parameter: nn.Parameter) -> None:
        """Makes the parameter show the weights of the current step: somebody is about to use them."""

    def replace(self, parameter: nn.Parameter, value: torch.Tensor) -> bool:
        """Stores what somebody assigns to `parameter.data`. False: it is for torch to point the parameter there."""


class InterceptedParameter(nn.Parameter):
    """See [Note: direct access to parameters]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with without_interception():
            if not _asks_nothing(func) and _tell(func, args, kwargs):
                return None
            return func(*args, **kwargs)


@lru_cache(maxsize=1024)
def _asks_nothing(func: Any) -> bool:
    """Loops over parameters ask for shapes and flags at every step."""
    return is_harmless(func) and not _sets_data(func) and getattr(func, "__name__", "") != "data_ptr"  # kernels use it


def _tell(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True: the parameter's owner has done what was asked for."""
    if _sets_data(func):
        owner = _owner_of(args[0])
        return owner is not None and owner.replace(args[0], args[1])
    for parameter in parameters_in((*args, *kwargs.values())):
        owner = _owner_of(parameter)
        if owner is not None:
            owner.refresh(parameter)
    return False


def _owner_of(parameter: Any) -> Owner | None:
    return vars(parameter).get("_hp_mapping") if type(parameter) is InterceptedParameter else None


def without_interception() -> AbstractContextManager[None]:
    """Around work on parameters as they are."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


def intercept(parameters: Iterable[nn.Parameter]) -> None:
    """Subclasses of other libraries stay what they are."""
    for p in parameters:
        if type(p) is nn.Parameter:
            p.__class__ = InterceptedParameter  # the object stays the same, and so does its memory


def stop_intercepting(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        if type(p) is InterceptedParameter:
            p.__class__ = nn.Parameter  # type: ignore[assignment]


def plain_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    found = type(parameter)
    return nn.Parameter if found is InterceptedParameter else found


def is_harmless(func: Any) -> bool:
    """Whether a torch function does not look at a parameter's weights."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _property_of(func) not in _CONTENTS
    return name in _HARMLESS


def _sets_data(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__set__" and _property_of(func) == "data"


def _property_of(func: Any) -> str:
    return getattr(getattr(func, "__self__", None), "__name__", "")


def parameters_in(values: Iterable[Any]) -> Iterator[nn.Parameter]:
    """Also of lists, as `cat` and `stack` take them."""
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from parameters_in(value)
