"""The page is whole in one file and looks right in a browser, where there is one."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds_zo.bench.contenders import ALL, EXACTLY
from ds_zo.bench.losses import time_to_loss
from ds_zo.bench.report import contenders, markdown, page
from tests.bench.comparison_rows import MEASURED, rows

BROWSER = os.environ.get("DS_ZO_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"))), None
)

PROBE = """
<script>
const boxes = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect());
const labels = [...document.querySelectorAll('svg[aria-label="memory against speed"] text')]
  .filter((text) => NAMES.includes(text.textContent.trim())).map((text) => text.getBoundingClientRect());
let covered = 0;
labels.forEach((a, i) => labels.slice(i + 1).forEach((b) => {
  covered += a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
}));
document.title = JSON.stringify({
  sizes: boxes.map((box) => [box.width, box.height]), labels: labels.length, covered,
  overflow: document.documentElement.scrollWidth - window.innerWidth,
  rows: document.querySelectorAll("table")[0].rows.length,
  requests: performance.getEntriesByType("resource").length,
});
</script>
"""


def in_browser(text: str, folder: Path, *, width: int) -> dict[str, Any]:
    """What a real browser makes of the page, measured by a script that the page itself does not have."""
    file = folder / "page.html"
    probe = PROBE.replace("NAMES", json.dumps(list(MEASURED)))
    file.write_text(text.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1600", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    found = re.search(r"<title>(.*?)</title>", done.stdout, flags=re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return measured


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the PATH, or named by DS_ZO_CHROMIUM")
def test_a_browser_shows_four_plots_and_the_table_without_overflow(tmp_path: Path) -> None:
    seen = in_browser(page(rows(), target_loss=9.0), tmp_path, width=1400)
    assert len(seen["sizes"]) == 4
    assert all(w > 400 and h > 150 for w, h in seen["sizes"])
    assert seen["rows"] == 1 + len(MEASURED) + 1
    assert seen["overflow"] <= 0
    assert seen["requests"] == 0
    assert seen["labels"] == len(MEASURED)
    assert seen["covered"] == 0


def test_the_page_needs_nothing_else_and_escapes_what_it_quotes() -> None:
    made = rows()
    made[1] |= {"tokens_per_s": 5.0, "peak_gb": 1.0, "losses": [float("nan")] * 8, "commit": "def5678"}
    made[2] |= {"tokens_per_s": 5.0, "peak_gb": 1.0, "losses": [9.0, float("inf"), float("nan")]}
    made[3] |= {"peak_gb": None, "losses": None, "forward_s": None}
    text = page(made)
    assert "commit def5678, abc1234" in text, "a run that was gone on with later"
    assert not re.search(r'(?:points|d|x|y)="[^"]*(?:nan|inf)', text), "what is no number is not drawn"
    assert not re.search(r'(?:src|href)="https?:', text)
    assert "out of memory &amp; &lt;no more&gt;" in text and "<no more>" not in text
    assert len(re.findall(r' id="', text)) == len(set(re.findall(r' id="([^"]*)"', text)))


def test_the_table_has_every_contender_its_settings_and_its_failure() -> None:
    text = markdown(rows(), target_loss=9.0)
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    shown = [line.split(" | ")[0][2:] for line in lines]
    everyone = [name for name in ALL if name in MEASURED or name == "superoffload"]
    assert shown[: len(MEASURED)] == sorted(MEASURED, key=lambda name: MEASURED[name][0]), "the fastest first"
    assert "| 16,583 (16,258) | 247 (240 to 272) |" in lines[shown.index("adamw")]
    failed = lines[len(MEASURED) + 2]
    assert failed == "| superoffload | oom: torch.OutOfMemoryError: CUDA out of memory & <no more> |"
    settings = lines[-len(everyone) :]
    assert [line.split(" | ")[0][2:] for line in settings] == everyone
    assert "pinned, overlap_comm" in settings[2] and "90% of the cores" in settings[everyone.index("superoffload")]
    assert "link 55.2 GB/s up" in text and "4.20 G parameters/s" in text and "s to loss 9" in text
    assert len({line.count(" | ") for line in lines[: len(MEASURED)]}) == 1


def test_a_table_says_what_was_not_run_and_what_ran_on_a_larger_card() -> None:
    made = rows()
    words = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 172.00 MiB. GPU 0 has a total capacity of 139.80 GiB "
        "of which 116.42 GiB is free. 22.35 GiB allowed; Of the allocated memory 22.00 GiB is allocated by PyTorch"
    )
    made[-1] |= {"error": words, "failed_in": "_engine"}
    told = "does not fit: 0.18 GB more wanted while it was set up, with 23.6 of 24.0 GB in use |"
    assert f"| superoffload | {told}" in markdown(made), "of the card that was emulated"
    made[-1] |= {"status": "skipped", "error": "not run: planned 136.3 of 128.5 GB of host memory"}
    assert "| not run: would take 136.3 GB of host memory, 128.5 were free |" in markdown(made)
    made[-1] |= {"settings": f"stock{EXACTLY}"}
    assert "| superoffload | stock |" in markdown(made) and "than this host has: superoffload." in markdown(made)
    made[-1] |= {"status": "not run", "error": "time (--total-s); --resume runs it"}
    made[2] |= {"ran_with_gb": "all", "running": "BF16_Optimizer(SGD)"}
    made[3]["starts_as_given"] = False
    assert "| superoffload | not run: time (--total-s)" in markdown(made)
    assert "never held more than it has: sgd." in markdown(made)
    assert "without losses: zero2-offload." in markdown(made)
    assert "BF16_Optimizer(SGD)" in page(made)


def test_time_to_a_loss_is_of_the_smoothed_curve() -> None:
    row = {"losses": [4.0, 1.0, 4.0, 4.0, 3.0, 1.0, 1.0], "step_wall_s": 0.5}
    assert time_to_loss(row, 3.0) == 1.0
    assert time_to_loss({**row, "losses": [4.0, 4.0, 4.0, 4.0, 0.0]}, 3.0) == 2.5
    assert time_to_loss(row, 0.5) is None


def test_rows_of_two_runs_are_not_compared() -> None:
    mixed = rows()
    mixed[3]["run_id"] = "r2"
    with pytest.raises(ValueError, match="one run, got r1, r2"):
        contenders(mixed)


def test_a_table_of_a_cpu_has_no_words_of_a_gpu_and_marks_zo() -> None:
    made = [row | {"gpu": None, "peak_gb": 0.0, "link_gbps": None} for row in rows()]
    for row in made:
        row["params"] = row["params"] | {"config": {"optimizer": {"type": "ZO" if row["case"] == "zo" else "SGD"}}}
    text = markdown(made).partition("| contender | set up as |")[0]
    assert "| zo* |" in text and "| lomo |" in text and "zeroth order" in text
    head = next(line for line in text.splitlines() if line.startswith("| contender | tokens/s"))
    assert "GPU" not in head and "up GB" not in head and "copies" not in head
    assert not [line for line in text.splitlines() if line.startswith("- ") and "GPU" in line]
    assert "GPU GB" in markdown(rows())
