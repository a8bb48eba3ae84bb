"""Finds the submodules that are a model's blocks, from its structure or from paths given by the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn


def find_blocks(module: nn.Module, paths: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The model's blocks by dotted name, in the model's order. Empty if the model has no blocks.

    Without `paths`, blocks are the entries of the outermost module lists whose entries have one type, or that hold most
    of the model's parameters: `model.layers`, `transformer.h`, both stacks of an encoder-decoder. `paths` names the
    lists instead. An entry without a forward of its own, such as a nested list, is never called: the modules in it are
    the blocks. A module that occurs in several places is one block.
    """
    if paths is None:
        lists = _outermost_lists(module, "", total=_numel(module))
    else:
        lists = {path: _named_list(module, path) for path in ([paths] if isinstance(paths, str) else paths)}
    blocks: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for path, entries in lists.items():
        for name, block in _called(entries, path):
            if id(block) not in seen:
                seen.add(id(block))
                blocks[name] = block
    return blocks


def reached_elsewhere(module: nn.Module, blocks: Iterable[nn.Module]) -> set[int]:
    """Ids of modules inside a block that are also reachable outside it, so that they may run without a call of the
    block."""
    parents: dict[int, list[int]] = {}
    for m in module.modules():
        for child in m.children():
            parents.setdefault(id(child), []).append(id(m))
    found: set[int] = set()
    for block in blocks:
        inside = {id(m) for m in block.modules()}
        for m in block.modules():
            if m is not block and not inside.issuperset(parents[id(m)]):
                found |= {id(below) for below in m.modules()}
    return found


def _called(container: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules in a container that have a forward and parameters, with their paths."""
    for name, child in container.named_children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from _called(child, f"{path}.{name}")
        elif next(child.parameters(), None) is not None:
            yield f"{path}.{name}", child


def _named_list(module: nn.Module, path: str) -> nn.Module:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        lists = ", ".join(name for name, m in module.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
        raise ValueError(
            f"the model has no submodule {path!r}; its lists are: {lists or 'none'} (ds_zo.stream.blocks)"
        ) from None
    if not isinstance(found, (nn.ModuleList, nn.Sequential)) or len(found) == 0:
        raise ValueError(
            f"{path!r} is a {type(found).__name__}, not a non-empty ModuleList or Sequential of blocks "
            "(ds_zo.stream.blocks)"
        )
    return found


def _outermost_lists(module: nn.Module, prefix: str, *, total: int) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and _are_blocks(child, total=total):
            found[path] = child
        else:
            found |= _outermost_lists(child, f"{path}.", total=total)
    return found


def _are_blocks(entries: nn.ModuleList | nn.Sequential, *, total: int) -> bool:
    found = [entry for entry in entries if entry is not None]  # x-transformers has None among the entries
    if not found or any(next(entry.parameters(), None) is None for entry in found):
        return False
    alike = len({type(entry) for entry in found}) == 1
    return (alike and len(found) > 1) or (isinstance(entries, nn.ModuleList) and 2 * _numel(entries) > total)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
