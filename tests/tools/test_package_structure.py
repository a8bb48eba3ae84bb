"""CONTRIBUTING's picture of the package and its walks through the code are what the code is."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import structure

from ds_zo.config import BACKENDS
from tests.helpers.processes import REPO

PAGE = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8")
_LINES = re.compile(r"(?<=[>\s])[\d,]+(?= lines)")


@pytest.fixture(scope="module")
def drawn() -> str:
    return structure.diagram()


def test_the_diagram_is_current(drawn: str) -> None:
    written = PAGE.split(structure.BEGIN)[1].split(structure.END)[0].strip()
    remedy = "run: python tools/structure.py --write CONTRIBUTING.md"
    without_sizes = [re.sub(r"(\d+ files, )?[\d,]+ lines", "", text) for text in (written, drawn)]
    assert without_sizes[0] == without_sizes[1], remedy
    before, now = ([int(n.replace(",", "")) for n in _LINES.findall(text)] for text in (written, drawn))
    assert len(now) > 10
    assert all(abs(a - b) <= max(200, 0.1 * b) for a, b in zip(before, now, strict=True)), remedy


def named(text: str) -> list[tuple[str, str]]:
    """Files of ds_zo and functions or classes in them that a text names."""
    return re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", text)


WALKS = dict(
    walk.split("\n\n", 1) for walk in PAGE.split("## Walks of a block")[1].split("\n## ")[0].split("\n### ")[1:]
)
"""The walks by their headings."""


def test_every_backend_has_a_walk() -> None:
    walked = {name.lower() for heading in WALKS for name in re.findall(r"of (\w+)", heading)}
    assert walked == {name for name in BACKENDS if name != "adalomo"}, "LOMO's walk is AdaLOMO's too"


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_is_short_and_names_functions_that_exist(heading: str) -> None:
    lines, stops = WALKS[heading].strip().splitlines(), named(WALKS[heading])
    assert len(lines) <= 10 and max(map(len, lines)) <= 120
    assert len(stops) >= len(lines) - 1
    assert not [stop for stop in stops if not _defines(REPO / "ds_zo" / stop[0], stop[1])]


def test_the_eight_nouns_are_where_the_table_says() -> None:
    table = PAGE.split("## Eight nouns")[1].split("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    assert len(rows) == 8 and all(len(row) == 5 for row in rows)
    assert len(named(table)) >= 8
    assert not [found for found in named(table) if not _defines(REPO / "ds_zo" / found[0], found[1])]


def test_the_recipes_name_files_that_exist_and_are_as_short_as_they_say() -> None:
    recipes = PAGE.split("## Recipes")[1].split("\n## ")[0]
    files = re.findall(r"`((?:ds_zo|tests)/[\w/]+\.py)`", recipes)
    assert len(files) > 20 and not [file for file in files if not (REPO / file).exists()]
    lengths = re.findall(r"`(tests/backends/outside/\w+\.py)`[^`]*under (\d+) lines", recipes)
    assert [int(most) for _, most in lengths] == [150, 50, 40]
    assert not [file for file, most in lengths if len((REPO / file).read_text().splitlines()) >= int(most)]


def _defines(path: Path, name: str) -> bool:
    if not path.exists():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            return False
        body = found.body
    return True


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    """All classes of the package, and their files."""
    paths = sorted((REPO / "ds_zo").rglob("*.py"))
    nodes = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [(path, node) for path, node in nodes if isinstance(node, ast.ClassDef)]


def test_a_streamed_block_of_zo_crosses_few_files() -> None:
    """Its files, and how often the walk returns from a lower package to a higher one."""
    files = [file for file, _ in named(WALKS["A block of ZO"])]
    floors = [("ops", "streaming", "checkpoint", "backends").index(file.split("/")[0]) for file in files]
    assert len(files) > 10
    assert len(set(files)) <= 13
    assert sum(after > before for before, after in pairwise(floors)) <= 5


def test_classes_of_backends_and_streaming_are_small() -> None:
    """At most 25 attributes of its own and 400 lines."""
    sizes = {
        node.name: (len(_attributes(node)), (node.end_lineno or 0) - node.lineno + 1)
        for path, node in classes()
        if path.relative_to(REPO / "ds_zo").parts[0] in ("backends", "streaming")
    }
    assert len(sizes) > 100 and sizes["Unit"][0] > 15, sizes
    assert not {name: size for name, size in sizes.items() if size[0] > 25 or size[1] > 400}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that methods assign on `self`, and annotated ones of the class."""
    annotated = {
        stmt.target.id for stmt in node.body if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)
    }
    return annotated | {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }


def test_no_two_classes_of_the_package_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path, node in classes():
        places.setdefault(node.name, []).append(f"{path.relative_to(REPO)}:{node.lineno}")
    assert len(places) > 100
    assert not {name: found for name, found in places.items() if len(found) > 1}, "rename one: it says what it is"


def test_the_ten_lines_shown_are_those_that_are_tested() -> None:
    [shown] = re.findall(r"```python\n(class PlainSGD.*?)\n\n\n", PAGE, re.DOTALL)
    assert shown in (REPO / "tests" / "backends" / "test_outside_backend.py").read_text(encoding="utf-8")


def make_package(folder: Path, **texts: str) -> Path:
    package = folder / "toy"
    for name, text in {"__init__": "", **texts}.items():
        path = package / f"{name.replace('__init__', '~').replace('__', '/').replace('~', '__init__')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


def test_levels_and_arrows_of_a_small_package(tmp_path: Path) -> None:
    """`c` imports `b` and `a`, `b` imports `a`: three levels, and the arrow from `c` to `a` follows from the others."""
    package = make_package(
        tmp_path,
        a____init__="from toy.a.x import X",
        a__x="X = 1\n",
        b__y="from toy.a import X\nimport torch\n",
        c__z="import toy.b.y\nfrom toy.a import x\n",
        c__w="from toy.c.z import x\ny = x\n",
    )
    modules = structure.read_modules(package)
    imports = structure.graph(modules, structure.folder_of)
    assert imports == {"a": set(), "b": {"a"}, "c": {"a", "b"}}
    assert structure.levels(imports) == {"a": 0, "b": 1, "c": 2}
    assert structure.reduced(imports) == {"a": set(), "b": {"a"}, "c": {"b"}}
    assert structure.targets(modules["toy.b.y"], modules) == {"toy.a.x"}, "a re-exported name counts where it is from"
    assert "c --> b" in structure.diagram(package) and "c --> a" not in structure.diagram(package)


def test_imports_for_type_checkers_alone_do_not_count(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import toy.b.y\n"
    package = make_package(tmp_path, a__x=text, b__y="import toy.a.x")
    assert structure.graph(structure.read_modules(package), structure.folder_of) == {"a": set(), "b": {"a"}}


def test_no_files_of_backends_or_of_config_import_each_other_in_a_circle() -> None:
    checked = ("ds_zo.backends.", "ds_zo.config.")
    modules = {name: m for name, m in structure.read_modules(REPO / "ds_zo").items() if name.startswith(checked)}
    assert len(structure.levels(structure.graph(modules, lambda m: None if m.is_package else m.name))) > 50


def test_a_circle_is_an_error(tmp_path: Path) -> None:
    package = make_package(tmp_path, a__x="import toy.b.y", b__y="import toy.a.x")
    with pytest.raises(ValueError, match="a > b > a"):
        structure.diagram(package)


def test_writing_needs_the_markers(tmp_path: Path, drawn: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{structure.BEGIN}\nstale\n{structure.END}\nafter\n")
    structure.write(page)
    written = page.read_text()
    assert drawn in written and "stale" not in written and written.endswith("\nafter\n")
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="marker lines"):
        structure.write(page)


def test_no_folder_has_more_code_than_its_budget() -> None:
    counted, over = structure.over_budget()
    assert "ds_zo/streaming" in counted and "tests" in counted
    assert not over, "delete code, or raise the number in tests/budget.txt and give the reason in the commit"


def test_a_folder_above_its_budget_is_named(tmp_path: Path) -> None:
    text = '"""Three lines\nof a\ndocstring."""\n\nimport os  # not counted\n\n# a comment\nx = (\n    1,\n)\n'
    make_package(tmp_path, a__x=text)
    (tmp_path / "budget.txt").write_text("# folders\n3 toy/a\n2 toy/a toy\n")
    counted, over = structure.over_budget(tmp_path / "budget.txt", tmp_path)
    assert structure.code_lines(text) == 3
    assert counted.splitlines()[0].split() == ["3", "of", "3", "toy/a"]
    assert over == ["toy/a + toy: 6 lines of code, at most 2"]
