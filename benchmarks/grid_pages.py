"""The blocks of the pages that are made from rows of two grids: `lsp-equal-time` and `lora-lomo-rates`.

A block is empty as long as its file of rows is absent, or lacks one of its methods. Rates are chosen on dev, and the
same number of rates was tried for each side. Spread is over seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.equal_score import best_within, seconds_to
from benchmarks.sources import read_rows, source, sweep
from ds_zo.records.rows import Row, table

RESULTS = Path(__file__).parent / "results"
EQUAL_TIME, LORA_RATES = "h200_lsp_equal_time.jsonl", "h200_lora_lomo_rates.jsonl"
_TIMED = {
    "lsp-512": "LSP, d = 512, embedding projected",
    "lsp-512-dense": "LSP, d = 512, embedding whole",
    "zero-offload": "ZeRO-Offload",
}


def good_rows(file: str) -> list[Row]:
    return [row for row in read_rows(file, folder=RESULTS) if row["status"] == "ok"]


def at_best_rate(rows: Sequence[Row], *, lower_is_better: bool, key: str = "lr") -> list[Row]:
    """The rows at the rate whose mean over seeds is best on dev. Only rates with all seeds count."""
    by_rate: dict[object, list[Row]] = {}
    for row in rows:
        by_rate.setdefault(row[key], []).append(row)
    most = max((len(found) for found in by_rate.values()), default=0)
    whole = [found for found in by_rate.values() if len(found) == most]
    sign = 1.0 if lower_is_better else -1.0
    return min(whole, key=lambda found: sign * statistics.mean(row["dev"] for row in found), default=[])


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Mean, then the least and the largest value."""
    mean = form.format(statistics.mean(values))
    if len(values) < 2:
        return f"{mean} (one seed)"
    return f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def lsp_equal_time() -> str:
    """LSP and ZeRO-Offload in the same seconds, with the same precision, clipping, rates and seeds."""
    rows = good_rows(EQUAL_TIME)
    chosen = {
        name: at_best_rate([row for row in rows if row["method"] == name], lower_is_better=True) for name in _TIMED
    }
    chosen = {name: found for name, found in chosen.items() if found}
    if "zero-offload" not in chosen or len(chosen) < 2:
        return ""
    zero = chosen["zero-offload"]
    first = zero[0]
    timed = {name for name, found in chosen.items() if _commits(found) == _commits(zero)}
    shortest_s = min(row["train_s"] for name in timed for row in chosen[name])
    body = []
    for name, found in chosen.items():
        within = [best_within(row, shortest_s + 1e-2) for row in found]  # rows round
        train_s = best = share = ""
        if name in timed:
            train_s = spread([row["train_s"] for row in found], "{:.0f}")
            best = spread([value for value in within if value is not None]) if all(within) else "no look at dev by then"
            share = "" if found is zero else _seconds_beside(zero, found)
        body.append(
            [
                _TIMED[name],
                f"{found[0]['lr']:g}",
                ", ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in rows if row["method"] == name})),
                train_s,
                best,
                spread([row["after"] for row in found]),
                share,
            ]
        )
    said = (
        f"SmolLM2-135M on Alpaca, {first['steps']} steps of {first['batch_size']} texts, each run alone on the GPU, "
        "all in bf16 with clipping by 1.0 and ZeRO-Offload's copies overlapped. Of the rates that were tried, the best "
        "on dev is shown. Mean over seeds, then the least and the largest. LSP's time includes the fit of its "
        "projectors. The last column is its time to ZeRO-Offload's best perplexity on dev, as a share of "
        "ZeRO-Offload's time to it, with the same seed."
    )
    if len(timed) < len(chosen):
        said += " Times are of one machine. Runs of another commit, on another machine, have none here."
    heads = [
        "",
        "learning rate",
        "tried",
        "s in all",
        f"best dev perplexity in {shortest_s:.0f} s",
        "test perplexity",
        "of ZeRO-Offload's time",
    ]
    return "\n\n".join([said, table(heads, body), source(rows, sweep("lsp-equal-time", "--jobs 1"))])


def _commits(rows: Sequence[Row]) -> set[str]:
    """Runs of one session have one commit. A session has one machine, and times of two machines are not compared."""
    return {row["commit"] for row in rows}


def _seconds_beside(theirs: Sequence[Row], ours: Sequence[Row]) -> str:
    by_seed = {row["seed"]: row for row in ours}
    shares, num_missed = [], 0
    for row in theirs:
        own_s = seconds_to(row, row["dev"])
        our_s = seconds_to(by_seed[row["seed"]], row["dev"]) if row["seed"] in by_seed else None
        if own_s is None or our_s is None:
            num_missed += 1
        else:
            shares.append(our_s / own_s)
    missed = f"not reached with {num_missed} of {len(theirs)} seeds" if num_missed else ""
    return "; ".join(words for words in (spread(shares) if shares else "", missed) if words)


def lora_lomo_rates() -> str:
    """LoRA + LOMO beside LoRA by rank. The adapters had the same two rates on either side."""
    rows = good_rows(LORA_RATES)
    body, gains = [], {}
    for rank in sorted({row["lora_rank"] for row in rows}):
        of_rank = [row for row in rows if row["lora_rank"] == rank]
        lora = at_best_rate([row for row in of_rank if row["method"] == "lora"], lower_is_better=False)
        both = [row for row in of_rank if row["method"].startswith("lora+lomo-")]
        both = at_best_rate(both, lower_is_better=False, key="method")
        if not lora or not both:
            continue
        alone = {row["seed"]: row["after"] for row in lora}
        gained = [100 * (row["after"] - alone[row["seed"]]) for row in both if row["seed"] in alone]
        if not gained:
            continue
        gains[rank] = gained
        scores = [[100 * row["after"] for row in found] for found in (lora, both)]
        rates = [f"{lora[0]['lr']:g}", both[0]["method"].removeprefix("lora+lomo-")]
        cells = [f"{spread(score, '{:.1f}')} at {rate}" for score, rate in zip(scores, rates, strict=True)]
        body.append([str(rank), *cells, spread(gained, "{:+.1f}")])
    if not body:
        return ""
    first = rows[0]
    said = (
        f"SmolLM2-135M on BoolQ, {first['steps']} steps of {first['batch_size']} texts: percent right on test. LoRA "
        "trains adapters by AdamW; LoRA + LOMO also trains the base by LOMO. Both had two rates of the adapters, the "
        "same ones, and the better on dev is shown after `at`. Mean over seeds, then the least and the largest; the "
        "last column is with the same seed:"
    )
    heads = ["rank", "LoRA", "LoRA + LOMO", "what LOMO adds, points"]
    return "\n\n".join([said, table(heads, body), _verdict(gains), source(rows, sweep("lora-lomo-rates"))])


def _verdict(gains: Mapping[int, Sequence[float]]) -> str:
    """Says at which ranks LOMO helps with all seeds, and at which it does not."""
    ahead = [str(rank) for rank, gained in gains.items() if min(gained) > 0]
    behind = [str(rank) for rank, gained in gains.items() if max(gained) < 0]
    open_ = [str(rank) for rank in gains if str(rank) not in (*ahead, *behind)]
    parts = [("better than LoRA alone", ahead), ("worse", behind), ("better or worse by seed", open_)]
    said = [f"{words} at rank {', '.join(ranks)}" for words, ranks in parts if ranks]
    return f"LoRA + LOMO is {'; '.join(said)}."


GRID_BLOCKS: dict[str, Callable[[], str]] = {"lsp-equal-time": lsp_equal_time, "lora-lomo-rates": lora_lomo_rates}
"""By the name in a page's marker, as in `pages.BLOCKS`."""
