"""What the planner expects of more tokens a step on three links.

    python -m benchmarks.many_tokens --out benchmarks/results/cpu_many_tokens.jsonl

The command writes a row for each model, link and batch, and one for each batch that `ds-zo plan --tokens-per-step auto`
chooses. `benchmarks.pages` draws the picture. Nothing is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ds_zo.records.rows import Row, append_row

if TYPE_CHECKING:
    from ds_zo.planner import Plan

LINKS_GBPS = (55.2, 25.0, 12.0)
_LENGTH = 1024
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
_CASES = {"lomo-7b": ("random:llama-7b", "lomo"), "adapter-70b": ("random:llama-70b", "adapter-nf4")}
"""By name: model and backend."""


def plans(case: str) -> Callable[[float, int], Plan]:
    """Plans a case for a link and a batch. All blocks stream, and their inputs are in host memory."""
    from ds_zo.planner import load_model, plan, with_link

    name, backend = _CASES[case]
    model = load_model(name, batch=1, seq=_LENGTH)
    stream = {"resident_blocks": 0, "offload_activations": True}

    def planned(gbps: float, batch: int) -> Plan:
        linked = replace(model, batch=batch, rates=with_link(model.rates, gbps))
        return plan(linked, backends=[backend], stream=stream, offload=True)

    return planned


def rows_of(case: str) -> Iterator[Row]:
    from ds_zo.planner import smallest_unbound

    planned = plans(case)
    for gbps in LINKS_GBPS:
        found = [(planned(gbps, batch), False) for batch in _BATCHES]
        found.append((smallest_unbound(partial(planned, gbps)), True))
        for one, is_chosen in found:
            (estimate,) = one.estimates
            yield {
                "case": case,
                "status": "planned",
                "model": one.model,
                "backend": estimate.contender,
                "link_gbps": gbps,
                "batch": one.batch,
                "length": one.seq,
                "is_chosen": is_chosen,
                "step_s": estimate.step_s,
                "compute_s": estimate.compute_s,
                "tokens_per_s": one.tokens_per_s(estimate),
            }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a file that is written anew")
    out = parser.parse_args(arguments).out
    out.unlink(missing_ok=True)
    for case in _CASES:
        for row in rows_of(case):
            append_row(out, row)


if __name__ == "__main__":
    main()
