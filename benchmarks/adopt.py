"""Takes rows of a GPU session into `benchmarks/results`, and makes the pages again.

    python -m benchmarks.adopt runs/session

Of the folder, `NAME/rows.jsonl` goes to `results/lean/NAME`, and the files that FILES names are appended to theirs.
Rows that a call had no time for are left out, and so are rows that are there already. A run is left out, too, if it
lacks our methods or all others: a ratio needs both in one run. `results/lean/headline.svg` is drawn again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pages
from ds_zo.bench.compare import last_run
from ds_zo.bench.contenders import ALL
from ds_zo.bench.headline import write_headline
from ds_zo.bench.runner import NOT_RUN
from ds_zo.records.rows import Row, append_row, read_objects

RESULTS = Path(__file__).parent / "results"
FILES = {
    "zo_paper.jsonl": "h200_zo_paper.jsonl",
    "lsp_figure5.jsonl": "h200_lsp_figure5.jsonl",
    "lsp_equal_time.jsonl": "h200_lsp_equal_time.jsonl",
    "lora_lomo_rates.jsonl": "h200_lora_lomo_rates.jsonl",
    "checkpoint_disk.jsonl": "h200_checkpoint_speed.jsonl",
    "checkpoint_shm.jsonl": "h200_checkpoint_speed.jsonl",
}
"""By name in a session's folder: the file in `results`."""


def adopt(session: Path) -> dict[str, int]:
    """Copies the rows, and returns the number of new ones by file."""
    added = {}
    for name, file in FILES.items():
        if (session / name).exists():
            added[file] = _append(read_objects(session / name), RESULTS / file)
    for source in sorted(session.glob("*/rows.jsonl")):
        for run in dict.fromkeys(row["run_id"] for row in read_objects(source)):
            rows = last_run(source, run)
            if has_both_sides(rows):
                target = _folder_of(source.parent.name, run) / "rows.jsonl"
                target.parent.mkdir(parents=True, exist_ok=True)
                added[str(target.relative_to(RESULTS))] = _append(rows, target)
            else:
                print(f"left out: run {run} of {source} lacks our methods or others", file=sys.stderr)
    if not added:
        known = ", ".join(("NAME/rows.jsonl", *FILES))
        raise ValueError(f"a session's folder has {known}, got {session}, which has none of them: name another folder")
    return added


def has_both_sides(rows: Sequence[Row]) -> bool:
    """Whether one run has a row of ours with numbers, and one of others with any outcome."""
    ours = {name for name, contender in ALL.items() if contender.backend is not None}
    entrants = [row for row in rows if "contender" in row.get("params", {}) and row["status"] != NOT_RUN]
    measured = any(row["case"] in ours and row["status"] == "ok" for row in entrants)
    return measured and any(row["case"] not in ours for row in entrants)


def _folder_of(name: str, run: str) -> Path:
    """`lean/NAME`, or `lean/NAME-RUN` where that holds another run: a table has rows of one run."""
    folder = RESULTS / "lean" / name
    held = read_objects(folder / "rows.jsonl") if (folder / "rows.jsonl").exists() else []
    return folder if all(row["run_id"] == run for row in held) else folder.with_name(f"{name}-{run}")


def _append(rows: Sequence[Row], target: Path) -> int:
    known = {_key(row) for row in read_objects(target)} if target.exists() else set()
    new = [row for row in rows if row.get("status") != NOT_RUN and _key(row) not in known]
    for row in new:
        append_row(target, row)
    return len(new)


def _key(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("session", type=Path, help="the folder with a session's rows")
    try:
        for file, number in adopt(parser.parse_args(arguments).session).items():
            print(f"{number:4} new rows in {file}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if any((RESULTS / "lean").glob("*/rows.jsonl")):
        write_headline([RESULTS / "lean"])
    pages.rows_in.cache_clear()
    pages.main([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
