"""Access to the Hub: reads public copies of tasks with `datasets`, and checks that a model's name can be resolved."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ds_zo.tasks.errors import TaskError

PARQUET = "refs/convert/parquet"
"""Revision with the Hub's Parquet conversion of a dataset, for datasets that are loading scripts, which new versions of
`datasets` do not run."""


_CONNECT_TIMEOUT_S = 5.0


def check_reachable(model: str) -> None:
    """Raises OSError if a Hub name is not in the cache and the Hub cannot be reached. transformers would retry for half
    a minute. Behind a proxy nothing is checked."""
    from huggingface_hub import constants, try_to_load_from_cache

    if Path(model).exists() or constants.is_offline_mode() or getproxies():
        return
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise OSError(f"{model} is not in the Hub's cache, and {hub.hostname} cannot be reached: {error}") from None


@dataclass(frozen=True)
class HubName:
    """A dataset on the Hub and its configuration."""

    dataset: str
    configuration: str | None = None
    test: str = "validation"
    """Name of the split used for test. Suites do not publish the labels of their test splits, so it is a validation
    split."""


def read_official_split(name: HubName, split: str, *, task: str) -> list[dict[str, Any]]:
    """All rows of an official split, in its order."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise TaskError(
            f"reading task {task} from the Hub needs the package datasets: pip install datasets, "
            f"or give a folder of JSONL files (--data-dir)"
        ) from None
    try:
        try:
            found = load_dataset(name.dataset, name.configuration, split=split)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            found = load_dataset(name.dataset, name.configuration, split=split, revision=PARQUET)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"{name.dataset}, configuration {name.configuration}, split {split}"
        raise TaskError(
            f"task {task} could not be read from the Hub ({where}): {first_line} "
            f"(offline, give a folder of JSONL files: --data-dir)"
        ) from error
    return [dict(row) for row in found]
