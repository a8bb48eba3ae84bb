"""Draws the package's folders from their imports, and counts their lines of code.

python tools/structure.py                        a Mermaid diagram of the folders of ds_zo
python tools/structure.py --write FILE           the diagram between the markers of a Markdown file
python tools/structure.py --budget               lines of code beside the limits of tests/budget.txt

A line of code holds a token that is no comment, and is no part of a docstring or an import.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

BEGIN = "<!-- structure: written by `python tools/structure.py --write`, not by hand -->"
END = "<!-- end of structure -->"
REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "ds_zo"
BUDGET = REPO / "tests" / "budget.txt"
_SPLIT = "backends"
"""The folder whose subfolders are boxes of their own."""

Graph = dict[str, set[str]]
"""For each box, the boxes that it imports."""

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(text: str) -> int:
    """Lines of code in a source file: without docstrings, blank lines, comments and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (isinstance(node, ast.Expr) and _is_string(node.value)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


class Module:
    """One source file: its lines, and the modules of the same package that it imports."""

    def __init__(self, path: Path, package: Path) -> None:
        relative = path.relative_to(package.parent).with_suffix("")
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        self.name = ".".join(parts)
        self.is_package = relative.name == "__init__"
        text = path.read_text(encoding="utf-8")
        self.num_lines = code_lines(text)
        self.imported: list[tuple[str, str | None]] = []
        """Module and, for `from module import name`, the name. Imports for type checkers alone are left out."""
        tree = ast.parse(text)
        guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        for_types = {id(node) for guard in guards for node in ast.walk(guard)}
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.Import):
                self.imported += [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                self.imported += [(node.module, alias.name) for alias in node.names]


@cache
def read_modules(package: Path) -> dict[str, Module]:
    """All modules of a package, by dotted name."""
    found = [Module(path, package) for path in sorted(package.rglob("*.py"))]
    return {module.name: module for module in found}


def targets(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """The modules that `module` imports. A name that a package's `__init__` re-exports counts for the module that the
    `__init__` has it from."""
    found = set()
    for source, name in module.imported:
        if name is not None and f"{source}.{name}" in modules:
            found.add(f"{source}.{name}")
        elif source in modules:
            origins = [s for s, n in modules[source].imported if n == name and s in modules]
            found.add(origins[0] if modules[source].is_package and origins else source)
    return found - {module.name}


def graph(modules: Mapping[str, Module], box_of: Callable[[Module], str | None]) -> Graph:
    """Imports between boxes; a module whose box is None is left out."""
    boxes = {name: box for name, module in modules.items() if (box := box_of(module)) is not None}
    found: Graph = {box: set() for box in boxes.values()}
    for name, box in boxes.items():
        imported = {boxes[target] for target in targets(modules[name], modules) if target in boxes}
        found[box] |= imported - {box}
    return found


def levels(imports: Graph) -> dict[str, int]:
    """The level of a box: 0 where it imports none, else one above the highest box that it imports."""
    found: dict[str, int] = {}

    def level(box: str, above: tuple[str, ...] = ()) -> int:
        if box in above:
            raise ValueError(f"imports must not go in a circle, got {' > '.join((*above, box))}; move what both need")
        if box not in found:
            found[box] = max((1 + level(lower, (*above, box)) for lower in imports[box]), default=0)
        return found[box]

    for box in imports:
        level(box)
    return found


def reduced(imports: Graph) -> Graph:
    """Without the imports that a longer path of imports contains."""

    def reachable(box: str) -> set[str]:
        return imports[box].union(*(reachable(lower) for lower in imports[box]))

    return {box: lower - set().union(*map(reachable, lower)) for box, lower in imports.items()}


def folder_of(module: Module) -> str | None:
    """The box of a module in the diagram: its folder, a subfolder of `backends`, or a file of the package's root."""
    parts = module.name.split(".")[1:]
    if not parts or (parts == [_SPLIT] and module.is_package):
        return None
    if parts[0] == _SPLIT and (len(parts) > 2 or module.is_package):
        return f"{parts[0]}/{parts[1]}"
    return parts[0] if len(parts) > 1 or module.is_package else f"{parts[0]}.py"


def diagram(package: Path = PACKAGE) -> str:
    """The folders of a package as a Mermaid flowchart, a row for each import level."""
    modules = read_modules(package)
    imports = graph(modules, folder_of)
    rows: dict[int, list[str]] = {}
    for box, level in sorted(levels(imports).items()):
        rows.setdefault(level, []).append(box)
    lines = ["flowchart TD"]
    for level in sorted(rows, reverse=True):
        lines.append(f'    subgraph level{level}["level {level}"]')
        for box in rows[level]:
            of_box = [module.num_lines for module in modules.values() if folder_of(module) == box]
            files = f"{len(of_box)} files, " if len(of_box) > 1 else ""
            lines.append(f'        {_id(box)}["{box}<br/>{files}{round(sum(of_box), -2) or sum(of_box):,} lines"]')
        lines.append("    end")
    for box, lower in sorted(reduced(imports).items()):
        lines += [f"    {_id(box)} --> {_id(other)}" for other in sorted(lower)]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def over_budget(budget: Path = BUDGET, repo: Path = REPO) -> tuple[str, list[str]]:
    """A table of folders with their lines of code and their limits, and the folders above their limit."""
    lines, over = [], []
    for line in budget.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        limit, *folders = line.split()
        files = [path for folder in folders for path in (repo / folder).rglob("*.py")]
        found = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
        lines.append(f"{found:7,} of {int(limit):7,}  {' + '.join(folders)}")
        if found > int(limit):
            over.append(f"{' + '.join(folders)}: {found:,} lines of code, at most {int(limit):,}")
    return "\n".join(lines), over


def write(path: Path) -> None:
    """Replaces what stands between the markers of a Markdown file."""
    head, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise ValueError(f"{path} must hold the two marker lines {BEGIN} and {END}; add them where the diagram goes")
    path.write_text(f"{head}{BEGIN}\n\n{diagram()}\n\n{END}{tail}", encoding="utf-8")


def _id(box: str) -> str:
    return re.sub(r"\W", "_", box)


def main() -> None:
    """Prints the diagram or the counts, or writes the diagram to a file."""
    parser = argparse.ArgumentParser(description="The folders of ds_zo and their imports.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the diagram between FILE's markers")
    parser.add_argument("--budget", action="store_true", help="print lines of code beside their limits instead")
    args = parser.parse_args()
    if args.budget:
        counted, over = over_budget()
        print(counted)
        sys.exit("\n".join(over) or None)
    if args.write is not None:
        write(args.write)
    else:
        print(diagram())


if __name__ == "__main__":
    main()
