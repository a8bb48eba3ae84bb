"""Markdown tables of every key, made from the configuration models."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ds_zo.config.optimizers import AdaLOMOParams, AdapterParams, LOMOParams, LSPParams, ZOParams
from ds_zo.config.section import CheckpointConfig, DsZoConfig, StreamConfig

BEGIN = "<!-- keys: written by `python -m ds_zo.config --write`, not by hand -->"
END = "<!-- end of keys -->"

_TABLES: tuple[tuple[str, type[BaseModel], type[BaseModel] | None], ...] = (
    ('`optimizer.params` with `"type": "ZO"`', ZOParams, None),
    ('`optimizer.params` with `"type": "LOMO"`', LOMOParams, None),
    ('`optimizer.params` with `"type": "AdaLOMO"`: those of LOMO, and', AdaLOMOParams, LOMOParams),
    ("`optimizer.params.adapter` of LOMO and AdaLOMO", AdapterParams, None),
    ('`optimizer.params` with `"type": "LSP"`', LSPParams, None),
    ("`ds_zo`", DsZoConfig, None),
    ("`ds_zo.stream`", StreamConfig, None),
    ("`ds_zo.checkpoint`", CheckpointConfig, None),
)
_TYPE_WORDS = {int: "integer", float: "number", bool: "true or false", str: "string"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def key_tables() -> str:
    """All tables, each under a heading that names the section of the JSON with its keys."""
    return "\n\n".join(_table(title, model, without) for title, model, without in _TABLES)


def write_tables(path: Path) -> None:
    """Replaces the text between the markers of a Markdown file by the tables."""
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"{path} must hold the two marker lines {BEGIN} and {END}; add them where the tables go")
    path.write_text(f"{head}{BEGIN}\n\n{key_tables()}\n\n{END}{tail}", encoding="utf-8")


def _table(title: str, model: type[BaseModel], without: type[BaseModel] | None) -> str:
    known = without.model_fields if without is not None else {}
    rows = [_row(key, info) for key, info in model.model_fields.items() if key not in known]
    return "\n".join([f"### {title}", "", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def _row(key: str, info: FieldInfo) -> str:
    meaning = " ".join((info.description or "").split())
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
