"""An environment in which ds-zo is installed, made in a moment: it borrows the libraries of this interpreter."""

from __future__ import annotations

import ast
import sysconfig
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def pth_of_setup() -> str:
    """The text that setup.py writes to `ds_zo_autoload.pth`."""
    tree = ast.parse((REPO / "setup.py").read_text(encoding="utf-8"))
    (text,) = (node.value.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "PTH")
    return text


def make_environment(folder: Path, *, autoload: bool = True) -> Path:
    """Makes the environment and returns its Python. Without `autoload` it has the package, and no .pth file."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "a_libraries.pth").write_text(f"{REPO}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    if autoload:
        (packages / "ds_zo_autoload.pth").write_text(pth_of_setup(), encoding="utf-8")
    return folder / "bin" / "python"
