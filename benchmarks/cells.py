"""What a cell of a page shows of rows, and what a block says of the rows it has used.

A range in brackets is that of single steps, then the number of timed steps. The range of a ratio is that of one side's
slowest step over the other side's fastest, and the other way round.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence

from benchmarks.accuracy import by_seed
from benchmarks.humaneval.task import wilson
from ds_zo.bench.contenders import ALL, EXACTLY
from ds_zo.bench.report import host_gb, planned_host_gb, reason_of, shown, speed_range
from ds_zo.bench.runner import VOID
from ds_zo.records.rows import Row
from ds_zo.tasks.score import LOWER_IS_BETTER

Rows = Sequence[Row]
_GIB_OF_GB = 1e9 / 2**30


# Of one row of each case


def ms(row: Row, *keys: str) -> str | None:
    """Milliseconds of the median step, with the range of all; of the first of some keys the milliseconds alone."""
    seconds = next((row[key] for key in keys or ["step_s"] if row.get(key) is not None), None)
    if seconds is None:
        return None
    found = f"{1e3 * seconds:,.0f}"
    if keys or not row.get("seconds"):
        return found
    return f"{found} ({1e3 * row['step_s_min']:,.0f} to {1e3 * row['step_s_max']:,.0f}, {len(row['seconds'])})"


def speed(row: Row) -> str:
    """Tokens/s of the median step, with the range of all."""
    found = f"{row['tokens_per_s']:,.0f}"
    return f"{found} ({speed_range(row)})" if row.get("seconds") else found


def ratio(row: Row, base: Row) -> str:
    """How many times the tokens/s of another row of the same run."""
    if row.get("run_id") != base.get("run_id"):
        raise ValueError(f"a ratio needs rows of one run, got {row.get('run_id')} and {base.get('run_id')}")
    found = f"{row['tokens_per_s'] / base['tokens_per_s']:.2f}"
    if not row.get("seconds") or not base.get("seconds"):
        return found
    tokens, others = (side["tokens_per_s"] * side["step_s"] for side in (row, base))
    least, most = (
        tokens / row[mine] / (others / base[other])
        for mine, other in (("step_s_max", "step_s_min"), ("step_s_min", "step_s_max"))
    )
    return f"{found} ({least:.2f} to {most:.2f})"


def quotient(row: Row, base: Row, key: str, other: str | None = None) -> str:
    return f"{row[key] / base[other or key]:.2f}"


def change(row: Row, base: Row, key: str, form: str) -> str:
    """By how many percent a value is larger than that of the base."""
    return f"{100 * (row[key] / base[key] - 1):{form}}%"


def percent(row: Row, key: str) -> str:
    return "" if row.get(key) is None else f"{100 * row[key]:.0f}%"


def gib(row: Row, key: str) -> str:
    """GiB; a total that the card does not hold is a sum of parts."""
    return f"{row[key] * _GIB_OF_GB:.2f}" + (" (sum)" if key == "total_gb" and not row["fits"] else "")


def beside_plan(row: Row, key: str, planned: str) -> str:
    """GB, with those that were planned in brackets."""
    value = host_gb(row) if key == "host_peak_gb" else row[key]
    return f"{value:.1f}" + ("" if row.get(planned) is None else f" ({row[planned]:.1f})")


def host(row: Row) -> str:
    gb = host_gb(row) or 0.0
    return f"{gb:.{0 if gb >= 100 else 1}f} GB"


def mean_speed(row: Row) -> str:
    """Mean tokens/s; where a row has none, those of the median step."""
    return f"{row.get('tokens_per_s_mean') or row['tokens_per_s']:,.0f}"


def ms_a_layer(row: Row) -> str:
    return f"{1e3 * row['step_s'] / row['params']['layers']:.0f}"


def mean_ratio(row: Row, base: Row) -> str:
    """The mean tokens/s as a multiple of the base's. Brackets: slowest step over the fastest, and the other way."""
    least, most = base["step_s_min"] / row["step_s_max"], base["step_s_max"] / row["step_s_min"]
    return f"{row['tokens_per_s_mean'] / base['tokens_per_s_mean']:.2f} ({least:.2f} to {most:.2f})"


def settings(row: Row) -> str:
    """How a contender is set up. Names of other contenders are those of the tables."""
    words = row["settings"].removesuffix(EXACTLY)
    return re.sub(r"\bas ([\w-]+),", lambda found: f"as {ALL[found[1]].title if found[1] in ALL else found[1]},", words)


def head_to_head(row: Row) -> str:
    """Mean speed with its range, GPU and host memory; or in two words why there are no figures."""
    planned = planned_host_gb(row)
    if planned is not None:
        return f"would take {float(planned[0]):.0f} GB of host memory"
    said = _OUTCOMES.get(row["status"], reason_of(row))
    if row["status"] == "ok":
        speeds = f"{row['tokens_per_s_mean']:,.0f} ({speed_range(row)})"
        said = " / ".join([speeds, shown(row.get("peak_gb")), shown(host_gb(row))])
    return said + (" †" if row.get("ran_with_gb") else "")


_OUTCOMES = {"oom": "does not fit", "timeout": "too slow", "killed": "stopped: host memory", VOID: "not measured"}


ROW_SHOWS: dict[str, Callable[..., str | None]] = {
    "ms": ms,
    "speed": speed,
    "ratio": ratio,
    "quotient": quotient,
    "change": change,
    "percent": percent,
    "gib": gib,
    "beside_plan": beside_plan,
    "ms_a_layer": ms_a_layer,
    "host": host,
    "mean_speed": mean_speed,
    "mean_ratio": mean_ratio,
    "settings": settings,
    "head_to_head": head_to_head,
    "gpu_gb": lambda row: shown(row["peak_gb"]),
    "host_gb": lambda row: shown(host_gb(row)),
}
"""By name in a block's data: makes a cell of one row for each case that the column names."""


# Of training runs: all rows of a case


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Mean, then the least and the largest value; of one value the value."""
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} ({min(values):{form}} to {max(values):{form}})"


def is_loss(rows: Rows) -> bool:
    return rows[0]["metric"] in LOWER_IS_BETTER


def scores(rows: Rows, key: str = "after") -> list[float]:
    """Percent, or perplexity, one for each seed."""
    scale = 1 if is_loss(rows) else 100
    return [scale * row[key] for row in by_seed(rows).values()]


def losses(rows: Rows) -> list[float]:
    """Percent, or the loss of a token, one for each seed."""
    return [math.log(value) for value in scores(rows)] if is_loss(rows) else scores(rows)


def deviation(rows: Rows) -> str:
    """Mean and standard deviation over seeds, then their number."""
    values, form = scores(rows), ".2f" if is_loss(rows) else ".1f"
    mean = format(statistics.mean(values), form)
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{form}} ({len(values)})"


def score_range(rows: Rows, kind: str = "") -> str:
    """Mean over seeds, the lowest and the highest. `kind`: a form; `%`: with a sign; `log`: losses, not perplexity."""
    if kind == "log":
        return spread(losses(rows), ".4f" if is_loss(rows) else ".1f")
    if kind == "%" and not is_loss(rows):
        return spread([row["after"] for row in by_seed(rows).values()], ".1%")
    return spread(scores(rows), kind.strip("%") or (".2f" if is_loss(rows) else ".1f"))


def range_at(rows: Rows, key: str) -> str:
    """The range of the scores, then the rate, of which the method may be named."""
    return f"{score_range(rows)} at {str(rows[0][key]).rpartition('-')[2] if key == 'method' else rate(rows)}"


def first(rows: Rows, key: str) -> str:
    return f"{scores(rows, key)[0]:{'.2f' if is_loss(rows) else '.1f'}}"


def with_seconds(rows: Rows) -> str:
    """The range of the scores, and the seconds of training until the state that was best on dev."""
    found = [
        next((point["train_s"] for point in row["curve"] if point["step"] == row["best_step"] and "dev" in point), None)
        for row in by_seed(rows).values()
    ]
    seconds = [float(s) for s in found if s is not None]
    return score_range(rows) + (f", {statistics.mean(seconds):.0f} s" if seconds else "")


def gain(rows: Rows, base: Rows) -> str:
    """By how many points each seed is better than the base."""
    alone = by_seed(base)
    return spread([100 * (row["after"] - alone[seed]["after"]) for seed, row in by_seed(rows).items()], "+.1f")


def gap(rows: Rows, base: Rows) -> str:
    """The difference of the means, in points or in percent of the loss."""
    mine, other = (statistics.mean(losses(side)) for side in (rows, base))
    return f"{100 * (mine / other - 1):+.2f}%" if is_loss(rows) else f"{mine - other:+.1f} points"


def later_loss(rows: Rows, base: Rows) -> str:
    """By how many percent the training loss over the second half of the steps is larger."""
    mine, other = (
        statistics.mean(
            statistics.mean(
                p["loss"] for p in row["curve"] if p.get("loss") is not None and 2 * p["step"] > row["steps"]
            )
            for row in by_seed(side).values()
        )
        for side in (rows, base)
    )
    return f"{100 * (mine / other - 1):+.2f}%"


def better(rows: Rows, others: Rows, name: str, other: str) -> str:
    """Which of two is better, if the ranges of their seeds do not overlap."""
    mine, theirs = scores(rows), scores(others)
    if min(mine) <= max(theirs) and min(theirs) <= max(mine):
        return "neither"
    return name if (statistics.mean(mine) < statistics.mean(theirs)) == is_loss(rows) else other


def distances(rows: Rows, base: Rows, on: str = "after") -> list[float]:
    """Percent of the base's score by which the rows are better, by seed: of a perplexity that of its logarithm."""
    mine, other = (
        {row["seed"]: -math.log(row[on]) if is_loss(rows) else row[on] for row in side} for side in (rows, base)
    )
    return [100 * (mine[seed] - other[seed]) / abs(other[seed]) for seed in sorted(mine.keys() & other.keys())]


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def distance(rows: Rows, base: Rows, on: str = "after") -> str:
    """Mean and standard error of the distances, then their number."""
    found = distances(rows, base, on)
    error = f" ± {standard_error(found):.1f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):+.1f}{error} ({len(found)})"


def farthest(rows: Rows, others: Rows) -> str:
    """The largest relative difference of two methods' training losses on a task, rounded up to one digit."""
    pairs = [(mine, other) for mine in rows for other in others if mine["task"] == other["task"]]
    curves = [[{p["step"]: p["loss"] for p in row["curve"] if "loss" in p} for row in pair] for pair in pairs]
    value = max(abs(mine[step] / other[step] - 1) for mine, other in curves for step in mine)
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit) * unit:.0e}".replace("e-0", "e-")


def num_losses(rows: Rows) -> str:
    return str(sum("loss" in point for row in rows for point in row["curve"]))


def shortest(*groups: Rows) -> str:
    """Seconds of training of the run that ended first."""
    return f"{_shortest_s(*groups):.0f}"


def _shortest_s(*groups: Rows) -> float:
    return min(float(row["train_s"]) for rows in groups for row in rows)


def _looks(row: Row) -> list[tuple[float, float]]:
    """Seconds and score of all looks at dev; a lower score is better."""
    return [(p["train_s"], p["dev"][row["metric"]]) for p in row["curve"] if row["metric"] in (p.get("dev") or {})]


def best_within(rows: Rows, *others: Rows) -> str:
    """The best loss on dev in the time of the run that ended first."""
    seconds = _shortest_s(*others) + 1e-2  # rows round
    return spread([min(value for s, value in _looks(row) if s <= seconds) for row in rows])


def share_of_time(rows: Rows, base: Rows) -> str:
    """The time to the best loss of the base, as a share of the base's time to it, by seed."""
    if rows[0] is base[0]:
        return ""
    by, shares = {row["seed"]: row for row in rows}, []
    for row in base:
        own_s, our_s = (next((s for s, x in _looks(r) if x <= row["dev"]), None) for r in (row, by[row["seed"]]))
        shares += [our_s / own_s] if own_s and our_s else []
    missed = f"not reached with {len(base) - len(shares)} of {len(base)} seeds" if len(shares) < len(base) else ""
    said = f"{spread(shares)}{' (one seed)' if len(shares) == 1 else ''}" if shares else ""
    return "; ".join(filter(None, (said, missed)))


def rate(rows: Rows, form: str = "g") -> str:
    """A learning rate: 0.0001, or 1e-4 and 1.5e-4 with form e."""
    lr = next((row["lr"] for row in rows if row["lr"] is not None), None)
    if lr is None:
        return ""
    return f"{lr:.1e}".replace(".0e", "e").replace("e-0", "e-") if form == "e" else f"{lr:g}"


def tried(rows: Rows) -> str:
    return ", ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in rows}))


def steps(rows: Rows) -> str:
    return str(max(row["steps"] for row in rows) or "")


def mean(rows: Rows, key: str, form: str) -> str:
    """The mean of a key, or of a key of the values on test."""
    return format(statistics.mean(row[key] if key in row else row["after_values"][key] for row in rows), form)


def trained_s(rows: Rows) -> str:
    return mean(rows, "train_s", ".0f") if steps(rows) else ""


def only(rows: Rows, key: str) -> str:
    """The value that all rows have."""
    found = sorted({str(row[key]) for row in rows})
    if len(found) > 1:
        raise ValueError(f"rows of one table must have the same {key}, found {', '.join(found)}; filter them")
    return found[0]


def holds(rows: Rows, base: Rows) -> str:
    """Whether the rows are at most 2% worse, or their standard error."""
    found = distances(rows, base)
    return "yes" if statistics.mean(found) >= -max(2.0, standard_error(found)) else "no"


def span(rows: Rows, key: str, form: str) -> str:
    """The range of a value over machines; of a key within a key with a dot between."""
    first, _, second = key.partition(".")
    values = [row[first][second] if second else row[first] for row in rows]
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def passed(rows: Rows) -> str:
    """pass@1 in percent, and its 95% interval."""
    values = [row["after_values"] for row in rows]
    share, num = statistics.mean(value["pass_at_1"] for value in values), values[0]["num_problems"]
    low, high = wilson(share * num, num)
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"


SEED_SHOWS: dict[str, Callable[..., str]] = {
    "deviation": deviation,
    "mean_score": lambda rows: f"{statistics.mean(scores(rows)):.1f}",
    "range": score_range,
    "range_at": range_at,
    "first": first,
    "with_seconds": with_seconds,
    "gain": gain,
    "gap": gap,
    "later_loss": later_loss,
    "better": better,
    "distance": distance,
    "farthest": farthest,
    "num_losses": num_losses,
    "shortest": shortest,
    "best_within": best_within,
    "share_of_time": share_of_time,
    "spread": lambda rows, key, form: spread([row[key] for row in rows], form),
    "rate": rate,
    "tried": tried,
    "steps": steps,
    "mean": mean,
    "trained_s": trained_s,
    "only": only,
    "most": lambda rows, key, form: format(max(row[key] for row in rows), form),
    "passed": passed,
    "holds": holds,
    "span": span,
    "commits": lambda rows: commits(rows),
    "seeds": lambda rows: str(len({row["seed"] for row in rows})),
}
"""By name in a block's data: makes a cell of all rows of each case that the column names."""


def source(used: Rows, *commands: str) -> str:
    """What is folded away under a block: links to the files of its rows, the runs in them, the commands that make such
    rows. Rows of training runs belong to no run; their commits are named."""
    files = list(dict.fromkeys(row["file"] for row in used))
    links = ", ".join(f"[{file}](../benchmarks/results/{file})" for file in files) or "none"
    runs = sorted({str(row["run_id"]) for row in used if row.get("run_id")})
    commits = sorted({str(row["commit"]) for row in used if row.get("commit") and not row.get("run_id")})
    named = "".join(
        f", {word}{'s' if len(found) > 1 else ''} {', '.join(found)}"
        for word, found in (("run", runs), ("commit", commits))
        if found
    )
    made = f"Rows: {links}{named}. Made by {' and '.join(commands)}."
    return f'<details markdown="1">\n<summary>Rows and command</summary>\n\n{made}\n\n</details>'


def command(words: str) -> str:
    """In Markdown. `sweep GRID ...` is a grid of training runs, `compare ...` a comparison; all else is a module of
    benchmarks with its arguments. `at COMMIT MODULE ...` is a module of a decided study, whose code that commit has."""
    first, _, rest = words.partition(" ")
    if first == "at":
        commit, _, words = rest.partition(" ")
        return f"{command(words)} in the tree of commit {commit}"
    if first == "compare":
        return f"`python launch/compare.py {rest}`"
    if first == "sweep":
        return f"`python launch/sweep.py --model DIR --data-root DIR --results rows.jsonl --grid {rest}`"
    return " ".join(f"`python -m benchmarks.{first} {rest} --out rows.jsonl`".split())


def commits(rows: Rows) -> str:
    return ", ".join(sorted({str(row.get("commit")) for row in rows}))
