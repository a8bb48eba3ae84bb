"""A plan as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain

from ds_zo.planner.estimate import Estimate
from ds_zo.planner.plan import ADAPTERS, DOES_NOT_FIT, ORDER, Plan

_ABOUT_GB = "GB are 10**9 bytes. A card sold with 24 GB has 25.8; driver and CUDA context, not shown, take about 1"


def render(plan: Plan, *, details: bool = False) -> str:
    """The table of all estimates, and the notes of those that do not fit. With `details`, or for a single estimate, its
    bytes by part and its JSON follow."""
    limits = plan.limits
    lines = [
        f"{plan.model} ({plan.architecture}): {plan.num_parameters:,} parameters in {plan.num_blocks} blocks; "
        f"{plan.batch} x {plan.seq} tokens, {plan.dtype}; GPU {_limit(limits.device_nbytes)}, host "
        f"{_limit(limits.host_nbytes)}; rates: {plan.rates.name}",
        "",
        *grid(
            ["backend", "fits", "GPU GB", "host GB", "ms/step", "tokens/s", "up GB", "down GB", "how"],
            [_row(plan, e) for e in plan.estimates],
        ),
    ]
    lines += [_ABOUT_GB]
    if any(e.is_tight for e in plan.estimates):
        lines += ["tight: less than 5% of the memory is left; other processes, or a longer batch, take more"]
    reasons = dict.fromkeys(plan.left_out.values())
    lines += [f"{', '.join(n for n, w in plan.left_out.items() if w == why)} left out: {why}" for why in reasons]
    if details or len(plan.estimates) == 1:
        for estimate in plan.estimates:
            lines += ["", *_details(estimate)]
    else:
        lines += [f"{e.contender} {note}" for e in plan.estimates for note in e.notes if note.startswith(DOES_NOT_FIT)]
    return "\n".join([*lines, "", *_advice(plan)])


def _advice(plan: Plan) -> list[str]:
    """The method to use, with its learning rate and the reason."""
    found = plan.recommended
    if found is None:
        needs = [e for e in plan.estimates if e.contender in chain(*ORDER)]
        least = min(needs, key=lambda e: (not e.fits_device, e.host_peak_nbytes), default=None)
        remedy = "" if least is None else f"; {least.contender} needs the least host memory, {_memory(least)}"
        return [f"use: nothing fits{remedy}. A smaller --batch or --seq takes less GPU memory"]
    if found.contender == "adamw":
        why = "all weights and AdamW's states fit the GPU, so ds_zo is not needed"
    elif found.contender in ADAPTERS:
        why = "training all weights with gradients does not fit; adapters do, and this is the fastest way"
    elif found.contender in ORDER[-1]:
        why = "no method with gradients fits; a step of ZO teaches less than theirs"
    else:
        why = "it trains all weights with gradients in this memory, which AdamW does not fit"
    if len(plan.estimates) == 1:
        why = "it fits"
    why += ", without memory to spare" if found.is_tight else ""
    lines = [f"use: {_choice(plan, found)}", f"how: {found.setting}", f"why: {why}"]
    other = plan.recommended_adapter
    if other is not None and other is not found:
        lines.append(f"for LoRA instead: {_choice(plan, other)}")
    return lines


def _choice(plan: Plan, e: Estimate) -> str:
    rate = e.config["optimizer"]["params"]["lr"]
    return f"{e.contender} at a learning rate of {rate:g}: {_memory(e)}, {plan.tokens_per_s(e):,.0f} tokens/s"


def _memory(e: Estimate) -> str:
    return f"{e.device_peak_nbytes / 1e9:.1f} GB of GPU and {e.host_peak_nbytes / 1e9:.1f} GB of host memory"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. Columns are as wide as their widest cell, and numbers are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    last = len(header) - 1

    def line(row: Sequence[str]) -> str:
        cells = (
            cell if i == last else cell.rjust(width) if cell[:1].isdigit() or cell == "-" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def _row(plan: Plan, e: Estimate) -> list[str]:
    return [
        e.contender,
        "tight" if e.is_tight else "yes" if e.fits else "no: GPU" if not e.fits_device else "no: host",
        f"{e.device_peak_nbytes / 1e9:.2f}",
        f"{e.host_peak_nbytes / 1e9:.1f}",
        f"{e.step_s * 1e3:.0f}",
        f"{plan.tokens_per_s(e):,.0f}",
        f"{e.up_nbytes / 1e9:.2f}" if e.up_nbytes else "-",
        f"{e.down_nbytes / 1e9:.2f}" if e.down_nbytes else "-",
        e.setting,
    ]


def _details(e: Estimate) -> list[str]:
    filling = (
        f", and {e.filling_nbytes / 1e9:.2f} more until the blocks that stay are on the GPU" if e.filling_nbytes else ""
    )
    starting = (
        f", and {e.starting_nbytes / 1e9:.2f} in total while the engine is made"
        if e.starting_nbytes > e.device_nbytes
        else ""
    )
    return [
        f"{e.contender}",
        f"  GPU   {_parts(e.device)}{starting}",
        f"  host  {_parts(e.host)}{filling}",
        *(f"  note  {note}" for note in e.notes),
        "  JSON  " + json.dumps(e.config),
    ]


def _parts(nbytes: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {n / 1e9:.2f}" for name, n in nbytes.items()) + " GB"


def _limit(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else f"{nbytes / 1e9:g} GB"
