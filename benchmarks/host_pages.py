"""Blocks of docs/benchmarks.md about the host: small models on few cores, and the parts of LSP's schedule.

A block is empty while its rows are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ds_zo.records.rows import Row, read_objects, table

HOSTS = "h200_hosts.jsonl"
RESULTS = Path(__file__).parent / "results"
NAMES = {
    "hosts.1.3b.1x2048": "OPT-1.3B, 1 x 2,048, ZO on the GPU",
    "hosts.1.3b.4x512": "OPT-1.3B, 4 x 512, ZO on the GPU",
    "hosts/1.3b/4/ceiling": "LLaMA-1.3B, forward and backward alone",
    "hosts/1.3b/4/adamw-torch": "LLaMA-1.3B, AdamW of PyTorch, fused, bf16 states",
    "hosts/1.3b-hooks": "LLaMA-1.3B, SGD in plain hooks",
    "hosts/1.3b-lomo": "LLaMA-1.3B, LOMO",
    "hosts/1.3b/4/lsp-512": "LLaMA-1.3B, LSP, Adam on the CPU",
    "hosts/1.3b/4/lsp-512-device": "LLaMA-1.3B, LSP, Adam on the GPU",
    "hosts/3b/4/ceiling": "LLaMA-3B, forward and backward alone",
    "hosts/3b/4/adamw-torch": "LLaMA-3B, AdamW of PyTorch, fused, bf16 states",
    "hosts/3b/4/lsp-512": "LLaMA-3B, LSP, Adam on the CPU",
    "hosts/3b/4/lsp-512-device": "LLaMA-3B, LSP, Adam on the GPU",
    "hosts/7b-hooks": "LLaMA-7B, SGD in plain hooks",
    "hosts/7b-lomo": "LLaMA-7B, LOMO",
}
"""By case of `zo_speed`, `lomo_speed` and `lsp_speed`, preset `hosts`. A case with compiled blocks has "-compiled" at
its end."""
SCHEDULES = {
    "lsp-512": "all of Algorithm 3",
    "late-uploads": "updates are uploaded when the next forward needs them",
    "first-come": "copies and Adam in the order of arrival",
    "late-first-come": "both",
}
"""By case of `lsp_speed`, preset `schedule`."""


def _last() -> dict[str, Row]:
    """The last row of each case."""
    path = RESULTS / HOSTS
    rows = read_objects(path) if path.exists() else []
    return {row["case"]: row for row in rows if row["status"] == "ok"}


def _source(rows: Iterable[Row]) -> str:
    runs = sorted({row["run_id"] for row in rows})
    return f"Rows: [{HOSTS}](../benchmarks/results/{HOSTS}), {'run' if len(runs) == 1 else 'runs'} {', '.join(runs)}."


def slow_hosts() -> str:
    last, used, body = _last(), [], []
    for case, name in NAMES.items():
        for suffix, words in (("", ""), ("-compiled", ", blocks compiled")):
            if (row := last.get(case + suffix)) is None:
                continue
            used.append(row)
            seconds = row["step_s"], row["two_cores_s"], row["gpu_busy_s"]
            spread = f"{1e3 * row['step_s_min']:.0f} to {1e3 * row['step_s_max']:.0f}"
            cells = [f"{1e3 * s:.0f}" for s in seconds] + [f"{seconds[1] / seconds[2]:.2f}"]
            body.append([name + words, f"{cells[0]} ({spread})", *cells[1:], f"{row['peak_gb']:.1f}"])
    if not body:
        return ""
    conditions = (
        "One H200, random weights in bf16; LLaMA at 4 x 1,024 tokens with activation checkpointing. Milliseconds a "
        "step, median and spread, with 16 cores and with the same process on two of them, and those in which the GPU "
        "is busy. Lines of different runs are of different machines:"
    )
    heads = ["", "16 cores", "two cores", "GPU busy", "two cores / busy", "GPU GB"]
    return f"{conditions}\n\n{table(heads, body)}\n\n{_source(used)}"


def lsp_schedule() -> str:
    last, used, body = _last(), [], []
    for case, name in SCHEDULES.items():
        if (row := last.get(f"schedule/1.3b/4+1/{case}")) is None:
            continue
        used.append(row)
        both = [
            f"{1e3 * r['step_s']:.0f} ({1e3 * r['step_s_min']:.0f} to {1e3 * r['step_s_max']:.0f})"
            for r in (row, row["then"])
        ]
        body.append([name, *both])
    if not body:
        return ""
    conditions = (
        "One H200, LLaMA-1.3B, bf16, d = 512, random projectors, Adam on the CPU; milliseconds a step, median and "
        "spread. Each line but the first leaves a part of the schedule out:"
    )
    return f"{conditions}\n\n{table(['', '4 x 1,024', '1 x 1,024'], body)}\n\n{_source(used)}"


HOST_BLOCKS: dict[str, Callable[[], str]] = {"slow-hosts": slow_hosts, "lsp-schedule": lsp_schedule}
