"""Makes the blocks of pages from data: the files of `blocks/`, one for each page.

A block names its files of rows, a filter, its lines and its columns. The keys of a block:

rows         sources; each has `file`, and may have `where` (keys with their values), `case` (a template of the row's
             keys that names it; default: its own case), `views` (names in `benchmarks.views` with arguments)
lines        by title, or as lists that begin with it: what the templates of the line's cases are filled with;
             `contenders`: those of `ds-zo bench` that have rows
fields       names for these values; without names they are {0}, {1}
columns      lists: head, show, templates of cases (default: `case`; null: no row is needed), options
run          the run of all rows; without it a cell is of the newest run that has all of its cases at full depth
needs        a key without which a row counts as not measured
together     the cells of a line are of one run, if one run has all of them
missing      shown where a cell has no rows
paired       templates of cases; only seeds count that all of them have
split        a table for each value of this key; `head` numbers them
says, then   text before and after the table; `facts` are columns without a head whose cells it names
parts        several tables of the same rows: what is different in each
note         more for the sentence with the commands
made by      commands; without them no text says where the rows are

A show is a name in `benchmarks.cells` with its arguments, or a template of the row's keys. Options of a column:

names        of what is shown
paper        a field, or two with "/" between, in `form`; the cell is paper / ours; `none` is shown for null
run          another run
missing      another word for a cell without rows
failed       shown for a row that has failed, where the block has `failures`
unmeasured   the template of a case that was not run; the cell says what it would take

A title may name keys of the line's first row. Text without figures of rows stands on the page, outside its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

from benchmarks import cells
from benchmarks.views import VIEWS
from ds_zo.bench.contenders import ALL
from ds_zo.bench.report import planned_host_gb
from ds_zo.records.rows import Row, read_objects, table

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
SHOWS = {**cells.ROW_SHOWS, **cells.SEED_SHOWS}
Spec = Mapping[str, Any]


def read_yaml(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@cache
def specs() -> dict[str, Spec]:
    """The data of all blocks, by name."""
    found: dict[str, Spec] = {}
    for file in sorted((FOLDER / "blocks").glob("*.yaml")):
        found |= read_yaml(file)
    return found


@cache
def rows_in(file: str) -> list[Row]:
    """The rows of a file, each with the file's name as `file`; none where there is no such file."""
    path = RESULTS / file
    return [{**row, "file": file} for row in read_objects(path)] if path.exists() else []


def rows_of(source: Spec) -> list[Row]:
    """The rows of a source, each with its name as `case`."""
    where = source.get("where", {})
    found = [row for row in rows_in(source["file"]) if all(row.get(key) == value for key, value in where.items())]
    found = seen(found, source.get("views", ()))
    name = source.get("case")
    return [{**row, "case": name.format_map(row)} for row in found] if name else found


def seen(rows: list[Row], names: Sequence[str]) -> list[Row]:
    """The rows that some views make of rows."""
    for named in names:
        view, *arguments = named.split()
        rows = VIEWS[view](rows, *arguments)
    return rows


class Line:
    """A line's title, and what it fills templates with."""

    def __init__(self, title: str, values: Sequence[Any], fields: Sequence[str]) -> None:
        self.title = title
        self.values = values
        self.fields = dict(zip(fields, values, strict=False))

    def filled(self, template: str) -> str:
        return template.format(*self.values, **self.fields)

    def paper(self, wanted: str) -> float | None:
        """A figure of the paper, or the quotient of two, in which a dash counts as nothing."""
        first, _, second = (part.strip() for part in wanted.partition("/"))
        value = self.fields.get(first)
        if not second or (second.isdigit() and value is None):
            return value
        over = float(second) if second.isdigit() else self.fields[second]
        return None if over is None else (value or 0) / over


class Block:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.rows = seen([row for source in spec["rows"] for row in rows_of(source)], spec.get("views", ()))
        self.used: list[Row] = []

    def text(self) -> str:
        """The Markdown of the block; empty while it has no rows."""
        if not self.rows:
            return ""
        whole, parts = self.spec, list[str]()
        for part in whole.get("parts", [{}]):
            self.spec = {**whole, **part}
            parts += self.part()
        if "made by" not in whole:
            return "\n\n".join(parts)
        made = cells.source(self.used, *map(cells.command, whole["made by"]))
        return "\n\n".join([*parts, made.replace("\n\n</details>", f"{whole.get('note', '')}\n\n</details>")])

    def part(self) -> Iterator[str]:
        """Text, tables, text."""
        spec, nothing = self.spec, Line("", (), ())
        facts = {name: self.cell(nothing, *column) for name, column in spec.get("facts", {}).items()}
        yield from [spec["says"].format(**facts)] if "says" in spec else []
        if "columns" in spec:
            heads = [column[0].format(**facts) for column in spec["columns"]]
            yield from self.tables(heads)
        yield from [spec["then"].format(**facts)] if "then" in spec else []

    def lines(self) -> Iterator[Line]:
        """The lines of the table; of a mapping, a value that is no list is the only one."""
        given = self.spec["lines"]
        if given == "contenders":
            given = {ALL[name].title: name for name in ALL if any(row["case"] == name for row in self.rows)}
        for line in given.items() if isinstance(given, dict) else given:
            title, *values = line
            if isinstance(given, dict) and isinstance(values[0], list):
                (values,) = values
            yield Line(title, values, self.spec.get("fields", ()))

    def tables(self, heads: Sequence[str]) -> Iterator[str]:
        head, key, rows = self.spec.get("head", ""), self.spec.get("split"), self.rows
        if key is None:
            yield table([head, *heads], [self.cells_of(line) for line in self.lines()])
            return
        wanted = {line.filled(self.spec["case"]) for line in self.lines()}
        for number, value in enumerate(dict.fromkeys(row.get(key) for row in rows if row["case"] in wanted), 1):
            self.rows = [row for row in rows if row.get(key) == value]
            body = [self.cells_of(line) for line in self.lines()]
            yield table([head.format(number), *heads], [cells for cells in body if any(cells[1:])])

    def cells_of(self, line: Line) -> list[str]:
        return [self.title(line), *(self.cell(line, *column[1:]) for column in self.spec["columns"])]

    def title(self, line: Line) -> str:
        if "{" not in line.title:
            return line.title
        case = line.filled(self.spec.get("about") or self.spec["case"])
        rows = [row for row in self.measured(line) if fnmatchcase(row["case"], case)]
        return line.title.format_map({**rows[-1], "commits": cells.commits(rows)})

    def cell(self, line: Line, show: str, *given: Any) -> str:
        """The text of a cell. `given`: templates of cases, or None where no row is needed; then options."""
        if given and given[0] is None:
            return line.filled(show)
        cases = [line.filled(case) for case in given if isinstance(case, str)] or [line.filled(self.spec["case"])]
        options: Spec = given[-1] if given and isinstance(given[-1], dict) else {}
        ours = self.shown(line, show, cases, options)
        if ours is None and "unmeasured" in options:
            ours = self.needed(line.filled(options["unmeasured"]), is_speed=show == "speed")
        ours = options.get("names", {}).get(ours, ours)
        if "paper" not in options:
            return options.get("missing", self.spec.get("missing", "")) if ours is None else ours
        figure = line.paper(options["paper"])
        if figure is None and ours is None and "none" not in options:
            return ""
        theirs = options.get("none", "") if figure is None else format(figure, options.get("form", ",.0f"))
        return f"{theirs} / {self.spec['missing'] if ours is None else ours}"

    def needed(self, case: str, *, is_speed: bool) -> str | None:
        """What a case would take that no machine of ours holds."""
        for row in reversed([row for row in self.rows if row["case"] == case]):
            planned = planned_host_gb(row)
            if planned is not None or row.get("needs_gb") is not None:
                self.used.append(row)
                gb = f"{row['needs_gb']:.0f} GB" if planned is None else f"{float(planned[0]):.0f} GB of host memory"
                return "not run" if is_speed else f"would take {gb}"
        return None

    def shown(self, line: Line, show: str, cases: Sequence[str], options: Spec) -> str | None:
        """A cell's own part; None: its rows are missing."""
        name, *arguments = show.split()
        arguments = [line.filled(word) for word in arguments] if name in SHOWS else []
        if name in cells.SEED_SHOWS:
            groups = [self.group(line, case) for case in cases]
            self.used += [row for rows in groups for row in rows]
            return cells.SEED_SHOWS[name](*groups, *arguments) if all(groups) else None
        found = self.of_one_run(line, set(cases), run=options.get("run"))
        if found is None:
            return None
        rows = [found[case] for case in cases]
        self.used += rows
        if "failed" in options and rows[0]["status"] != "ok":
            return str(options["failed"])
        if name == "number":
            runs = sorted({other.filled(self.spec["run"]) for other in self.lines()})
            return str(1 + runs.index(rows[0]["run_id"]))
        if name in cells.ROW_SHOWS:
            return cells.ROW_SHOWS[name](*rows, *arguments)
        return show.format_map({**rows[0], **line.fields})

    def group(self, line: Line, case: str) -> list[Row]:
        """All rows of a case. Where lines are paired, only seeds count that both sides have."""
        found = [row for row in self.rows if fnmatchcase(row["case"], case)]
        for other in map(line.filled, self.spec.get("paired", ())):
            seeds = {row["seed"] for row in self.rows if row["case"] == other}
            found = [row for row in found if row["seed"] in seeds]
        return found

    def of_one_run(self, line: Line, cases: set[str], *, run: str | None) -> dict[str, Row] | None:
        """The last row of each case in the newest run that has all of them."""
        rows = self.measured(line, run=run)
        if self.spec.get("together"):
            of_line = {
                line.filled(case) for column in self.spec["columns"] for case in column[2:] if isinstance(case, str)
            }
            cases = of_line if newest(rows, of_line) else cases
        return newest(rows, cases)

    def measured(self, line: Line, *, run: str | None = None) -> list[Row]:
        """The rows of the run that have figures: all are at full depth where a key is needed."""
        run = run or line.filled(self.spec.get("run", "")) or None
        needs = self.spec.get("needs")
        return [
            row
            for row in self.rows
            if run in (None, row.get("run_id"))
            and (row.get("status", "ok") in ("ok", "planned") or self.spec.get("failures"))
            and (needs is None or (row.get(needs) is not None and row.get("full_layers") in (None, row.get("layers"))))
        ]


def newest(rows: Sequence[Row], cases: set[str]) -> dict[str, Row] | None:
    """The last row of each case in the newest run that has all of them."""
    mine = [row for row in rows if row["case"] in cases]
    for run in sorted({str(row.get("run_id")) for row in mine}, reverse=True):
        found = {row["case"]: row for row in mine if str(row.get("run_id")) == run}
        if len(found) == len(cases):
            return found
    return None


def text_of(name: str) -> str:
    """The Markdown of a block."""
    return Block(specs()[name]).text()
