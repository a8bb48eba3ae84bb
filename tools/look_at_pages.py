"""Opens every page of the built site in Chromium at the width of a phone and of a desktop.

    python tools/look_at_pages.py runs/site

Fails if a page scrolls sideways, if a picture does not load, or if it is shown smaller than LEAST_SHARE of its size.
Wide tables, code and plots scroll inside the page. Without a Chromium that runs (on the PATH, or named by
DS_ZO_CHROMIUM) it says so and checks nothing.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS_PX = (390, 1280)
LEAST_SHARE = 0.6
"""Width of a picture on the page as a share of its own width. Its letters are too small to read below that."""
_REDIRECT = 'http-equiv="refresh"'
"""Pages of old addresses have it. They lead to other pages."""
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --window-size=1400,1000 --no-first-run "
    "--no-proxy-server --disable-background-networking --disable-component-update --disable-sync --disable-quic"
).split()
_ONLY_HERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
"""Without it, Chromium waits for services that it cannot reach."""
_WAIT_S, _NUM_TRIES = 60, 3
"""Seconds without a report from the browser after which it is started again, and how often it is started."""
_DRIVER = """<!doctype html><title></title><body><script>
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
  const seen = {page, width, sideways: root.scrollWidth - root.clientWidth,
    pictures: [...root.querySelectorAll("article img")].map((i) => [i.src, i.naturalWidth, i.clientWidth])};
  frame.remove();
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
}
(async () => {
  for (const [page, width] of VIEWS) await look(page, width);
})();
</script></body>"""


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    return os.environ.get("DS_ZO_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def measured(site: Path, chromium: str) -> list[dict[str, Any]]:
    """What Chromium makes of each page at each width. The site is served on this machine while it looks. A browser that
    stops is started again for the views that it has not reported. Empty: it does not open a page of this machine."""
    written = (path for path in site.rglob("*.html") if path.name != "404.html")
    pages = sorted(str(path.relative_to(site)) for path in written if _REDIRECT not in path.read_text(encoding="utf-8"))
    views = [(page, width) for page in pages for width in WIDTHS_PX]
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    has_started = threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/driver":
                has_started.set()
                self._answer(_DRIVER.replace("VIEWS", json.dumps([v for v in views if v not in seen])).encode())
            else:
                super().do_GET()

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for _ in range(_NUM_TRIES):
        with _running(chromium, f"http://127.0.0.1:{server.server_address[1]}/driver"), suppress(queue.Empty):
            while len(seen) < len(views):
                found = reports.get(timeout=_WAIT_S)
                seen[found["page"], found["width"]] = found
        if len(seen) == len(views):
            break
        print(f"Chromium has reported nothing for {_WAIT_S} s, after {len(seen)} of {len(views)} views")
    server.shutdown()
    if len(seen) < len(views) and has_started.is_set():
        page, width = next(view for view in views if view not in seen)
        raise SystemExit(f"{page} at {width} px is not shown: Chromium was started {_NUM_TRIES} times")
    return list(seen.values())


@contextmanager
def _running(chromium: str, address: str) -> Iterator[None]:
    """Context in which Chromium shows a page. All its processes are ended on exit."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [chromium, *_OPTIONS, _ONLY_HERE, f"--user-data-dir={profile}", address]
        done = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()


def faults(seen: dict[str, Any]) -> list[str]:
    """What is wrong with one page at one width."""
    at = f"{seen['page']} at {seen['width']} px"
    found = [f"{at} is {seen['sideways']} px too wide"] if seen["sideways"] > 0 else []
    for source, natural_px, shown_px in seen["pictures"]:
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
    if not seen:
        told = "Chromium opens no page of this machine: the pages were not looked at"
        if "DS_ZO_CHROMIUM" in os.environ:
            raise SystemExit(told)
        print(told)
        return
    wrong = [line for page in seen for line in faults(page)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    print(f"{len(seen) // len(WIDTHS_PX)} pages, {' and '.join(map(str, WIDTHS_PX))} px wide: nothing is cut off")


if __name__ == "__main__":
    main()
