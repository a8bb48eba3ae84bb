"""On PYTHONPATH: DeepSpeed finds no FP16 instructions in the CPU, in this process and in those that it starts."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ACCELERATOR = "deepspeed.accelerator.cpu_accelerator"


class Finder(MetaPathFinder):
    """Answers for one module, once, with what the other finders find for it."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != ACCELERATOR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.CPU_Accelerator.is_fp16_supported = lambda self: None  # DeepSpeed's own answer there

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
