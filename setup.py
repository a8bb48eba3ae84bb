"""Adds `ds_zo_autoload.pth` to wheels and editable installations. All else is in pyproject.toml.

Python executes the file when it starts. setuptools has no setting for a file that belongs beside the packages.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = """\
import os; os.environ.get("DS_ZO_AUTOLOAD", "0") not in ("", "0") and __import__("ds_zo_autoload").install()
"""


class BuildWithPth(build_py):
    def run(self) -> None:
        super().run()
        # An editable wheel has the files of install_lib, and none of build_lib.
        folder = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(folder, "ds_zo_autoload.pth").write_text(PTH, encoding="utf-8")


setup(cmdclass={"build_py": BuildWithPth})
