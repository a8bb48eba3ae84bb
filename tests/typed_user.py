"""A user's file with every public name of ds_zo. tools/wheel.sh checks it by `mypy --strict` against the wheel."""

from __future__ import annotations

from pathlib import Path

import torch

import ds_zo


def model_of(config: type) -> torch.nn.Module:
    return ds_zo.load_pretrained(config, str(ds_zo.EMBEDDED_MODEL), dtype=torch.float32)


def fits(name: str, device_memory_gb: float) -> str:
    found = ds_zo.plan(name, device_memory_gb=device_memory_gb, backends=["zo"])
    return f"{type(found).__name__} by ds_zo {ds_zo.__version__}"


def newest(folder: Path) -> str | None:
    with ds_zo.Preemption() as preemption:
        return None if preemption.requested() else ds_zo.newest_complete(folder)


def register(optimizer: type) -> bool:
    try:
        ds_zo.register_backend("Mine", optimizer, streams=False)
    except ds_zo.ConfigError:
        return False
    ds_zo.uninstall()
    ds_zo.install()
    return True
