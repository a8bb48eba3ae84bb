"""The figures of the pages in docs/ are those of the rows, their pictures are current, and their words fit the rows."""

from __future__ import annotations

import importlib.util
import re
import shlex
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import draw_docs
import pytest

from benchmarks import blocks, cells, pages, pictures, recipes, speed, sweep
from ds_zo.bench.compare import main as compare
from ds_zo.records.rows import Row
from tests.helpers.processes import REPO

pytestmark = pytest.mark.slow

DOCS, RESULTS = REPO / "docs", REPO / "benchmarks" / "results"
NAMES = [
    "how-zo",
    "how-lomo",
    "how-lsp",
    "how-streaming",
    "benchmarks",
    "reproductions",
]
ZO, LSP = ("h200_zo_targets.jsonl", "20261115T180412Z"), ("h200_lsp.jsonl", "20261115T150212Z")
LOMO, BIAS = "h200_lomo.jsonl", "h200_lsp_bias.jsonl"
FIGURE = re.compile(r"\d[\d,.]*\s*(?:tokens/s|TB|GB|GiB|MB|ms\b|s\b|%|points|times)")
"""A number with a unit that somebody has to measure."""
CARD = re.compile(r"([Ww]ithin|capped at|limited to|A100 of) \d+ GB|links of \d+ to \d+ GB/s")
"""Sizes of cards and links that a case was given."""


def read(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*NAMES, "choose", "adapters"])
def test_the_figures_of_a_page_are_those_of_the_rows(name: str) -> None:
    text = read(name)
    assert pages.filled(text) == text, "run: python -m benchmarks.pages"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_no_measured_figure_outside_its_blocks(name: str) -> None:
    text = pages.MARKED.sub("", read(name))
    assert FIGURE.findall(CARD.sub("", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))) == []


def test_every_block_is_on_a_page_and_a_changed_row_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [found[1] for page in pages.marked_pages() for found in pages.MARKED.findall(page.read_text("utf-8"))]
    assert sorted(used) == sorted(["keys", *blocks.specs(), *recipes.blocks()])
    text = read("benchmarks")
    row = max((r for r in blocks.rows_in(LOMO) if r.get("cap_gb") == 24), key=lambda r: r["parameters"])
    monkeypatch.setitem(row, "tokens_per_s", 1234.4)
    old, changed = "| 1,630 (1,625 to 1,633,", "| 1,234 (1,231 to 1,236,"
    assert text.count(old) == 1
    assert pages.filled(text) == text.replace(old, changed)
    with pytest.raises(ValueError, match=r"must be one of .*zo-speed, .* got speeds; rename it"):
        pages.filled("<!-- rows: speeds -->\n<!-- /rows -->\n")


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


@pytest.mark.parametrize("name", draw_docs.PAINTERS)
def test_a_picture_is_current_and_legible_on_a_phone(name: str) -> None:
    file = DOCS / "pictures" / f"{name}.svg"
    kept = file.read_text(encoding="utf-8")
    drawn = draw_docs.draw(name)
    again = "run: python tools/draw_docs.py"
    assert pictures.words(drawn.encode()) == pictures.words(kept.encode()), again
    if creator(drawn) == creator(kept):  # another CPU may round a coordinate differently
        assert numbers(drawn) == pytest.approx(numbers(kept), abs=0.02), again
    assert f"](pictures/{name}.svg)" in read(f"how-{name}")
    width = float(ET.fromstring(kept).attrib["viewBox"].split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:\w+ )?([\d.]+)px", kept)]
    assert sizes and min(sizes) * 360 / width >= 11, "pixels of text on a phone, 360 pixels wide"
    assert "fill: #ffffff" in kept, "a dark page would shine through"


@pytest.mark.parametrize("file", [file for file in pictures.pictures() if file.endswith(".svg")])
def test_a_measured_picture_is_drawn_from_rows(file: str) -> None:
    name = Path(file).name
    pages_text = " ".join(page.read_text("utf-8") for page in (REPO / "README.md", *DOCS.glob("*.md")))
    assert re.search(rf"!\[[^]]{{20,}}\]\([\w/]*pictures/{name}\)", pages_text), "with words for who cannot see it"
    kept = pictures.words((REPO / file).read_bytes())
    assert pictures.words(pictures.drawn(file)) == kept, "run: python -m benchmarks.pages"


def test_measured_pictures_are_those_of_the_data() -> None:
    others = {"headline.svg", "front_page.svg", "many_tokens.svg"}
    measured = {path.name for path in (DOCS / "pictures").glob("h200_*")} | others
    assert {Path(file).name for file in pictures.pictures() if file.startswith("docs/")} == measured


def cells_of(name: str) -> dict[str, list[str]]:
    lines = [line for line in blocks.text_of(name).splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}


def test_words_beside_measured_pictures_fit_the_rows() -> None:
    """What is said of the pictures can be seen in them."""
    zo, lsp = ([row for row in blocks.rows_in(file) if row["run_id"] == run] for file, run in (ZO, LSP))
    by_case = {row["case"]: row for row in zo}
    for size in ("1.3b", "6.7b", "13b"):
        mezo, resident = (by_case[f"{size}.{way}"] for way in ("mezo", "resident"))
        assert resident["tokens_per_s"] > mezo["tokens_per_s"] and resident["peak_gb"] < 1.01 * mezo["peak_gb"]
        for way, is_faster in (("streamed", False), ("bf12", True), ("fp8", True)):
            if size != "1.3b":
                row = by_case[f"{size}.{way}"]
                assert row["peak_gb"] < 0.2 * mezo["peak_gb"]
                assert (row["tokens_per_s"] > mezo["tokens_per_s"]) == is_faster
                assert row["tokens_per_s"] > 0.9 * mezo["tokens_per_s"]
    parts = pictures.parts_of_steps(lsp)
    shares = {name: {kind: s / sum(part.values()) for kind, s in part.items()} for name, part in parts.items()}
    assert shares["LSP, d = 512"]["copy"] + shares["LSP, d = 512"]["cpu"] < 0.1
    assert 0.45 < shares["ZeRO-Offload"]["copy"] < 0.55 and 0.28 < shares["ZeRO-Offload"]["cpu"] < 0.38
    assert shares["layer-wise, no projection"]["cpu"] > 0.6
    shown = {key: row for key, row in pictures.medians(blocks.rows_in(BIAS)).items() if key[2] in (4, 16)}
    assert all(row["galore_total_bias_test"] < row["bias_test"] for row in shown.values())
    largest = {(shape, r): row for (shape, _, r), row in sorted(shown.items())}
    assert sum(row["galore_device_bias_test"] > row["bias_test"] for row in largest.values()) == 3 == len(largest) - 1
    for (shape, dim, r), row in shown.items():
        if r == 4:
            fit, test = (row[key] - shown[shape, dim, 16][key] for key in ("bias_fit", "bias_test"))
            assert fit > 0 and fit > test, (shape, dim)


def creator(svg: str) -> str:
    """The version of matplotlib."""
    found = re.search(r"Matplotlib v[\d.]+", svg)
    assert found is not None
    return found[0]


def numbers(svg: str) -> list[float]:
    """Coordinates of paths and texts."""
    found = [element.attrib.get(key, "") for element in ET.fromstring(svg).iter() for key in ("d", "x", "y")]
    return [float(number) for text in found for number in re.findall(r"-?\d+\.?\d*", text)]


def test_words_beside_the_tables_fit_the_rows() -> None:
    """Sentences that judge: what ZO learned, what fp8 alone did not, LSP's projectors, AdaLOMO beside LOMO."""

    def scores(row: list[str]) -> list[float]:
        return [float(cell.split()[0].rstrip("%")) for cell in row]

    quality = {name: scores(row[2:]) for name, row in cells_of("quality").items() if name not in ("", "---")}
    before, zo, fp8 = (quality[name] for name in ("no training", "ZO", "ZO, fp8, `master: wire`"))
    sst2, *others = range(4)
    assert zo[sst2] > before[sst2] + 10 and all(zo[task] < before[task] + 3 for task in others)
    assert zo[4] > before[4] and fp8[sst2] < before[sst2] + 1, "perplexity: lower is better"
    assert all(quality[name][1] > zo[1] for name in ("LOMO", "LSP, d = 512", "LoRA"))
    for task in (1, 3):  # RTE and BoolQ
        assert quality["AdamW"][task] > quality["AdaLOMO"][task] > quality["LOMO"][task]
    ours, other = quality["AdaLOMO"], quality["LOMO"]
    assert all(a > b for a, b in zip(ours[:4], other[:4], strict=True)) and ours[4] < other[4], "perplexity"
    learned, _, _, loose, on_dev = (scores(row) for row in list(cells_of("lsp-learned").values())[2:])
    assert learned[1] < -2 and min(learned[task] for task in (0, 2, 3, 4)) > -1 and min(on_dev) > -1
    assert loose[1] < learned[1] and loose[4] < learned[4], "clipping decides: RTE and Alpaca"
    for cell in cells_of("lsp-learned")["learned"]:
        below, error = (float(number) for number in cell.partition(" (")[0].split(" ± "))
        assert below > -2 * error, "lower than AdamW by less than two standard errors"
    assert all(row[-1] == "yes" for row in list(cells_of("lsp-left-out").values())[2:])
    compared = [scores(line.split("|")[4:7]) for line in blocks.text_of("lsp-random").splitlines()[2:5]]
    closer = [first > second > third for first, second, third in compared]
    assert closer == [True, True, True], "random above learned above AdamW: SmolLM2 at both sizes, and Qwen"
    loss = {name: scores(row)[1] for name, row in cells_of("wire-loss").items() if name.startswith(("bf", "fp"))}
    assert abs(loss["bf12"]) < 0.01 and abs(loss["bf16"]) < 0.01 and loss["fp8"] > 0.5
    better = [row[-1] for row in list(cells_of("paper-lomo-lora").values())[2:]]
    assert better == ["LOMO", "LoRA", "neither", "LoRA", "LOMO"], "LOMO loses on, wins on, overlaps on"
    ranges = [re.findall(r"[+-][\d.]+", row[-1])[1:] for row in list(cells_of("lora-lomo-rates").values())[2:]]
    assert [low[0] + high[0] for low, high in ranges] == ["-+", "++", "--", "-+"], "better at rank 2, worse at rank 4"
    share = {name: float(row[3].rstrip("%")) for name, row in cells_of("stream-link").items() if row[3].endswith("%")}
    assert share.pop("OPT-6.7B, bf16, four sequences") < 70 and min(share.values()) > 90


def measured_blocks() -> Iterator[tuple[str, str]]:
    """Name and text of every block that has rows, with single spaces."""
    for page in pages.marked_pages():
        for found in pages.MARKED.finditer(page.read_text(encoding="utf-8")):
            text = " ".join(found[0].removeprefix(found[1]).removesuffix(found[3]).split())
            if text and "made by" in blocks.specs().get(found[2], {}):
                yield found[2], text


def commands_of(text: str) -> list[list[str]]:
    """The commands that a block names, in words."""
    made = re.findall(r"Made by (`[^`]+`(?: and `[^`]+`)*)(?! in the tree)", text)
    return [shlex.split(command) for said in made for command in re.findall("`([^`]+)`", said)]


def test_every_block_names_its_rows_their_run_and_their_command() -> None:
    index = (RESULTS / "README.md").read_text(encoding="utf-8")
    for name, text in measured_blocks():
        files = re.findall(r"\]\(\.\./benchmarks/results/([\w./-]+)\)", text)
        assert files and all((RESULTS / file).exists() for file in files), name
        assert [file for file in files if file.partition("/")[0] not in index] == [], "the index has the command"
        assert re.search(r"\bruns? \d{8}T\d{6}Z|\bcommits? [0-9a-f]{7}", text), name
        assert text.count("Rows: ") == len(re.findall("Made by `", text)) >= 1, name
        for module, decided in re.findall(r"-m (benchmarks\.\w+)[^`]*`( in the tree of commit)?", text):
            assert bool(importlib.util.find_spec(module)) != bool(decided), name


def test_a_block_is_made_of_rows_that_its_commands_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without all other rows of the suites the block is the same."""
    read, checked = blocks.read_objects, set()
    for name, text in dict(measured_blocks()).items():
        listed = set[str]()
        for _, *words in commands_of(text):
            if words[:2] == ["-m", "benchmarks.speed"]:
                speed.main([*words[2:], "--list"])
                listed |= {line.split()[1] for line in capsys.readouterr().out.splitlines()[:-1]}
        if not listed:
            continue

        def only_listed(path: Path, listed: set[str] = listed) -> list[Row]:
            is_made = lambda case: case in listed or any(found.startswith(f"{case}.") for found in listed)  # noqa: E731
            return [row for row in read(path) if row["status"] == "planned" or is_made(row["case"])]

        with monkeypatch.context() as patch:
            patch.setattr(blocks, "read_objects", only_listed)
            blocks.rows_in.cache_clear()
            assert " ".join(blocks.text_of(name).split()) == text, name
        checked.add(name)
    blocks.rows_in.cache_clear()
    assert {"zo-speed", "lomo-streamed", "lsp-speed", "paper-zo-1", "paper-lomo-2", "paper-lsp-6"} <= checked


def test_other_commands_of_blocks_are_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of `launch/compare.py`, one with each set of options, list their contenders; those of `launch/sweep.py`
    choose methods of their grid."""
    commands = [command for _, text in measured_blocks() for command in commands_of(text) if command[1] != "-m"]
    others = list({tuple(w for w in c if w.startswith("--") or "sweep" in c[1]): c for c in commands}.values())
    assert {command[1] for command in others} == {"launch/compare.py", "launch/sweep.py"}
    for _, script, *words in others:
        if script == "launch/compare.py":
            assert compare([*words, "--dry-run", "--device", "cuda"]) == 0
            listed = re.findall(r"^ {4}(\S+) ", capsys.readouterr().out, flags=re.MULTILINE)
            if "--contenders" in words:
                assert sorted(listed) == sorted(words[words.index("--contenders") + 1].split(","))
        else:
            args = sweep.parse_args([str(tmp_path) if word == "DIR" else word for word in words])
            assert sweep.chosen_grid(args).methods


def test_a_ratio_needs_rows_of_one_run() -> None:
    row: Row = {
        "run_id": "r",
        "tokens_per_s": 100.0,
        "step_s": 2.0,
        "step_s_min": 1.0,
        "step_s_max": 4.0,
        "seconds": [1],
    }
    base = row | {"tokens_per_s": 50.0, "step_s": 4.0, "step_s_min": 4.0, "step_s_max": 5.0}
    assert cells.ratio(row, base) == "2.00 (1.00 to 5.00)"
    assert (cells.speed(row), cells.ms(row)) == ("100 (50 to 200, 1)", "2,000 (1,000 to 4,000, 1)")
    with pytest.raises(ValueError, match=r"a ratio needs rows of one run, got r and s"):
        cells.ratio(row, base | {"run_id": "s"})


def test_words_beside_the_head_to_head_fit_the_rows() -> None:
    """LLaMA-1.3B waits for the host and four ranges overlap; lomo-optim waits for the host on OPT; `master: wire`."""
    small, opt = (
        {row["case"]: row for row in blocks.rows_in(f"compare/{model}/uncapped/rows.jsonl")}
        for model in ("llama-1.3b", "opt-6.7b")
    )
    four = [small[name] for name in ("lomo", "lsp", "adamw", "sgd")]
    assert all(row["gpu_idle_s"] > 0.5 * row["step_s"] for row in four)
    assert max(row["step_s_min"] for row in four) < min(row["step_s_max"] for row in four)
    assert opt["lomo-optim"]["gpu_idle_s"] > 0.8 * opt["lomo-optim"]["step_s"]
    file, run = ZO
    rows = {row["case"]: row for row in blocks.rows_in(file) if row["run_id"] == run}
    split, wire = (rows[f"6.7b.{name}"] for name in ("split", "streamed"))
    assert split["host_gb"] == 2 * wire["host_gb"]
