"""Errors of a JSON, each in one line: the rule, the value found, the remedy, and the key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

P = ParamSpec("P")
_RULE_ERROR = "ds_zo_rule"
_MAX_VALUE_CHARS = 60
_NEAR = 0.85

_RULES = {
    "int": "must be an integer",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a string",
    "tuple": "must be a list",
    "list": "must be a list",
    "dict": "must be an object",
    "model": "must be an object",
    "finite": "must be a finite number",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "too_long": "has the wrong number of entries",
    "too_short": "has the wrong number of entries",
    "missing": "has the wrong number of entries",
}
"""The rule of an error by its kind in pydantic, or by the first word of the kind."""


class ConfigError(ValueError):
    """The JSON has a value that cannot be used. `location` is the dotted name of its key; the message has it once."""

    def __init__(self, text: str, *, at: str) -> None:
        is_named = re.search(rf"(?<![\w.]){re.escape(at)}(?!\w|\.\w)", text)
        self._text, self._end = text, "" if is_named else f" ({at})"
        super().__init__(self.alone())
        self.location = at
        self.also: list[ConfigError] = []
        """Further errors of the same JSON."""

    def alone(self) -> str:
        """The message without the number of further errors."""
        return " ".join(f"{self._text}{self._end}".split())

    def __str__(self) -> str:
        more = f"; {len(self.also)} more after this one" if self.also else ""
        return " ".join(f"{self._text}{more}{self._end}".split())


class Errors:
    """The errors of a JSON. `with errors:` goes on after an error; `raise_all` raises the first one with the others."""

    def __init__(self, found: Iterable[ConfigError] = ()) -> None:
        self._found = list(found)

    def add(self, error: ConfigError) -> None:
        self._found.append(error)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._found += [error, *error.also]
        error.also = []
        return True

    def raise_all(self) -> None:
        """Raises if there is an error. A key has one error: others follow from the same value."""
        by_key = {error.location: error for error in reversed(self._found)}
        found = [error for error in self._found if by_key[error.location] is error]
        if found:
            found[0].also = found[1:]
            raise found[0]


def raises_all(rules: Callable[P, Iterable[ConfigError]]) -> Callable[P, None]:
    """Makes a function that yields errors raise the first one with the others."""

    @wraps(rules)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        Errors(rules(*args, **kwargs)).raise_all()

    return check


def rule_error(text: str, *, field: str | None = None) -> PydanticCustomError:
    """The error of a rule that a validator of a model checks. `field` is the key to change, if it is not the
    validator's own."""
    return PydanticCustomError(_RULE_ERROR, "{text}", {"text": text, "field": field})


def shown(value: Any) -> str:
    """The value as it is written in the JSON, cut to one short line."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def suggestion(word: str, known: Iterable[str]) -> str:
    """A remedy for an unknown word: the nearest of the known words in any letter case, or all of them."""
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f'did you mean "{by_lower[near[0]]}"?' if near else f"choose from: {', '.join(names)}"


def is_near(word: str, known: str) -> bool:
    """Whether `word` is a misspelling of `known`. Another word, such as wandb_name beside wandb, is not."""
    return difflib.SequenceMatcher(None, known, word).ratio() >= _NEAR


def translate(error: ValidationError, model: type[BaseModel], *, at: str) -> ConfigError:
    """Pydantic's errors in `model`, which is at the key `at` of the JSON."""
    first, *others = [_translated(detail, model, at=at) for detail in error.errors(include_url=False)]
    first.also = others
    return first


def _translated(detail: ErrorDetails, model: type[BaseModel], *, at: str) -> ConfigError:
    path = [str(part) for part in detail["loc"]]
    if detail["type"] == "missing" and path[-1].isdigit():  # pydantic names the entry that a short list lacks
        path.pop()
    if detail["type"] == _RULE_ERROR:
        text, field = detail["ctx"]["text"], detail["ctx"]["field"]
        path += [field] if field else []
    else:
        text = _cause(detail, path, model)
    return ConfigError(text, at=".".join(filter(None, [at, *path])))


def _cause(detail: ErrorDetails, path: list[str], model: type[BaseModel]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    owner, field = _find(model, path)
    name = _spelled(path) if path else model.__name__
    if kind == "extra_forbidden" and name in (retired := getattr(owner, "retired", {})):
        reason, remedy = retired[name]
        return f"{name} is not a key, because {reason}, got {shown(value)}; {remedy}"
    if kind == "extra_forbidden":
        return f'unknown key "{name}" with value {shown(value)}; {suggestion(name, keys_of(owner))}'
    if kind in ("literal_error", "enum"):
        options = _options(str(context.get("expected", "")))
        near = difflib.get_close_matches(str(value).lower(), options, n=1)
        remedy = f'did you mean "{near[0]}"?' if near else _default_remedy(field)
        return f"{name} must be one of {', '.join(options)}, got {shown(value)}; {remedy}"
    if kind in ("value_error", "assertion_error"):
        return f"{context['error']}, got {shown(value)}; {_default_remedy(field)}"
    wanted = kind.split("_")[0]
    rule = _RULES.get(kind) or _RULES.get(wanted)
    text = f"is not valid: {detail['msg']}" if rule is None else rule.format(**context)
    form: str | None = None
    if wanted in ("int", "float", "bool"):
        form = type_remedy(value)
    elif wanted == "model" and field is not None and (inner := model_in(field.annotation)) is not None:
        form = f'write {{"{keys_of(inner)[0]}": ...}}, or leave it out'
    return f"{name} {text}, got {shown(value)}; {form or _default_remedy(field)}"


def type_remedy(value: Any) -> str | None:
    """A remedy for a number or a switch of the wrong type; None where the value does not show its meaning."""
    if value == "auto":
        return 'write a value, because only Trainer and Accelerate replace "auto", and DeepSpeed does not'
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return f"write {value.lower()} without quotes" if value.lower() in ("true", "false") else None
        return f"write {value} without quotes"
    if isinstance(value, bool):
        return "write a number"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return None


def _spelled(path: list[str]) -> str:
    """The last key of a path, with its index where it is an entry of a list."""
    return f"{path[-2]}[{path[-1]}]" if len(path) > 1 and path[-1].isdigit() else path[-1]


def _find(model: type[BaseModel], path: list[str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that has the last key of the path, and the field of that key; None if there is none."""
    owner: type[BaseModel] = model
    field: FieldInfo | None = None
    for name in path:
        inner = model_in(field.annotation) if field is not None else None
        owner = inner or owner
        by_key = {info.alias or key: info for key, info in owner.model_fields.items()}
        found = by_key.get(name) or owner.model_fields.get(name)
        if found is None:
            return owner, field if name.isdigit() else None
        field = found
    return owner, field


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is an object, also where null is allowed; None for a plain value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def keys_of(model: type[BaseModel]) -> list[str]:
    return [info.alias or key for key, info in model.model_fields.items()]


def _options(expected: str) -> list[str]:
    """pydantic's "'a', 'b' or 'c'" as a list; aliases of an enum appear once."""
    return list(dict.fromkeys(part.strip().strip("'") for part in expected.replace(" or ", ", ").split(",")))


def _default_remedy(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return "correct it"
    default = field.get_default(call_default_factory=False)
    if default is None or field.default_factory is not None:
        return "leave it out for the automatic choice"
    return f"leave it out for the default {shown(default)}"
