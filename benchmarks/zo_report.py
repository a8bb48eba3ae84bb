"""Markdown tables from the rows of ZO's presets. A ratio is always to a row of the same run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.zo_presets import CAP_GB, TARGETS, Target
from ds_zo.records.rows import Row, table

Rows = Mapping[str, Row]
"""One run's rows by case."""

_FEW_STEPS = 20
_KERNEL_TARGETS = {"bf16 replay 1 + perturb 1": (215.0, 350.0)}
_SMALLER_IS_BETTER = ("peak_gb", "host")


def report(rows: Iterable[Row]) -> str:
    """A section a run, a table for each of its parts that has rows."""
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "case" in row:
            runs.setdefault(str(row.get("run_id")), {})[row["case"]] = row
    if not runs:
        raise ValueError("no row has a case and a run: give rows that `zo_speed preset ... --out` wrote")
    return "\n\n".join(part for run_id, of_run in runs.items() for part in _run_parts(run_id, of_run)) + "\n"


def _run_parts(run_id: str, rows: Rows) -> list[str]:
    tables: tuple[tuple[str, Callable[[Rows], str | None]], ...] = (
        ("Targets", targets_table),
        ("Rows", all_rows),
        ("Table 1: MeZO and ZO, every block streamed", table_1),
        ("Tables 2 and 5: without one feature", ablation_table),
        ("Tables 3 and 9: compute and wire of a float32 model", amp_table),
        ("Tables 7 and 8: batch and length, fp16", sweep_table),
        ("Table 10: layers of models larger than the host", table_10),
    )
    parts = [_machine(run_id, rows)]
    for title, make in tables:
        made = make(rows)
        if made is not None:
            parts.append(f"### {title}\n\n{made}")
    return parts


def _machine(run_id: str, rows: Rows) -> str:
    any_row = next(iter(rows.values()))
    versions = any_row.get("versions") or {}
    lines = [
        f"## Run {run_id}",
        f"{any_row.get('gpu')}, {any_row.get('cpus')} CPUs, commit {any_row.get('commit')}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". Random weights, random token ids.",
    ]
    machine = rows.get("machine", {})
    if link := machine.get("link_gbps"):
        lines.append("Link: " + ", ".join(f"{way} {gbps:.1f} GB/s" for way, gbps in link.items()) + ".")
    if rates := machine.get("kernel_gparameters_per_s"):
        body = []
        for name, rate in rates.items():
            least, stretch = _KERNEL_TARGETS.get(name, (None, None))
            body.append([name, _number(rate), _number(least), _number(stretch)])
        lines.append(table(["kernel", "G parameters/s", "at least", "stretch"], body))
    return "\n\n".join(lines)


def ratios(rows: Iterable[Row]) -> str:
    """One line a row that has something of its run to be compared with: what a run prints when it ends."""
    by_case = {row["case"]: row for row in rows}
    lines = []
    for name, row in by_case.items():
        if row.get("status", "ok") != "ok":
            lines.append(f"{name}: {row['status']}, {row.get('error', '')}"[:120])
            continue
        texts = [_judgement(target, row, by_case) for target in TARGETS.get(name, ())]
        if not texts and row.get("method") == "zo":
            over = [ratio_to_mezo(point, by_case) for point in points_of(row)]
            texts = [f"{_number(ratio)} x MeZO" for ratio in over if ratio is not None]
        if texts:
            lines.append(f"{name}: {'; '.join(texts)}")
    return "\n".join(lines)


def _judgement(target: Target, row: Row, rows: Rows) -> str:
    label, measured, wanted, _, verdict = _judged(target, row, rows)
    return f"{label} {measured} ({', '.join(filter(None, (wanted, verdict)))})"


# The targets


def targets_table(rows: Rows) -> str | None:
    body = []
    for name, wanted in TARGETS.items():
        if name not in rows:
            continue
        for target in wanted:
            body.append([name, *_judged(target, rows[name], rows)])
    return table(["case", "what", "measured", "wanted", "stretch", "reached"], body) if body else None


def _judged(target: Target, row: Row, rows: Rows) -> list[str]:
    what = {"ratio": "tokens/s, x MeZO", "peak_gb": "peak GB", "link": "link up, of one-way bandwidth"}
    label = what.get(target.what, target.what)
    limit = target.least
    if target.what == "host":
        limit = _host_limit(row)
        label = "host GB (1.05 x stored + 2)"
    sign = "<=" if target.what in _SMALLER_IS_BETTER else ">="
    shown = [f"{sign} {_number(limit)}" if limit is not None else "", _number(target.stretch)]
    if row.get("status", "ok") != "ok":
        return [label, str(row["status"]), *shown, "no"]
    if target.what == "finite":
        steps, good = trained(row)
        text = f"{steps} steps, loss {_number(row.get('loss'))}, peak {_number(largest_peak(row))} GB"
        return [f"runs within {CAP_GB:g} GB", text, f"{_FEW_STEPS} steps, finite", "", "yes" if good else "no"]
    value = _value(target.what, row, rows)
    if value is None:
        return [label, "", *shown, ""]
    better = -1 if target.what in _SMALLER_IS_BETTER else 1
    verdict = ""
    if limit is not None:
        verdict = "yes" if better * value >= better * limit else "no"
    if verdict == "yes" and target.stretch is not None and better * value >= better * target.stretch:
        verdict = "stretch"
    return [label, _number(value), *shown, verdict]


def _value(what: str, row: Row, rows: Rows) -> float | None:
    if what == "ratio":
        return ratio_to_mezo(row, rows)
    if what == "link":
        return link_busy(row, rows)
    if what == "host":
        return row.get("host_peak_gb")
    if what.startswith("of "):
        other = rows.get(what.removeprefix("of "), {})
        return row["tokens_per_s"] / other["tokens_per_s"] if other.get("tokens_per_s") else None
    return row.get(what)


def trained(row: Row) -> tuple[int, bool]:
    """(steps made in all, whether there were enough, with finite losses, within the cap)."""
    phases = [row, *([row["filled"]] if row.get("filled") else [])]
    steps = sum(phase["warmup"] + phase["steps"] for phase in phases)
    finite = all(math.isfinite(loss) for phase in phases for loss in (phase.get("losses") or [phase["loss"]]))
    within = row.get("cap_gb") is None or largest_peak(row) <= row["cap_gb"]
    return steps, steps >= _FEW_STEPS and finite and within


def largest_peak(row: Row) -> float:
    return max(row.get("peak_gb") or 0.0, (row.get("filled") or {}).get("peak_gb") or 0.0)


def ratio_to_mezo(row: Row, rows: Rows) -> float | None:
    """tokens/s over in-memory MeZO's on the same model and input in the same run."""
    mezo = _mezo_of(row, rows)
    return row["tokens_per_s"] / mezo["tokens_per_s"] if mezo is not None else None


def _mezo_of(row: Row, rows: Rows) -> Row | None:
    same = ("shape", "dtype", "layers", "batch", "length")
    for other in rows.values():
        for point in points_of(other):
            if other.get("method") == "mezo" and all(point.get(key) == row.get(key) for key in same):
                return point
    return None


def points_of(row: Row) -> list[Row]:
    """A row for each input that a case measured; none for a case that did not run."""
    if row.get("tokens_per_s") is None:
        return []
    return [row | point for point in row.get("points") or [row]]


def link_busy(row: Row, rows: Rows) -> float | None:
    """Bytes brought up in a step, over what the link measured in the same run would carry in its time."""
    link = rows.get("machine", {}).get("link_gbps")
    return row["up_gb_a_step"] / row["step_s"] / link["up"] if link and row.get("up_gb_a_step") else None


def _host_limit(row: Row) -> float | None:
    return 1.05 * row["host_gb"] + 2 if row.get("host_gb") is not None else None


# All rows


def all_rows(rows: Rows) -> str | None:
    heads = [
        *("case", "layers", "B x T", "wire", "master", "interval", "resident", "tokens/s", "x MeZO"),
        "ms (min-max of steps)",
    ]
    heads += ["GPU GB", "host GB", "up, down GB a step", "link busy", "load s", "status"]
    body = []
    for name, row in rows.items():
        if "method" not in row or row["method"] in ("machine", "timeline", "warmup"):
            if row.get("status", "ok") != "ok":
                body.append([name, *[""] * (len(heads) - 2), str(row["status"])])
            continue
        for point in points_of(row) or [row]:
            body.append([name, *_cells(point, rows)])
        if row.get("filled"):
            body.append([f"{name}, device filled", *_cells(row | row["filled"], rows)])
    return table(heads, body) if body else None


def _cells(row: Row, rows: Rows) -> list[str]:
    stream = row.get("stream") or {}
    streams = row["method"] == "zo" and not row.get("resident")
    measured = row.get("tokens_per_s") is not None
    spread = (
        f"{1e3 * row['step_s']:.0f} ({1e3 * row['step_s_min']:.0f}-{1e3 * row['step_s_max']:.0f} of {row['steps']})"
        if measured
        else ""
    )
    moved = f"{row['up_gb_a_step']:.2f}, {row['down_gb_a_step']:.2f}" if measured and streams else ""
    status = row.get("status", "ok")
    if row.get("fits") is False:
        status = f"needs {row['needs_gb']:.0f} GB, there are {row['device_gb']:.0f}"
    busy = link_busy(row, rows) if measured else None
    return [
        _depth(row),
        f"{row['batch']} x {row['length']}" if measured else "",
        str(stream.get("wire_dtype", row["dtype"])) if streams else str(row["dtype"]),
        str(row.get("master", "")),
        str(row.get("interval", "")),
        f"{row['resident_blocks']}/{row['num_blocks']}" if "num_blocks" in row else "all",
        _number(row.get("tokens_per_s")),
        _number(ratio_to_mezo(row, rows)) if measured and row["method"] != "mezo" else "",
        spread,
        _number(row.get("peak_gb")),
        _number(row.get("host_peak_gb")),
        moved,
        f"{busy:.0%}" if busy is not None else "",
        _number(row.get("load_s")),
        status,
    ]


def _depth(row: Row) -> str:
    layers, full = row.get("layers"), row.get("full_layers")
    return str(layers) if layers == full else f"{layers} of {full}"


# The paper's tables


def table_1(rows: Rows) -> str | None:
    """GB and tokens/s a size and dtype; in brackets ZO over MeZO."""
    body = []
    for size in _sizes(rows, "t1."):
        for dtype in ("fp32", "fp16", "fp8"):
            mezo, ours = rows.get(f"t1.{size}.{dtype}.mezo", {}), rows.get(f"t1.{size}.{dtype}.zo", {})
            either = ours if "layers" in ours else mezo
            if "layers" in either:
                body.append(
                    [size, dtype, _depth(either), *_pair(mezo, ours, "peak_gb"), *_pair(mezo, ours, "tokens_per_s")]
                )
            for kind in ("mezo", "zo"):
                whole = rows.get(f"t1.{size}.{dtype}.{kind}.whole")
                if whole is not None and whole.get("tokens_per_s") is None:
                    reason = (
                        whole.get("error") or f"needs {whole['needs_gb']:.0f} GB, there are {whole['device_gb']:.0f}"
                    )
                    body.append([size, dtype, f"all, {kind}: {reason}", *[""] * 4])
    heads = ["size", "dtype", "layers", "MeZO GB", "ZO GB (x)", "MeZO tokens/s", "ZO tokens/s (x)"]
    return table(heads, body) if body else None


def ablation_table(rows: Rows) -> str | None:
    body = []
    for name, row in rows.items():
        prefix, _, rest = name.rpartition(".")
        prefix, _, asked = prefix.rpartition(".")
        if not name.startswith("t2."):
            continue
        in_table_1 = f"t1.{prefix.removeprefix('t2.')}.fp16.zo"
        whole = rows.get(in_table_1 if asked == "auto" else f"{prefix}.{asked}.all", {})
        cells = [str(row.get("shape")), rest.replace("_", " "), asked, str(row.get("interval", "")), _depth(row)]
        ratio = ratio_to_mezo(row, rows) if row.get("tokens_per_s") else None
        body.append([*cells, _number(row.get("tokens_per_s")), _over(row, whole, "tokens_per_s"), _number(ratio)])
    heads = ["model", "features", "interval asked", "used", "layers", "tokens/s", "x all features", "x MeZO"]
    return table(heads, body) if body else None


def amp_table(rows: Rows) -> str | None:
    body = []
    for name, row in rows.items():
        prefix, _, wire = name.rpartition(".")
        if not name.startswith("amp."):
            continue
        plain = rows.get(f"{prefix}.fp32", {})
        tokens, over = _number(row.get("tokens_per_s")), _over(row, plain, "tokens_per_s")
        up, part = row.get("up_gb_a_step"), _over(row, plain, "up_gb_a_step")
        cells = [str(row.get("shape")), _depth(row), prefix.rpartition(".")[2], wire]
        body.append([*cells, tokens, over, _number(up), part, _number(row.get("peak_gb"))])
    heads = ["model", "layers", "compute", "wire", "tokens/s", "x fp32 wire", "up GB a step", "x fp32 wire", "GPU GB"]
    return table(heads, body) if body else None


def sweep_table(rows: Rows) -> str | None:
    body = []
    for name, row in rows.items():
        if not (name.startswith("t78.") and ".zo" in name):
            continue
        for point in points_of(row):
            mezo = _mezo_of(point, rows) or {}
            cells = [row["shape"], _depth(row), str(point["batch"]), str(point["length"])]
            body.append([*cells, *_pair(mezo, point, "peak_gb"), *_pair(mezo, point, "tokens_per_s")])
    heads = ["model", "layers", "B", "T", "MeZO GB", "ZO GB (x)", "MeZO tokens/s", "ZO tokens/s (x)"]
    return table(heads, body) if body else None


def table_10(rows: Rows) -> str | None:
    body = []
    for name, row in rows.items():
        if not name.startswith("t10."):
            continue
        wire = (row.get("stream") or {}).get("wire_dtype", "")
        cells = [name.removeprefix("t10."), _depth(row), wire, _number(row.get("cap_gb")), _number(row.get("peak_gb"))]
        layer_ms = 1e3 * row["step_s"] / row["layers"] if row.get("step_s") else None
        body.append([*cells, _number(row.get("tokens_per_s")), _number(layer_ms), str(row.get("status", "ok"))])
    heads = ["model", "layers", "wire", "cap GB", "GPU GB", "tokens/s at this depth", "ms a layer", "status"]
    return table(heads, body) if body else None


def _sizes(rows: Rows, prefix: str) -> list[str]:
    """By model size, as named between `prefix` and the next part that is no number."""
    found = set()
    for name in rows:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            end = next(i for i, letter in enumerate(rest) if letter in "mb") + 1
            found.add(rest[:end])
    return sorted(found, key=lambda size: float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]])


def _pair(mezo: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> list[str]:
    def text(row: Mapping[str, Any]) -> str:
        return _number(row.get(key)) if row.get(key) is not None else str(row.get("status", ""))

    over = _over(ours, mezo, key)
    return [text(mezo), f"{text(ours)} ({over})" if over else text(ours)]


def _over(row: Mapping[str, Any], base: Mapping[str, Any], key: str) -> str:
    return f"{row[key] / base[key]:.2f}" if row.get(key) and base.get(key) else ""


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
