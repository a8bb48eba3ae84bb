"""Figures of the README and of docs/choose.md are those of rows in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import front_page, many_tokens, pages, pictures
from ds_zo.bench.report import host_gb
from tests.helpers.processes import REPO

RESULTS = REPO / "benchmarks" / "results"
CHOOSE, README = ((REPO / name).read_text(encoding="utf-8") for name in ("docs/choose.md", "README.md"))


def rows_of(file: str) -> Iterator[dict[str, Any]]:
    with (RESULTS / file).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def row_of(file: str, case: str, run: str) -> dict[str, Any]:
    """The one row of a case in a run. An empty `run` accepts any."""
    found = [row for row in rows_of(file) if row.get("case") == case and row["run_id"].startswith(run)]
    assert len(found) == 1, (file, case, run, len(found))
    return found[0]


def tables_of(text: str) -> list[list[str]]:
    """The cells of all lines of tables."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def figures_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """GPU memory, host memory and speed as pages write them."""
    host = host_gb(row) or 0.0
    speed = row.get("tokens_per_s_mean") or row["tokens_per_s"]
    return f"{row['peak_gb']:.1f} GB", f"{host:.0f} GB" if host >= 100 else f"{host:.1f} GB", f"{speed:,.0f}"


def test_the_readme_and_the_choice_of_methods_are_current() -> None:
    assert pages.filled(README) == README and pages.filled(CHOOSE) == CHOOSE, "run: python -m benchmarks.pages"


def test_the_readme_begins_with_the_figures_of_its_table() -> None:
    """The table is a selection of that of docs/choose.md."""
    speeds = [row[2:5] for row in tables_of(CHOOSE)]
    shown = [row for row in tables_of(README) if row[1].endswith(" GB")]
    assert [row[0].partition(":")[0] for row in shown] == ["8B", "30B", "70B", "120B mixture (gpt-oss)"]
    assert all(row[1:4] in speeds for row in shown)
    head = README.partition("\n![")[0]
    near = [(round(float(gpu.split()[0])), round(float(host.split()[0]))) for _, gpu, host, *_ in shown]
    assert near[1:] == [(21, 66), (7, 44), (12, 73)]
    assert "7 GB of GPU and 44 GB" in " ".join(head.split()) and "21 and 66" in head and "12 and 73" in head


def test_speeds_that_the_readme_compares_are_of_rows() -> None:
    text = " ".join(README.split())
    run = "20261115T093417Z"
    ours, other = (row_of("h200_lomo.jsonl", f"speed/{name}", run) for name in ("adalomo", "peer_adalomo"))
    assert f"takes {1e3 * ours['step_s']:.0f} ms a step, and {1e3 * other['step_s']:.0f} ms by the package" in text
    run = "20261117T050307Z"
    ours, other = (row_of("h200_adapter.jsonl", f"7b/nf4-{name}", run) for name in ("streamed-inputs", "bitsandbytes"))
    said = "makes {:,.0f} tokens/s in {:.1f} GB, and bitsandbytes with the base on the GPU {:,.0f} in {:.1f} GB."
    assert said.format(*(row[key] for row in (ours, other) for key in ("tokens_per_s", "peak_gb"))) in text
    gpu, host, speed = figures_of(row_of("lean/held-7b-24gb/rows.jsonl", "zero2-offload-bf16", ""))
    assert f"ZeRO-Offload makes {speed} in {gpu} and {host} of host memory" in text
    assert f"`LOMO` of 7B takes {front_page.bars()['7B/all'].gb:.1f} GB without them" in text


def test_the_picture_of_the_readme_is_drawn_from_rows_and_legible_on_a_phone() -> None:
    kept = (REPO / "docs" / "pictures" / "front_page.svg").read_text(encoding="utf-8")
    assert front_page.draw() == kept, "run: python -m benchmarks.pages"
    assert "(docs/pictures/front_page.svg)" in README
    assert 24 * 360 / front_page.WIDTH >= 11 and "font: 24px" in kept and "fill: #ffffff" in kept
    bars = front_page.bars()
    assert len(bars) == len(front_page.SIZES) * len(front_page.NAMES) and bars["7B/zero-offload"].starts_larger
    row = front_page.planned_row("30B/lora")
    kept_row = next(r for r in rows_of(front_page.PLANNED) if r["case"] == "30B/lora")
    assert row == {**kept_row, **{key: pytest.approx(kept_row[key], rel=0.02) for key in ("peak_gb", "host_peak_gb")}}


@pytest.mark.usefixtures("models_are_traced_once")
def test_the_speeds_of_many_tokens_are_those_of_the_planner() -> None:
    every = list(rows_of("cpu_many_tokens.jsonl"))
    assert {row["link_gbps"] for row in every} == set(pictures.LINK_COLOURS) == set(many_tokens.LINKS_GBPS)
    rows = [row for row in every if row["case"] == "lomo-7b" and row["link_gbps"] == 12.0]
    chosen, other = (next(row for row in rows if row["is_chosen"] == is_chosen) for is_chosen in (True, False))
    planned = many_tokens.plans("lomo-7b")
    for row in (chosen, other):
        found = planned(12.0, row["batch"])
        assert found.tokens_per_s(found["lomo"]) == pytest.approx(row["tokens_per_s"], rel=0.02)
    assert chosen["step_s"] <= 1.02 * chosen["compute_s"] and other["step_s"] > 10 * other["compute_s"]


def test_saves_cost_what_the_page_says() -> None:
    file, page = "h200_checkpoint_speed.jsonl", (REPO / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    kept = {
        run: row_of(file, "opt-6.7b/zo-async", run)["tokens_per_s"] / row_of(file, "opt-6.7b/zo", run)["tokens_per_s"]
        for run in ("20261115T130850Z", "20261115T085025Z")
    }
    in_memory, on_disk = kept.values()
    assert f"OPT-6.7B streamed kept {in_memory:.2f} of its tokens/s" in page
    speed = row_of(file, "disk", "20261115T085025Z")["disk_gbps"]
    assert f"On a disk of {speed:.1f} GB/s it kept {on_disk:.2f}" in page
