"""Shows the rows of a speed suite: a table for each run, a line for each case, a column for each figure it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_zo.bench.report import shown
from ds_zo.records.rows import Row, table

FIGURES: Mapping[str, tuple[str, float]] = {
    "tokens_per_s": ("tokens/s", 1),
    "step_s": ("ms", 1e3),
    "step_s_min": ("fastest", 1e3),
    "step_s_max": ("slowest", 1e3),
    "two_cores_s": ("ms on two cores", 1e3),
    "gpu_busy_s": ("GPU busy ms", 1e3),
    "forward_s": ("forward ms", 1e3),
    "backward_s": ("backward ms", 1e3),
    "update_s": ("update ms", 1e3),
    "exposed_copy_s": ("exposed copies ms", 1e3),
    "exposed_cpu_s": ("exposed CPU ms", 1e3),
    "peak_gb": ("GPU GB", 1),
    "total_gb": ("GPU GB in all", 1),
    "host_peak_gb": ("host GB", 1),
    "up_gb_a_step": ("up GB a step", 1),
    "checkpoint_gb": ("checkpoint GB", 1),
    "disk_gbps": ("disk GB/s", 1),
    "loss": ("loss", 1),
}
"""By key of a row: the head of its column, and the factor to the column's unit."""


def report(rows: Iterable[Row]) -> str:
    """The rows as Markdown. A case without figures says why."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(str(row.get("run_id")), []).append(row)
    return "\n\n".join(f"{_facts(run, found)}\n\n{_table(found)}" for run, found in runs.items()) or "No rows."


def _facts(run: str, rows: list[Row]) -> str:
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in (first.get("versions") or {}).items())
    where = f"{first.get('gpu') or 'no GPU'}, {first.get('cpus')} CPUs, commit {first.get('commit')}"
    return f"## Run {run}\n\n{where}; {versions}."


def _table(rows: list[Row]) -> str:
    figures = {key: of for key, of in FIGURES.items() if any(isinstance(row.get(key), (int, float)) for row in rows)}
    body = []
    for row in rows:
        cells = [shown(row.get(key), scale=scale) for key, (_, scale) in figures.items()]
        status = row.get("status", "ok")
        said = str(row.get("settings") or "") if status == "ok" else f"{status}: {str(row.get('error'))[:120]}"
        body.append([row["case"], *cells, " ".join(said.split())])
    return table(["case", *(head for head, _ in figures.values()), ""], body)
