"""Makes rows of rows, before a block chooses among them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.accuracy import at_chosen_rates
from benchmarks.cells import distances
from benchmarks.grids import read_grid
from ds_zo.records.rows import Row
from ds_zo.tasks.score import sign_of

Rows = Sequence[Row]


def points(rows: Rows) -> list[Row]:
    """A row for each input that a case measured, named CASE+BATCHxLENGTH; beside the rows themselves."""
    made = [{**row, **point} for row in rows for point in row.get("points") or [row] if "batch" in point]
    return [*rows, *({**row, "case": f"{row['case']}+{row['batch']}x{row['length']}"} for row in made)]


def part(rows: Rows, key: str) -> list[Row]:
    """Beside each row that holds the figures of a second phase, a row with these, named CASE+KEY."""
    return [*rows, *({**row, **row[key], "case": f"{row['case']}+{key}"} for row in rows if row.get(key))]


def by_link(rows: Rows) -> list[Row]:
    """A row for each link that an engine of Figure 5 was measured on: its case is `figure5/LINK/SHAPE/METHOD`."""
    found: list[Row] = []
    for row in rows:
        suite, _, rest = row["case"].partition("/")
        if suite != "figure5":
            found.append(row)
            continue
        own = "own" if row.get("link_gbps") is None else f"{row['link_gbps']:g}"
        of_case = {key: value for key, value in row.items() if key != "links"}
        for link, measured in {own: {}, **row.get("links", {})}.items():
            found.append({**of_case, **measured, "case": f"figure5/{link}/{rest}"})
    return found


def beside_link(rows: Rows) -> list[Row]:
    """Adds the seconds that a step's uploads take at the speed of the link in the same run, and their share."""
    links = {row["run_id"]: row["link_gbps"]["up"] for row in rows if row["case"] == "machine" and row.get("link_gbps")}
    found = []
    for row in rows:
        if row.get("up_gb_a_step") and row["run_id"] in links:
            upload_s = row["up_gb_a_step"] / links[row["run_id"]]
            row = {**row, "upload_s": upload_s, "upload_share": upload_s / row["step_s"]}
        found.append(row)
    return found


def good(rows: Rows) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def like(rows: Rows, key: str, pattern: str) -> list[Row]:
    return [row for row in rows if fnmatchcase(str(row[key]), pattern)]


def chosen(rows: Rows, grid: str, *apart: str) -> list[Row]:
    """Good rows at the rate that was chosen for their method, for each value of the keys `apart` alone."""
    groups = grouped(rows, apart).values()
    return [row for of in groups for found in at_chosen_rates(of, read_grid(grid)).values() for row in found]


def best_on_dev(rows: Rows, setting: str, *apart: str) -> list[Row]:
    """Of each group, rows with the setting whose mean over seeds is best on dev. Only settings with all seeds count."""
    found: list[Row] = []
    for group in grouped(rows, apart).values():
        settings = list(grouped(group, [setting]).values())
        most = max(map(len, settings))
        best = max((of for of in settings if len(of) == most), key=_mean_dev)
        found += best
    return found


def _mean_dev(rows: Rows) -> float:
    """On dev; higher is better."""
    return sign_of(rows[0]["metric"]) * statistics.mean(row["dev"] for row in rows)


def grouped(rows: Rows, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def estimators(rows: Rows) -> list[Row]:
    """Runs of zeroth-order estimators at the rate that was best on dev. Cases: short/NAME, TASK/NAME/SECONDS."""
    named = []
    for row in (row for row in rows if "curve" in row):
        c, before, after = row["config"], row["curve"][0]["test"], row["best"]["test"]
        one_sided = c["space"] == "full" and not c["two_sided"]
        passes = c["directions"] + 1 if one_sided else c["groups"] * c["directions"] * (1 + c["two_sided"])
        more = {"directions": c["groups"] * c["directions"], "sequences": passes * c["examples"], "seed": c["seed"]}
        more |= {"mean_ms": sum(row["step_ms"]) / 2, "percent": 100 * after, "percent_before": 100 * before}
        case = f"{c['task']}/{c['name']}/{c['seconds']:g}" if c["cosine"] else f"short/{c['name']}"
        setting = json.dumps({**c, "seed": None}, sort_keys=True)
        scores = {"before": before, "after": after, "dev": row["late_dev"]}
        named.append({**row, **more, **scores, "case": case, "setting": setting})
    return best_on_dev(named, "setting", "case")


def left_out(rows: Rows, base: str, *methods: str) -> list[Row]:
    """Beside the rows, for each task those of the method that is best on dev of all other tasks, as TASK/chosen."""
    of = {case: found for (case,), found in grouped(rows, ["case"]).items()}
    tasks = list(dict.fromkeys(row["task"] for row in rows))

    def on_dev(method: str, task: str) -> float:
        return statistics.mean(distances(of[f"{method}/{task}"], of[f"{base}/{task}"], "dev"))

    made: list[Row] = []
    for task in tasks:
        best = max(methods, key=lambda method: statistics.mean(on_dev(method, o) for o in tasks if o != task))
        made += [{**row, "case": f"{task}/chosen"} for row in of[f"{best}/{task}"]]
    return [*rows, *made]


VIEWS: dict[str, Callable[..., list[Row]]] = {
    "points": points,
    "part": part,
    "by_link": by_link,
    "beside_link": beside_link,
    "good": good,
    "like": like,
    "chosen": chosen,
    "best_on_dev": best_on_dev,
    "estimators": estimators,
    "left_out": left_out,
}
"""By name in a block's data."""
