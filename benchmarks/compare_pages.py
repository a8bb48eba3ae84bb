"""The blocks of pages that are made from rows of `launch/compare.py`; `ds-zo bench --headline` makes the headline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from benchmarks.sources import RESULTS, STEPS, ms, read_rows, source
from ds_zo.bench.contenders import ALL
from ds_zo.bench.headline import command_of
from ds_zo.bench.report import contenders, host_gb, reason_of, shown, title_of
from ds_zo.records.rows import Row, table

ZERO2_24 = "compare/zero_offload_24gb.jsonl"


def lean() -> str:
    """A table for each folder of `results/lean`: rows of `launch/compare.py`."""
    from ds_zo.bench.compare import last_run

    blocks = []
    for path in sorted((RESULTS / "lean").glob("*/rows.jsonl")):
        rows = last_run(path, None)
        body = []
        for row in contenders(rows):
            cells = [_title(row["contender"])]
            if row["status"] == "ok":
                cells += [f"{row['tokens_per_s_mean']:,.0f}", ms(row), shown(row.get("peak_gb")), shown(host_gb(row))]
            else:
                cells += [reason_of(row), "", "", ""]
            body.append([*cells, re.sub(r"\bas ([\w-]+),", lambda found: f"as {_title(found[1])},", row["settings"])])
        heads = ["", "tokens/s, mean", "ms, median", "GPU GB", "host GB", "set up as"]
        named = [row | {"file": path.relative_to(RESULTS).as_posix()} for row in rows]
        first = contenders(rows)[0]
        kept = "recomputed" if first["params"]["spec"]["checkpointing"] else "kept"
        said = f"One {first['gpu'].removeprefix('NVIDIA ')}, {title_of(rows)}, activations {kept}. {STEPS}"
        made = source(named, compare_command(contenders(rows), f"runs/{path.parent.name}"))
        parts = (said, table(heads, body), beside_others(contenders(rows)), made)
        blocks.append("\n\n".join(part for part in parts if part))
    return "\n\n".join(blocks)


def _title(name: str) -> str:
    """A contender's name in the tables."""
    return ALL[name].title if name in ALL else name


def compare_command(rows: Sequence[Row], out: str) -> str:
    """The command that makes such rows: `launch/compare.py`, with a peer's own code `benchmarks.peers`."""
    specs = {row["case"]: row["params"]["spec"] for row in rows}
    cap = rows[0]["params"]["spec"]["device_memory_gb"]
    options = [
        f"--contenders {','.join(name for name in specs if name in ALL)}",
        "" if cap is None else f"--device-memory-gb {cap:g}",
        "--start-uncapped" if any(spec.get("starts_uncapped") for spec in specs.values()) else "",
        "" if rows[0]["params"]["spec"]["profile"] else "--no-profile",
    ]
    if any(row.get("tried") for row in rows):
        options.append("--best-batch")
    else:
        options += [f"--accumulate {n}={s['accumulation']}" for n, s in specs.items() if s.get("accumulation", 1) > 1]
    made = command_of(rows[0]["params"]["spec"], " ".join(option for option in options if option), out)
    for peer in (name for name in specs if name not in ALL):
        made = made.replace("launch/compare.py", f"-m benchmarks.peers {peer} --checkout DIR --python FILE")
    return made


def beside_others(rows: Sequence[Row]) -> str:
    """Our methods' speed over that of the fastest stock DeepSpeed that offloads, and over that of the fastest contender
    that is not ours; all rows of one run. Brackets: our slowest timed step over their fastest, and the other way
    round."""
    done = [row for row in rows if row["status"] == "ok"]
    ours = [row for row in done if row["case"] in ALL and ALL[row["case"]].backend is not None]
    others = [row for row in done if row not in ours]
    stock = [row for row in others if row["case"].startswith(("zero", "zenflow", "superoffload"))]
    if not ours or not stock:
        return ""
    fastest = [max(found, key=lambda row: float(row["tokens_per_s_mean"])) for found in (stock, others)]
    said = []
    for other in {row["case"]: row for row in fastest}.values():
        ratios = []
        for row in ours:
            least, most = other["step_s_min"] / row["step_s_max"], other["step_s_max"] / row["step_s_min"]
            mean = row["tokens_per_s_mean"] / other["tokens_per_s_mean"]
            ratios.append(f"{_title(row['case'])} {mean:.2f} ({least:.2f} to {most:.2f})")
        said.append(f"of {_title(other['case'])}: {', '.join(ratios)}")
    micro = "" if all(row["params"]["spec"].get("accumulation", 1) == 1 for row in done) else ", tokens a step equal"
    return f"In this run{micro}, mean tokens/s as a multiple of those {'; '.join(said)}."


def zero2_start() -> str:
    """That stock ZeRO-Offload of 7B models does not start within 24 GB, though its steps fit."""
    rows = [row for row in read_rows(ZERO2_24) if row["case"] == "zero2-offload"]
    assert all(row["status"] == "oom" for row in rows)
    models = [row["params"]["spec"]["model"].removeprefix("random:") for row in rows]
    commands = [compare_command([row], f"runs/{model}") for row, model in zip(rows, models, strict=True)]
    return (
        f"ZeRO-Offload (stage 2) of {' and '.join(models)} runs out of memory while it starts within 24 GB. DeepSpeed "
        f"copies its flat weights once more on the GPU at the start.\n\n{source(rows, *commands)}"
    )


COMPARE_BLOCKS: dict[str, Callable[[], str]] = {"lean": lean, "zero2-start": zero2_start}
"""By the name in a page's marker, as in `pages.BLOCKS`."""
