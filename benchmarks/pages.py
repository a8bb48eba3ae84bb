"""Writes the measured tables and sentences of the pages in docs/ from the rows in results/.

    python -m benchmarks.pages            # fills every page
    python -m benchmarks.pages --check    # names the pages that are not current, and exits with status 1

A page marks the place of a block by two comments on lines of their own, `<!-- rows: NAME -->` and `<!-- /rows -->`.
NAME is a key of BLOCKS. The text between the comments is replaced, by nothing while a block has no rows. A page has no
measured figure outside such blocks, so new rows need no edit by hand.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.accuracy import at_chosen_rates, by_seed
from benchmarks.accuracy import table as accuracy_table
from benchmarks.adapter_pages import ADAPTER_BLOCKS
from benchmarks.compare_pages import COMPARE_BLOCKS
from benchmarks.grid import rows_of
from benchmarks.grid_pages import GRID_BLOCKS
from benchmarks.grids import read_grid
from benchmarks.host_pages import HOST_BLOCKS
from benchmarks.paper_pages import PAPER_BLOCKS, lomo_lora
from benchmarks.qwen_pages import QWEN_BLOCKS
from benchmarks.sources import STEPS, gb, ms, ratio, read_rows, source, speed, suite, sweep
from benchmarks.zo_study_pages import ZO_STUDY_BLOCKS
from ds_zo.records.prose import wrapped
from ds_zo.records.rows import Row, table

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"
RESULTS = "benchmarks/results"
MARKED = re.compile(r"^(<!-- rows: ([\w-]+) -->\n).*?^(<!-- /rows -->)$", flags=re.DOTALL | re.MULTILINE)

ZO, LOMO, LSP = "h200_zo_targets.jsonl", "h200_lomo.jsonl", "h200_lsp.jsonl"
ZO_RUN = "20261115T180412Z"
LOMO_RUN = "20261115T093417Z"
LOMO_STREAMED_RUN = "20261115T093718Z"
LSP_RUN = "20261115T150212Z"
LSP_LATER_RUN = "20261115T211400Z"
ACCURACY, LEARNED, GAP = "h200_accuracy.jsonl", "h200_lsp_learned.jsonl", "h200_lsp_gap.jsonl"
EQUAL_Z = "h200_equal_z.jsonl"
SMOLLM, QWEN = "SmolLM2-135M", "Qwen2.5-Coder-1.5B"
LSP_SETTINGS = {
    "learned": "lsp-512-dense",
    "random": "lsp-512-dense-random",
    "learned, `clip_scope: global`": "lsp-512-dense-global",
}
"""By name on a page: the method of grid `lsp-gap`."""
TASKS = {"sst2": "SST-2", "rte": "RTE", "copa": "COPA", "boolq": "BoolQ", "alpaca": "Alpaca"}


ACCURACY_SWEEP = sweep("accuracy", "--choose-rates --jobs 13")
LSP_SWEEP = sweep("lsp-gap", "--methods adamw,lsp-512-dense,lsp-512-dense-random,lsp-512-dense-global")


@cache
def rows_in(file: str) -> list[Row]:
    return read_rows(file)


def row_of(file: str, case: str, *, run: str) -> Row:
    """The one row of a case in a run."""
    found = [row for row in rows_in(file) if row.get("case") == case and row.get("run_id") == run]
    if len(found) != 1:
        raise ValueError(f"a figure needs one row, found {len(found)} of case {case} of run {run} in {file}")
    return found[0]


# ZO and streaming


def zo_speed() -> str:
    methods = {
        "MeZO, whole model on the GPU": "mezo",
        "ZO, all blocks on the GPU": "resident",
        "ZO, half of the blocks on the GPU": "half",
        "ZO, all blocks streamed, bf16": "streamed",
        "ZO, all blocks streamed, bf12": "bf12",
        "ZO, all blocks streamed, fp8": "fp8",
    }
    found = {row["case"]: row for row in rows_in(ZO) if row["run_id"] == ZO_RUN}
    used, body = list[Row](), []
    for title, name in methods.items():
        cells = [title]
        for size in ("6.7b", "13b"):
            row = found.get(f"{size}.{name}")
            cells += ["", ""] if row is None else [speed(row), gb(row["peak_gb"])]
            used += [] if row is None else [row]
        body.append(cells)
    heads = ["", "OPT-6.7B, tokens/s", "GPU GB", "OPT-13B, tokens/s", "GPU GB"]
    return "\n\n".join(
        [
            "One H200, random weights, bf16, one sequence of 2,048 tokens, `master: wire`, all in one run. The speed "
            f"is that of the median step. {STEPS}",
            table(heads, body),
            source(used, suite("zo_speed", "preset targets", only=r"^(6\.7|13)b\.")),
        ]
    )


def zo_directions() -> str:
    one, two = (row_of(ZO, f"6.7b.{name}", run=ZO_RUN) for name in ("streamed", "directions2"))
    more = f"{100 * (two['step_s'] / one['step_s'] - 1):.0f}% more for twice the forward passes"
    said = (
        "OPT-6.7B on one H200, random weights, 1 x 2,048 tokens, all blocks streamed in bf16: the median step takes "
        f"{ms(one)} ms with one direction and {ms(two)} ms with two, which is {more}. {STEPS}"
    )
    command = suite("zo_speed", "preset targets", only=r"^6\.7b\.(streamed|directions2)$")
    return f"{said}\n\n{source([one, two], command)}"


def equal_noise() -> str:
    """How far ZO's losses are from MeZO's with the same noise."""
    by_method: dict[str, dict[str, Row]] = {}
    for row in rows_in(EQUAL_Z):
        by_method.setdefault(row["task"], {})[row["method"]] = row
    farthest, num_losses = 0.0, 0
    for pair in by_method.values():
        ours, theirs = (
            {point["step"]: point["loss"] for point in pair[name]["curve"] if "loss" in point}
            for name in ("zo", "mezo")
        )
        assert ours.keys() == theirs.keys()
        farthest = max(farthest, *(abs(ours[step] / theirs[step] - 1) for step in ours))
        num_losses += len(ours)
    tasks = " and ".join(TASKS[task] for task in sorted(by_method, reverse=True))
    first = rows_in(EQUAL_Z)[0]
    scores = all(pair["zo"]["after"] == pair["mezo"]["after"] for pair in by_method.values())
    return (
        f"With the same z, in float32, the losses of ZO and of in-memory MeZO differ by at most {_bound(farthest)} of "
        f"their value, and their test scores are {'the same' if scores else 'not the same'} ({SMOLLM}, {tasks}, "
        f"{first['steps']} steps of {first['batch_size']} texts, {num_losses} losses compared).\n\n"
        f"{source(rows_in(EQUAL_Z), sweep('equal-z', '--jobs 4'))}"
    )


def _bound(value: float) -> str:
    """The smallest number of one digit that is not below a positive one."""
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit) * unit:.0e}".replace("e-0", "e-")


def stream_link() -> str:
    machine = row_of(ZO, "machine", run=ZO_RUN)
    link = machine["link_gbps"]["up"]
    cases = {
        "OPT-6.7B, bf16": "6.7b.streamed",
        "OPT-6.7B, bf12": "6.7b.bf12",
        "OPT-6.7B, fp8": "6.7b.fp8",
        "OPT-6.7B, bf16, half of the blocks on the GPU": "6.7b.half",
        "OPT-6.7B, bf16, four sequences": "6.7b.batch4.streamed",
        "OPT-13B, bf16": "13b.streamed",
        "OPT-13B, fp8": "13b.fp8",
    }
    used, body = [machine], []
    for title, case in cases.items():
        row = row_of(ZO, case, run=ZO_RUN)
        used.append(row)
        upload_s = row["up_gb_a_step"] / link
        body.append(
            [
                title,
                gb(row["up_gb_a_step"]),
                f"{1e3 * upload_s:,.0f}",
                ms(row),
                f"{100 * upload_s / row['step_s']:.0f}%",
            ]
        )
    heads = ["ZO, streamed", "GB up a step", "at link speed, ms", "step, ms", "share"]
    return "\n\n".join(
        [
            f"One H200 whose link copies {link:.1f} GB/s up, random weights, `master: wire`, one sequence of 2,048 "
            "tokens where nothing else is said, all in one run. The share is that of the uploads, at the link's speed, "
            f"in the median step. {STEPS}",
            table(heads, body),
            source(used, suite("zo_speed", "preset targets", only=r"^(machine|(6\.7|13)b\.)")),
        ]
    )


def stream_capped() -> str:
    found = [row for row in rows_in(ZO) if row.get("cap_gb") == 24 and row.get("filled") and row["status"] == "ok"]
    body = []
    for row in sorted(found, key=lambda row: row["parameters"]):
        filled, kept = row["filled"], row["filled"]["resident_blocks"]
        name = f"{row['shape'].upper()}, {row['stream'].get('wire_dtype', row['dtype'])}"
        body.append([f"{name}, no block on the GPU", gb(row["peak_gb"]), gb(row["host_peak_gb"]), ms(row), speed(row)])
        kept_blocks = f"{kept} of {row['num_blocks']} blocks on the GPU"
        host = gb(filled["host_peak_gb"])
        body.append([f"{name}, {kept_blocks}", gb(filled["peak_gb"]), host, ms(filled), speed(filled)])
    heads = ["ZO within 24 GB", "GPU GB", "host GB", "step, ms", "tokens/s"]
    conditions = (
        "One H200 whose memory is limited to 24 GB, random weights, `master: wire`, one sequence of 2,048 tokens. Step "
        f"and speed are those of the median step. {STEPS}"
    )
    made = source(found, suite("zo_speed", "preset targets", only="capped"))
    return "\n\n".join([conditions, table(heads, body), made])


def wire_loss() -> str:
    by_wire = {row["wire"]: row for row in rows_in("cpu_wire_loss.jsonl")}
    base = by_wire["fp32"]["loss"]
    body = [[wire, f"{row['loss']:.5f}", f"{100 * (row['loss'] / base - 1):+.3f}%"] for wire, row in by_wire.items()]
    first = by_wire["fp32"]
    conditions = (
        f"Loss of {SMOLLM} on {first['texts']} texts of BoolQ before any training, on a CPU in float32, with its "
        "blocks rounded to each format. The result is deterministic:"
    )
    command = suite("wire_loss", "--model DIR --text FILE.jsonl --limit 24")
    made = source(list(by_wire.values()), command)
    return "\n\n".join([conditions, table(["`wire_dtype`", "loss", "change"], body), made])


# LOMO


def lomo_speed() -> str:
    methods = {
        "forward and backward alone": "no_update",
        "LOMO": "lomo",
        "AdaLOMO": "adalomo",
        "LOMO, clipped by the global norm": "lomo_clipped",
        "AdamW, fused, bf16 states": "adamw_fused",
        "AdamW, float32 master weights": "adamw_master",
        "lomo-optim: Lomo": "peer_lomo",
        "lomo-optim: AdaLomo": "peer_adalomo",
        "lomo-optim: Lomo, clipped": "peer_lomo_clipped",
    }
    found = {row["case"]: row for row in rows_in(LOMO) if row["run_id"] == LOMO_RUN}
    body = []
    for title, name in methods.items():
        row, compiled = found[f"speed/{name}"], found.get(f"speed/{name}-compiled")
        body.append([title, ms(row), "" if compiled is None else ms(compiled), gb(row["peak_gb"])])
    heads = ["", "ms a step", "with `compile_blocks`", "GPU GB"]
    conditions = (
        "One H200, LLaMA-7B with random weights, bf16, 4 x 1,024 tokens, activation checkpointing, all in one run. "
        f"The time is that of the median step. {STEPS} The memory is that without `compile_blocks`:"
    )
    made = source(list(found.values()), suite("lomo_speed", "run --preset speed"))
    return "\n\n".join([conditions, table(heads, body), made])


def lomo_streamed() -> str:
    resident = row_of(LOMO, "streamed/7b-resident", run=LOMO_STREAMED_RUN)
    streamed = [row_of(LOMO, "streamed/7b-6gb", run=LOMO_STREAMED_RUN), *_lomo_within_24()]
    cases = [
        ("LLaMA-7B, all on the GPU", resident),
        *((f"{_shape(row)}, streamed within {row['cap_gb']:g} GB", row) for row in streamed),
    ]
    body = [
        [title, gb(row["peak_gb"]), gb(row["host_peak_gb"]), ms(row), speed(row), row["run_id"]] for title, row in cases
    ]
    heads = ["LOMO", "GPU GB", "host GB", "step, ms", "tokens/s", "run"]
    conditions = (
        "One H200, random weights, bf16, 4 x 1,024 tokens, activations recomputed. Step and speed are those of the "
        f"median step. {STEPS} Compare lines of one run:"
    )
    made = source([row for _, row in cases], suite("lomo_speed", "run --preset streamed", only="(7|13|30)b"))
    return "\n\n".join([conditions, table(heads, body), made])


def _shape(row: Row) -> str:
    name, _, size = row["shape"].rpartition("-")
    families = {"llama": "LLaMA", "opt": "OPT", "": "LLaMA"}
    return f"{families.get(name, name)}-{size.upper()}"


def _lomo_within_24() -> list[Row]:
    found = [row for row in rows_in(LOMO) if row.get("cap_gb") == 24 and row["status"] == "ok"]
    return sorted(found, key=lambda row: row["parameters"])


# LSP


def lsp_speed() -> str:
    methods = {
        "forward and backward alone": "ceiling",
        "LSP, d = 512": "lsp-512",
        "LSP, d = 1024": "lsp-1024",
        "AdamW on the GPU, float32 master weights": "adamw",
        "ZeRO-Offload (stage 2)": "zero2-offload",
        "ZenFlow": "zenflow",
    }
    found = {row["case"]: row for row in rows_in(LSP) if row["run_id"] == LSP_RUN and row["status"] == "ok"}
    used, body = list[Row](), []
    for title, name in methods.items():
        cells = [title]
        for size in ("1.3b", "3b"):
            row = found.get(f"issue/{size}/4+1/{name}")
            cells += [""] * 3 if row is None else [ms(row), gb(row["peak_gb"]), gb(row["host_gb_added"])]
            used += [] if row is None else [row]
        body.append(cells)
    heads = ["", "1.3B, ms", "GPU GB", "host GB", "3B, ms", "GPU GB", "host GB"]
    conditions = (
        "One H200, LLaMA with random weights, bf16, 4 x 1,024 tokens, activation checkpointing, clipping 1.0, random "
        f"projectors, all in run {LSP_RUN}. The time is that of the median step. {STEPS} Host GB is the memory beyond "
        "the start of the process:"
    )
    lsp, adamw = (row_of(LSP, f"issue/1.3b/4+1/{name}", run=LSP_LATER_RUN) for name in ("lsp-512", "adamw-torch"))
    stricter = (
        f"Run {LSP_LATER_RUN} has torch's fused AdamW with weights and moments in bf16. There, at 1.3B with the same "
        f"settings, a step takes {ms(lsp)} ms by LSP (d = 512) and {ms(adamw)} ms by AdamW, in {gb(lsp['peak_gb'])} "
        f"and {gb(adamw['peak_gb'])} GB of GPU memory."
    )
    made = source([*used, lsp, adamw], suite("lsp_speed", "run --preset issue", only="^issue/"))
    return "\n\n".join([conditions, table(heads, body), stricter, made])


def lsp_memory() -> str:
    cases = {
        "LLaMA-1.3B, 1 x 384, within 4 GB": "capped/1.3b/1/lsp-512",
        "LLaMA-7B, 4 x 1,024, within 24 GB": "capped/7b/4/lsp-512",
        "LLaMA-7B, 4 x 1,024, streamed, within 8 GB": "capped/7b/4/lsp-512-streamed",
    }
    rows = {title: row_of(LSP, case, run=LSP_RUN) for title, case in cases.items()}
    body = [[title, gb(row["peak_gb"]), gb(row["host_gb_added"]), ms(row)] for title, row in rows.items()]
    heads = ["LSP, d = 512", "GPU GB", "host GB", "step, ms"]
    conditions = (
        "One H200 with a limit on its memory, random weights, bf16, activation checkpointing, clipping 1.0, random "
        f"projectors. The time is that of the median step. {STEPS} Host GB is the memory beyond the start of the "
        "process:"
    )
    made = source(list(rows.values()), suite("lsp_speed", "run --preset issue", only="^capped/"))
    return "\n\n".join([conditions, table(heads, body), made])


def lsp_learned() -> str:
    """LSP's distance to AdamW with the same seeds, learned projectors beside random ones."""
    body = [[title, *(_percent(_distances(method, task)) for task in TASKS)] for title, method in LSP_SETTINGS.items()]
    loose = [_percent(_distances("lsp-512-dense", task, file=GAP)) for task in TASKS]
    commits = sorted({row["commit"] for row in _lsp_rows("lsp-512-dense", SMOLLM, file=GAP)})
    body.append([f"learned, each matrix clipped to 1.0 (at commits {', '.join(commits)} only)", *loose])
    body.append(["learned, on dev", *(_percent(_distances("lsp-512-dense", task, on="dev")) for task in TASKS)])
    heads = ["projectors (d = 512)", *TASKS.values()]
    conditions = (
        f"{SMOLLM} on one H200, float32 with TF32, 120 steps of 16 texts, `edge: dense`, learning rate 1e-4, the one "
        "chosen for AdamW. Percent of AdamW's score on test, above (+) or below (-) it with the same seeds: accuracy, "
        "for Alpaca the loss with its sign turned. AdamW's runs are of other sweeps, with the same data and settings. "
        "Mean, standard error, and the number of seeds in brackets:"
    )
    used = [row for name in LSP_SETTINGS.values() for row in _lsp_rows(name, SMOLLM)]
    used += [*_lsp_rows("adamw", SMOLLM), *_lsp_rows("lsp-512-dense", SMOLLM, file=GAP)]
    return "\n\n".join([conditions, table(heads, body), source(used, LSP_SWEEP, ACCURACY_SWEEP)])


def lsp_left_out() -> str:
    """For each task: the setting that is best on dev of the four others, and its distance on test."""
    body = []
    for task in TASKS:
        others = [other for other in TASKS if other != task]
        title, method = max(
            LSP_SETTINGS.items(),
            key=lambda item: statistics.mean(statistics.mean(_distances(item[1], o, on="dev")) for o in others),
        )
        found = _distances(method, task)
        holds = statistics.mean(found) >= -max(2.0, _standard_error(found))
        body.append([TASKS[task], title, _percent(found), "yes" if holds else "no"])
    heads = ["task left out", "chosen on dev of the four others", "percent of AdamW's score", "within 2% or its error"]
    used = [row for name in (*LSP_SETTINGS.values(), "adamw") for row in _lsp_rows(name, SMOLLM)]
    return "\n\n".join([table(heads, body), source(used, LSP_SWEEP, ACCURACY_SWEEP)])


def lsp_random() -> str:
    """Test perplexity on Alpaca by learned and by random projectors of equal size."""
    used, body = list[Row](), []
    for model, lr, dim in ((SMOLLM, 1e-4, 128), (SMOLLM, 1e-4, 512), (QWEN, 3e-6, 512)):
        sides = []
        for method in (f"lsp-{dim}-dense-random", f"lsp-{dim}-dense", "adamw"):
            found = [row for row in _lsp_rows(method, model) if row["task"] == "alpaca" and row["lr"] == lr]
            used += found
            sides.append({row["seed"]: row["after"] for row in found})
        seeds = sorted(sides[0].keys() & sides[1].keys())
        cells = [
            _mean_and_range([side[seed] for seed in seeds], "{:.3f}") if seeds and set(seeds) <= side.keys() else ""
            for side in sides
        ]
        body.append([model, f"{lr:.0e}".replace("e-0", "e-"), str(dim), *cells, str(len(seeds))])
    heads = ["model", "learning rate", "d", "random", "learned", "AdamW", "seeds"]
    conditions = (
        "Perplexity on test of Alpaca after 120 steps of 16 texts, r = 4, the embedding whole, the same seeds. Mean "
        "over seeds, with the lowest and the highest in brackets:"
    )
    methods = ",".join(f"lsp-{dim}-dense{kind}" for dim in (128, 512) for kind in ("", "-random"))
    command = sweep("lsp-gap", f"--methods adamw,{methods} --tasks alpaca")
    return "\n\n".join([conditions, table(heads, body), source(used, command, f"{command} --lrs 3e-6")])


def _lsp_rows(method: str, model: str, *, file: str = LEARNED) -> list[Row]:
    """The good rows of a method. AdamW's are in three files, of which one has its chosen rate."""
    if method == "adamw" and model == SMOLLM:
        chosen = at_chosen_rates(_accuracy_rows(), read_grid("accuracy"))["adamw"]
        rows = [*chosen, *(row for row in rows_in(GAP) if row["lr"] == chosen[0]["lr"])]
    else:
        rows = [row for row in rows_in(file) if file == LEARNED or row["lr"] == 1e-4]
    return [row for row in rows if row["status"] == "ok" and row["method"] == method and model in str(row["model"])]


def _distances(method: str, task: str, *, on: str = "after", file: str = LEARNED) -> list[float]:
    """Percent of AdamW's score by which the method is better, by seed."""
    mine, other = (
        {
            row["seed"]: -math.log(row[on]) if task == "alpaca" else row[on]
            for row in _lsp_rows(name, SMOLLM, file=file)
            if row["task"] == task
        }
        for name in (method, "adamw")
    )
    return [100 * (mine[seed] - other[seed]) / abs(other[seed]) for seed in sorted(mine.keys() & other.keys())]


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _mean_and_range(values: Sequence[float], form: str) -> str:
    mean = form.format(statistics.mean(values))
    return mean if len(values) < 2 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def _percent(values: Sequence[float]) -> str:
    if not values:
        return ""
    error = f" ± {_standard_error(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):+.1f}{error} ({len(values)})"


# Quality of all methods


def _accuracy_rows() -> list[Row]:
    return [{**row, "file": ACCURACY} for row in rows_of([REPO / RESULTS / ACCURACY])]


def _quality(names: Mapping[str, str], *, lsp: Mapping[str, str] | None = None) -> str:
    """The lines of the accuracy table for some methods. `names`: by method, its name on a page. `lsp`: the same of
    LSP's settings at AdamW's rate."""
    lines = [line for line in _accuracy_lines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads, body = cells[0], {row[0]: row for row in cells[2:]}
    # The grid marks a rate by "?" where rates were added to it after the rows were made.
    shown = [[title, body[method][1].rstrip("?"), *body[method][2:]] for method, title in names.items()]
    keys = [head.split()[0] for head in heads[3:]]
    tasks = [TASKS[key] + (", perplexity" if key == "alpaca" else "") for key in keys]
    ours = {method: _lsp_rows(method, SMOLLM) for method in lsp or {}}
    for method, found in ours.items():
        scores = [[row["after"] for row in found if row["task"] == key] for key in keys]
        shown.append([(lsp or {})[method], "0.0001", "120", *map(_mean_and_deviation, scores)])
    conditions = (
        f"{SMOLLM} on one H200: percent right on test, for Alpaca perplexity. A step has 16 texts, with ZO and MeZO "
        "8. Methods with gradients clip them at 1.0, except AdaLOMO. Models are in float32 with TF32; ZO in bf16 or "
        "fp8 computes in bf16. Mean and standard deviation, with the number of seeds in brackets; one seed where there "
        "is none. Of the rates tried for a method, the best on dev of SST-2 and RTE is shown. LSP has AdamW's rate:"
    )
    used = [row for row in _accuracy_rows() if row["method"] in names and row["status"] == "ok"]
    assert {(row["batch_size"], row["method"].startswith(("zo", "mezo"))) for row in used} <= {(16, False), (8, True)}
    made = source([*used, *itertools.chain(*ours.values())], ACCURACY_SWEEP, *([LSP_SWEEP] if ours else []))
    return "\n\n".join([conditions, table(["", "learning rate", "steps", *tasks], shown), made])


def _mean_and_deviation(values: Sequence[float]) -> str:
    """As the accuracy table writes scores. Above 1 a score is a perplexity, else a share."""
    digits, scale = (2, 1) if values[0] > 1 else (1, 100)
    mean, deviation = (scale * of(values) for of in (statistics.mean, statistics.stdev))
    return f"{mean:.{digits}f} ± {deviation:.{digits}f} ({len(values)})"


@cache
def _accuracy_lines() -> list[str]:
    return accuracy_table(_accuracy_rows(), grid=read_grid("accuracy")).splitlines()


def all_quality() -> str:
    return _quality(
        {
            "zero-shot": "no training",
            "adamw": "AdamW",
            "lora": "LoRA",
            "lomo": "LOMO",
            "sgd": "SGD",
            "adalomo": "AdaLOMO",
            "mezo": "MeZO",
            "zo": "ZO",
            "zo-bf16": "ZO, bf16",
            "zo-fp8": "ZO, blocks in fp8",
            "zo-bf16-wire": "ZO, bf16, `master: wire`",
            "zo-fp8-wire": "ZO, fp8, `master: wire`",
        },
        lsp={"lsp-512-dense": "LSP, d = 512", "lsp-512-dense-random": "LSP, d = 512, random projectors"},
    )


def lomo_beside_lora() -> str:
    chosen = at_chosen_rates(_accuracy_rows(), read_grid("accuracy"))
    rows = {method: chosen[method] for method in ("lomo", "lora")}
    scores = {
        method: {
            task: [row["after"] for row in by_seed([r for r in found if r["task"] == task]).values()] for task in TASKS
        }
        for method, found in rows.items()
    }
    used = [row for found in rows.values() for row in found]
    conditions = (
        f"{SMOLLM} on one H200, float32 with TF32, {used[0]['steps']} steps of {used[0]['batch_size']} texts, each "
        "method at the rate chosen for it. Score on test: mean over seeds, with the lowest and the highest in brackets:"
    )
    return "\n\n".join([conditions, lomo_lora(scores, tasks=TASKS), source(used, ACCURACY_SWEEP)])


def checkpoints() -> str:
    file, run = "h200_checkpoint_speed.jsonl", "20261115T130850Z"
    used, body = [row_of(file, "disk", run=run)], []
    for size in ("1.3b", "2.7b", "6.7b"):
        without, saving = (row_of(file, f"opt-{size}/{name}", run=run) for name in ("zo", "zo-async"))
        used += [without, saving]
        body.append([f"OPT-{size.upper()}", speed(without), speed(saving), ratio(saving, without)])
    heads = ["ZO, streamed", "tokens/s without saves", "with a save every 10 steps", "ratio"]
    conditions = (
        "One H200, random weights, bf16, 1 x 2,048 tokens, `master: wire`, saved to a file system in memory that takes "
        f"{used[0]['disk_gbps_threads']:.1f} GB/s from the writer's threads. A figure is of {used[1]['steps']} steps "
        f"without saves and of {used[2]['steps']} with them, timed as a whole, so that there is no spread:"
    )
    command = suite("checkpoint_speed", "table --folder DIR --methods zo,zo-async")
    return "\n\n".join([conditions, table(heads, body), source(used, command)])


BLOCKS: dict[str, Callable[[], str]] = {
    "zo-speed": zo_speed,
    "zo-directions": zo_directions,
    "equal-noise": equal_noise,
    "stream-link": stream_link,
    "stream-24gb": stream_capped,
    "wire-loss": wire_loss,
    "lomo-speed": lomo_speed,
    "lomo-streamed": lomo_streamed,
    "lsp-speed": lsp_speed,
    "lsp-memory": lsp_memory,
    "lsp-learned": lsp_learned,
    "lsp-left-out": lsp_left_out,
    "lsp-random": lsp_random,
    "quality": all_quality,
    "checkpoints": checkpoints,
    "paper-lomo-lora": lomo_beside_lora,
    **COMPARE_BLOCKS,
    **GRID_BLOCKS,
    **PAPER_BLOCKS,
    **QWEN_BLOCKS,
    **ZO_STUDY_BLOCKS,
    **ADAPTER_BLOCKS,
    **HOST_BLOCKS,
}
"""By the name in a page's marker: the function that makes the block's Markdown."""


def filled(text: str) -> str:
    """The text of a page with all its blocks made from the rows."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in BLOCKS:
            raise ValueError(f"a block of rows must be one of {', '.join(BLOCKS)}, got {name}; rename it")
        made = wrapped(BLOCKS[name]())
        return f"{begin}\n{made}\n\n{end}" if made else f"{begin}{end}"  # empty while it has no rows

    return MARKED.sub(block, text)


def marked_pages() -> list[Path]:
    """The pages of docs/ that have blocks."""
    return [page for page in sorted(DOCS.glob("*.md")) if MARKED.search(page.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a page is not current"
    )
    args = parser.parse_args(arguments)
    stale = []
    for page in marked_pages():
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            stale.append(page.name)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.check and stale:
        sys.exit(f"not current: {', '.join(stale)}; run: python -m benchmarks.pages")
    print(f"{'written' if stale else 'all current'}{': ' if stale else ''}{', '.join(stale)}")


if __name__ == "__main__":
    main()
