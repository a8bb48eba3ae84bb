"""Opens every page of the built site in Chromium at the width of a phone and of a desktop.

    python tools/look_at_pages.py runs/site

Fails if a page scrolls sideways, if a picture does not load, or if it is shown smaller than LEAST_SHARE of its size.
Wide tables, code and plots scroll inside the page. Without Chromium (on the PATH, or named by DS_ZO_CHROMIUM) it says
so and checks nothing.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WIDTHS_PX = (390, 1280)
LEAST_SHARE = 0.6
"""Width of a picture on the page as a share of its own width. Its letters are too small to read below that."""
_REDIRECT = 'http-equiv="refresh"'
"""Pages of old addresses have it. They lead to other pages."""
_OFFLINE = "--disable-background-networking --disable-component-update --disable-sync --disable-quic --no-first-run"
"""Chromium waits for services that it cannot reach."""
_DRIVER = """<!doctype html><title></title><body><script>
const seen = [];
const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  frame.src = page;
  document.body.append(frame);
  await loaded;
  await later(20);
  const root = frame.contentDocument.documentElement;
  seen.push({page, width, sideways: root.scrollWidth - root.clientWidth,
    pictures: [...root.querySelectorAll("article img")].map((i) => [i.src, i.naturalWidth, i.clientWidth])});
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await look(page, width);
  document.title = JSON.stringify(seen);
})();
</script></body>"""


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    return os.environ.get("DS_ZO_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def measured(site: Path, chromium: str) -> list[dict[str, object]]:
    """What Chromium makes of each page at each width. The site is served on this machine while it looks."""
    written = (path for path in site.rglob("*.html") if path.name != "404.html")
    pages = sorted(str(path.relative_to(site)) for path in written if _REDIRECT not in path.read_text(encoding="utf-8"))
    driver = _DRIVER.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS_PX))

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path != "/driver":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(driver.encode())
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
        options += [*_OFFLINE.split(), "--virtual-time-budget=600000", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_address[1]}/driver"
        done = subprocess.run([chromium, *options, address], capture_output=True, text=True, timeout=240)
    server.shutdown()
    title = re.search(r"<title>(.+?)</title>", done.stdout, flags=re.DOTALL)
    if title is None:
        raise SystemExit(f"Chromium showed no pages: {done.stderr[-2000:]}")
    found: list[dict[str, object]] = json.loads(html.unescape(title[1]))
    return found


def faults(seen: dict[str, object]) -> list[str]:
    """What is wrong with one page at one width."""
    at = f"{seen['page']} at {seen['width']} px"
    found = [f"{at} is {seen['sideways']} px too wide"] if int(str(seen["sideways"])) > 0 else []
    for source, natural_px, shown_px in seen["pictures"]:  # type: ignore[attr-defined]
        if not natural_px:
            found.append(f"{at}: {source} does not load")
        elif shown_px < LEAST_SHARE * natural_px:
            found.append(f"{at}: {source} is {natural_px} px wide and shown in {shown_px}")
    return found


def main() -> None:
    site, chromium = Path(sys.argv[1]).resolve(), browser()
    if chromium is None:
        print("no Chromium: the pages were not looked at (DS_ZO_CHROMIUM names one)")
        return
    seen = measured(site, chromium)
    wrong = [line for page in seen for line in faults(page)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"{len(seen) // len(WIDTHS_PX)} pages, {' and '.join(map(str, WIDTHS_PX))} px wide: nothing is cut off")


if __name__ == "__main__":
    main()
