"""The blocks of docs/adapters.md: speed and memory of adapters over a streamed base, and what NF4 does to the loss.

A block is empty while its rows are missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy import at_chosen_rates
from benchmarks.grids import read_grid
from benchmarks.sources import STEPS, read_rows, source, speed, suite, sweep
from ds_zo.bench.report import host_gb
from ds_zo.records.rows import Row, table
from ds_zo.tasks.score import LOWER_IS_BETTER

RESULTS = Path(__file__).parent / "results"
SPEED, LOSS, TRAINING = "h200_adapter.jsonl", "cpu_nf4_loss.jsonl", "h200_nf4.jsonl"
NAMES = {
    "7b/nf4-streamed": "LLaMA-7B, AdamW, NF4, all blocks streamed",
    "7b/nf4-streamed-inputs": "LLaMA-7B, AdamW, NF4, all blocks streamed, inputs of blocks on the host",
    "7b/nf4-resident": "LLaMA-7B, AdamW, NF4, all blocks on the GPU",
    "7b/bf16-streamed": "LLaMA-7B, AdamW, bf16, all blocks streamed",
    "13b/bf16-link": "LLaMA-13B, AdamW, bf16, all blocks streamed",
    "30b/bf16-link": "LLaMA-30B, AdamW, bf16, all blocks streamed",
    "7b/bf16-peft": "LLaMA-7B, PEFT in PyTorch, bf16 on the GPU",
    "7b/nf4-bitsandbytes": "LLaMA-7B, PEFT and bitsandbytes, NF4 on the GPU",
    "7b/nf4-zero3": "LLaMA-7B, ZeRO-3 `offload_param`, NF4 of bitsandbytes",
    "70b/nf4-zero3": "LLaMA-70B, ZeRO-3 `offload_param`, NF4 of bitsandbytes",
    "70b/nf4-16gb": "LLaMA-70B, AdamW, NF4, within 16 GB",
    "70b/nf4-10gb-inputs": "LLaMA-70B, AdamW, NF4, within 10 GB, inputs of blocks on the host",
    "70b/nf4-8gb-inputs": "LLaMA-70B, AdamW, NF4, within 8 GB, inputs of blocks on the host",
    "175b/nf4-12gb-inputs": "OPT-175B, AdamW, NF4, within 12 GB, inputs of blocks on the host",
    "175b/nf4-zo-24gb": "OPT-175B, ZO, NF4, within 24 GB",
    "175b/nf4-zo-12gb": "OPT-175B, ZO, NF4, within 12 GB",
}
"""By case of `benchmarks.adapter_speed`."""
METHODS = {"lora": ("LoRA by AdamW", "lora-nf4"), "zo-lora": ("LoRA by ZO", "zo-lora-nf4")}
"""By method over bf16: its name, and the method over NF4."""
TASKS = {"sst2": "SST-2", "alpaca": "Alpaca"}


def rows_of(file: str) -> list[Row]:
    return [row for row in read_rows(file, folder=RESULTS) if row.get("status", "ok") == "ok"]


def adapter_speed() -> str:
    """A line for each row: by run, then in the order of `NAMES`."""
    order = list(NAMES)
    rows = [row for row in rows_of(SPEED) if row["case"] in NAMES and "tokens_per_s" in row]
    rows.sort(key=lambda row: (row["run_id"], order.index(row["case"])))
    if not rows:
        return ""
    runs = sorted({row["run_id"] for row in rows})
    body = []
    for row in rows:
        busy = row.get("link_busy")
        body.append(
            [
                NAMES[row["case"]],
                f"{row['batch']} x {row['length']:,}",
                speed(row),
                _beside_plan(row["peak_gb"], row.get("planned_device_gb")),
                _beside_plan(host_gb(row), row.get("planned_host_gb")),
                "" if busy is None else f"{100 * busy:.0f}%",
                str(1 + runs.index(row["run_id"])),
            ]
        )
    conditions = (
        "One H200, random weights in bf16 or NF4, LoRA of rank 16 on all linear layers of the blocks. Limits of GPU "
        "memory are enforced. All blocks of OPT-175B, and of LLaMA-70B within 8 GB, have the weights of the first. "
        "Memory is the peak, in GB, with that of `ds-zo plan` in brackets. `link busy` is the share of a step in which "
        "uploads occupy the link, at the rate that uploads have alone. The speed is that of the median step. "
        f"{STEPS} Compare lines of one run; the runs are numbered as below the table:"
    )
    heads = ["model, optimizer, base", "tokens a step", "tokens/s", "GPU", "host", "link busy", "run"]
    return "\n\n".join([conditions, table(heads, body), source(rows, suite("adapter_speed", ""))])


def _beside_plan(measured: float | None, planned: float | None) -> str:
    assert measured is not None
    return f"{measured:.1f}" + ("" if planned is None else f" ({planned:.1f})")


def nf4_loss() -> str:
    """The loss of a pretrained base before training, in NF4 of two packages and in bf16."""
    by_kind: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of(LOSS):
        by_kind.setdefault((row["model"], row["task"]), {})[row["form"]] = row
    body = []
    for (model, task), found in by_kind.items():
        if not {"bf16", "nf4", "bitsandbytes"} <= found.keys():
            continue
        bf16, ours, theirs = (found[form]["loss"] for form in ("bf16", "nf4", "bitsandbytes"))
        cells = [f"{bf16:.4f}", f"{ours:.4f}", f"{theirs:.4f}"]
        body.append([model, f"{TASKS[task]}, {found['nf4']['texts']} texts", *cells, _change(ours, theirs)])
        body[-1].append(_change(ours, bf16))
    if not body:
        return ""
    conditions = (
        "Loss of a token of held-out texts before training, computed in float32 on a CPU. The linear layers of the "
        "blocks are in bf16, in NF4 as this package stores them, and in NF4 of bitsandbytes:"
    )
    heads = ["model", "texts", "bf16", "NF4", "bitsandbytes", "NF4 to bitsandbytes", "NF4 to bf16"]
    made = source(rows_of(LOSS), suite("nf4_loss", "--model DIR --data-root DIR"))
    return "\n\n".join([conditions, table(heads, body), made])


def nf4_training() -> str:
    """Adapters trained over NF4 and over bf16 with equal steps, rates and seeds."""
    rows = rows_of(TRAINING)
    body = []
    for model in sorted({row["model"] for row in rows}, key=len):
        chosen = at_chosen_rates([row for row in rows if row["model"] == model], read_grid("nf4"))
        for method, (name, other) in METHODS.items():
            for task, shown in TASKS.items():
                pair = [_by_seed(chosen.get(key, []), task) for key in (method, other)]
                seeds = sorted(pair[0].keys() & pair[1].keys())
                if seeds:
                    body.append([model, name, shown, *_compared(*([found[seed] for seed in seeds] for found in pair))])
    if not body:
        return ""
    conditions = (
        "Adapters trained over a base in NF4 and over the same base in bf16, with equal steps, rates and seeds, on one "
        "H200. For SST-2 percent right on test, for Alpaca the loss of a token on test: the mean over seeds, with the "
        "lowest and the highest in brackets. The training loss is the mean over the second half of the steps:"
    )
    heads = ["model", "", "task", "steps", "seeds", "over bf16", "over NF4", "difference", "training loss"]
    pairs = "--methods lora,lora-nf4"
    made = source(
        rows,
        sweep("nf4", pairs),
        sweep("nf4", f"{pairs} --lrs 2e-4 --steps 60 --seeds 0 -- --eval-batch-size 32"),
        sweep("nf4", "--methods zo-lora,zo-lora-nf4 --tasks sst2 --lrs 3e-4"),
    )
    made = made.replace("\n\n</details>", " The second command is Qwen's.\n\n</details>")
    return "\n\n".join([conditions, table(heads, body), made])


def _by_seed(rows: Sequence[Row], task: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if row["task"] == task}


def _compared(over_bf16: Sequence[Row], over_nf4: Sequence[Row]) -> list[str]:
    """Cells: steps, seeds, both scores, their difference, and the change of the training loss."""
    is_loss = over_bf16[0]["metric"] in LOWER_IS_BETTER
    scores = [[math.log(r["after"]) if is_loss else 100 * r["after"] for r in rows] for rows in (over_bf16, over_nf4)]
    means = [statistics.mean(found) for found in scores]
    difference = _change(means[1], means[0]) if is_loss else f"{means[1] - means[0]:+.1f} points"
    losses = [statistics.mean(map(_second_half, rows)) for rows in (over_bf16, over_nf4)]
    digits = 4 if is_loss else 1
    cells = [_spread(found, digits) for found in scores]
    return [str(over_bf16[0]["steps"]), str(len(over_bf16)), *cells, difference, _change(losses[1], losses[0])]


def _second_half(row: Row) -> float:
    losses = [p["loss"] for p in row["curve"] if p.get("loss") is not None and 2 * p["step"] > row["steps"]]
    return statistics.mean(losses)


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.2f}%"


ADAPTER_BLOCKS: dict[str, Callable[[], str]] = {
    "adapter-speed": adapter_speed,
    "nf4-loss": nf4_loss,
    "nf4-training": nf4_training,
}
