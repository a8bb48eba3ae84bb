"""Prints the versions of packages in a client's environment as one JSON object, without importing them."""

from __future__ import annotations

import json
import platform
from importlib import metadata

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft")


def main() -> None:
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    found = {name: installed[name] for name in PACKAGES if name in installed}
    print(json.dumps({"python": platform.python_version(), **found}))


if __name__ == "__main__":
    main()
