"""Imports ds_zo right after DeepSpeed, in every Python process that starts with `DS_ZO_AUTOLOAD=1` in its environment.

`install` is called when Python starts: by the `sitecustomize` of `ds-zo run`, or by the file of `ds-zo autoload on`. A
process that never imports DeepSpeed imports this module too, so it imports nothing but `sys`. It is outside the package
ds_zo, because importing that package imports torch.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # type checkers take this for typing's own constant
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class AfterImport:
    """A finder for `sys.meta_path` that calls `action` once, after the module `name` has been executed.

    The finders behind it find the module. `importlib.util.find_spec` does not execute a module, so nothing is called.
    If the action fails, that import and every later one raise its error.
    """

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self._name, self._action = name, action
        self._error: Exception | None = None

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec and spec.loader
        if loader is None:
            return spec

        inner = vars(loader).get("exec_module")  # of another finder that waits for the same module

        def execute_then_act(module: ModuleType) -> None:
            if self._error is not None:
                raise self._error
            if inner is None:
                del loader.exec_module  # the loader's own method is called from here on
            else:
                loader.exec_module = inner
            loader.exec_module(module)
            if self not in sys.meta_path:
                return
            try:
                self._action()
            except Exception as error:
                self._error = error
                # Python removes the module. A submodule that stays could be imported without it.
                for submodule in [found for found in sys.modules if found.startswith(f"{self._name}.")]:
                    del sys.modules[submodule]
                raise
            sys.meta_path.remove(self)

        loader.exec_module = execute_then_act
        return spec


def _import_ds_zo() -> None:
    try:
        __import__("ds_zo")
    except Exception as error:
        # Not an ImportError: libraries take that for "DeepSpeed is not installed", and go on without it.
        raise RuntimeError(
            "DS_ZO_AUTOLOAD is set, so ds_zo is imported after DeepSpeed, but that import failed with "
            f"{type(error).__name__}: {error}. Repair the installation of ds-zo, or unset DS_ZO_AUTOLOAD "
            f"({sys.executable})"
        ) from error


_AFTER_DEEPSPEED = AfterImport("deepspeed", _import_ds_zo)


def install() -> None:
    """Has ds_zo imported after DeepSpeed in this process. Python calls it twice in some virtual environments."""
    if _AFTER_DEEPSPEED not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER_DEEPSPEED)
