"""Files of checks of Triton kernels, run without a GPU: by Triton's interpreter, in a fork of a warm process.

A check is a function `check_NAME(device)` of such a file, and in its dictionary CHECKS; tests on a GPU import that.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.processes import REPO, python_path

if TYPE_CHECKING:
    from tests.helpers.warm_interpreter import WarmInterpreter

MODULES = ["tests.ops.kernel_checks", "tests.optim.lomo_kernel_checks", "tests.projectors.projector_checks"]


def names_of_checks(module: str) -> list[str]:
    """Read in its source: importing it would import Triton."""
    file = REPO / Path(*module.split(".")).with_suffix(".py")
    functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return [function.name.removeprefix("check_") for function in functions if function.name.startswith("check_")]


def errors_of_checks(warm_interpreter: WarmInterpreter) -> dict[tuple[str, str], str | None]:
    """Traceback of each check, or None, by its file and name. One process runs all: each would import Triton."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = python_path(REPO)
    done = warm_interpreter.run(__file__, cwd=REPO, env=environment, timeout_s=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = {(line["module"], line["check"]): line["error"] for line in lines}
    assert errors.keys() == {(module, check) for module in MODULES for check in names_of_checks(module)}, done.stderr
    return errors


def import_triton_anew() -> None:
    """Triton reads TRITON_INTERPRET where it decorates its own functions, and the warm process has imported it. Its
    compiled part stays."""
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "._C" not in name]:
        del sys.modules[name]


def replace_language_once_a_launch() -> None:
    """The interpreter replaces the functions of `triton.language` when a kernel is launched, and in each call of a
    function by a kernel once more, which takes most of its time: here only in a module's first call."""
    from triton.runtime import interpreter

    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules: set[int] = set()

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in modules:
            return None
        modules.add(module)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = replace_once, launch_anew


def let_scalars_be_indices() -> None:
    """`range` of a kernel's scalar argument: the interpreter keeps it as an array of one element, which numpy 2.5 does
    not take for an integer."""
    from triton.runtime import interpreter

    replace = interpreter._patch_lang_tensor

    def replace_and_mend(tensor: Any, *scope: Any) -> Any:
        found = replace(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return found

    interpreter._patch_lang_tensor = replace_and_mend


def main() -> None:
    """One JSON line for each check: its file, its name and its traceback, or null."""
    warnings.simplefilter("ignore")
    import_triton_anew()
    replace_language_once_a_launch()
    let_scalars_be_indices()
    for module in MODULES:
        for name, check in importlib.import_module(module).CHECKS.items():
            error = None
            try:
                check("cpu")
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"module": module, "check": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
