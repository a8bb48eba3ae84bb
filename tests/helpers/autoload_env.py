"""An environment in which ds-zo is installed, made in a moment: it borrows the libraries of this interpreter."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def make_environment(folder: Path, *, has_package: bool = True) -> Path:
    """Makes the environment and returns its Python. Without `has_package` it has the libraries alone."""
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    folders = [str(REPO)] * has_package + [sysconfig.get_path("purelib")]
    (packages / "a_libraries.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    if has_package:
        (packages / "ds_zo-0.dist-info").mkdir()
        (packages / "ds_zo-0.dist-info" / "METADATA").write_text("Name: ds-zo\nVersion: 0\n", encoding="utf-8")
    return folder / "bin" / "python"
