"""The block of docs/how-zo.md about zeroth-order estimators at equal GPU seconds, of the rows of `zo_per_second`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from benchmarks.sources import read_rows, source, suite
from ds_zo.records.rows import Row, table
from ds_zo.tasks.score import sign_of

ROWS = "h200_zo_per_second.jsonl"
NAMES = {
    "mezo-b16": "MeZO",
    "mezo-b64": "MeZO, larger batch",
    "mezo-n4": "MeZO, 4 directions",
    "mezo-n16": "MeZO, 16 directions",
    "fzoo-n8": "FZOO: one-sided, Rademacher noise, normalised step",
    "lora-512": "LoRA, noise in its factors",
    "rank1-512": "rank-1 noise, a direction for each example",
    "rank1-64x8": "rank-1 noise, a direction for 8 examples",
    "rank1-16x16": "rank-1 noise, a direction for 16 examples",
    "rank1-one-sided": "rank-1 noise, 8 directions for each example",
    "mezo-b8-lm": "MeZO, loss of the answer's tokens",
    "rank1-512-lm": "rank-1 noise, a direction for each example, loss of the answer's tokens",
}
"""By variant of `zo_per_second`."""
TASKS = {"sst2": "SST-2, %", "rte": "RTE, %", "boolq": "BoolQ, %", "copa": "COPA, %", "alpaca": "Alpaca, perplexity"}


def _chosen(rows: list[Row]) -> Row:
    """The run with the rate that was best on dev."""
    return max(rows, key=lambda row: sign_of(row["metric"]) * row["late_dev"])


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _by_variant(rows: list[Row]) -> dict[str, Row]:
    names = [name for name in NAMES if any(row["config"]["name"] == name for row in rows)]
    return {name: _chosen([row for row in rows if row["config"]["name"] == name]) for name in names}


def _longer(rows: list[Row]) -> Iterator[list[str]]:
    """Cells for each task, time and estimator, at the rate that dev chose."""
    for task, title in TASKS.items():
        of_task = [row for row in rows if row["config"]["task"] == task]
        for seconds in sorted({row["config"]["seconds"] for row in of_task}):
            equal_time = [row for row in of_task if row["config"]["seconds"] == seconds]
            for name, row in _by_variant(equal_time).items():
                best = row["config"] | {"seed": None}
                seeds = [other for other in equal_time if other["config"] | {"seed": None} == best]
                scores = [other["best"]["test"] for other in seeds]
                mean, low, high = (_score(task, f(scores)) for f in (statistics.mean, min, max))
                after = f"{mean} ({low} to {high})" if len(seeds) > 1 else mean
                before = _score(task, row["curve"][0]["test"])
                yield [title, f"{seconds:g}", NAMES[name], str(len(seeds)), before, after]


def _score(task: str, value: float) -> str:
    return f"{value:.2f}" if task == "alpaca" else _percent(value)


def zo_per_second() -> str:
    """Short runs of all variants on SST-2, then longer runs of the best ones on each task."""
    rows = [row for row in read_rows(ROWS) if "curve" in row]
    if not rows:
        return ""
    short = [row for row in rows if not row["config"]["cosine"]]
    body = []
    for name, row in _by_variant(short).items():
        c = row["config"]
        is_full_one_sided = c["space"] == "full" and not c["two_sided"]
        passes = (c["directions"] + 1) if is_full_one_sided else c["groups"] * c["directions"] * (1 + c["two_sided"])
        ms = sum(row["step_ms"]) / 2
        sizes = [f"{size:,}" for size in (c["groups"] * c["directions"], passes * c["examples"])]
        body.append([NAMES[name], *sizes, f"{ms:.0f}", f"{row['tflops']:.0f}", _percent(row["best"]["test"])])
    heads = ["estimator", "directions a step", "sequences a step", "ms a step", "TFLOP/s", "SST-2, %"]
    parts = [
        "SmolLM2-135M in bf16 on one H200, whole model on the GPU, steps in CUDA graphs. Each run has the GPU alone, "
        f"for the same {short[0]['config']['seconds']:g} seconds of training, at the better of two rates on dev. One "
        "seed: a few points of difference may be chance. The loss compares the possible answers. In the last two lines "
        "it is that of the right answer's tokens, which `ds-zo train` minimises. Percent right on test; "
        f"{_percent(short[0]['curve'][0]['test'])} without training:",
        table(heads, body),
    ]
    longer = [row for row in rows if row["config"]["cosine"]]
    if longer:
        heads = ["task", "seconds of training", "estimator", "seeds", "before", "after"]
        parts += [
            "Longer runs, in which the rate falls to zero. Scores are of test, at the step that was best on dev: the "
            "mean over seeds, with the lowest and the highest in brackets. A seed that never passed the untrained "
            "model on dev has the untrained model's score:",
            table(heads, list(_longer(longer))),
        ]
    command = suite("zo_per_second", "run").replace("--out", "--model DIR --data-root DIR --out")
    return "\n\n".join([*parts, source(rows, command)])


ZO_STUDY_BLOCKS: dict[str, Callable[[], str]] = {"zo-per-second": zo_per_second}
