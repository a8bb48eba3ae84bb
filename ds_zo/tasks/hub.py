"""Public copies of the tasks, read through `datasets`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_zo.tasks.errors import TaskError

PARQUET = "refs/convert/parquet"
"""The Hub's own conversion of datasets that are kept as loading scripts, which `datasets` no longer runs."""


@dataclass(frozen=True)
class HubName:
    """A dataset on the Hub and its configuration."""

    dataset: str
    configuration: str | None = None
    test: str = "validation"
    """The split with labels that is not for training: the suites keep those of their test splits to themselves."""


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
