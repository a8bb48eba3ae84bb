"""Which submodules of a model are its blocks: found from structure, or named by the user."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def find_blocks(module: nn.Module, paths: str | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The model's blocks by dotted name, in the order they stand there. Empty: the model is all edge.

    Found are the outermost lists whose entries are alike, or that hold most of the model's parameters: `model.layers`,
    `transformer.h`, both stacks of an encoder-decoder. `paths` names the lists instead.
    """
    if paths is None:
        lists = _outermost_lists(module, "", total=_numel(module))
    else:
        lists = {path: _named_list(module, path) for path in ([paths] if isinstance(paths, str) else paths)}
    return {f"{path}.{name}": block for path, entries in lists.items() for name, block in entries.named_children()}


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
    if len(entries) == 0 or any(next(entry.parameters(), None) is None for entry in entries):
        return False
    alike = len({type(entry) for entry in entries}) == 1
    return (alike and len(entries) > 1) or (isinstance(entries, nn.ModuleList) and 2 * _numel(entries) > total)


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
