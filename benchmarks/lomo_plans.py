"""What the planner expects of LOMO in the LOMO paper's runs on several cards.

    python -m benchmarks.lomo_plans --out benchmarks/results/cpu_lomo_plans.jsonl

The command writes a row for each line of the paper's Table 2 in which LOMO has several cards. Nothing is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ds_zo.records.rows import Row, append_row

_LENGTH = 1024
"""Tokens of a card in a step, as in the paper's Table 2."""
_CARDS = {"13b": 2, "30b": 4, "65b": 8}
"""By size: the cards that LOMO has in that table."""


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
    for size, num_cards in _CARDS.items():
        append_row(out, planned_on_cards(size, num_cards))


if __name__ == "__main__":
    main()
