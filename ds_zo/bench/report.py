"""Makes a Markdown table and one HTML page of a comparison, from its rows alone."""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepspeed.utils import logger

from ds_zo.bench.contenders import ALL, EXACTLY, settings_of
from ds_zo.bench.losses import smoothed, time_to_loss
from ds_zo.bench.runner import NOT_RUN, VOID
from ds_zo.records.rows import Row, table_lines

_ERROR_CHARACTERS = 110
_GIB = {"KiB": 2.0**-20, "MiB": 2.0**-10, "GiB": 1.0}
_LOADING = ("_engine", "_model", "_partitioned", "_peer")
"""Functions of `entrant` that make a trainer. A case that fails in one of them has not begun to train."""

NOTES = (
    "Speed is of the median step, in brackets of the mean, which counts steps that wait for a delayed update. Steps: "
    "how many were timed, and how many before them were not; slow ones are fewer.",
    "Forward, backward and update are each waited for, so what overlaps across them shows in the step's time only.",
    "Copies alone: time a step in which the GPU's copy engines work and nothing computes. Up and down: bytes copied "
    "between host and GPU. Both are from the profiler's trace of later steps.",
    "DeepSpeed's throughput timer, which by default waits for the GPU twice a step, is off for all, and PyTorch's "
    "allocator has expandable_segments.",
    "GPU memory is what PyTorch allocated at its most, in brackets what it reserved. Host memory is the larger of the "
    "process's peak and the fall of the machine's free memory, which helper processes share in.",
)

_ZO_NOTE = (
    "A star marks steps of zeroth order: two forward passes and no gradient. Such a step teaches less than the others, "
    "so that its tokens/s are not its speed of learning."
)
_HOST_NOTE = (
    "Host memory is the larger of the process's peak and the fall of the machine's free memory, which helper processes "
    "share in."
)
_GPU_COLUMNS = ("copies alone ms", "GPU GB", "up GB", "down GB")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2024; background: #fff; margin: 2rem auto; max-width: 84rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
.facts { color: #555; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; } th, td { padding: .3rem .5rem; text-align: right;
  border-bottom: 1px solid #e3e6ea; white-space: nowrap; }
th { text-align: right; color: #444; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; font-weight: 600; } td.words { text-align: left; white-space: normal;
  min-width: 18rem; color: #444; } tr.failed td { color: #8a2f2f; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 0 2rem; }
figure { margin: 0 0 1rem; } figure svg { max-width: 100%; height: auto; }
figcaption { color: #555; font-size: .88rem; }
pre { background: #f6f7f9; padding: .7rem; overflow-x: auto; font-size: .78rem; white-space: pre-wrap; }
"""


def write_report(rows: Sequence[Row], out: Path, *, target_loss: float | None = None) -> str:
    """Writes report.md into `out` and, where matplotlib is installed, report.html; returns the Markdown."""
    text = markdown(rows, target_loss=target_loss)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning(
            f"no page: matplotlib is not installed; where it is, ds-zo bench --report-only --out {out} draws it"
        )
    else:
        (out / "report.html").write_text(page(rows, target_loss=target_loss), encoding="utf-8")
    return text


def markdown(rows: Sequence[Row], *, target_loss: float | None = None) -> str:
    """Makes the tables: contenders with numbers, the fastest first; contenders without; the set-up of each."""
    entrants = contenders(rows)
    columns = _columns(entrants, target_loss)
    done, failed = by_speed(entrants), [row for row in entrants if row["status"] != "ok"]
    lines = [f"## {title_of(rows)}", "", facts_of(rows), ""]
    if done:
        lines += [*table_lines(list(columns), [[cell(row) for cell in columns.values()] for row in done]), ""]
    if failed:
        why = [[row["contender"], reason_of(row)] for row in failed]
        lines += [*table_lines(["without numbers", "why"], why), ""]
    lines += [*(f"- {note}" for note in notes_of(rows)), ""]
    lines += table_lines(["contender", "set up as"], [[row["contender"], row["settings"]] for row in entrants])
    return "\n".join(lines)


def notes_of(rows: Sequence[Row]) -> list[str]:
    entrants = contenders(rows)
    moved = [row for row in entrants if row.get("ran_with_gb")]
    elsewhere = ", ".join(row["contender"] for row in moved if row["status"] == "ok")
    failed = ", ".join(row["contender"] for row in moved if row["status"] != "ok")
    exactly = ", ".join(row["contender"] for row in entrants if row["pinned_exactly"])
    astray = ", ".join(row["contender"] for row in entrants if row.get("starts_as_given") is False)
    notes = [note for note in NOTES if "GPU" not in note or on_gpu(entrants)]
    if not on_gpu(entrants):
        notes.append(_HOST_NOTE)
    if any(is_zeroth_order(row) for row in entrants):
        notes.append(_ZO_NOTE)
    if elsewhere:
        notes.append(
            f"Run once, with more memory than this cap, of which they never held more than it has: {elsewhere}."
        )
    if failed:
        notes.append(f"Run once, with more memory than this cap, where they failed: {failed}.")
    if exactly:
        notes.append(
            f"{EXACTLY[2].upper()}{EXACTLY[3:]}, since PyTorch would round up to more than this host has: {exactly}."
        )
    if astray:
        notes.append(f"Not started from the weights they were given, so without losses: {astray}.")
    return notes


def page(rows: Sequence[Row], *, target_loss: float | None = None) -> str:
    """Makes one HTML file that opens without a server or a network."""
    from ds_zo.bench.plots import learning_curves

    entrants = contenders(rows)
    done, failed = by_speed(entrants), [row for row in entrants if row["status"] != "ok"]
    is_random = entrants[0]["params"]["spec"]["model"].startswith("random:")
    body = [f"<h1>{_text(title_of(rows))}</h1>", f'<p class="facts">{_text(facts_of(rows))}</p>']
    body += ['<div class="scroll">', _table([*done, *failed], target_loss), "</div>"]
    body += ['<ul class="facts">', *(f"<li>{_text(note)}</li>" for note in notes_of(rows)), "</ul>"]
    if done:
        figures = (
            *_device_figures(done),
            (
                "Loss against steps",
                learning_curves(done, against="steps"),
                "The same batches in the same order."
                + (" Random weights and a few steps: that each trains, not which trains best." if is_random else ""),
            ),
            ("Loss against time", learning_curves(done, against="seconds"), "At each contender's mean speed."),
        )
        body.append('<div class="figures">')
        for name, svg, caption in figures:
            body.append(
                f"<section><h2>{_text(name)}</h2><figure>{svg}<figcaption>{_text(caption)}</figcaption></figure></section>"
            )
        body.append("</div>")
    body += ["<h2>How each is set up</h2>", _settings_table(entrants)]
    if failed:
        body.append("<h2>Last words</h2>")
        body += [
            f"<details><summary>{_text(row['case'])}: {_text(row['status'])}</summary>"
            f"<pre>{_text(row.get('error'))}\n\n{_text(row.get('last_words') or '')}</pre></details>"
            for row in failed
        ]
    head = f'<meta charset="utf-8"><title>{_text(title_of(rows))}</title><style>{STYLE}</style>'
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    content = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}{viewport}</head>\n<body>\n{content}\n</body></html>\n'


def _device_figures(done: Sequence[Row]) -> tuple[tuple[str, str, str], ...]:
    """The figures about the GPU: name, picture, caption."""
    from ds_zo.bench.plots import breakdown, memory_against_speed

    if not on_gpu(done):
        return ()
    cap_gb = done[0]["params"]["spec"].get("device_memory_gb")
    return (
        (
            "Memory against speed",
            memory_against_speed(done, cap_gb=cap_gb),
            "Up and to the left is better. Circles are ours.",
        ),
        ("Where a step's time goes", breakdown(done), "Upper bar: the parts, each waited for. Lower: the GPU."),
    )


def contenders(rows: Sequence[Row]) -> list[Row]:
    """Returns the contenders' rows, all of one run: two machines of the same kind differ by more than most contenders
    do."""
    runs = {row["run_id"] for row in rows}
    if len(runs) > 1:
        raise ValueError(f"a table compares rows of one run, got {', '.join(sorted(runs))}: choose one (--run-id)")
    found = [
        row
        | {"contender": row["case"], **_settings(row)}
        | ({"losses": []} if row.get("starts_as_given") is False else {})
        for row in rows
        if "contender" in row.get("params", {})
    ]
    if not found:
        raise ValueError("no contender has a row yet: --resume continues the run")
    return in_table_order(found)


def in_table_order(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows in the order of the table, not in the order of the run."""
    place = {name: i for i, name in enumerate(ALL)}
    return sorted(rows, key=lambda row: place.get(row["case"], len(place) if "contender" in row["params"] else -1))


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that have numbers, the fastest first."""
    return sorted((row for row in rows if row["status"] == "ok"), key=lambda row: -float(row["tokens_per_s"]))


def _settings(row: Row) -> Row:
    """Returns the set-up in words, also of a case that ended before it recorded them, and whether DeepSpeed pinned
    memory in exact sizes. A note of the table says the latter once for all contenders."""
    words = row.get("settings") or (settings_of(ALL[row["case"]], row.get("env", {})) if row["case"] in ALL else "")
    return {"settings": words.removesuffix(EXACTLY), "pinned_exactly": words.endswith(EXACTLY)}


def title_of(rows: Sequence[Row]) -> str:
    spec = contenders(rows)[0]["params"]["spec"]
    cap = spec.get("device_memory_gb")
    card = f", GPU memory capped at {cap:g} GB" if cap is not None and on_gpu(rows) else ""
    layers = f" cut to {spec['layers']} layers" if spec.get("layers") else ""
    model = re.sub(r"^random:(.*)", r"\1 with random weights", spec["model"])
    return f"{model}{layers}, {spec['batch']} x {spec['length']} tokens, {spec['dtype']}{card}"


def facts_of(rows: Sequence[Row]) -> str:
    first = contenders(rows)[0]
    facts = [f"run {first['run_id']}", first.get("gpu") or "no GPU", f"{first.get('cpus')} CPUs"]
    machine = next((row for row in rows if row.get("cpu_adam_gparams_per_s")), None)
    if machine is not None:
        if machine.get("link_gbps"):
            link = machine["link_gbps"]
            facts.append(f"link {link['up']:.1f} GB/s up, {link['down']:.1f} down, {link['both']:.1f} both")
        facts.append(f"CPU Adam {machine['cpu_adam_gparams_per_s']:.2f} G parameters/s")
    size = next((row["parameters"] for row in rows if row.get("parameters")), None)
    if size is not None:
        facts.append(f"{size:,} parameters")
    spec = first["params"]["spec"]
    facts.append("activations recomputed" if spec["checkpointing"] else "activations kept")
    facts.append(f"commit {', '.join(dict.fromkeys(str(row.get('commit')) for row in contenders(rows)))}")
    facts += [f"{name} {version}" for name, version in first.get("versions", {}).items()]
    return "; ".join(facts)


def on_gpu(rows: Sequence[Row]) -> bool:
    return any(row.get("gpu") for row in rows)


def is_zeroth_order(row: Row) -> bool:
    """Whether the case trains by ZO or MeZO."""
    optimizer = (row["params"].get("config") or {}).get("optimizer") or {}
    return str(optimizer.get("type")).lower() in ("zo", "mezo")


def _columns(rows: Sequence[Row], target_loss: float | None) -> dict[str, Callable[[Row], str]]:
    def milliseconds(key: str) -> Callable[[Row], str]:
        return lambda row: shown(row.get(key), scale=1e3)

    columns: dict[str, Callable[[Row], str]] = {
        "contender": lambda row: f"{row['contender']}{'*' if is_zeroth_order(row) else ''}",
        "tokens/s": _speed,
        "step ms": _spread,
        "steps": _steps,
        "forward ms": milliseconds("forward_s"),
        "backward ms": milliseconds("backward_s"),
        "update ms": milliseconds("update_s"),
        "copies alone ms": milliseconds("copy_exposed_s"),
        "GPU GB": lambda row: _pair(row.get("peak_gb"), row.get("peak_reserved_gb")),
        "host GB": lambda row: shown(host_gb(row)),
        "up GB": lambda row: shown(row.get("up_gb")),
        "down GB": lambda row: shown(row.get("down_gb")),
        "loss after N": _loss,
    }
    if target_loss is not None:
        columns[f"s to loss {target_loss:g}"] = lambda row: shown(time_to_loss(row, target_loss))
    if on_gpu(rows):
        return columns
    done = [row for row in rows if row["status"] == "ok"]
    kept = {name: cell for name, cell in columns.items() if name not in _GPU_COLUMNS}
    return {name: cell for name, cell in kept.items() if any(map(cell, done)) or not done}


def _speed(row: Row) -> str:
    return f"{row['tokens_per_s']:,.0f} ({row['tokens_per_s_mean']:,.0f})"


def reason_of(row: Row) -> str:
    """Says why a case has no numbers."""
    reason = _first_line(row.get("error"))
    if row["status"] == "oom":
        return _out_of_memory(row) or f"oom: {reason}"
    planned = planned_host_gb(row)
    if planned is not None:
        return f"not run: would take {planned[0]} GB of host memory, {planned[1]} were free"
    if row["status"] == VOID:
        return f"not measured: {row.get('error')}"
    return reason if reason.startswith(NOT_RUN) else f"{row['status']}: {reason}"


def planned_host_gb(row: Row) -> tuple[str, str] | None:
    """Returns (planned GB, available GB) of a case that was skipped for want of host memory; None: of any other
    case."""
    found = re.fullmatch(r"not run: planned ([\d.]+) of ([\d.]+) GB of host memory", str(row.get("error")))
    return (found[1], found[2]) if found else None


def _out_of_memory(row: Row) -> str | None:
    """Returns PyTorch's out-of-memory message in GB of the emulated card; None: the message is not PyTorch's. The
    original names the whole card's memory too."""
    words = str(row.get("error"))

    def gb(pattern: str) -> float | None:
        found = re.search(pattern.replace("SIZE", r"([\d.]+) ([KMG]iB)"), words)
        return float(found[1]) * _GIB[found[2]] * 2**30 / 1e9 if found else None

    wanted, held = gb("Tried to allocate SIZE"), gb("allocated memory SIZE is allocated")
    card = gb("SIZE allowed") or gb("total capacity of SIZE")
    if wanted is None or held is None or card is None:
        return None
    when = " while it was set up" if _was_loading(row) else " in a step"
    return f"does not fit: {shown(wanted)} GB more wanted{when}, with {shown(held)} of {shown(card)} GB in use"


def _was_loading(row: Row) -> bool:
    if row.get("failed_in"):
        return row["failed_in"] in _LOADING
    words = str(row.get("last_words"))
    return any(f"in {name}\n" in words for name in (*_LOADING, "_configure_optimizer", "_configure_zero_optimizer"))


def _steps(row: Row) -> str:
    timed, before = row.get("seconds"), row.get("warmup_seconds")
    return "" if timed is None or before is None else f"{len(timed)} after {len(before)}"


def _spread(row: Row) -> str:
    if row.get("step_s") is None:
        return ""
    return f"{shown(row['step_s'], scale=1e3)} ({shown(row['step_s_min'], scale=1e3)} to " + (
        f"{shown(row['step_s_max'], scale=1e3)})"
    )


def speed_range(row: Row) -> str:
    """Returns tokens/s of the slowest and of the fastest timed step, and how many steps were timed."""
    tokens = row["tokens_per_s"] * row["step_s"]
    return f"{tokens / row['step_s_max']:,.0f} to {tokens / row['step_s_min']:,.0f}, {len(row['seconds'])}"


def _loss(row: Row) -> str:
    losses = row.get("losses") or []
    return f"{smoothed(losses)[-1]:.3f} ({len(losses)})" if losses else ""


def host_gb(row: Row) -> float | None:
    peak = row.get("host_peak_gb")
    on_gpu = row.get("device") == "cuda"
    return max(peak, row.get("host_drop_gb") or 0.0) if peak is not None and on_gpu else peak


def _pair(value: float | None, bracketed: float | None) -> str:
    return "" if value is None else f"{shown(value)} ({shown(bracketed)})"


def shown(value: float | None, *, scale: float = 1.0) -> str:
    if value is None:
        return ""
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _first_line(error: Any) -> str:
    line = (str(error or "").strip().splitlines() or [""])[0]
    return line if len(line) <= _ERROR_CHARACTERS else line[: _ERROR_CHARACTERS - 3] + "..."


def _table(rows: Sequence[Row], target_loss: float | None) -> str:
    columns = _columns(rows, target_loss)
    parts = ["<table><thead><tr>", *(f"<th>{_text(name)}</th>" for name in columns), "</tr></thead><tbody>"]
    for row in rows:
        if row["status"] == "ok":
            parts += ["<tr>", *(f"<td>{_text(cell(row))}</td>" for cell in columns.values()), "</tr>"]
        else:
            parts.append(f'<tr class="failed"><td>{_text(row["contender"])}</td>')
            parts.append(f'<td class="words" colspan="{len(columns) - 1}">{_text(reason_of(row))}</td></tr>')
    return "".join([*parts, "</tbody></table>"])


def _settings_table(rows: Sequence[Row]) -> str:
    lines = [
        f'<tr><td>{_text(row["contender"])}</td><td class="words">{_text(row["settings"])}</td>'
        f'<td class="words">{_text(row.get("running") or "")}</td></tr>'
        for row in rows
    ]
    return "".join(["<table><tbody>", *lines, "</tbody></table>"])


def _text(value: Any) -> str:
    return html.escape(str(value))
