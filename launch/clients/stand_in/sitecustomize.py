"""Stand-in for `ds-zo run`: imports ds_zo after deepspeed."""

import importlib.machinery
import sys


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "deepspeed":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            import ds_zo  # noqa: F401

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
