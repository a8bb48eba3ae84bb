"""The blocks of the pages that set our rows beside the papers' own figures.

A cell is `paper / ours`. Ours is the newest run that has all cases of a line, at full depth; where there is none, the
cell says so. Ratios are within one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import paper_figures as paper
from ds_zo.bench.contenders import ALL
from ds_zo.bench.report import contenders, host_gb, reason_of, shown, title_of
from ds_zo.records.rows import Row, read_objects, table

RESULTS = Path(__file__).parent / "results"
NOT_MEASURED = "not measured"
ZO_FILES = ("h200_zo_full.jsonl", "h200_zo_targets.jsonl")
LOMO_FILE, CHECKPOINT_FILE, FIGURE_5_FILE = "h200_lomo.jsonl", "h200_checkpoint_speed.jsonl", "h200_lsp_figure5.jsonl"
LOMO_PLANS = "cpu_lomo_plans.jsonl"
LEAN = RESULTS / "lean"
_GIB = 2**30
_METHODS = {"adamw_master": "AdamW", "sgd_master": "SGD", "lomo": "LOMO"}


def rows_of(*files: str) -> list[Row]:
    """The rows of the files that there are, the oldest first."""
    return [row for file in reversed(files) if (RESULTS / file).exists() for row in read_objects(RESULTS / file)]


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


def both(theirs: float | None, ours: float | None, form: str = "{:,.0f}") -> str:
    first = "out of memory" if theirs is None else form.format(theirs)
    return f"{first} / {NOT_MEASURED if ours is None else form.format(ours)}"


def over(row: Row | None, base: Row | None) -> float | None:
    return None if row is None or base is None else float(row["tokens_per_s"] / base["tokens_per_s"])


def _ratio(theirs: float | None, base: float | None) -> float | None:
    return None if theirs is None or base is None else theirs / base


def _block(said: str, heads: Sequence[str], body: Sequence[Sequence[str]], used: Sequence[Row], *files: str) -> str:
    """A table with its conditions before it and its rows after it."""
    runs = sorted({row["run_id"] for row in used})
    links = ", ".join(f"[{file}](../benchmarks/results/{file})" for file in files if (RESULTS / file).exists())
    named = f", {'run' if len(runs) == 1 else 'runs'} {', '.join(runs)}" if runs else ""
    return "\n\n".join([said, table(heads, body), f"Rows: {links or NOT_MEASURED}{named}."])


# ZO


def zo_1() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for (size, dtype), (mezo_mb, zo_mb, mezo_speed, zo_speed) in paper.ZO_TABLE_1.items():
        names = [f"t1.{size}.{dtype}.{method}" for method in ("mezo", "zo")]
        found = in_one_run(rows, *names) or in_one_run(rows, names[1]) or {}
        mezo, ours = (found.get(name) for name in names)
        used += found.values()
        mezo_gb, our_gb = (None if row is None else row["peak_gb"] for row in (mezo, ours))
        speeds = [None if row is None else row["tokens_per_s"] for row in (mezo, ours)]
        body.append(
            [
                f"OPT-{size.upper()}, {dtype}",
                both(mezo_mb and mezo_mb / 1e3, mezo_gb, "{:.1f}"),
                both(zo_mb and zo_mb / 1e3, our_gb, "{:.1f}"),
                both(mezo_speed, speeds[0]),
                both(zo_speed, speeds[1]),
                _times(_ratio(zo_speed, mezo_speed), over(ours, mezo)),
            ]
        )
    said = (
        "Tokens/s and GPU memory in GB, one sequence of 2,048 tokens. The paper's card is an A100 of 80 GB; ours is an "
        "H200, all blocks streamed, `master: wire`. Cells are paper / ours:"
    )
    heads = ["", "MeZO GB", "ZO GB", "MeZO tokens/s", "ZO tokens/s", "ZO / MeZO"]
    return _block(said, heads, body, used, *ZO_FILES)


def _times(theirs: float | None, ours: float | None) -> str:
    if theirs is None and ours is None:
        return ""
    return f"{'' if theirs is None else f'{theirs:.2f}'} / {NOT_MEASURED if ours is None else f'{ours:.2f}'}"


def zo_2() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for size, (mezo, *without, whole) in paper.ZO_TABLE_5.items():
        cells = [f"OPT-{size.upper()}"]
        for theirs, feature in zip(without, ("no_overlap", "no_reuse_buffers", "no_fuse_update"), strict=True):
            names = f"t2.{size}.1.{feature}", f"t2.{size}.1.all"
            found = in_one_run(rows, *names) or {}
            used += found.values()
            cells.append(_times(theirs / whole, over(found.get(names[0]), found.get(names[1]))))
        names = f"t2.{size}.1.all", f"t2.{size}.mezo"
        found = in_one_run(rows, *names) or {}
        body.append([*cells, _times(_ratio(whole, mezo), over(found.get(names[0]), found.get(names[1])))])
    said = (
        "Throughput with one feature off, as a share of that with all features; the last column is all features beside "
        "MeZO. Blocks are written back every step, as in the paper. The paper's models are in float32, ours in fp16. "
        "Cells are paper / ours:"
    )
    heads = ["", "no overlap", "no reusable memory", "no efficient update", "all features / MeZO"]
    return _block(said, heads, body, used, *ZO_FILES)


def zo_3() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for (compute, size), (plain, *narrow) in paper.ZO_TABLE_9.items():
        cells = [f"OPT-{size.upper()}, {compute}"]
        for theirs, wire in zip(narrow, ("fp16", "bf16", "fp8"), strict=True):
            names = f"amp.{size}.{compute}.{wire}", f"amp.{size}.{compute}.fp32"
            found = in_one_run(rows, *names) or {}
            used += found.values()
            cells.append(_times(theirs / plain, over(found.get(names[0]), found.get(names[1]))))
        body.append(cells)
    said = (
        "A float32 model computed under autocast: throughput with blocks stored and moved in fewer bits, as a share of "
        "that in float32. Cells are paper / ours:"
    )
    return _block(said, ["", "blocks in fp16", "in bf16", "in fp8"], body, used, *ZO_FILES)


def zo_6() -> str:
    rows, used, body = rows_of(CHECKPOINT_FILE), list[Row](), []
    places = {row["run_id"]: row for row in rows if row["case"] == "disk"}
    for run, disk in places.items():
        rate = disk.get("disk_gbps_threads") or disk["disk_gbps"]
        for size, (mezo, mezo_saved, zo, zo_saved, zo_async) in paper.ZO_TABLE_6.items():
            of_run = [row for row in rows if row["run_id"] == run]
            cells = [f"OPT-{size.upper()}, {rate:.1f} GB/s"]
            for theirs, saved, plain in (
                (mezo_saved / mezo, "mezo-torch-save", "mezo"),
                (zo_saved / zo, "zo-torch-save", "zo"),
                (zo_async / zo, "zo-async", "zo"),
            ):
                names = f"opt-{size}/{saved}", f"opt-{size}/{plain}"
                found = in_one_run(of_run, *names) or {}
                used += found.values()
                cells.append(_times(theirs, over(found.get(names[0]), found.get(names[1]))))
            body.append(cells)
    said = (
        "Throughput with a save every 10 steps, as a share of that without. Our lines name the speed of the file "
        "system: a real disk, and one in memory with the writer's threads. The paper names neither its interval nor "
        "its disk. Cells are paper / ours:"
    )
    heads = ["", "MeZO, torch.save", "ZO, torch.save", "ZO, asynchronous"]
    return _block(said, heads, body, used, CHECKPOINT_FILE)


def zo_7_8() -> str:
    rows, used, body = rows_of(*ZO_FILES), list[Row](), []
    for (batch, length), by_size in paper.ZO_TABLES_7_8.items():
        for size, (mezo_mb, zo_mb, mezo_speed, zo_speed) in by_size.items():
            of_mezo = f"t78.{size}.mezo"
            alone, swept = (
                in_one_run(rows, name, of_mezo) for name in (f"t78.{size}.zo.{batch}x{length}", f"t78.{size}.zo")
            )
            found = alone or swept or {}
            mezo = found.get(of_mezo)
            ours = next((row for row in found.values() if row is not mezo), None)
            ours, mezo = (_point(row, batch, length) for row in (ours, mezo))
            used += found.values()
            memory = [None if row is None else row["peak_gb"] for row in (mezo, ours)]
            body.append(
                [
                    f"OPT-{size.upper()}, {batch} x {length:,}",
                    both(mezo_mb / 1e3, memory[0], "{:.1f}"),
                    both(zo_mb / 1e3, memory[1], "{:.1f}"),
                    _times(zo_speed / mezo_speed, over(ours, mezo)),
                ]
            )
    said = (
        "Batches and lengths: GPU memory in GB, and ZO's throughput as a multiple of MeZO's. The paper's models are in "
        "float32, ours in fp16. Cells are paper / ours:"
    )
    return _block(said, ["", "MeZO GB", "ZO GB", "ZO / MeZO"], body, used, *ZO_FILES)


def _point(row: Row | None, batch: int, length: int) -> Row | None:
    """What a case measured for one input; None: nothing."""
    points = [] if row is None else row.get("points") or [row]
    return next((point for point in points if (point["batch"], point["length"]) == (batch, length)), None)


def zo_10() -> str:
    newest = {row["case"]: row for row in rows_of(*ZO_FILES) if row["case"].startswith("t10.")}
    body = []
    for case, row in sorted(newest.items()):
        length = row["params"].get("length", 2048)
        cells = [case.removeprefix("t10."), f"{length:,}"]
        if row["status"] == "ok":
            cap = "none" if row.get("cap_gb") is None else f"{row['cap_gb']:g}"
            each_ms = f"{1e3 * row['step_s'] / row['layers']:.0f}"
            cells += [f"{row['layers']} of {row['full_layers']}", cap, f"{row['peak_gb']:.1f}", each_ms]
        else:
            cells += ["", "", str(row["status"]), ""]
        body.append(cells)
    said = (
        "Models of more than 100 billion parameters: true layers and edges, as many layers as the host holds. The "
        "figures of the paper's Table 10 are not in the text that this page is made from:"
    )
    heads = ["", "tokens", "layers", "limit GB", "GPU GB", "ms a layer"]
    return _block(said, heads, body, list(newest.values()), *ZO_FILES)


# LOMO


def lomo_1() -> str:
    rows, used, body = rows_of(LOMO_FILE), list[Row](), []
    for (method, checkpointed), figures in paper.LOMO_TABLE_1.items():
        name = f"paper/memory-{method}-{'checkpointed' if checkpointed else 'plain'}"
        row = (in_one_run(rows, name, key="total_gb") or {}).get(name)
        used += [row] if row is not None else []
        parts = ("parameters_gb", "gradients_gb", "states_gb", "activations_gb", "total_gb")
        ours = [None if row is None else row[part] * 1e9 / _GIB for part in parts]
        title = f"{_METHODS[method]}{', checkpointed' if checkpointed else ''}"
        body.append([title, *(both(a, b, "{:.2f}") for a, b in zip(figures, ours, strict=True))])
    said = (
        "GiB of GPU memory for LLaMA-7B at 8 x 512 tokens. Parts are computed from the tensors, the total is the "
        "allocator's peak; where the card is too small, the total is the sum. Cells are paper / ours:"
    )
    heads = ["", "parameters", "gradients", "optimizer states", "activations", "total"]
    return _block(said, heads, body, used, LOMO_FILE)


def lomo_2() -> str:
    rows, used, body = rows_of(LOMO_FILE), list[Row](), []
    plans = {row["case"]: row for row in rows_of(LOMO_PLANS)}
    for (size, method), (cards, theirs_gb, theirs) in paper.LOMO_TABLE_2.items():
        name = f"paper/speed-{size}-{method}"
        row = (in_one_run(rows, name) or {}).get(name)
        used += [row] if row is not None else []
        ours = (None, None) if row is None else (row["peak_gb"], row["tokens_per_s"])
        plan = plans.get(f"plan/{size}-{method}-{cards}")
        cells = [f"LLaMA-{size.upper()}, {_METHODS[method]}", f"{cards} x RTX 3090 / 1 x H200"]
        planned = "" if plan is None else f"{plan['peak_gb']:.1f} GB, {plan['tokens_per_s']:,.0f} tokens/s"
        body.append([*cells, both(theirs_gb, ours[0], "{:.1f}"), both(theirs, ours[1]), planned])
    said = (
        "GB and tokens/s of each card, 1 x 1,024 tokens. Ours is one H200 throughout. Runs on several cards are not "
        "measured: lines with other numbers of cards show that a model fits, and no ratio. The last column is computed "
        "by `ds-zo plan` for as many H200 as the paper has cards, with LOMO at ZeRO stage 3: memory and speed of each "
        "card, where no collective overlaps with computing. It has no estimate of AdamW and SGD at stage 3 without "
        "offload. Other cells are paper / ours:"
    )
    return _block(said, ["", "cards", "GB", "tokens/s", "planned"], body, used, LOMO_FILE, LOMO_PLANS)


def lomo_lora(rows: Mapping[str, Mapping[str, Sequence[float]]], *, tasks: Mapping[str, str], link: str) -> str:
    """LOMO beside LoRA by task, in words. `rows`: by method and task, the test scores of its seeds."""
    better, worse = list[str](), list[str]()
    for task, title in tasks.items():
        lomo, lora = (statistics.mean(rows[method][task]) for method in ("lomo", "lora"))
        lower_is_better = task == "alpaca"
        ahead = lomo < lora if lower_is_better else lomo > lora
        scores = f"{lomo:.2f} and {lora:.2f} perplexity" if lower_is_better else f"{lomo:.1%} and {lora:.1%}"
        (better if ahead else worse).append(f"{title} ({scores})")
    return (
        f"LOMO loses to LoRA on {', '.join(worse) or 'no task'}, and wins on {', '.join(better) or 'no task'}: "
        f"test scores of LOMO and of LoRA, means over seeds, each at the rate chosen for it. {link}"
    )


# LSP


def lsp_5() -> str:
    rows, used, body = rows_of(FIGURE_5_FILE), list[Row](), []
    for shape, (title, theirs) in paper.LSP_FIGURE_5.items():
        cells = [f"{title} / {shape}", f"{theirs:.2f}"]
        for link in ("own", "20", "10"):
            for other in ("zero2-offload", "zero2-offload-bf16"):
                names = f"figure5/{link}/{shape}/lsp-512", f"figure5/{link}/{shape}/{other}"
                found = in_one_run(rows, *names) or {}
                used += found.values()
                ours = over(found.get(names[0]), found.get(names[1]))
                cells.append(NOT_MEASURED if ours is None else f"{ours:.2f}")
        body.append(cells)
    said = (
        "LSP's throughput (d = 512) over ZeRO-Offload's. The paper's cards have links of 10 to 20 GB/s, ours is an "
        "H200 on its own link, then with copies slowed down to such links. ZeRO-Offload has float32 states, as in the "
        "paper, or bf16 states. The paper's ratios are in the order of its text:"
    )
    links = ("own link", "20 GB/s", "10 GB/s")
    heads = ["paper's case / our shape", "paper"]
    heads += [f"{link}, {states} states" for link in links for states in ("float32", "bf16")]
    return _block(said, heads, body, used, FIGURE_5_FILE)


def lsp_6() -> str:
    newest = {row["case"]: row for row in rows_of(FIGURE_5_FILE) if row.get("apart_step_s") is not None}
    body = []
    for case, row in newest.items():
        _, link, shape, name = case.split("/")
        parts = [row.get(key) for key in ("rest_s", "exposed_copy_s", "exposed_cpu_s", "apart_step_s")]
        cells = [f"{shape}, {name}", "own" if link == "own" else f"{link} GB/s"]
        body.append(
            [*cells, *("" if s is None else f"{1e3 * s:,.0f}" for s in parts), f"{1e3 * row['exposed_spread_s']:.0f}"]
        )
    said = (
        "Milliseconds of a step: the GPU's part, and what the step waits for copies and for the CPU beyond it. The "
        "parts add up to the step. For ZeRO-Offload, copies are in the GPU's part. The paper draws these parts, and "
        "prints one figure: LSP halves the time of an iteration."
    )
    heads = ["", "link", "GPU", "copies", "CPU", "step", "spread"]
    if not body:
        body = [[NOT_MEASURED, *[""] * (len(heads) - 1)]]
    return _block(said, heads, body, list(newest.values()), FIGURE_5_FILE)


# Head to head in the least memory


def lean() -> str:
    """A table for each folder of `results/lean`: rows of `launch/compare.py`."""
    from ds_zo.bench.compare import last_run

    found = sorted(path.parent for path in LEAN.glob("*/rows.jsonl"))
    blocks = []
    for folder in found:
        rows = last_run(folder / "rows.jsonl", None)
        body = []
        for row in contenders(rows):
            cells = [row["contender"]]
            if row["status"] == "ok":
                steps = f"{1e3 * row['step_s_min']:,.0f} to {1e3 * row['step_s_max']:,.0f}, {len(row['seconds'])} steps"
                cells += [f"{row['tokens_per_s_mean']:,.0f}", f"{1e3 * row['step_s']:,.0f} ({steps})"]
                cells += [shown(row.get("peak_gb")), shown(host_gb(row)), row["settings"]]
            else:
                cells += [reason_of(row), "", "", "", row["settings"]]
            body.append(cells)
        heads = ["", "tokens/s", "step ms", "GPU GB", "host GB", "set up as"]
        file = f"lean/{folder.name}/rows.jsonl"
        made = _block(f"{title_of(rows)}:", heads, body, rows[:1], file)
        blocks.append("\n\n".join(words for words in (made, beside_stock(contenders(rows))) if words))
    return "\n\n".join(blocks) or f"{NOT_MEASURED.capitalize()}."


def beside_stock(rows: Sequence[Row]) -> str:
    """Our methods' speed over that of the fastest stock DeepSpeed that offloads, all rows of one run. Brackets: our
    slowest timed step over their fastest, and the other way round."""
    done = [row for row in rows if row["status"] == "ok"]
    ours = [row for row in done if row["case"] in ALL and ALL[row["case"]].backend is not None]
    stock = [row for row in done if row["case"].startswith(("zero", "zenflow", "superoffload"))]
    if not ours or not stock:
        return ""
    other = max(stock, key=lambda row: float(row["tokens_per_s_mean"]))
    said = []
    for row in ours:
        ratio = row["tokens_per_s_mean"] / other["tokens_per_s_mean"]
        least, most = other["step_s_min"] / row["step_s_max"], other["step_s_max"] / row["step_s_min"]
        said.append(f"{row['case']} {ratio:.2f} ({least:.2f} to {most:.2f})")
    micro = "" if all(row["params"]["spec"].get("accumulation", 1) == 1 for row in done) else ", tokens a step equal"
    return f"In this run{micro}, tokens/s as a multiple of {other['case']}'s: {', '.join(said)}."


def stock_7b() -> str:
    """Stock DeepSpeed that offloads and ours on LLaMA-7B, in words without links: the README may show them too. Rows of
    low-memory states come first; without them, those of the head to head."""
    from ds_zo.bench.compare import last_run

    held = LEAN / "held-7b-24gb" / "rows.jsonl"
    is_held = held.exists()
    rows = contenders(last_run(held if is_held else RESULTS / "compare/llama-7b/uncapped/rows.jsonl", None))
    done = {row["case"]: row for row in rows if row["status"] == "ok"}
    names = [name for name in done if name.startswith("zero")] + [
        name for name in ("lomo", "lsp", "zo") if name in done
    ]
    said = [
        f"{ALL[name].title} {done[name]['tokens_per_s_mean']:,.0f} tokens/s, {shown(done[name]['peak_gb'])} GB of GPU "
        f"and {shown(host_gb(done[name]))} GB of host memory"
        for name in names
    ]
    started = " Stock DeepSpeed was started on the whole card: the limit holds for its steps." if is_held else ""
    where = "steps within 24 GB" if is_held else "on the card as it is"
    return f"LLaMA-7B, 4 x 1,024 tokens, {where}, run {rows[0]['run_id']}: {'; '.join(said)}.{started}"


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
    "lean": lean,
    "stock-7b": stock_7b,
}
"""By the name in a page's marker, as in `pages.BLOCKS`."""
