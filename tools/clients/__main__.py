"""Runs clients: `bash tools/clients.sh --help`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clients.client import read_clients
from clients.environment import REPO, Environment, make_environment
from clients.evaluation import try_evaluation
from clients.page import PAGE, ROWS, STAGES, page, read_rows, summary, write_rows
from clients.training import try_training

CLIENTS = read_clients()


def try_client(name: str, environment: Environment, folder: Path, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Runs cases of a client one after the other."""
    client, rows = CLIENTS[name], []
    for task, backend in cases:
        print(f"==> {client.title} {client.version}: {task}, {backend}", flush=True)
        begin = time.monotonic()
        try_case = try_training if client.trains else try_evaluation
        found = try_case(client, environment, folder / f"{task}_{backend}", task, backend)
        row = {"client": name, "version": client.version, "task": task, "backend": backend, **found}
        rows.append({**row, "seconds": round(time.monotonic() - begin), "commit": _commit()})
        print(summary(rows[-1:]), flush=True)
    return rows


def _commit() -> str:
    done = subprocess.run(["git", "-C", str(REPO), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bash tools/clients.sh",
        description="Trains, resumes and exports with programs of other projects and the JSONs of ds_zo, on the CPU.",
        epilog="example: bash tools/clients.sh trl llamafactory",
    )
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=REPO / "runs" / "clients", help="environments and runs go here")
    parser.add_argument("--only", metavar="TASK:BACKEND", help="this case alone, such as sft:zo")
    parser.add_argument("--ci", action="store_true", help="`trl sft` with ZO alone, in the environment of the tests")
    parser.add_argument("--record", action="store_true", help="write the rows and the page docs/integrations.md")
    parser.add_argument("--page", action="store_true", help="write the page from the rows; run nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: stopped"))  # ends the client's processes too
    names = args.clients or list(CLIENTS)
    if unknown := sorted(set(names) - CLIENTS.keys()):
        sys.exit(f"error: a client is one of {', '.join(CLIENTS)}, got {unknown[0]}: name one of them")
    if args.ci and (args.clients or args.only):
        parser.error("--ci is one case, `trl sft` with ZO: leave CLIENT and --only out")
    rows, failed = [], []
    if args.ci:
        rows = try_client("trl", Environment(Path(sys.prefix)), args.folder.resolve() / "ci", [("sft", "zo")])
    elif not args.page:
        for name in names:
            folder = args.folder.resolve() / name
            cases = [case for case in CLIENTS[name].cases() if args.only in (None, ":".join(case))]
            if not cases:
                continue
            try:
                environment = make_environment(CLIENTS[name], folder / "venv")
            except subprocess.CalledProcessError:
                failed.append(name)
                continue
            rows += try_client(name, environment, folder, cases)
            if args.record:
                write_rows(ROWS, rows)
        if not rows and not failed:
            sys.exit(f"error: --only must name a case of {', '.join(names)}, got {args.only}: such as sft:zo")
        print(summary(rows))
    if args.record or args.page:
        PAGE.write_text(page(CLIENTS, read_rows(ROWS), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if failed:
        sys.exit(f"error: pip could not install {', '.join(failed)}, see above")
    if any(row[stage] != "passed" for row in rows for stage in STAGES if stage in row):
        sys.exit("error: a client failed, see above")


if __name__ == "__main__":
    main()
