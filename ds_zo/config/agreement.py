"""Checks that the settings which determine an update are the same on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ds_zo.config.errors import ConfigError
from ds_zo.config.marks import MayDiffer, marks_in
from ds_zo.config.resolved import Resolved
from ds_zo.config.section import DsZoConfig

_MAY_DIFFER = frozenset(
    [
        *("pin_memory", "clipping_explicit", "ignored", "warnings", "params_at"),
        *(f"ds_zo.{path}" for path, _ in marks_in(DsZoConfig, MayDiffer)),
    ]
)
"""Settings that may differ between ranks: placement, ways of computing, and files. Weights do not depend on them."""


_PLAIN = (bool, int, float, str, tuple, torch.Tensor)
"""Types of values whose text is the same in every process."""


def shared_settings(
    config: Resolved,
    *,
    param_groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    scheduler: Mapping[str, Any],
) -> dict[str, str]:
    """The text of each setting that must be equal on all ranks, by its key in the JSON or in the script's optimizer.
    `names`: of the model's parameters, by id."""
    found = {config.params_at: config.optimizer.model_dump(), "ds_zo": config.section.model_dump()}
    others = {field.name for field in dataclasses.fields(config)} - {"optimizer", "section"}
    found |= {name: getattr(config, name) for name in sorted(others)}
    found["scheduler"] = dict(scheduler)
    for index, group in enumerate(param_groups):
        plain = {key: value for key, value in group.items() if value is None or isinstance(value, _PLAIN)}
        plain.pop("params", None)
        order = {f"params[{i}]": names.get(id(p), "not of the model") for i, p in enumerate(group["params"])}
        found[f"param_groups[{index}]"] = {**plain, "num_params": len(group["params"]), **order}
    return {at: repr(value) for at, value in _leaves(found, "") if at not in _MAY_DIFFER}


def check_agreement(settings: Sequence[Mapping[str, str]], *, may_lack: bool = False) -> None:
    """Raises for the first setting that differs between ranks. `settings` has those of all ranks, by rank. `may_lack`:
    ranks that lack a setting do not differ in it."""
    for at in dict.fromkeys(at for of_rank in settings for at in of_rank):
        values = [(rank, of_rank.get(at, "nothing")) for rank, of_rank in enumerate(settings)]
        compared = [(rank, value) for rank, value in values if at in settings[rank] or not may_lack]
        first, expected = compared[0]
        for rank, value in compared:
            if value != expected:
                raise ConfigError(
                    f"all ranks need the same {at}, because their weights would differ, got {expected} on rank {first} "
                    f"and {value} on rank {rank}: start every rank with one script, one model, one JSON and one seed",
                    at=at,
                )


def _leaves(value: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        path = f"{at}.{name}" if at else str(name)
        if isinstance(item, Mapping) and item and path not in _MAY_DIFFER:
            yield from _leaves(item, path)
        else:
            yield path, item
