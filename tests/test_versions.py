"""Supported versions: one table, which pyproject.toml repeats; messages for versions outside; branches by version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import versions as script
from deepspeed.utils import logger
from packaging.version import Version

from ds_zo import ConfigError, versions
from ds_zo.config import resolve

REPO = Path(__file__).resolve().parents[1]


def test_pyproject_has_the_ranges_of_the_table() -> None:
    """No other requirement has an upper bound: a resolver that meets one takes an older ds_zo, or no ds_zo at all."""
    text = (REPO / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    for package, supported in versions.SUPPORTED.items():
        pattern = r'requires-python = "([^"]*)"' if package == "python" else rf'"{package}([<>][^"]*)"'
        assert set(re.findall(pattern, text)) == {supported.required}, package
    assert re.findall(r'"(\w+)[^"]*(?:<|~=|==\d)[^"]*"', text) == ["deepspeed"]


def test_the_newest_versions_of_the_table_are_those_that_were_tested() -> None:
    corners = list(script.read_corners().values())
    for package, supported in versions.SUPPORTED.items():
        newest = max((Version(corner[package]) for corner in corners), key=lambda version: version.release)
        assert newest.release[:2] == Version(supported.newest).release, package


def test_installed_versions_are_tested_ones() -> None:
    """The smoke suite runs in such environments only, and there nothing is refused or warned of."""
    assert versions.warning() is None


INSIDE = "torch 2.13.0+cpu, torch 2.13.1rc2, deepspeed 0.18.6+d7ab3d2, deepspeed 0.18.6.post1, deepspeed 0.19.99"
INSIDE += ", transformers 4.57.1, transformers 5.22.9"
OUTSIDE = "torch 2.10.0rc1, torch 2.14.0a0+git1234, torch 2.14.0.dev20270101+cu130, deepspeed 0.18.6rc1"
OUTSIDE += ", transformers 4.57.0, transformers 5.23.0, transformers 6, python 3.14.0"


@pytest.mark.parametrize("release", f"{INSIDE}, {OUTSIDE}".split(", "))
def test_a_version_outside_is_warned_of_with_range_and_remedy(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, version = release.split()
    monkeypatch.setattr(versions, "installed", {package: version}.get)
    supported = versions.SUPPORTED[package]
    remedy = f"use Python {supported}" if package == "python" else f"pip install '{package}=={supported.newest}.*'"
    text = f"ds_zo is not tested with {release} (tested: {supported}): if something fails, {remedy}"
    warned = f"{text} (all tested versions: constraints.txt)"
    assert versions.warning() == (warned if release in OUTSIDE.split(", ") else None)


def test_one_line_warns_of_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lines.append)
    monkeypatch.setattr(versions, "installed", {"torch": "2.15.0", "transformers": "5.23.0", "peft": "0.21.2"}.get)
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        versions.check_installed()
    (line,) = lines
    assert "torch 2.15.0 (tested: 2.10 to 2.13), transformers 5.23.0 (tested: 4.57.1 to 5.22): if" in line
    assert line.endswith("'torch==2.13.*', pip install 'transformers==5.22.*' (all tested versions: constraints.txt)")


@pytest.mark.parametrize(
    ("package", "version"), [("deepspeed", "0.18.2"), ("deepspeed", "0.18.3rc1"), ("transformers", "4.55.4")]
)
def test_a_version_that_fails_is_refused(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", {"torch": "2.15.0", package: version}.get)
    with pytest.raises(ImportError, match=rf"got {package} {version}, with which it fails: pip install"):
        versions.warning()


@pytest.mark.parametrize("key", ["amp", "elasticity", "progressive_layer_drop"])
def test_features_that_deepspeed_removed_are_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda package: "0.18.6")
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "ZO"}, key: {"enabled": True}}
    with pytest.raises(ConfigError, match=f"{key} is a feature that ds_zo does not have"):
        resolve(config)
    resolve({**config, key: {"enabled": False}})


def test_the_page_shows_the_rows_and_the_ranges() -> None:
    assert script.tables(script.read_rows()) in script.PAGE.read_text(), "run: bash tools/versions.sh --render"


def test_the_badges_say_the_ranges_and_the_licence() -> None:
    python, deepspeed = (versions.SUPPORTED[name] for name in ("python", "deepspeed"))
    texts = {
        f"Python {python}",
        f"DeepSpeed {deepspeed}",
        "License Apache-2.0",
    }
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    badges = re.findall(r"!\[([^]]+)\]\(https://img\.shields\.io/badge/([^)]+)-blue\)", readme)
    assert {text for text, _ in badges} == texts
    for text, address in badges:
        assert address.replace("--", "~").replace("-", " ").replace("~", "-").replace("_", " ") == text
    assert 'license = "Apache-2.0"' in (REPO / "pyproject.toml").read_text(encoding="utf-8")
