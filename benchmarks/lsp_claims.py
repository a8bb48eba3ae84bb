"""What LSP is to reach on one GPU, judged by the rows of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_zo.records.rows import Row, table_lines

SHAPES = ("1.3b", "3b")
BATCHES = (4, 1)

_RATIOS = (
    ("lsp-512", "zero2-offload", "tokens_per_s", 3.3, True),
    ("lsp-512", "adamw", "tokens_per_s", 0.95, True),
    ("lsp-512", "adamw-torch", "tokens_per_s", 0.95, True),
    ("lsp-1024", "adamw", "tokens_per_s", 0.85, True),
    ("lsp-512", "zero2-offload", "peak_gb", 1.05, False),
    ("lsp-512", "zero2-offload", "host_gb_added", 0.2, False),
)
"""Who, beside whom, in what, the limit, whether it is the least that will do. `adamw` is DeepSpeed's, with float32
master weights; `adamw-torch` has none: it trains worse, and is the stricter peer in speed."""
_LAYERWISE = ("lsp-none", "zero2-offload", "tokens_per_s", 1.18, True)
"""Dense gradients by the layer-wise schedule: the paper's own gain, at its own size."""
_CAPPED = ("capped/1.3b/1/lsp-512", "capped/7b/4/lsp-512")
_WORDS = {"tokens_per_s": "tokens/s", "peak_gb": "GPU peak", "host_gb_added": "host memory"}


def claims_table(rows: Sequence[Row]) -> str:
    """As Markdown. `rows` are a run's, one for each batch size ([Note: two batch sizes a case])."""
    by_case = {row["case"]: row for row in rows}
    lines: list[list[str]] = []
    for shape in SHAPES:
        for batch in BATCHES:
            ratios = [*_RATIOS, _LAYERWISE] if (shape, batch) == ("1.3b", 4) else _RATIOS
            lines += [_ratio_cells(f"{shape}/{batch}", by_case, *ratio) for ratio in ratios]
    for name in _CAPPED:
        row = by_case.get(name)
        status = "not measured" if row is None else row["status"]
        verdict = "" if status in ("not measured", "not run") else "yes" if status == "ok" else "NO"
        lines.append([name.rpartition("/")[0], "lsp-512 within its cap", status, "ok", verdict])
    return "\n".join(["## Claims", "", *table_lines(["of", "what", "found", "asked", ""], lines)])


def _ratio_cells(
    where: str, rows: Mapping[str, Row], who: str, beside: str, key: str, limit: float, is_least: bool
) -> list[str]:
    found = [rows.get(f"{where}/{name}", {}).get(key) for name in (who, beside)]
    asked = f"{'>=' if is_least else '<='} {limit:g}"
    what = f"{who} / {beside}, {_WORDS[key]}"
    if found[0] is None or not found[1]:
        return [where, what, "not measured", asked, ""]
    ratio = found[0] / found[1]
    holds = ratio >= limit if is_least else ratio <= limit
    return [where, what, f"{ratio:.3f}", asked, "yes" if holds else "NO"]


def by_batch(rows: Sequence[Row]) -> list[Row]:
    """[Note: two batch sizes a case] The preset `issue` sets every contender up once, and measures it with both batch
    sizes and, where asked, taken apart. Here such a row becomes what the other presets would have made: one for each
    batch size, and one for the breakdown."""
    found: list[Row] = []
    for row in rows:
        then_batch = row.get("params", {}).get("then_batch")
        if then_batch is None:
            found.append(row)
            continue
        shape, name = row["params"]["shape"].removeprefix("llama-"), row["case"].rpartition("/")[2]
        own = {key: value for key, value in row.items() if key != "then"}
        alone = {key: value for key, value in own.items() if not key.startswith(("exposed_", "rest_s", "apart_"))}
        first = f"{shape}/{row['params']['batch']}/{name}"
        found.append({**alone, "case": first})
        found.append({**alone, "case": f"{shape}/{then_batch}/{name}", **row.get("then", {})})
        if row["params"].get("take_apart") or (name == "ceiling" and shape == SHAPES[0]):
            found.append({**own, "case": f"breakdown/{first}"})
    return found
