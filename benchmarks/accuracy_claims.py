"""What is claimed of one method beside another, held against a sweep's scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ds_zo.records.rows import Row, table
from ds_zo.tasks.score import LOWER_IS_BETTER

Scores = Mapping[str, Mapping[str, Mapping[int, Row]]]
"""Rows by method, task and seed."""
Rule = Literal["noise", "above", "2%"]
WITHIN = 0.02
"""Of the other's score; of its loss, where that is what is scored."""


@dataclass(frozen=True)
class Claim:
    """`noise`: the means differ by no more than the spread over seeds; `above`: at least the other's; `2%`: no more
    than 2% below."""

    method: str
    other: str
    rule: Rule


CLAIMS = (
    Claim("zo", "mezo", "noise"),
    Claim("zo-bf16", "zo", "noise"),
    Claim("zo-fp8", "zo", "noise"),
    Claim("zo-bf16", "mezo-bf16", "above"),
    Claim("zo-fp8", "mezo-bf16", "above"),
    Claim("zo", "zero-shot", "above"),
    Claim("lomo", "sgd", "noise"),
    Claim("lomo", "zero-shot", "above"),
    Claim("adalomo", "zero-shot", "above"),
    Claim("lsp", "adamw", "2%"),
    Claim("lsp-512", "adamw", "2%"),
    Claim("lsp-512-dense", "adamw", "2%"),
    Claim("lsp", "zero-offload", "above"),
    Claim("lora+lomo", "lora", "above"),
)


def claims_table(scores: Scores, tasks: Sequence[str], *, claims: Sequence[Claim] = CLAIMS) -> str:
    """Markdown: each task's difference (points of accuracy, or nats a token with the sign turned), and if it holds."""
    lines = []
    for claim in claims:
        name = {
            "noise": f"{claim.method} = {claim.other} within seed noise",
            "above": f"{claim.method} >= {claim.other}",
            "2%": f"{claim.method} within 2% of {claim.other}",
        }[claim.rule]
        pairs = [
            (scores.get(claim.method, {}).get(task, {}), scores.get(claim.other, {}).get(task, {})) for task in tasks
        ]
        lines.append([name, *(verdict(claim.rule, *pair) for pair in pairs)])
    return table(["claim", *tasks], lines)


def verdict(rule: Rule, mine: Mapping[int, Row], others: Mapping[int, Row]) -> str:
    """A difference and yes or no; a dash where a side has no rows."""
    if not mine or not others:
        return "–"
    a, b = _values(mine), _values(others)
    difference = statistics.mean(a) - statistics.mean(b)
    spreads = [statistics.stdev(side) for side in (a, b) if len(side) > 1]
    noise = math.sqrt(statistics.mean(s**2 for s in spreads) * 2) if spreads else None
    if rule == "noise":
        if noise is None:
            return f"{difference:+.2f} (one seed)"
        return f"{difference:+.2f} ± {noise:.2f} {_yes(abs(difference) <= noise)}"
    limit = 0.0 if rule == "above" else -WITHIN * abs(statistics.mean(b))
    return f"{difference:+.2f} {_yes(difference >= limit)}"


def _values(rows: Mapping[int, Row]) -> list[float]:
    """Higher is better: percent, or minus the loss where perplexity is what was scored."""
    return [
        -math.log(row["after"]) if row["metric"] in LOWER_IS_BETTER else 100.0 * row["after"] for row in rows.values()
    ]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
