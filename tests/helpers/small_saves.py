"""Saves of a few small files, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_zo.checkpoint.snapshot import Snapshot, WeightsFile
from ds_zo.checkpoint.writer import SaveRequest, write_checkpoint

NUM_FILES = 6


def make_save(folder: Path, tag: str, *, written: Callable[[], None] = lambda: None, **options: Any) -> SaveRequest:
    tensors = {"weight": torch.full((64,), float(len(tag)))}
    weights_files = [WeightsFile(lambda: tensors, 256, f"file{i}", written) for i in range(NUM_FILES)]
    return SaveRequest(
        save_dir=folder,
        tag=tag,
        backend="lomo",
        global_steps=int("".join(filter(str.isdigit, tag)) or 0),
        ds_zo_version="0",
        snapshot=Snapshot(weights_files, dict),
        state={},
        progress=False,
        **options,
    )


def save(folder: Path, tag: str, **options: Any) -> None:
    write_checkpoint(make_save(folder, tag, **options))
