"""The table and plot of the pages are made from rows by a command, and from nothing else."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ds_zo.bench.compare import main
from ds_zo.bench.headline import BEGIN, END
from tests.bench.comparison_rows import MEASURED, rows

TOLD = {"steps": 8, "warmup": 3, "max_s": 4.0, "seed": 0}


def write_part(folder: Path, *, model: str, cap: float | None, **changes: dict[str, Any]) -> None:
    """`changes`: of rows, by contender."""
    made = []
    for row in rows():
        row = json.loads(json.dumps(row)) | {"machine": "m1"}
        if "spec" in row["params"]:
            row["params"]["spec"] |= {"model": model, "device_memory_gb": cap, **TOLD}
            row |= changes.get(row["case"], {})
        made.append(row)
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def test_the_command_fills_the_file_between_its_markers_from_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, readme = tmp_path / "results", tmp_path / "README.md"
    failed = {"status": "skipped", "error": "not run: planned 121.3 of 24.0 GB of host memory"}
    void = {"status": "void", "error": "it was told of the whole card"}
    hollow = {"tokens_per_s_mean": 12_345.4, "peak_gb": 23.04, "host_peak_gb": 6.54, "host_drop_gb": 0.0}
    hollow |= {"ran_with_gb": "all"}
    write_part(results / "llama-1.3b" / "uncapped", model="random:llama-1.3b", cap=None)
    write_part(results / "llama-1.3b" / "24gb", model="random:llama-1.3b", cap=24.0, adamw=failed, zo=hollow)
    write_part(results / "big", model="random:opt-6.7b", cap=24.0, lsp={"parameters": 6_658_473_984}, superoffload=void)
    reason = "Not measured: SuperOffload of opt-6.7b, 4 x 1024 within 24 GB: it was told of the whole card."
    (results / "begun").mkdir()
    machine = json.dumps(rows()[0])
    (results / "begun" / "rows.jsonl").write_text(machine + "\n")  # whose call ended before a contender's
    before = f"# Title, not {END}\n\n{BEGIN}\nold figures\n{END}\n\nThe rest.\n"
    readme.write_text(before, encoding="utf-8")

    assert main(["--headline", str(results), "--into", str(readme)]) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"# Title, not {END}\n\n{BEGIN}\nOne NVIDIA H200; 16 cores") and text.endswith(
        f"{END}\n\nThe rest.\n"
    )
    said = capsys.readouterr()
    assert "old figures" not in text and said.out.strip() in text
    assert f"left out: {results / 'begun'}: no contender has a row yet" in said.err

    small, whole = text.split("On the card as it is")
    assert "| | llama-1.3b, 4 x 1024 | opt-6.7b, 4 x 1024 |" in small
    assert "tokens/s (slowest to fastest step, number of steps) / GPU GB / host GB" in small
    in_all = "36,506 (33,851 to 38,388, 3) / 4.90 / 1.50"
    assert f"| ZO | 12,345 (33,851 to 38,388, 3) / 23.0 / 6.54 † | {in_all} |" in small
    assert "\n† Ran without the limit; figures only if its peak stayed under the limit." in text
    rows_of = "[opt-6.7b-24gb](results/big/rows.jsonl)."
    rows_of = f"[llama-1.3b-24gb](results/llama-1.3b/24gb/rows.jsonl), {rows_of}"
    rows_of = f"Rows: run r1: [llama-1.3b](results/llama-1.3b/uncapped/rows.jsonl), {rows_of}"
    assert rows_of in " ".join(text.split())
    assert "| AdamW on the GPU | would take 121 GB of host memory |" in small
    assert "| SuperOffload | does not fit | not measured |" in small
    assert (
        "| | llama-1.3b, 4 x 1024 |\n" in whole
        and "| AdamW on the GPU | 16,258 (15,075 to 17,096, 3) / 28.3 /" in whole
    )
    assert f"\n{reason}\n\n" in text
    command = "python launch/compare.py --model random:llama-1.3b --batch 4 --device-memory-gb none,24 --resume --out "
    assert f"{command}runs/results/llama-1.3b\n" in text

    assert "](results/headline.svg)" in text
    drawn = ET.parse(results / "headline.svg").getroot()
    words = [element.text for element in drawn.iter() if element.text and element.text.strip()]
    assert words.count("llama-1.3b, 4 x 1024") == 1 and "zo within 24 GB" in words and "zero2-offload" in words

    again = text.replace("\n", "\r\n").encode()
    readme.write_bytes(again)
    assert main(["--headline", str(results), "--into", str(readme)]) == 0
    assert readme.read_bytes() == again, "the same rows make the same text, and line ends are the file's"
    elsewhere = (results / "big" / "rows.jsonl").read_text().replace('"m1"', '"m2"').replace("55.2", "51.0")
    (results / "big" / "rows.jsonl").write_text(elsewhere)
    assert main(["--headline", str(results)]) == 0
    facts = "2 machines with one NVIDIA H200 each, each column from one of them; 16 cores; link 51.0 to 55.2 GB/s up,"
    assert f"{facts} 55.1 down;" in " ".join(capsys.readouterr().out.split())
    (results / "big" / "rows.jsonl").write_text("")
    assert main(["--report-only", "--out", str(results)]) == 0
    assert (results / "llama-1.3b" / "24gb" / "report.md").exists(), "one without rows keeps no other from its page"


def test_every_page_with_markers_is_filled_with_links_of_its_own(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    write_part(results / "llama-1.3b", model="random:llama-1.3b", cap=None)
    (docs / "pictures").mkdir(parents=True)
    marked, without = f"{BEGIN}\n{END}\n", f"a sentence about {BEGIN} and {END}\n"
    for page, text in {tmp_path / "README.md": marked, docs / "a.md": marked, docs / "b.md": without}.items():
        page.write_text(text, encoding="utf-8")

    assert main(["--headline", str(results), "--into", str(tmp_path), str(docs)]) == 0
    files = tmp_path / "README.md", docs / "a.md"
    top, page = (" ".join(file.read_text(encoding="utf-8").split()) for file in files)  # lines are wrapped
    assert "](results/headline.svg)" in top and "under [results](results)" in top
    assert "](pictures/headline.svg)" in page and "under [../results](../results)" in page
    assert (docs / "pictures" / "headline.svg").read_bytes() == (results / "headline.svg").read_bytes()
    assert (docs / "b.md").read_text(encoding="utf-8") == without, "markers stand on lines of their own"


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--headline", str(tmp_path / "none")]) == 1
    assert "there are none (--headline)" in capsys.readouterr().err
    write_part(tmp_path / "results" / "llama", model="random:llama-1.3b", cap=None)
    (tmp_path / "page.md").write_text("no markers", encoding="utf-8")
    assert main(["--headline", str(tmp_path / "results"), "--into", str(tmp_path / "page.md")]) == 1
    assert "lacks: add them (--into)" in capsys.readouterr().err
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == "no markers"
    assert main(["--headline", str(tmp_path / "results"), "--into", str(tmp_path / "none.md")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["--headline", str(tmp_path / "results"), "--into", str(tmp_path)]) == 1
    assert f"which no page of {tmp_path} has (--into)" in capsys.readouterr().err
    failed = {name: {"status": "oom", "error": "CUDA out of memory"} for name in MEASURED}
    write_part(tmp_path / "failed" / "llama", model="random:llama-1.3b", cap=None, **failed)
    assert main(["--headline", str(tmp_path / "failed")]) == 0
    assert "| ZO | does not fit |" in capsys.readouterr().out and not (tmp_path / "failed" / "headline.svg").exists()
