"""LOMO's rows as Markdown: what was asked for against what was measured, then the tables. Ratios stay in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ds_zo.records.rows import Row, table

Rows = Mapping[str, Row]
"""One run's, by case."""

_GIB_OF_GB = 1e9 / 2**30


@dataclass(frozen=True)
class Target:
    what: str
    value: Callable[[Rows], float]
    """Raises KeyError where a row it needs is missing, or has no result."""
    bound: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def _ratio(of: str, to: str, key: str = "tokens_per_s") -> Callable[[Rows], float]:
    return lambda rows: rows[of][key] / rows[to][key]


def _gib(case: str) -> Callable[[Rows], float]:
    return lambda rows: rows[case]["peak_gb"] * _GIB_OF_GB


def _finite_steps(case: str) -> Callable[[Rows], float]:
    return lambda rows: sum(map(math.isfinite, rows[case]["losses"]))


def _against(what: str, of: str, to: str, bound: float) -> tuple[Target, Target]:
    """As the model is, and with its blocks compiled (ours alone: the authors' package is measured as it comes)."""
    return (
        Target(what, _ratio(f"speed/{of}", f"speed/{to}"), bound),
        Target(f"{what}; ours with blocks compiled", _ratio(f"speed/{of}-compiled", f"speed/{to}"), bound),
    )


TARGETS = (
    *_against("LOMO against lomo-optim's, tokens/s", "lomo", "peer_lomo", 1.5),
    *_against("LOMO against AdamW on the GPU (torch's default)", "lomo", "adamw", 1.1),
    *_against("LOMO against AdamW on the GPU (fused)", "lomo", "adamw_fused", 1.1),
    Target(
        "LOMO against AdamW on the GPU (fused), both with blocks compiled",
        _ratio("speed/lomo-compiled", "speed/adamw_fused-compiled"),
        1.1,
    ),
    *_against("LOMO against AdamW on the GPU (fused, float32 master)", "lomo", "adamw_master", 1.1),
    *_against("LOMO clipped by norm against lomo-optim's", "lomo_clipped", "peer_lomo_clipped", 1.5),
    *_against("AdaLOMO against lomo-optim's AdaLomo", "adalomo", "peer_adalomo", 1.7),
    *(
        Target(f"{what}{words}, peak GiB", _gib(f"speed/{method}{suffix}"), 15.3, at_least=False)
        for suffix, words in (("", ""), ("-compiled", " with blocks compiled"))
        for what, method in (("LOMO", "lomo"), ("LOMO clipped by norm", "lomo_clipped"), ("AdaLOMO", "adalomo"))
    ),
    *(
        Target(f"7B LOMO against plain hooks{words}", _ratio(f"hosts/7b-lomo{turn}", f"hosts/7b-hooks{turn}"), 1 / 1.03)
        for turn, words in (("", ""), ("-again", ", measured again"))
    ),
    Target("7B streamed within 6 GB against resident", _ratio("streamed/7b-6gb", "streamed/7b-resident"), 0.5),
    Target("1.3B streamed against ZeRO-3 offload", _ratio("streamed/1.3b", "streamed/1.3b-zero3"), 3.0),
    Target("13B streamed within 24 GB, steps with a finite loss", _finite_steps("streamed/13b-24gb"), 20),
    Target("30B streamed within 24 GB, steps with a finite loss", _finite_steps("streamed/30b-24gb"), 20),
    *(
        Target(
            f"memory of LOMO checkpointed{words} against AdamW plain (8 x 512), {how}",
            _ratio(f"paper/memory-lomo-checkpointed{suffix}", "paper/memory-adamw_master-plain", *keys),
            0.108,
            at_least=False,
        )
        for suffix, words, how, keys in (
            ("", "", "both the sum of their parts, as the paper counts", ("computed_total_gb",)),
            ("", "", "its measured peak to the sum of AdamW's parts", ("total_gb",)),
            ("-compiled", " with blocks compiled", "its measured peak to the sum of AdamW's parts", ("total_gb",)),
        )
    ),
)


def markdown(rows: Iterable[Row], *, plan: Callable[[Row], Row | None] | None = None) -> str:
    """`plan` says of a row what was to be expected, or None where nothing was planned."""
    runs: dict[str, dict[str, Row]] = {}
    for row in rows:
        runs.setdefault(row["run_id"], {})[row["case"]] = row
    if not runs:
        return "No rows."
    parts = [_targets(runs)]
    for run_id, found in runs.items():
        parts.append(f"## Run {run_id}\n\n{_machine(next(iter(found.values())))}")
        parts += [part(found.values()) for part in (_speeds, _bounds, _memory, _accumulation, _failures)]
        if plan is not None:
            parts.append(_plans(found.values(), plan))
    return "\n\n".join(part for part in parts if part) + "\n"


def _targets(runs: Mapping[str, Rows]) -> str:
    """Each from the newest run that has all its rows. Toy models prove nothing about targets."""
    lines = []
    for target in TARGETS:
        for run_id in reversed(list(runs)):
            found = runs[run_id].items()
            usable = {name: row for name, row in found if row["status"] == "ok" and not row["params"].get("overrides")}
            try:
                value = target.value(usable)
            except KeyError:
                continue
            sign, verdict = ("≥" if target.at_least else "≤"), ("yes" if target.met(value) else "NO")
            lines.append((target.what, f"{sign} {target.bound:g}", f"{value:.3g}", verdict, run_id))
            break
    return table(("target", "asked", "measured", "met", "run"), lines) if lines else ""


def _machine(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (row.get("versions") or {}).items())
    return f"{row.get('gpu') or row.get('device')}, {row.get('cpus')} CPUs, commit {row.get('commit')}; {versions}."


def _speeds(rows: Iterable[Row]) -> str:
    lines = []
    for row in rows:
        if row["status"] != "ok" or not row["target"].endswith(":speed"):
            continue
        if not row["fits"]:
            lines.append(
                (row["case"], *["—"] * 6, f"does not fit: weights, gradients, state {row['needed_gb']:.0f} GB")
            )
            continue
        cap = f", cap {row['cap_gb']:g} GB" if row.get("cap_gb") else ""
        moved = (
            f", {row['up_gb_a_step']:.1f} GB up and {row['down_gb_a_step']:.1f} down" if "up_gb_a_step" in row else ""
        )
        host = ""
        if "two_cores_s" in row:
            host = f"; on two cores {row['two_cores_s'] * 1e3:.1f} ms, GPU busy {(row['gpu_busy_s'] or 0) * 1e3:.1f} ms"
        first = f"; the first step took {row['first_step_s']:.0f} s" if row.get("compiled") else ""
        lines.append(
            (
                row["case"],
                f"{row['tokens_per_s']:,.0f}",
                f"{row['step_s'] * 1e3:.0f} ({row['step_s_min'] * 1e3:.0f} to {row['step_s_max'] * 1e3:.0f})",
                f"{row['peak_gb'] * _GIB_OF_GB:.2f}",
                f"{row['peak_reserved_gb'] * _GIB_OF_GB:.2f}",
                f"{row['host_peak_gb']:.1f}",
                "—" if row.get("loss") is None else f"{row['loss']:.3f}",
                f"{row['settings']}{cap}{moved}{host}{first}",
            )
        )
    heads = ("case", "tokens/s", "ms a step (range)", "peak GiB", "reserved GiB", "host GB", "loss", "settings")
    return table(heads, lines) if lines else ""


def _bounds(rows: Iterable[Row]) -> str:
    """What an update costs beside the forward and backward that no method can do without."""
    speeds = {row["case"]: row for row in rows if row["status"] == "ok" and row["target"].endswith(":speed")}
    said = []
    for suffix, words in (("", "as the model is"), ("-compiled", "with blocks compiled")):
        least = speeds.get(f"speed/no_update{suffix}")
        if least is None:
            continue
        beside = [
            f"{name.removeprefix('speed/')} takes {row['step_s'] / least['step_s']:.3f} x that"
            for name, row in speeds.items()
            if name.startswith("speed/")
            and row["fits"]
            and bool(row.get("compiled")) == bool(suffix)
            and row is not least
        ]
        alone = f"Forward and backward alone, {words}: {least['step_s'] * 1e3:.0f} ms"
        said.append("; ".join([alone, ", ".join(beside)]) + "." if beside else alone + ".")
    return "\n\n".join(said)


def _memory(rows: Iterable[Row]) -> str:
    keys = ("parameters_gb", "gradients_gb", "states_gb", "activations_gb", "total_gb")
    lines = [
        (
            row["case"],
            *(f"{row[key] * _GIB_OF_GB:.2f}" for key in keys),
            f"{row['attention']} attention, {'measured' if row['fits'] else 'does not fit: the sum of its parts'}",
        )
        for row in rows
        if row["status"] == "ok" and row["target"].endswith(":memory")
    ]
    heads = ("GiB", "parameters", "gradients", "optimizer state", "activations", "total", "how")
    return table(heads, lines) if lines else ""


def _accumulation(rows: Iterable[Row]) -> str:
    said = []
    for row in rows:
        if row["status"] != "ok" or not row["target"].endswith(":accumulation"):
            continue
        micro = row["batch"] // row["micro_batches"]
        said.append(
            f"Sequential accumulation, {row['micro_batches']} updates of {micro} rows for one of {row['batch']}, "
            f"{row['num_steps']} steps at lr {row['lr']:g}: the loss went from {row['first_loss']:.4f} to "
            f"{row['last_loss_sequential']:.4f}, with the true batch to {row['last_loss_true']:.4f}; the curves differ "
            f"by at most {row['largest_loss_difference']:.4f} (those of the true batch and of SGD that accumulates, by "
            f"{row['largest_sgd_difference']:.1e})."
        )
    return "\n\n".join(said)


def _plans(rows: Iterable[Row], plan: Callable[[Row], Row | None]) -> str:
    lines = []
    for row in rows:
        planned = plan(row)
        if planned is None:
            continue
        pairs = [(planned[key] * scale, row[key] * scale) for key, scale in (("peak_gb", _GIB_OF_GB), ("step_s", 1e3))]
        cells = [f"{wanted:.4g} / {got:.4g} ({got / wanted - 1:+.1%})" for wanted, got in pairs]
        lines.append((row["case"], *cells, planned["setting"]))
    return table(("planned / measured", "peak GiB", "ms a step", "plan"), lines) if lines else ""


def _failures(rows: Iterable[Row]) -> str:
    lines = [
        (row["case"], row["status"], str(row.get("error", "")).replace("\n", " ")[:300])
        for row in rows
        if row["status"] != "ok"
    ]
    return table(("case", "status", "why"), lines) if lines else ""
