"""Blocks of docs/benchmarks.md about the host: small models on few cores, and the parts of LSP's schedule.

A block is empty while its rows are missing.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.sources import STEPS, ms, read_rows, source, suite
from ds_zo.records.rows import Row, table

HOSTS = "h200_hosts.jsonl"
_SUITES = ("lomo", "lsp")
NAMES = {
    "hosts.1.3b.1x2048": "OPT-1.3B, ZO on the GPU, 1 x 2,048",
    "hosts.1.3b.4x512": "OPT-1.3B, ZO on the GPU, 4 x 512",
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
    "lsp-512": "the whole schedule",
    "late-uploads": "updates are uploaded when the next forward needs them",
    "first-come": "copies and Adam in the order of arrival",
    "late-first-come": "both",
}
"""By case of `lsp_speed`, preset `schedule`."""


def _rows() -> list[Row]:
    return [row for row in read_rows(HOSTS) if row["status"] == "ok"]


def slow_hosts() -> str:
    """A table for each machine, with a line for each row in the order of `NAMES`."""
    rows = _rows()
    titles = {
        case + suffix: name + words
        for case, name in NAMES.items()
        for suffix, words in (("", ""), ("-compiled", ", blocks compiled"))
    }
    order = list(titles)
    used = [row for row in rows if row["case"] in titles]
    machines = list(dict.fromkeys(row.get("machine") for row in used))
    used.sort(key=lambda row: order.index(row["case"]))
    if not used:
        return ""
    parts = [
        "One H200, random weights in bf16; LLaMA at 4 x 1,024 tokens with activation checkpointing. Milliseconds a "
        "step with 16 cores, milliseconds with the same process on two of them, and those of a step in which the GPU "
        "is busy. `SGD in plain hooks` is a few lines of PyTorch that update each weight when its gradient arrives. A "
        f"table for each machine: compare lines of one table. {STEPS}"
    ]
    for num, machine in enumerate(machines, start=1):
        heads = [f"machine {num}", "16 cores", "two cores", "GPU busy", "two cores / busy", "GPU GB"]
        body = []
        for row in (row for row in used if row.get("machine") == machine):
            two_cores_s, busy_s = row["two_cores_s"], row["gpu_busy_s"]
            cells = [f"{1e3 * two_cores_s:.0f}", f"{1e3 * busy_s:.0f}", f"{two_cores_s / busy_s:.2f}"]
            body.append([titles[row["case"]], ms(row), *cells, f"{row['peak_gb']:.1f}"])
        parts.append(table(heads, body))
    commands = suite("zo_speed", "preset hosts"), *(suite(f"{name}_speed", "run --preset hosts") for name in _SUITES)
    return "\n\n".join([*parts, source(used, *commands)])


def lsp_schedule() -> str:
    last = {row["case"]: row for row in _rows()}
    found = {name: last.get(f"schedule/1.3b/4+1/{case}") for case, name in SCHEDULES.items()}
    used = [row for row in found.values() if row is not None]
    if not used:
        return ""
    body = [[name, ms(row), ms(row["then"])] for name, row in found.items() if row is not None]
    conditions = (
        "LSP uploads the updates of finished layers beside the rest of the backward pass. Near its end, copies and "
        "Adam take the last layer first, because the next forward needs it first. One H200, LLaMA-1.3B, bf16, d = "
        "512, random projectors, Adam on the CPU; milliseconds a step. Each line but "
        f"the first leaves a part of the schedule out. {STEPS}"
    )
    heads = ["", "4 x 1,024", "1 x 1,024"]
    return f"{conditions}\n\n{table(heads, body)}\n\n{source(used, suite('lsp_speed', 'run --preset schedule'))}"


HOST_BLOCKS: dict[str, Callable[[], str]] = {"slow-hosts": slow_hosts, "lsp-schedule": lsp_schedule}
