"""Hooks of mkdocs.yml. Pages link to files of the repository outside docs/; the site gets a copy of each such file.

A link is written as on disk (`../benchmarks/results/h200_lomo.jsonl`), so it works in the repository's own view too. In
the site the file is at `repository/PATH`. Markdown files become pages, whose links are followed in turn. A folder
becomes the page of its README.md, or a list of its files. An address of a page that is part of another one leads there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

REPO = Path(__file__).resolve().parents[1]
DOCS = "docs"
PLACE = "repository"
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
MOVED = {
    "docker": "index.html#docker",
    "paper-zo": "reproductions.html#zo-offloading",
    "paper-lomo": "reproductions.html#lomo",
    "paper-lsp": "reproductions.html#lsp-offload",
    "several-gpus": "how-streaming.html#several-gpus",
    "versions": "support.html#versions",
    "run_without_import": "integrations.html#without-an-import-line",
    "clients": "integrations.html#other-programs",
    "troubleshooting": "help.html",
    "faq": "help.html#questions",
    "limits": "help.html#limits",
    "planning": "choose.html#what-fits-on-my-card-and-how-fast",
    "records": "benchmarks.html",
}
"""By the name of a page that the site had: where its text is."""
FENCE = re.compile(r"^(```.*?^```)$", flags=re.DOTALL | re.MULTILINE)


def target_of(link: str, *, source: str) -> tuple[str, str] | None:
    """The path in the repository that a link of the file `source` leads to, and its anchor. None: an address of the
    web, an anchor of the same file, or a path that does not exist."""
    file, _, anchor = link.partition("#")
    if not file or "://" in link or link.startswith("mailto:"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
    return (path, anchor) if not path.startswith("..") and (REPO / path).exists() else None


def place_of(path: str) -> str:
    """The path in the site's sources of a path in the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (REPO / path).is_dir():
        return f"{PLACE}/{path}/README.md"
    return f"{PLACE}/{path}"


def source_of(place: str) -> str:
    """The inverse of `place_of` for pages."""
    return place.removeprefix(f"{PLACE}/") if place.startswith(f"{PLACE}/") else f"{DOCS}/{place}"


def text_of(path: str) -> str:
    """The Markdown of a page, or of a folder without README.md: a list of its files."""
    found = REPO / path
    if found.is_file():
        return found.read_text(encoding="utf-8")
    if (found / "README.md").exists():
        return (found / "README.md").read_text(encoding="utf-8")
    files = sorted(entry.name for entry in found.iterdir() if entry.is_file())
    return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in files), ""])


def links_of(text: str) -> list[str]:
    """The links of a page outside its code blocks."""
    return [link for part in FENCE.split(text)[::2] for link in LINK.findall(part)]


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the files outside docs/ that pages lead to."""
    from mkdocs.structure.files import File  # tests of the other functions run without mkdocs

    waiting = [source_of(page.src_uri) for page in files.documentation_pages()] + ["CONTRIBUTING.md"]
    while waiting:
        source = waiting.pop()
        place = place_of(source)
        is_folder = (REPO / source).is_dir()
        if files.get_file_from_path(place) is None:
            if is_folder:
                files.append(File.generated(config, place, content=text_of(source)))
            else:
                files.append(File.generated(config, place, abs_src_path=str(REPO / source)))
        if place.endswith(".md"):
            base = f"{source}/README.md" if is_folder else source
            found = [target_of(link, source=base) for link in links_of(text_of(source))]
            known = {path for path, _ in filter(None, found) if files.get_file_from_path(place_of(path)) is None}
            waiting += sorted(known)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links at the copies."""
    source = source_of(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = target_of(match[1], source=source)
        if target is None:
            return match[1]
        path, anchor = target
        return posixpath.relpath(place_of(path), here or ".") + (f"#{anchor}" if anchor else "")

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)


def on_post_build(*, config: Any) -> None:
    """Leaves a page at each old address that sends its reader on."""
    for old, new in MOVED.items():
        page = (
            f'<!doctype html><meta http-equiv="refresh" content="0; url={new}"><a href="{new}">This page has moved.</a>'
        )
        (Path(config["site_dir"]) / f"{old}.html").write_text(page, encoding="utf-8")
