"""Detects, during one forward, weights that are used while they are not materialised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from ds_zo.streaming.intercepted import is_harmless, parameters_in
from ds_zo.streaming.units import Unit


class StrayWeightDetector(TorchFunctionMode):
    """Records parameters that are passed to a torch function while their holder is not materialised.

    A holder is a unit or a group of parameters that a backend materialises together. For example,
    `F.linear(x, self.embed.weight)` outside of the embedding's forward would silently use weights without ZO's noise.
    """

    def __init__(self, holder_of: Mapping[int, tuple[int, str]], is_materialised: Callable[[int], bool]) -> None:
        """`holder_of`: the holder's key and the parameter's name, by the parameter's id. `is_materialised`: whether the
        holder with a key is materialised now."""
        super().__init__()
        self._holder_of = holder_of
        self._is_materialised = is_materialised
        self.strays: dict[int, str] = {}
        """Name of the first parameter of each holder that was used while the holder was not materialised, by the
        holder's key."""

    @classmethod
    def of_units(cls, units: Iterable[Unit]) -> StrayWeightDetector:
        """A detector for units, whose keys are their ids. Frozen weights that are on the device in their own dtype are
        not checked, because they are the same whether or not their unit is materialised."""
        by_id = {id(u): u for u in units}
        placed = (
            (u, p)
            for u in by_id.values()
            for part in u.parts
            for p in part.placed
            if p.trainable or u.streamed or not part.viewable
        )
        return cls({id(p.parameter): (id(u), p.name) for u, p in placed}, lambda key: by_id[key].in_use)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_harmless(func):
            for parameter in parameters_in((*args, *kwargs.values())):
                if id(parameter) in self._holder_of:
                    key, name = self._holder_of[id(parameter)]
                    if not self._is_materialised(key):
                        self.strays.setdefault(key, name)
        return func(*args, **kwargs)


def unwatched() -> AbstractContextManager[None]:
    """Context of a call of compiled code without the detector, under which torch would compile the code again."""
    is_watched = isinstance(_get_current_function_mode(), StrayWeightDetector)
    return _pop_mode_temporarily() if is_watched else nullcontext()


def used_outside(name: str) -> ValueError:
    """The error for a parameter of a streamed block that was used outside of its block."""
    return ValueError(
        f"parameter {name} was used outside the forward of the block that holds it, where its weights are not on the "
        "device: name a list of modules whose own forwards are called, or [] for none (ds_zo.stream.blocks)"
    )


@contextmanager
def refuse_strays(units: Sequence[Unit]) -> Iterator[None]:
    """Context of a forward of streamed blocks that raises if a weight is used outside of its block. An error inside is
    then its cause, because such a use may lead to any error."""
    detector = StrayWeightDetector.of_units(units)
    try:
        with detector:
            yield
    except Exception as error:
        for name in detector.strays.values():
            raise used_outside(name) from error
        raise
    for name in detector.strays.values():
        raise used_outside(name)
