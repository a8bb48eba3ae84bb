"""The blocks of the pages that set our rows beside the papers' own figures.

A cell is `paper / ours`. Ours is the newest run that has all cases of a line, at full depth; where there is none, the
cell says so. Ratios are within one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import paper_figures as paper
from benchmarks.lsp_cases import link_name
from benchmarks.lsp_speed import FIGURE_5, LINKS_GBPS
from benchmarks.sources import RATIOS, STEPS, gb, ms, ratio, read_rows, source, speed, suite
from ds_zo.bench.report import planned_host_gb
from ds_zo.records.rows import Row, table

RESULTS = Path(__file__).parent / "results"
NOT_MEASURED = "not measured"
ZO_FILES = ("h200_zo_paper.jsonl", "h200_zo_targets.jsonl")
LOMO_FILE, CHECKPOINT_FILE = "h200_lomo.jsonl", "h200_checkpoint_speed.jsonl"
LSP_FILES = ("h200_lsp_figure5.jsonl", "h200_lsp.jsonl")
LOMO_PLANS = "cpu_lomo_plans.jsonl"
_GIB = 2**30
_METHODS = {"adamw_master": "AdamW", "sgd_master": "SGD", "lomo": "LOMO"}
_CELLS = "Cells are paper / ours."


def rows_of(*files: str) -> list[Row]:
    """The rows of the files that there are, the oldest first."""
    return [row for file in reversed(files) for row in read_rows(file, folder=RESULTS)]


def in_one_run(rows: Sequence[Row], *cases: str, key: str = "tokens_per_s") -> dict[str, Row] | None:
    """Rows of these cases in the newest run that has all of them, measured and at full depth; None: no run has."""
    for run in sorted({row["run_id"] for row in rows}, reverse=True):
        found = {
            row["case"]: row
            for row in rows
            if row["run_id"] == run and row["case"] in cases and row["status"] == "ok" and row.get(key) is not None
        }
        is_full = all(row.get("full_layers") in (None, row.get("layers")) for row in found.values())
        if is_full and len(found) == len(set(cases)):
            return found
    return None


def both(theirs: float | None, ours: str | None, form: str = "{:,.0f}") -> str:
    first = "out of memory" if theirs is None else form.format(theirs)
    return f"{first} / {NOT_MEASURED if ours is None else ours}"


def over(found: Mapping[str, Row], name: str, base: str) -> str | None:
    return None if name not in found or base not in found else ratio(found[name], found[base])


def _times(theirs: float | None, ours: str | None) -> str:
    if theirs is None and ours is None:
        return ""
    return f"{'' if theirs is None else f'{theirs:.2f}'} / {NOT_MEASURED if ours is None else ours}"


def _block(said: str, heads: Sequence[str], body: Sequence[Sequence[str]], used: Sequence[Row], *commands: str) -> str:
    """A table with its conditions before it, its rows and their commands after it."""
    return "\n\n".join([said, table(heads, body), source(used, *commands)])


# ZO


def zo_1() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for (size, dtype), (mezo_mb, zo_mb, mezo_speed, zo_speed) in paper.ZO_TABLE_1.items():
        names = [f"t1.{size}.{dtype}.{method}" for method in ("mezo", "zo")]
        title, in_fp8 = f"OPT-{size.upper()}, {dtype}", f"t1.{size}.fp8.zo"
        found = in_one_run(rows, *names) or in_one_run(rows, names[1]) or {}
        narrow = in_one_run(rows, names[0], in_fp8) or in_one_run(rows, in_fp8)
        if not found and dtype == "fp16" and narrow is not None:
            found, title = {**narrow, names[1]: narrow[in_fp8]}, f"{title}, our ZO with blocks in fp8"
        used += found.values()
        cells = [_measured_or_needed(rows, found, name, used) for name in names]
        body.append(
            [
                title,
                both(mezo_mb and mezo_mb / 1e3, cells[0][0], "{:.1f}"),
                both(zo_mb and zo_mb / 1e3, cells[1][0], "{:.1f}"),
                both(mezo_speed, cells[0][1]),
                both(zo_speed, cells[1][1]),
                _times(None if mezo_speed is None else (zo_speed or 0) / mezo_speed, over(found, names[1], names[0])),
            ]
        )
    said = (
        "Tokens/s of the median step and GPU memory in GB, random weights, one sequence of 2,048 tokens. The paper's "
        "card is an A100 of 80 GB; ours is an H200, all blocks streamed, `master: wire`. A case that `would "
        f"take` more memory than our machine has was not run. {_CELLS} {STEPS} Ratios are of one run; their range is "
        "that of both sides."
    )
    heads = ["", "MeZO GB", "ZO GB", "MeZO tokens/s", "ZO tokens/s", "ZO / MeZO"]
    return _block(said, heads, body, used, suite("zo_speed", "preset paper", only=r"^t1\."))


def _measured_or_needed(
    rows: Sequence[Row], found: Mapping[str, Row], name: str, used: list[Row]
) -> tuple[str | None, str | None]:
    """GPU memory and tokens/s of a case. Of one that no machine of ours holds: what it would take, from its row."""
    if name in found:
        return gb(found[name]["peak_gb"]), speed(found[name])
    for row in reversed([row for row in rows if row["case"] == f"{name}.whole"]):
        planned = planned_host_gb(row)
        if planned is None and row.get("needs_gb") is None:
            continue
        used.append(row)
        needed = f"{row['needs_gb']:.0f} GB" if planned is None else f"{float(planned[0]):.0f} GB of host memory"
        return f"would take {needed}", "not run"
    return None, None


def zo_2() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    features = ("no_overlap", "no_reuse_buffers", "no_fuse_update")

    def ours(size: str) -> list[str | None]:
        every_step, chosen, in_table_1 = f"t2.{size}.1", f"t2.{size}.auto", f"t1.{size}.fp16"
        pairs = [(f"{every_step}.{feature}", f"{every_step}.all") for feature in features]
        pairs += [(f"{every_step}.all", f"{in_table_1}.mezo")]
        pairs += [(f"{chosen}.{feature}", f"{in_table_1}.zo") for feature in features[:2]]
        cells = []
        for names in pairs:
            found = in_one_run(rows, *names) or {}
            used.extend(found.values())
            cells.append(over(found, *names))
        return cells

    for size, (mezo, *without, whole) in paper.ZO_TABLE_5.items():
        theirs = [*(value / whole for value in without), None if mezo is None else whole / mezo, None, None]
        body.append([f"OPT-{size.upper()}", *map(_times, theirs, ours(size))])
    said = (
        "Throughput with one feature off, as a share of that with all features; one column is all features beside "
        "MeZO. Blocks are written back every step, as in the paper, and in the last two columns at the interval that "
        "is chosen without a setting. One H200, random weights, one sequence of 2,048 tokens. The paper's models are "
        f"in float32, ours in fp16. {_CELLS} {RATIOS}"
    )
    heads = ["", "no overlap", "no reusable memory", "no efficient update", "all features / MeZO"]
    heads += ["no overlap, chosen interval", "no reusable memory, chosen interval"]
    return _block(said, heads, body, used, suite("zo_speed", "preset paper", only=r"^(t1\..*fp16|t2\.)"))


def zo_3() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []

    for (compute, size), (plain, *narrow) in paper.ZO_TABLE_9.items():
        cells = [f"OPT-{size.upper()}, {compute}"]
        for wire, theirs in zip(("fp16", "bf16", "fp8"), narrow, strict=True):
            names = f"amp.{size}.{compute}.{wire}", f"amp.{size}.{compute}.fp32"
            found = in_one_run(rows, *names) or {}
            used += found.values()
            cells.append(_times(theirs / plain, over(found, *names)))
        body.append(cells)
    said = (
        "A float32 model computed under autocast in the dtype that a line names: throughput with blocks stored and "
        "moved in fewer bits, as a share of that in float32. One H200, random weights, one sequence of 2,048 tokens, "
        f"`master: wire`. {_CELLS} {RATIOS}"
    )
    heads = ["", "blocks in fp16", "in bf16", "in fp8"]
    return _block(said, heads, body, used, suite("zo_speed", "preset paper", only=r"^amp\."))


def zo_6() -> str:
    rows, used, body = rows_of(CHECKPOINT_FILE), list[Row](), []
    for place in ("disk", "tmpfs"):
        for size, (mezo, mezo_saved, zo, zo_saved, zo_async) in paper.ZO_TABLE_6.items():
            of_run = _checkpoints(rows, place, size)
            title, disk = f"OPT-{size.upper()}, {place}", next((row for row in of_run if row["case"] == "disk"), None)
            if disk is not None:
                used.append(disk)
                title += f", {disk.get('disk_gbps_threads') or disk['disk_gbps']:.1f} GB/s"
            cells = []
            for theirs, saved, plain in (
                (mezo_saved / mezo, "mezo-torch-save", "mezo"),
                (zo_saved / zo, "zo-torch-save", "zo"),
                (zo_async / zo, "zo-async", "zo"),
            ):
                names = f"opt-{size}/{saved}", f"opt-{size}/{plain}"
                found = in_one_run(of_run, *names) or {}
                used += found.values()
                cells.append(_times(theirs, over(found, *names)))
            body.append([title, *cells, "" if disk is None else disk["run_id"]])
    said = (
        "Throughput with a save every 10 steps, as a share of that without. One H200, random weights, bf16, one "
        "sequence of 2,048 tokens, all of ZO's blocks streamed, `master: wire`. Our lines name the file system and its "
        "speed. The paper names neither its interval nor its disk. Steps are timed as a whole, without a spread. "
        f"{_CELLS}"
    )
    heads = ["", "MeZO, torch.save", "ZO, torch.save", "ZO, asynchronous", "run"]
    return _block(said, heads, body, used, suite("checkpoint_speed", "table --folder DIR"))


def _checkpoints(rows: Sequence[Row], place: str, size: str) -> list[Row]:
    """The rows of the run at this place that has the most cases of this size; of several, the newest."""
    in_memory = {row["run_id"]: row["params"]["folder"].startswith("/dev/shm") for row in rows if row["case"] == "disk"}
    runs = sorted(run for run, is_tmpfs in in_memory.items() if is_tmpfs == (place == "tmpfs"))
    by_run = [[row for row in rows if row["run_id"] == run] for run in runs]
    count = [sum(row["case"].startswith(f"opt-{size}/") for row in found) for found in by_run]
    return max(zip(count, runs, by_run, strict=True))[2] if any(count) else []


def zo_7_8() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for (batch, length), by_size in paper.ZO_TABLES_7_8.items():
        for size, (mezo_mb, zo_mb, mezo_speed, zo_speed) in by_size.items():
            is_first = (batch, length) == (1, 2048)
            names = f"t1.{size}.fp16.zo" if is_first else f"t78.{size}.zo.{batch}x{length}", f"t78.{size}.mezo"
            found = in_one_run(rows, *names) or {}
            used += found.values()
            ours, mezo = (_point(found.get(name), batch, length) for name in names)
            memory = [None if row is None else gb(row["peak_gb"]) for row in (mezo, ours)]
            body.append(
                [
                    f"OPT-{size.upper()}, {batch} x {length:,}",
                    both(mezo_mb / 1e3, memory[0], "{:.1f}"),
                    both(zo_mb / 1e3, memory[1], "{:.1f}"),
                    _times(zo_speed / mezo_speed, None if ours is None or mezo is None else ratio(ours, mezo)),
                ]
            )
    said = (
        "Batches and lengths: GPU memory in GB, and ZO's throughput as a multiple of MeZO's. One H200, random weights, "
        "all of ZO's blocks streamed, `master: wire`. The paper's models are in float32, ours in fp16. "
        f"{_CELLS} {RATIOS}"
    )
    command = suite("zo_speed", "preset paper", only=r"^(t1\..*fp16|t78\.)")
    return _block(said, ["", "MeZO GB", "ZO GB", "ZO / MeZO"], body, used, command)


def _point(row: Row | None, batch: int, length: int) -> Row | None:
    """What a case measured for one input; None: nothing."""
    points = [] if row is None else [{**point, "run_id": row["run_id"]} for point in row.get("points") or [row]]
    return next((point for point in points if (point["batch"], point["length"]) == (batch, length)), None)


def zo_10() -> str:
    newest = {row["case"]: row for row in rows_of(*ZO_FILES) if row["case"].startswith("t10.")}
    body = []
    for _, row in sorted(newest.items()):
        asked = row["params"]
        cap_gb, layers = asked.get("cap_gb"), asked["layers"]
        cells = [
            asked["shape"],
            f"{asked.get('length', 2048):,}",
            str(layers),
            "none" if cap_gb is None else f"{cap_gb:g}",
        ]
        if row["status"] == "ok":
            cells += [gb(row["peak_gb"]), ms(row), f"{1e3 * row['step_s'] / layers:.0f}"]
        else:
            cells += ["out of memory" if row["status"] == "oom" else str(row["status"]), "", ""]
        body.append([*cells, row["run_id"]])
    said = (
        "Models of more than 100 billion parameters on one H200: layers and embeddings of the true size, random "
        "weights, fewer layers, since the host does not hold the 96 of OPT or the 70 of BLOOM, all blocks streamed, "
        "`master: wire`, OPT in fp16, blocks of BLOOM in fp8. The paper's figures of Table 10 are not shown. The time "
        f"is that of the median step. {STEPS}"
    )
    heads = ["", "tokens", "layers", "limit GB", "GPU GB", "ms a step", "ms a layer", "run"]
    commands = [suite("zo_speed", f"preset paper{host}", only=r"^t10\.") for host in (" --host-gb 100", "")]
    return _block(said, heads, body, list(newest.values()), *commands)


# LOMO


def lomo_1() -> str:
    rows, used, body = rows_of(LOMO_FILE), list[Row](), []
    for (method, checkpointed), figures in paper.LOMO_TABLE_1.items():
        name = f"paper/memory-{method}-{'checkpointed' if checkpointed else 'plain'}"
        row = (in_one_run(rows, name, key="total_gb") or {}).get(name)
        used += [row] if row is not None else []
        parts = ("parameters_gb", "gradients_gb", "states_gb", "activations_gb", "total_gb")
        ours = [None if row is None else f"{row[part] * 1e9 / _GIB:.2f}" for part in parts]
        if row is not None and not row["fits"]:
            ours[-1] = f"{ours[-1]} (sum)"
        title = f"{_METHODS[method]}{', checkpointed' if checkpointed else ''}"
        body.append([title, *(both(a, b, "{:.2f}") for a, b in zip(figures, ours, strict=True))])
    said = (
        "GiB of GPU memory for LLaMA-7B with random weights in bf16, 8 x 512 tokens, plain attention, on one H200. "
        "Parts are computed from the tensors; the total is the allocator's peak in one step, so that it has no spread. "
        f"A total that the card does not hold is the sum of its parts, and says so. {_CELLS}"
    )
    heads = ["", "parameters", "gradients", "optimizer states", "activations", "total"]
    return _block(said, heads, body, used, suite("lomo_speed", "run --preset paper", only="paper/memory"))


def lomo_2() -> str:
    rows, used, body = rows_of(LOMO_FILE), list[Row](), []
    plans = {row["case"]: row for row in rows_of(LOMO_PLANS)}
    for (size, method), (cards, theirs_gb, theirs) in paper.LOMO_TABLE_2.items():
        name = f"paper/speed-{size}-{method}"
        row = (in_one_run(rows, name) or {}).get(name)
        used += [row] if row is not None else []
        ours = (None, None) if row is None else (gb(row["peak_gb"]), speed(row))
        plan = plans.get(f"plan/{size}-{method}-{cards}")
        cells = [f"LLaMA-{size.upper()}, {_METHODS[method]}", f"{cards} x RTX 3090 / 1 x H200"]
        planned = "" if plan is None else f"{plan['peak_gb']:.1f} GB, {plan['tokens_per_s']:,.0f} tokens/s"
        body.append([*cells, both(theirs_gb, ours[0], "{:.1f}"), both(theirs, ours[1]), planned])
    said = (
        "GPU memory in GB and tokens/s of each card, random weights in bf16, 1 x 1,024 tokens, activation "
        "checkpointing. Ours is one H200 throughout. Lines with other numbers of cards show that a model "
        "fits, and no ratio. The last column is computed by `ds-zo plan` for as many H200 as the paper has cards, with "
        "LOMO at ZeRO stage 3, where no collective overlaps with computing. Other cells are paper / ours. Speed is "
        f"that of the median step. {STEPS}"
    )
    commands = suite("lomo_speed", "run --preset paper", only="paper/speed"), suite("lomo_plans", "")
    used += plans.values()
    return _block(said, ["", "cards", "GB", "tokens/s", "planned"], body, used, *commands)


def lomo_lora(rows: Mapping[str, Mapping[str, Sequence[float]]], *, tasks: Mapping[str, str]) -> str:
    """LOMO beside LoRA: a table by task, and who wins in words. `rows`: by method and task, the test scores of its
    seeds."""
    verdicts: dict[str, list[str]] = {"LOMO": [], "LoRA": [], "neither": []}
    body = []
    for task, title in tasks.items():
        lomo, lora = (rows[method][task] for method in ("lomo", "lora"))
        is_perplexity = task == "alpaca"
        ahead = (statistics.mean(lomo) < statistics.mean(lora)) == is_perplexity
        overlap = min(lomo) <= max(lora) and min(lora) <= max(lomo)
        better = "neither" if overlap else "LOMO" if ahead else "LoRA"
        verdicts[better].append(title)
        cells = (_mean_and_range(scores, is_perplexity) for scores in (lomo, lora))
        body.append([f"{title}{', perplexity' if is_perplexity else ''}", *cells, better])
    won, lost, level = (", ".join(found) or "no task" for found in verdicts.values())
    said = f"LOMO loses to LoRA on {lost}, and wins on {won}. The ranges of their seeds overlap on {level}."
    return "\n\n".join([table(["", "LOMO", "LoRA", "better"], body), said])


def _mean_and_range(values: Sequence[float], is_perplexity: bool) -> str:
    form = "{:.2f}" if is_perplexity else "{:.1%}"
    mean, least, most = (form.format(value) for value in (statistics.mean(values), min(values), max(values)))
    return f"{mean} ({least} to {most})"


# LSP

_LSP_NAMES = {"lsp-512": "LSP", "zero2-offload": "ZeRO-Offload"}
_FIGURE_5_COMMAND = suite("lsp_speed", "run --preset figure5")
_OWN_COMMAND = suite("lsp_speed", "run --preset issue", only="^issue/(1.3b|3b)/4")


def by_link(rows: Sequence[Row]) -> list[Row]:
    """A row for each link that an engine of Figure 5 was measured on: its case is `figure5/LINK/SHAPE/METHOD`."""
    found: list[Row] = []
    for row in rows:
        suite_name, _, rest = row["case"].partition("/")
        if suite_name != "figure5":
            found.append(row)
            continue
        of_case = {key: value for key, value in row.items() if key != "links"}
        for link, measured in {link_name(row.get("link_gbps")): {}, **row.get("links", {})}.items():
            found.append({**of_case, **measured, "case": f"figure5/{link}/{rest}"})
    return found


def lsp_5() -> str:
    rows, used, body = by_link(rows_of(*LSP_FILES)), list[Row](), []
    cases = {shape: (batch, length, other) for shape, batch, length, other in FIGURE_5}
    for shape, (title, theirs) in paper.LSP_FIGURE_5.items():
        batch, length, other = cases[shape]
        states = "bf16" if other.endswith("bf16") else "float32"
        prefixes = [f"figure5/{link_name(link)}/{shape}" for link in LINKS_GBPS]
        cells = _over_offload(rows, prefixes, other, used)
        body.append([title, f"{shape}, {batch} x {length:,}", states, f"{theirs:.2f}", *cells])
    for size in ("1.3b", "3b"):
        cells = _over_offload(rows, [f"issue/{size}/4+1"], "zero2-offload", used)
        body.append(["", f"llama-{size}, 4 x 1,024", "float32", "", *cells, *[NOT_MEASURED] * (len(LINKS_GBPS) - 1)])
    said = (
        "LSP's throughput (d = 512, random projectors, embedding and head projected) over ZeRO-Offload's (stage 2), "
        "random weights, bf16, activation checkpointing, clipping 1.0. The paper's cards have links of 10 to 20 GB/s, "
        "ours is an H200 on its own link, then with copies slowed down to such links. The paper's ratios are in "
        f"the order of its text. {RATIOS}"
    )
    links = [f"{link_name(link)} link" if link is None else f"{link:g} GB/s" for link in LINKS_GBPS]
    heads = ["paper's case", "our shape and tokens", "ZeRO-Offload's states", "paper", *links]
    return _block(said, heads, body, used, _FIGURE_5_COMMAND, _OWN_COMMAND)


def _over_offload(rows: Sequence[Row], prefixes: Sequence[str], other: str, used: list[Row]) -> list[str]:
    """LSP's speed over that of ZeRO-Offload, for each group of cases."""
    cells = []
    for names in ((f"{prefix}/lsp-512", f"{prefix}/{other}") for prefix in prefixes):
        found = in_one_run(rows, *names) or {}
        used += found.values()
        cells.append(over(found, *names) or NOT_MEASURED)
    return cells


def lsp_6() -> str:
    """Parts of a step, of rows of Figure 5 and of the newest run that takes LSP and ZeRO-Offload apart."""
    rows = by_link(rows_of(*LSP_FILES))
    used = list({row["case"]: row for row in rows if row["case"].startswith("figure5/") and "rest_s" in row}.values())
    own = [f"issue/1.3b/4+1/{name}" for name in ("lsp-512", "zero2-offload")]
    used += (in_one_run(rows, *own, key="rest_s") or {}).values()
    body = []
    for row in used:
        link = row["case"].split("/")[1] if row["case"].startswith("figure5/") else "own"
        step_s = row.get("apart_step_s") or row["step_s"]
        parts = [*(row.get(key) for key in ("rest_s", "exposed_copy_s", "exposed_cpu_s")), step_s]
        spread = row.get("exposed_spread_s")
        body.append(
            [
                f"{row['shape']}, {row['batch']} x {row['length']:,}, {_LSP_NAMES[row['case'].rpartition('/')[2]]}",
                "own" if link == "own" else f"{link} GB/s",
                *("" if s is None else f"{1e3 * s:,.0f}" for s in parts),
                NOT_MEASURED if spread is None else f"{1e3 * spread:.0f}",
                row["run_id"],
            ]
        )
    said = (
        "Milliseconds of a median step: the GPU's part, and what the step waits for copies and for the CPU beyond it. "
        "The parts add up to the step. A part is the difference of two measured times, so that noise makes small ones "
        "negative. For ZeRO-Offload, copies are in the GPU's part. One H200, random weights, bf16, activation "
        "checkpointing, d = 512. The paper draws these parts, and prints one figure: LSP halves the time of an "
        "iteration."
    )
    heads = ["", "link", "GPU", "copies", "CPU", "step", "spread of a part", "run"]
    if not body:
        body = [[NOT_MEASURED, *[""] * (len(heads) - 1)]]
    return _block(said, heads, body, used, _FIGURE_5_COMMAND, _OWN_COMMAND)


PAPER_BLOCKS: dict[str, Callable[[], str]] = {
    "paper-zo-1": zo_1,
    "paper-zo-2": zo_2,
    "paper-zo-3": zo_3,
    "paper-zo-6": zo_6,
    "paper-zo-7-8": zo_7_8,
    "paper-zo-10": zo_10,
    "paper-lomo-1": lomo_1,
    "paper-lomo-2": lomo_2,
    "paper-lsp-5": lsp_5,
    "paper-lsp-6": lsp_6,
}
"""By the name in a page's marker, as in `pages.BLOCKS`."""
