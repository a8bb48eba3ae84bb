"""Looks, during one forward, for weights that are used where they are not brought up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from ds_zo.streaming.intercepted import is_harmless, parameters_in
from ds_zo.streaming.units import Unit


class StrayWeightDetector(TorchFunctionMode):
    """Notes parameters that reach a torch function while their holder is not being visited.

    `F.linear(x, self.embed.weight)` outside the embedding's forward would use unperturbed weights, silently.
    """

    def __init__(self, holder_of: Mapping[int, tuple[int, str]], visited: Collection[int]) -> None:
        """`holder_of`: the holder's key and the parameter's name, by `id(parameter)`; `visited`: keys of holders."""
        super().__init__()
        self._holder_of = holder_of
        self._visited = visited
        self.strays: dict[int, str] = {}
        """The first parameter that was used outside of a visit, by the key of its holder."""

    @classmethod
    def of_units(cls, units: Iterable[Unit], visited: Collection[int]) -> StrayWeightDetector:
        """Units are known by their id. Frozen weights on the device are the same everywhere."""
        placed = ((u, p) for u in units for p in u.placed if p.trainable or u.streamed)
        return cls({id(p.parameter): (id(u), p.name) for u, p in placed}, visited)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_harmless(func):
            for parameter in parameters_in((*args, *kwargs.values())):
                if id(parameter) in self._holder_of:
                    key, name = self._holder_of[id(parameter)]
                    if key not in self._visited:
                        self.strays.setdefault(key, name)
        return func(*args, **kwargs)


def unwatched() -> AbstractContextManager[None]:
    """Around compiled code, which would be compiled anew to be watched."""
    is_watched = isinstance(_get_current_function_mode(), StrayWeightDetector)
    return _pop_mode_temporarily() if is_watched else nullcontext()


def used_outside(name: str) -> ValueError:
    """What to raise for a parameter of a streamed block."""
    return ValueError(
        f"parameter {name} was used outside the forward of the block that holds it, where its weights are not brought "
        "up: name the list whose entries are called whole, or [] for none (ds_zo.stream.blocks)"
    )


@contextmanager
def refuse_strays(units: Sequence[Unit], visited: Collection[int]) -> Iterator[None]:
    """Around a forward of streamed blocks. Its own error may be what a weight used outside of its block leads to."""
    watch = StrayWeightDetector.of_units(units, visited)
    try:
        with watch:
            yield
    except Exception as error:
        for name in watch.strays.values():
            raise used_outside(name) from error
        raise
    for name in watch.strays.values():
        raise used_outside(name)
