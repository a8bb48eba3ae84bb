"""What every block of figures on a page says of itself: its rows, their runs, the command that makes such rows, and the
range of the timed steps.

A range in brackets is that of single steps, then the number of timed steps. The range of a ratio is that of one side's
slowest step over the other side's fastest, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ds_zo.bench.report import speed_range
from ds_zo.records.rows import Row, read_objects

RESULTS = Path(__file__).parent / "results"
STEPS = "Brackets: range of single steps, and their number."
RATIOS = "Brackets: worst and best case of the ratio."


def read_rows(file: str, *, folder: Path = RESULTS) -> list[Row]:
    """The rows of a file, each with the file's name as `file`; none where there is no such file."""
    path = folder / file
    return [{**row, "file": file} for row in read_objects(path)] if path.exists() else []


def source(used: Sequence[Row], *commands: str) -> str:
    """What is folded away under a block: links to the files of its rows, the runs in them, the commands that make such
    rows. Rows of training runs belong to no run; their commits are named."""
    files = list(dict.fromkeys(row["file"] for row in used))
    links = ", ".join(f"[{file}](../benchmarks/results/{file})" for file in files) or "none"
    runs = sorted({str(row["run_id"]) for row in used if row.get("run_id")})
    commits = sorted({str(row["commit"]) for row in used if row.get("commit") and not row.get("run_id")})
    named = "".join(
        f", {word}{'s' if len(found) > 1 else ''} {', '.join(found)}"
        for word, found in (("run", runs), ("commit", commits))
        if found
    )
    made = f"Rows: {links}{named}. Made by {' and '.join(f'`{command}`' for command in commands)}."
    return f'<details markdown="1">\n<summary>Rows and command</summary>\n\n{made}\n\n</details>'


def suite(name: str, arguments: str, *, only: str | None = None) -> str:
    """The command of a speed suite. `only`: a regular expression of its cases."""
    chosen = "" if only is None else f" --only '{only}'"
    return " ".join(f"python -m benchmarks.{name} {arguments}{chosen} --out rows.jsonl".split())


def sweep(grid: str, arguments: str = "") -> str:
    """The command of a grid of training runs."""
    more = f" {arguments}" if arguments else ""
    return f"python launch/sweep.py --model DIR --data-root DIR --results rows.jsonl --grid {grid}{more}"


def ms(row: Row) -> str:
    """Milliseconds of the median step, with the range of all."""
    found = f"{1e3 * row['step_s']:,.0f}"
    if not row.get("seconds"):
        return found
    return f"{found} ({1e3 * row['step_s_min']:,.0f} to {1e3 * row['step_s_max']:,.0f}, {len(row['seconds'])})"


def speed(row: Row) -> str:
    """Tokens/s of the median step, with the range of all."""
    found = f"{row['tokens_per_s']:,.0f}"
    return f"{found} ({speed_range(row)})" if row.get("seconds") else found


def ratio(row: Row, base: Row) -> str:
    """How many times the tokens/s of another row of the same run."""
    if row.get("run_id") != base.get("run_id"):
        raise ValueError(f"a ratio needs rows of one run, got {row.get('run_id')} and {base.get('run_id')}")
    found = f"{row['tokens_per_s'] / base['tokens_per_s']:.2f}"
    if not row.get("seconds") or not base.get("seconds"):
        return found
    tokens, others = (side["tokens_per_s"] * side["step_s"] for side in (row, base))
    least, most = (
        tokens / row[mine] / (others / base[other])
        for mine, other in (("step_s_max", "step_s_min"), ("step_s_min", "step_s_max"))
    )
    return f"{found} ({least:.2f} to {most:.2f})"


def gb(value: float) -> str:
    return f"{value:.1f}"
