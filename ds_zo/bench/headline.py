"""Summarises several comparisons: a table for each card with one column per model, and one plot, from rows alone."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_zo.bench.contenders import ALL
from ds_zo.bench.report import contenders, host_gb, in_table_order, planned_host_gb, reason_of, shown, speed_range
from ds_zo.bench.runner import NOT_RUN, VOID
from ds_zo.records.prose import wrapped
from ds_zo.records.rows import Row

BEGIN, END = "<!-- headline -->", "<!-- /headline -->"
"""Markers in a file: `--into` replaces the text between them."""
PLOT = "headline.svg"
PICTURES = "pictures"
"""Name of a page's own folder of pictures. A site that is built from the page's folder can show only what is in it."""
_MISSING = ""
_RAN_ONCE = " †"
"""Mark of a case that was run with more memory than its table's limit."""
_CELLS = "tokens/s (slowest to fastest step, number of steps) / GPU GB / host GB"
_SHORT = {
    "oom": "does not fit",
    "timeout": "too slow",
    "killed": "stopped: host memory",
    NOT_RUN: "no time",
    VOID: "not measured",
}


@dataclass(frozen=True)
class MeasuredModel:
    """One model under one cap, with the rows of its run."""

    folder: Path
    rows: list[Row]

    @property
    def spec(self) -> Row:
        return dict(self.entrants[0]["params"]["spec"])

    @property
    def entrants(self) -> list[Row]:
        return contenders(self.rows)

    @property
    def model(self) -> str:
        """The head of the model's column."""
        spec = self.spec
        cut = f", {spec['layers']} layers" if spec.get("layers") else ""
        return f"{spec['model'].removeprefix('random:')}{cut}, {spec['batch']} x {spec['length']}"

    @property
    def cap_gb(self) -> float | None:
        found = self.spec["device_memory_gb"]
        return None if found is None else float(found)


def write_headline(folders: Sequence[Path], *, into: Sequence[Path] = ()) -> str:
    """Returns the Markdown for the first page, and writes it between the markers of all pages that `into` names.
    Without pages, links are relative to the working directory. The plot is a file beside the results, and in the folder
    `pictures` of each page that has one."""
    parts = read_parts(folders)
    root = Path(os.path.commonpath([str(folder) for folder in folders]))
    pages = pages_with_markers(into)
    drawn = draw_headline(parts)
    if drawn is not None:
        (root / PLOT).write_text(drawn, encoding="utf-8")
    texts = {page: page_text(parts, root=root, page=page, has_plot=drawn is not None) for page in pages}
    for page, text in texts.items():
        if drawn is not None:
            _plot_of(page, root).write_text(drawn, encoding="utf-8")
        put_between_markers(page, text)
    nowhere = Path("README.md")
    return texts[pages[0]] if pages else page_text(parts, root=root, page=nowhere, has_plot=drawn is not None)


def page_text(parts: Sequence[MeasuredModel], *, root: Path, page: Path, has_plot: bool) -> str:
    """Returns the Markdown with links relative to the page's folder."""
    base = page.parent
    plot = _relative(_plot_of(page, root), base) if has_plot else None
    return markdown(parts, root=_relative(root, base), plot=plot, rows=_rows(parts, base))


def pages_with_markers(into: Sequence[Path]) -> list[Path]:
    """Returns the named files, and of each named folder the Markdown files directly in it that hold the markers."""
    pages: list[Path] = []
    for path in into:
        marked = (page for page in sorted(path.glob("*.md")) if BEGIN in page.read_text("utf-8").splitlines())
        pages += marked if path.is_dir() else [path]
    if into and not pages:
        folders = ", ".join(map(str, into))
        raise ValueError(f"the headline goes between {BEGIN} and {END}, which no page of {folders} has (--into)")
    return list(dict.fromkeys(pages))


def read_parts(folders: Sequence[Path]) -> list[MeasuredModel]:
    from ds_zo.bench.compare import folders_with_rows, runs_of

    found = dict.fromkeys(part for folder in folders if folder.is_dir() for part in folders_with_rows(folder))
    if not found:
        raise ValueError(f"looked for rows in {', '.join(map(str, folders))}: there are none (--headline)")
    parts = [MeasuredModel(folder, rows) for folder, rows in runs_of(list(found), None)]
    size = {part.model: max(row.get("parameters") or 0 for row in part.rows) for part in parts}
    return sorted(parts, key=lambda part: (size[part.model], part.model, part.cap_gb is not None, part.cap_gb))


def put_between_markers(file: Path, text: str) -> None:
    """Replaces the text between the markers, and nothing else in the file."""
    with file.open(encoding="utf-8", newline="") as opened:  # keeps the line ends
        before = opened.read()
    begin = before.find(BEGIN)
    end = before.find(END, max(0, begin))
    if not 0 <= begin < end:
        raise ValueError(f"the headline goes between {BEGIN} and {END}, which {file} lacks: add them (--into)")
    own = f"{BEGIN}\n{text}\n".replace("\n", "\r\n" if "\r\n" in before else "\n")
    with file.open("w", encoding="utf-8", newline="") as opened:
        opened.write(before[:begin] + own + before[end:])


def markdown(parts: Sequence[MeasuredModel], *, root: str, plot: str | None, rows: str) -> str:
    """`rows`: the sentence that links to the rows."""
    lines = [_facts(parts), ""]
    caps = sorted({part.cap_gb for part in parts}, key=lambda cap: float("inf") if cap is None else cap)
    for cap in caps:
        of_cap = [part for part in parts if part.cap_gb == cap]
        card = "On the card as it is" if cap is None else f"Within {cap:g} GB of GPU memory"
        lines += [f"{card}: {_CELLS}", "", *_table(of_cap), ""]
    if any(row.get("ran_with_gb") for part in parts for row in part.entrants):
        lines += [
            f"{_RAN_ONCE.strip()} Ran without the limit; figures only if its peak stayed under the limit.",
            "",
        ]
    lines += [f"{note}\n" for note in _not_measured(parts)]
    if plot is not None:
        lines += [f"![GPU memory against speed, one panel a model]({plot})", ""]
    lines += [
        "Circles are ours, hollow where they ran within a smaller card. Speed is the mean over the timed steps, memory "
        "its peak. ZO's speed is not that of learning.",
        "",
        '<details markdown="1">',
        "<summary>Rows and command</summary>",
        "",
        "Every contender's settings, the parts of a step, bytes moved and last words are under "
        f"[{root}]({root}). {rows} "
        "Made by the command below; `--contenders NAME` selects a line:",
        "",
        "```bash",
        *_commands(parts),
        "```",
        "",
        "</details>",
    ]
    return wrapped("\n".join(lines))


def _rows(parts: Sequence[MeasuredModel], base: Path) -> str:
    """Links to the rows of every column, by the run that made them. `base`: the page's folder."""
    by_run: dict[str, list[str]] = {}
    for part in parts:
        name = f"{part.model.partition(',')[0]}{'' if part.cap_gb is None else f'-{part.cap_gb:g}gb'}"
        link = _relative(part.folder / "rows.jsonl", base)
        by_run.setdefault(part.rows[0]["run_id"], []).append(f"[{name}]({link})")
    said = "; ".join(f"run {run}: {', '.join(links)}" for run, links in by_run.items())
    return f"Rows: {said}. Compare figures of one run."


def _facts(parts: Sequence[MeasuredModel]) -> str:
    first = parts[0].entrants[0]
    rows = [row for part in parts for row in part.rows]
    num_machines = len({row.get("machine") for row in rows})
    cards = " or ".join(dict.fromkeys(str(row.get("gpu") or "CPU") for part in parts for row in part.entrants))
    where = (
        f"one {cards}"
        if num_machines == 1
        else f"{num_machines} machines with one {cards} each, each column from one of them"
    )
    facts = [where, f"{first.get('cpus')} cores"]
    links = [row["link_gbps"] for row in rows if row.get("link_gbps")]
    if links:
        up, down = (_span([link[way] for link in links], ".1f") for way in ("up", "down"))
        facts.append(f"link {up} GB/s up, {down} down")
    speeds = [row["cpu_adam_gparams_per_s"] for row in rows if row.get("cpu_adam_gparams_per_s")]
    if speeds:
        facts.append(f"CPU Adam {_span(speeds, '.2f')} G parameters/s")
    versions = first.get("versions", {})
    facts += [f"{name} {versions[name]}" for name in ("deepspeed", "torch") if name in versions]
    spec = parts[0].spec
    facts.append(f"{spec['dtype']}, activations {'recomputed' if spec['checkpointing'] else 'kept'}")
    commits = dict.fromkeys(str(row.get("commit")) for part in parts for row in part.entrants)
    text = "; ".join([*facts, f"commit {', '.join(commits)}"])
    return f"{text[0].upper()}{text[1:]}."


def _span(values: Sequence[float], form: str) -> str:
    """The range of a value over all machines, as text."""
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _table(parts: Sequence[MeasuredModel]) -> list[str]:
    names = {row["case"]: row for part in parts for row in part.entrants}
    lines = ["| | " + " | ".join(part.model for part in parts) + " |", "| --- " * (len(parts) + 1) + "|"]
    for row in in_table_order(list(names.values())):
        cells = [_cell(next((r for r in part.entrants if r["case"] == row["case"]), None)) for part in parts]
        lines.append(f"| {_title(row)} | " + " | ".join(cells) + " |")
    return lines


def _title(row: Row) -> str:
    return ALL[row["case"]].title if row["case"] in ALL else str(row["case"])


def _cell(row: Row | None) -> str:
    if row is None:
        return _MISSING
    planned = planned_host_gb(row)
    if planned is not None:
        return f"would take {float(planned[0]):.0f} GB of host memory"
    mark = _RAN_ONCE if row.get("ran_with_gb") else ""
    if row["status"] != "ok":
        short = _SHORT.get(row["status"]) or reason_of(row).removeprefix(f"{NOT_RUN}: ").replace("|", "\\|")
        return f"{short}{mark}"
    speed = f"{row['tokens_per_s_mean']:,.0f} ({speed_range(row)})"
    return " / ".join([speed, shown(row.get("peak_gb")), shown(host_gb(row))]) + mark


def _not_measured(parts: Sequence[MeasuredModel]) -> list[str]:
    """Makes one sentence for each reason why contenders have no numbers."""
    whose: dict[str, list[str]] = {}
    for part in parts:
        for row in part.entrants:
            if row["status"] == VOID:
                where = "" if part.cap_gb is None else f" within {part.cap_gb:g} GB"
                whose.setdefault(str(row.get("error")), []).append(f"{_title(row)} of {part.model}{where}")
    return [f"Not measured: {', '.join(names)}: {why}." for why, names in whose.items()]


def _commands(parts: Sequence[MeasuredModel]) -> list[str]:
    """Returns the commands that make such rows, from the parameters in the rows."""
    lines = []
    for model in dict.fromkeys(part.model for part in parts):
        of_model = [part for part in parts if part.model == model]
        caps = ",".join("none" if part.cap_gb is None else f"{part.cap_gb:g}" for part in of_model)
        spec = of_model[0].spec
        # a folder other than that of these rows, which a reader wants to keep
        out = f"runs/results/{Path(spec['model'].removeprefix('random:')).name}"
        lines.append(command_of(spec, f"--device-memory-gb {caps} --resume", out))
    return lines


def command_of(spec: Row, what: str, out: str) -> str:
    """Returns the command that makes rows of such a spec. `what`: its further arguments."""
    from ds_zo.bench.compare import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {"model": spec["model"], "batch": spec["batch"], "seq": spec["length"]}
    given |= {key: spec[key] for key in ("steps", "warmup", "max_s", "dtype", "layers", "seed")}
    options = [
        f"--{key.replace('_', '-')} {shlex.quote(str(value))}"
        for key, value in given.items()
        if value is not None and value != parser.get_default(key)
    ]
    return " ".join(["python launch/compare.py", *options, what, "--out", shlex.quote(out)])


def draw_headline(parts: Sequence[MeasuredModel]) -> str | None:
    """Returns the plot as SVG. None: there is nothing to draw."""
    from ds_zo.bench.plots import panels

    models = dict.fromkeys(part.model for part in parts)
    shown_rows = {
        model: [
            row | {"cap_gb": part.cap_gb}
            for part in parts
            for row in part.entrants
            if part.model == model and row["status"] == "ok" and not row.get("ran_with_gb")
        ]
        for model in models
    }
    caps = sorted({part.cap_gb for part in parts if part.cap_gb is not None})
    shown_rows = {model: rows for model, rows in shown_rows.items() if rows}
    return panels(shown_rows, caps_gb=caps) if shown_rows else None


def _plot_of(page: Path, root: Path) -> Path:
    own = page.parent / PICTURES
    return (own if own.is_dir() else root) / PLOT


def _relative(path: Path, base: Path) -> str:
    return Path(os.path.relpath(path, base)).as_posix()
