"""Links of pages to files outside docs/ lead to copies of the files in the site, and wrong links stay wrong."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import docs_hooks as hooks

REPO = Path(__file__).parents[2]


def shown(markdown: str, *, at: str) -> str:
    """The page's text as the site's builder gets it."""
    return str(hooks.on_page_markdown(markdown, page=SimpleNamespace(file=SimpleNamespace(src_uri=at))))


def test_links_out_of_docs_lead_to_copies() -> None:
    text = (
        "[a](../ds_zo/tasks/README.md#measured) [b](../launch/examples) [c](choose.md#quality) [d](https://x.org/a.md)"
    )
    expected = (
        "[a](repository/ds_zo/tasks/README.md#measured) [b](repository/launch/examples/README.md) "
        "[c](choose.md#quality) [d](https://x.org/a.md)"
    )
    assert shown(text, at="index.md") == expected


def test_pages_outside_docs_link_to_one_another_and_back() -> None:
    text = "[a](docs/exactness.md) ![b](../h200_curves.png)"
    assert shown(text, at="repository/CONTRIBUTING.md") == "[a](../exactness.md) ![b](../h200_curves.png)"
    picture = shown("![b](../h200_curves.png)", at="repository/benchmarks/results/compare/README.md")
    assert picture == "![b](../h200_curves.png)"


def test_a_wrong_link_and_code_are_left_alone() -> None:
    text = "[a](../nowhere.md)\n\n```text\n[b](../README.md)\n```\n"
    assert shown(text, at="index.md") == text, "the strict build reports the link"


def test_a_folder_without_a_page_becomes_a_list_of_its_files() -> None:
    text = hooks.text_of("launch/examples")
    assert text.startswith("# launch/examples\n") and "- [trainer.py](trainer.py)\n" in text


def test_an_old_address_leads_to_a_heading_of_a_page(tmp_path: Path) -> None:
    hooks.on_post_build(config={"site_dir": str(tmp_path)})
    assert {path.stem for path in tmp_path.iterdir()} == set(hooks.MOVED)
    for old, new in hooks.MOVED.items():
        page, _, anchor = new.partition("#")
        text = (REPO / "docs" / page.replace(".html", ".md")).read_text(encoding="utf-8")
        heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
        assert not (REPO / "docs" / f"{old}.md").exists()
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, new
        assert f"url={new}" in (tmp_path / f"{old}.html").read_text(encoding="utf-8")
