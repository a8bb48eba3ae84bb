"""Python imports this module when it starts below `ds-zo run`, which puts this folder first on PYTHONPATH.

The module installs autoload, and hands over to the `sitecustomize` that Python finds without this folder. Where there
is none, its import raises the error that Python expects then.
"""

import os
import sys

sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]
if os.environ.get("DS_ZO_AUTOLOAD", "0") not in ("", "0"):
    try:
        from ds_zo_autoload import install
    except ImportError:  # a Python without ds-zo, as of a tool that the command starts
        pass
    else:
        install()
del sys.modules[__name__]
__import__(__name__)
