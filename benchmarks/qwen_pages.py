"""The blocks of pages from rows of Qwen2.5-Coder-1.5B: scores, and HumanEval.

A block is empty while its rows are missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.accuracy import at_chosen_rates, by_seed
from benchmarks.grid import read_rows
from benchmarks.grids import read_grid
from benchmarks.sources import source, sweep
from ds_zo.records.rows import Row, table
from ds_zo.tasks.humaneval import HumanEval, HumanEvalChat, wilson
from ds_zo.tasks.score import LOWER_IS_BETTER

RESULTS = Path(__file__).parent / "results"
QWEN, CODE = "h200_qwen.jsonl", "h200_qwen_code.jsonl"
NAMES = {
    "zero-shot": "no training",
    "adamw": "AdamW",
    "lora": "LoRA",
    "zero-offload": "AdamW, ZeRO-Offload",
    "lomo": "LOMO",
    "adalomo": "AdaLOMO",
    "lsp": "LSP, d = 512",
    "zo": "ZO",
    "mezo": "MeZO",
}
TASKS = {"sst2": "SST-2", "rte": "RTE", "alpaca": "Alpaca, perplexity"}


def good_rows(file: str) -> list[Row]:
    return [{**row, "file": file} for row in read_rows(RESULTS / file) if row["status"] == "ok"]


def qwen_quality() -> str:
    """Scores, seconds of training until the tested state, and memory of each method at the rate chosen by dev."""
    rows = good_rows(QWEN)
    if not rows:
        return ""
    body = []
    for method, mine in at_chosen_rates(rows, read_grid("qwen")).items():
        rate = next((_rate(row["lr"]) for row in mine if row["lr"] is not None), "")
        cells = [_score(list(by_seed([row for row in mine if row["task"] == task]).values())) for task in TASKS]
        most = max(row["peak_device_gb"] for row in mine)
        body.append([NAMES[method], rate, str(max(row["steps"] for row in mine) or ""), *cells, f"{most:.1f}"])
    jobs = max(row["jobs"] for row in rows)
    conditions = (
        "Qwen2.5-Coder-1.5B-Instruct, of 4-bit weights widened to bf16, on one H200: percent right on test, for Alpaca "
        "perplexity. Mean over seeds, with the lowest and the highest in brackets. Then the seconds of training until "
        f"the state that was best on dev, while up to {jobs} runs share the GPU. The memory is the most of a run:"
    )
    heads = ["", "learning rate", "steps", *TASKS.values(), "GPU GB"]
    made = source(rows, sweep("qwen", "--choose-rates --jobs 9 --device-gb 139"))
    return "\n\n".join([conditions, table(heads, body), made])


def qwen_code() -> str:
    """pass@1 on HumanEval, with its 95% interval, of the prompt that fits held-out functions best without training."""
    rows = good_rows(CODE)
    forms = [task for task in (HumanEval.name, HumanEvalChat.name) if any(row["task"] == task for row in rows)]
    if not forms:
        return ""
    untrained = {row["task"]: row["after_values"]["perplexity"] for row in rows if row["method"] == "zero-shot"}
    form = min(forms, key=lambda task: untrained.get(task, math.inf))
    mine = [row for row in rows if row["task"] == form]
    digests = sorted({row["data_digest"] for row in mine})
    if len(digests) > 1:
        raise ValueError(f"rows of one table must have the same training data, found {', '.join(digests)} in {CODE}")
    body = []
    for method in [name for name in NAMES if any(row["method"] == name for row in mine)]:
        runs = [row for row in mine if row["method"] == method]
        values = [row["after_values"] for row in runs]
        passed, num = statistics.mean(value["pass_at_1"] for value in values), values[0]["num_problems"]
        low, high = wilson(passed * num, num)
        trains = method != "zero-shot"
        body.append(
            [
                NAMES[method],
                next((_rate(row["lr"]) for row in runs if row["lr"] is not None), ""),
                str(max(row["steps"] for row in runs)) if trains else "",
                f"{statistics.mean(row['train_s'] for row in runs):.0f}" if trains else "",
                f"{max(row['peak_device_gb'] for row in runs):.1f}",
                f"{statistics.mean(value['perplexity'] for value in values):.3f}",
                f"{100 * passed:.1f} ({100 * low:.1f} to {100 * high:.1f})",
                str(len(runs)),
            ]
        )
    prompt = "in its chat template" if form == HumanEvalChat.name else "as plain text"
    conditions = (
        "Qwen2.5-Coder-1.5B-Instruct, of 4-bit weights widened to bf16, on one H200, trained on docstrings and "
        f"functions of installed packages (digest {digests[0]}), which exclude HumanEval's. Prompts are {prompt}. "
        "Perplexity is of held-out functions. pass@1 is of one greedy completion for each of HumanEval's problems: the "
        "mean over seeds, and the 95% interval that so many problems give:"
    )
    heads = ["", "learning rate", "steps", "training, s", "GPU GB", "perplexity", "pass@1, %", "seeds"]
    return "\n\n".join([conditions, table(heads, body), source(mine, sweep("qwen-code", f"--rates-from {QWEN}"))])


def _rate(lr: float) -> str:
    """1e-4, 1.5e-4: as the pages write rates."""
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _score(rows: Sequence[Row]) -> str:
    """`mean (lowest to highest), seconds`; a dash without rows."""
    if not rows:
        return "–"
    scale, digits = (1.0, 2) if rows[0]["metric"] in LOWER_IS_BETTER else (100.0, 1)
    values = [scale * row["after"] for row in rows]
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    seconds = [found for row in rows if (found := _seconds_to_best(row)) is not None]
    after = f", {statistics.mean(seconds):.0f} s" if seconds else ""
    return f"{statistics.mean(values):.{digits}f}{spread}{after}"


def _seconds_to_best(row: Row) -> float | None:
    return next((float(p["train_s"]) for p in row["curve"] if p["step"] == row["best_step"] and "dev" in p), None)


QWEN_BLOCKS: dict[str, Callable[[], str]] = {
    "qwen-quality": qwen_quality,
    "qwen-code": qwen_code,
}
