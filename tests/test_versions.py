"""Supported versions: one table, which pyproject.toml repeats; messages for versions outside; branches by version."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ds_zo import ConfigError, versions
from ds_zo.config import resolve

REPO = Path(__file__).resolve().parents[1]


def test_pyproject_has_the_ranges_of_the_table() -> None:
    text = (REPO / "pyproject.toml").read_text()
    for package, supported in versions.SUPPORTED.items():
        pattern = r'requires-python = "([^"]*)"' if package == "python" else rf'"{package}([<>][^"]*)"'
        assert re.findall(pattern, text) == [str(supported)], package


def test_installed_versions_are_supported() -> None:
    """The smoke suite runs in supported environments only, and there nothing is refused or warned of."""
    for package in versions.SUPPORTED:
        found = versions.installed(package)
        assert found is None or versions.check(package, found) is None, package


@pytest.mark.parametrize(
    ("package", "version", "is_inside"),
    [
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.14.0a0+git1234", False),
        ("torch", "2.13.1rc2", True),
        ("torch", "2.14.0.dev20270101+cu130", False),
        ("deepspeed", "0.18.6rc1", False),
        ("deepspeed", "0.18.6+d7ab3d2", True),
        ("deepspeed", "0.18.6.post1", True),
        ("transformers", "4.57.1", True),
        ("transformers", "4.57.0", False),
        ("transformers", "5.22.9", True),
        ("transformers", "5.23.0", False),
        ("deepspeed", "0.18.5", False),
        ("deepspeed", "0.19.99", True),
    ],
)
def test_a_version_outside_is_warned_of_with_range_and_remedy(package: str, version: str, is_inside: bool) -> None:
    text = versions.check(package, version)
    if is_inside:
        assert text is None
    else:
        assert text is not None and "\n" not in text
        assert f"got {package} {version}" in text
        assert f"pip install '{package}{versions.SUPPORTED[package]}'" in text


@pytest.mark.parametrize(
    ("package", "version"), [("deepspeed", "0.18.2"), ("deepspeed", "0.18.3rc1"), ("transformers", "4.55.4")]
)
def test_a_version_that_fails_is_refused(package: str, version: str) -> None:
    with pytest.raises(ImportError, match=rf"got {package} {version}, with which it fails: pip install"):
        versions.check(package, version)


@pytest.mark.parametrize("key", ["amp", "elasticity", "progressive_layer_drop"])
def test_features_that_deepspeed_removed_are_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: "0.18.6")
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "ZO"}, key: {"enabled": True}}
    with pytest.raises(ConfigError, match=f"{key} is a feature that ds_zo does not have"):
        resolve(config)
    resolve({**config, key: {"enabled": False}})


def test_the_page_shows_the_rows_and_the_ranges() -> None:
    script = _script()
    assert script.tables(script.read_rows()) in script.PAGE.read_text(), "run: bash tools/versions.sh --render"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_versions", REPO / "tools" / "versions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_badges_say_the_ranges_and_the_licence() -> None:
    python, deepspeed = (versions.SUPPORTED[name] for name in ("python", "deepspeed"))
    texts = {
        f"Python {python.first} to {_before(python.end)}",
        f"DeepSpeed {deepspeed.first} to {_before(deepspeed.end)}",
        "License Apache-2.0",
    }
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    badges = re.findall(r"!\[([^]]+)\]\(https://img\.shields\.io/badge/([^)]+)-blue\)", readme)
    assert {text for text, _ in badges} == texts
    for text, address in badges:
        assert address.replace("--", "~").replace("-", " ").replace("~", "-").replace("_", " ") == text
    assert 'license = "Apache-2.0"' in (REPO / "pyproject.toml").read_text(encoding="utf-8")


def _before(end: str) -> str:
    """The last minor release before a range's end: 3.13 for 3.14."""
    major, minor = end.split(".")
    return f"{major}.{int(minor) - 1}"
