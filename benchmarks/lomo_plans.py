"""What the planner expects of LOMO: of a measured case, and of the LOMO paper's runs on several cards.

    python -m benchmarks.lomo_plans --out benchmarks/results/cpu_lomo_plans.jsonl

The command writes a row for each line of the paper's Table 2 in which LOMO has several cards. Nothing is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper_figures import LOMO_TABLE_2
from ds_zo.records.rows import Row, append_row

_LENGTH = 1024
"""Tokens of a card in a step, as in the paper's Table 2."""


def planned(row: Row) -> Row | None:
    """Peak and seconds a step for one-pass LOMO and AdaLOMO on a published shape; None for whatever else."""
    params = row["params"]
    measured = row["status"] == "ok" and row["target"].endswith(":speed") and row["fits"]
    planless = params.get("overrides") or params.get("compiled")
    if not measured or params["method"] not in ("lomo", "adalomo") or planless:
        return None

    from ds_zo.config.section import StreamConfig
    from ds_zo.planner.estimate import Limits
    from ds_zo.planner.lomo import estimate_adalomo, estimate_lomo
    from ds_zo.planner.models import load_model

    stream = StreamConfig(**params.get("stream") or {})
    budget = None if stream.device_memory_gb is None else int(stream.device_memory_gb * 1e9)
    estimate = (estimate_adalomo if params["method"] == "adalomo" else estimate_lomo)(
        load_model(f"random:{params['shape']}", batch=params["batch"], seq=params["length"]),
        Limits(device_nbytes=budget),
        stream=stream,
        offload="stream" in params,
        checkpointing=params.get("checkpointing", True),
    )
    return {"peak_gb": estimate.device_nbytes / 1e9, "step_s": estimate.step_s, "setting": estimate.setting}


def planned_on_cards(size: str, num_cards: int) -> Row:
    """LOMO at ZeRO stage 3 without `offload_param`, as `ds-zo plan` prints it. The gathers and the reductions overlap
    with nothing, so tokens/s are the worst case."""
    from ds_zo.planner import plan, scale

    found = plan(f"random:llama-{size}", batch=1, seq=_LENGTH, backends=["lomo"], offload=False)
    (scaled,) = scale(found, gpus=num_cards)
    sent_s = scaled.sharded_wire_nbytes / (found.rates.interconnect_gbps * 1e9)
    asked = f"--model random:llama-{size} --batch 1 --seq {_LENGTH} --backend lomo --no-offload --gpus {num_cards}"
    return {
        "case": f"plan/{size}-lomo-{num_cards}",
        "status": "planned",
        "command": f"ds-zo plan {asked}",
        "cards": num_cards,
        "peak_gb": scaled.sharded_device_nbytes / 1e9,
        "step_s": found["lomo"].step_s + sent_s,
        "tokens_per_s": _LENGTH / (found["lomo"].step_s + sent_s),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a file that is written anew")
    out = parser.parse_args(arguments).out
    out.unlink(missing_ok=True)
    for (size, method), (num_cards, _, _) in LOMO_TABLE_2.items():
        if method == "lomo" and num_cards > 1:
            append_row(out, planned_on_cards(size, num_cards))


if __name__ == "__main__":
    main()
