"""The figures of the pages in docs/ are those of the rows, their pictures are current, and their words fit the rows."""

from __future__ import annotations

import re
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lomo_speed, lsp_speed, pages, recipe_speed, zo_speed
from ds_zo.bench import headline
from ds_zo.bench.compare import main as compare

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "launch"))
import draw_docs  # noqa: E402

DOCS = REPO / "docs"
NAMES = [
    "how-zo",
    "how-lomo",
    "how-lsp",
    "how-streaming",
    "benchmarks",
    "records",
    "paper-zo",
    "paper-lomo",
    "paper-lsp",
]
FIGURE = re.compile(r"\d[\d,.]*\s*(?:tokens/s|TB|GB|GiB|MB|ms\b|s\b|%|points|times)")
"""A number with a unit that somebody has to measure."""
CARD = re.compile(r"[Ww]ithin \d+ GB")


def read(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*NAMES, "choose", "adapters"])
def test_the_figures_of_a_page_are_those_of_the_rows(name: str) -> None:
    text = read(name)
    assert pages.MARKED.search(text)
    assert pages.filled(text) == text, "run: python -m benchmarks.pages"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_measured_figure_outside_its_blocks(name: str) -> None:
    text = re.sub(f"{headline.BEGIN}.*{headline.END}", "", pages.MARKED.sub("", read(name)), flags=re.DOTALL)
    assert FIGURE.findall(CARD.sub("", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))) == []


def test_every_block_is_on_a_page_and_a_changed_row_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {found[1] for name in [*NAMES, "choose", "adapters"] for found in pages.MARKED.findall(read(name))}
    assert used == set(pages.BLOCKS)
    text = read("records")
    row = max((r for r in pages.rows_in(pages.LOMO) if r.get("cap_gb") == 24), key=lambda r: r["parameters"])
    monkeypatch.setitem(row, "tokens_per_s", 1234.4)
    assert pages.filled(text) == text.replace(" 1,630 tokens/s", " 1,234 tokens/s") != text
    with pytest.raises(ValueError, match=r"must be one of zo-speed, .* got speeds; rename it"):
        pages.filled("<!-- rows: speeds -->\n<!-- /rows -->\n")
    with pytest.raises(ValueError, match=r"needs one row, found 0 of case 9b of run r in h200_lomo.jsonl"):
        pages.row_of(pages.LOMO, "9b", run="r")


def test_check_names_pages_that_are_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("# Page\n\n<!-- rows: checkpoints -->\nold\n<!-- /rows -->\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"not current: page.md; run: python -m benchmarks.pages"):
        pages.main(["--check"])
    assert "old" in (tmp_path / "page.md").read_text(encoding="utf-8")
    pages.main([])
    pages.main(["--check"])
    assert capsys.readouterr().out == "written: page.md\nall current\n"


def test_the_headline_of_a_page_is_that_of_the_rows() -> None:
    results = REPO / "benchmarks" / "results" / "compare"
    text, parts = read("benchmarks"), headline.read_parts([results])
    made = headline.page_text(parts, root=results, page=DOCS / "benchmarks.md", has_plot=True)
    again = "run: python launch/compare.py --headline benchmarks/results/compare --into . docs"
    assert f"{headline.BEGIN}\n{made}\n{headline.END}" in text, again
    drawn = headline.draw_headline(parts)
    assert drawn is not None
    assert words(drawn) == words((DOCS / "pictures" / headline.PLOT).read_text(encoding="utf-8")), again


def words(svg: str) -> list[str]:
    """All words of the picture's texts. A version of matplotlib may break lines into elements in its own way."""
    texts = [element for element in ET.fromstring(svg).iter() if element.tag.endswith("}text")]
    return " ".join("".join(f"{part} " for part in element.itertext()) for element in texts).split()


@pytest.mark.parametrize("name", draw_docs.PAINTERS)
def test_a_picture_is_current_and_legible_on_a_phone(name: str) -> None:
    file = DOCS / "pictures" / f"{name}.svg"
    kept = file.read_text(encoding="utf-8")
    drawn = draw_docs.draw(name)
    again = f"run: python launch/draw_docs.py {name}"
    assert words(drawn) == words(kept), again
    if creator(drawn) == creator(kept):  # another CPU may round a coordinate differently
        assert numbers(drawn) == pytest.approx(numbers(kept), abs=0.02), again
    assert f"](pictures/{name}.svg)" in read(f"how-{name}")
    width = float(ET.fromstring(kept).attrib["viewBox"].split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", kept)]
    assert sizes and min(sizes) * 360 / width >= 11, "pixels of text on a phone, 360 pixels wide"
    assert "fill: #ffffff" in kept, "a dark page would shine through"


def creator(svg: str) -> str:
    """The version of matplotlib."""
    found = re.search(r"Matplotlib v[\d.]+", svg)
    assert found is not None
    return found[0]


def numbers(svg: str) -> list[float]:
    """Coordinates of paths and texts."""
    found = [element.attrib.get(key, "") for element in ET.fromstring(svg).iter() for key in ("d", "x", "y")]
    return [float(number) for text in found for number in re.findall(r"-?\d+\.?\d*", text)]


def test_the_command_of_a_record_runs_its_row_alone(capsys: pytest.CaptureFixture[str]) -> None:
    suites: dict[str, Any] = {m.__name__: m.main for m in (zo_speed, lomo_speed, lsp_speed, recipe_speed)}
    for record in pages.all_records():
        assert record.row in pages.rows_in(record.file)
        program, *rest = shlex.split(record.command)
        assert program == "python"
        if rest[0] == "launch/compare.py":
            assert compare([*rest[1:], "--dry-run", "--device", "cuda"]) == 0
            said = capsys.readouterr().out
            listed = re.findall(r"^ {4}(\S+) ", said, flags=re.MULTILINE)
            assert listed == [record.row["case"]] and said.startswith(rest[rest.index("--only") + 1]), said
            continue
        suites[rest[1]]([*rest[2:], "--list"])
        cases = [line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]]
        assert [case for case in cases if case != "warmup"] == [record.row["case"]]


def test_a_larger_model_of_a_recipe_is_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"peak_gb": 20.0, "host_peak_gb": 100.0, "tokens_per_s": 1000.0, "run_id": "r", "commit": "c"}
    found = [
        {"case": case.name, "status": "ok", "parameters": 69e9, **case.params, "params": case.params, **figures}
        for case in recipe_speed.cases_of()
        if "zo_70b" in case.name
    ]
    monkeypatch.setattr(pages, "_recipe_rows", lambda: found)
    record = next(pages.all_records())
    assert record.model == "LLaMA-70B, bf12, 16 x 128" and record.row["case"] == "zo_70b_24gb_bf12"
    assert record.command.startswith("python -m benchmarks.recipe_speed --only '^zo_70b_24gb_bf12$'")


def test_words_beside_the_tables_fit_the_rows() -> None:
    """Sentences that judge: what ZO learned, what fp8 alone did not, LSP's projectors, AdaLOMO beside LOMO."""

    def cells(block: str) -> dict[str, list[str]]:
        lines = [line for line in pages.BLOCKS[block]().splitlines() if line.startswith("| ")]
        return {row[0]: row[1:] for row in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}

    def scores(row: list[str]) -> list[float]:
        return [float(cell.split()[0].rstrip("%")) for cell in row]

    quality = {name: scores(row[2:]) for name, row in cells("quality").items() if name not in ("", "---")}
    before, zo, fp8 = (quality[name] for name in ("no training", "ZO", "ZO, fp8, `master: wire`"))
    sst2, *others = range(4)
    assert zo[sst2] > before[sst2] + 10 and all(zo[task] < before[task] + 3 for task in others)
    assert zo[4] > before[4] and fp8[sst2] < before[sst2] + 1, "perplexity: lower is better"
    assert all(quality[name][1] > zo[1] for name in ("LOMO", "LSP, d = 512", "LoRA"))
    for task in (1, 3):  # RTE and BoolQ
        assert quality["AdamW"][task] > quality["AdaLOMO"][task] > quality["LOMO"][task]
    learned, _, _, loose, on_dev = (scores(row) for row in list(cells("lsp-learned").values())[2:])
    assert learned[1] < -2 and min(learned[task] for task in (0, 2, 3, 4)) > -1 and min(on_dev) > -1
    assert loose[1] < learned[1] and loose[4] < learned[4], "clipping decides: RTE and Alpaca"
    assert all(row[-1] == "yes" for row in list(cells("lsp-left-out").values())[2:])
    compared = [[float(cell) for cell in line.split("|")[4:7]] for line in pages.lsp_random().splitlines()[4:7]]
    closer = [first > second > third for first, second, third in compared]
    assert closer == [True, True, True], "random above learned above AdamW: SmolLM2 at both sizes, and Qwen"
    loss = {name: scores(row)[1] for name, row in cells("wire-loss").items() if name.startswith(("bf", "fp"))}
    assert abs(loss["bf12"]) < 0.01 and abs(loss["bf16"]) < 0.01 and loss["fp8"] > 0.5
    share = {name: float(row[3].rstrip("%")) for name, row in cells("stream-link").items() if row[3].endswith("%")}
    assert share.pop("OPT-6.7B, bf16, four sequences") < 70 and min(share.values()) > 90


WITHOUT_ROWS = {"stock-7b", "lean", "paper-lsp-5", "paper-lsp-6"}
"""Blocks that link to no file of rows. `stock-7b` repeats the head to head; the others wait for their rows."""


def test_every_block_names_its_rows_and_their_command() -> None:
    index = (DOCS.parent / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    for name in [*NAMES, "choose", "adapters"]:
        for found in pages.MARKED.finditer(read(name)):
            files = re.findall(r"benchmarks/results/([\w.-]+)", found[0])
            assert files or found[2] in WITHOUT_ROWS or not found[0].split("-->")[1].startswith("\n\n"), found[2]
            assert [file for file in files if file not in index] == [], "the index has the command"
