"""Markdown tables of every key, made from the configuration models."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_zo.config.errors import model_in
from ds_zo.config.learning_rates import rate_table
from ds_zo.config.marks import ReadBy
from ds_zo.config.optimizers import OptimizerParams
from ds_zo.config.registry import backend_names, entries, readers
from ds_zo.config.section import FROZEN_DTYPES, BackendName, CheckpointConfig, DsZoConfig, FormatName, StreamConfig

_SECTIONS: dict[str, type[BaseModel]] = {
    "`ds_zo`": DsZoConfig,
    "`ds_zo.stream`": StreamConfig,
    "`ds_zo.checkpoint`": CheckpointConfig,
}
_TYPE_WORDS = {int: "integer", float: "number", bool: "true or false", str: "string"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def key_tables() -> str:
    """All tables, each under a heading that names the section of the JSON with its keys, and the learning rates."""
    own = [_table(title, model, None) for title, model in _SECTIONS.items()]
    rates = f"### Learning rates to start from\n\n{rate_table()}"
    return "\n\n".join([*_params_tables(), *own, rates])


def _params_tables() -> list[str]:
    """A table for each backend's `optimizer.params`, without the keys of a backend that it derives from; then a table
    for each object inside, after the last backend that has it."""
    tables = []
    types_with: dict[type[BaseModel], list[str]] = {}
    for entry in entries():
        for info in entry.params.model_fields.values():
            if (inner := model_in(info.annotation)) is not None:
                types_with.setdefault(inner, []).append(entry.optimizer_type)
    for entry in entries():
        bases = entry.params.__mro__[1:]
        derived = next((e for e in entries() if e.params in bases and e.params is not OptimizerParams), None)
        title = f'`optimizer.params` with `"type": "{entry.optimizer_type}"`'
        if derived is None:
            tables.append(_table(title, entry.params, None))
        else:
            tables.append(_table(f"{title}: those of {derived.optimizer_type}, and", entry.params, derived.params))
        for key, info in entry.params.model_fields.items():
            inner = model_in(info.annotation)
            if inner is not None and types_with[inner][-1] == entry.optimizer_type:
                owners = " and ".join(types_with[inner])
                tables.append(_table(f"`optimizer.params.{key}` of {owners}", inner, None))
    return tables


def _table(title: str, model: type[BaseModel], without: type[BaseModel] | None) -> str:
    known = without.model_fields if without is not None else {}
    rows = [_row(key, info) for key, info in model.model_fields.items() if key not in known]
    return "\n".join([f"### {title}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def _row(key: str, info: FieldInfo) -> str:
    meaning = " ".join((info.description or "").split())
    for mark in reversed(info.metadata):
        if isinstance(mark, ReadBy):
            meaning = meaning.replace("{readers}", readers(mark))
    cells = (f"`{key}`", _type_text(info), _default_text(info), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type_text(info: FieldInfo) -> str:
    text = _annotation_text(info.annotation)
    bounds = [
        f"{sign} {getattr(limit, name)}"
        for limit in info.metadata
        for name, sign in _SIGNS.items()
        if getattr(limit, name, None) is not None
    ]
    return f"{text} {' and '.join(bounds)}" if bounds else text


def _annotation_text(annotation: Any) -> str:
    if annotation is BackendName:
        return " or ".join(f"`{name}`" for name in backend_names())
    if annotation is FormatName:
        return " or ".join(f"`{name}`" for name in FROZEN_DTYPES)
    origin = get_origin(annotation)
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if origin is Literal:
        return " or ".join(f"`{option}`" for option in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_text(part) for part in parts)
    if origin is tuple:
        return f"list of {len(parts)} numbers"
    if origin is dict:
        return "object"
    if origin is list:
        return f"list of {_annotation_text(parts[0])}s"
    return _TYPE_WORDS.get(annotation, "object")


def _default_text(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "`{}`"
    return f"`{json.dumps(info.default)}`"
