"""Rows of what ran, and the part of docs/integrations.md made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clients.client import CONFIGS, NUM_STEPS, SAVE_STEPS, Client
from clients.environment import REPO
from clients.training import WITH_PLUGIN

ROWS = REPO / "benchmarks" / "results" / "cpu_clients.jsonl"
PAGE = REPO / "docs" / "integrations.md"
STAGES = ("train", "resume", "export", "evaluate")

BEGIN, END = "<!-- clients: written by `bash tools/clients.sh --page`, not by hand -->", "<!-- end of clients -->"

HEAD = f"""\
`bash tools/clients.sh` installs each program from its pinned release into an environment of its own. It runs the
program unmodified on the CPU, with a tiny LLaMA in float32.

- **train**: {NUM_STEPS} steps. The start-up table of ds_zo is in the log, every loss is finite, and the weights change.
- **resume**: a second run continues from the checkpoint of step {SAVE_STEPS}. Losses and final weights are those of the
  uninterrupted run, bit for bit.
- **export**: `ds-zo export` of the last checkpoint gives the weights of the program's own final save, bit for bit.
- **evaluate**: log-likelihoods of an exported model agree with plain PyTorch within 1e-4.

"""
JSONS = """
All programs but ms-swift take the JSONs below. Trainer, which they all use, fills in each `"auto"` from the program's
own settings: set a [learning rate for the method](recipes.md#learning-rates-to-start-from) there. A real model takes a
`subspace_dim` of 512, and no `writeback_interval`. For LOMO and AdaLOMO add `max_grad_norm: 0` to the program's file.

"""


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows in place of older rows of the same cases."""
    kept = {_case(row): row for row in [*read_rows(path), *rows]}
    lines = [json.dumps(kept[case]) + "\n" for case in sorted(kept)]
    path.write_text("".join(lines), encoding="utf-8")


def _case(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["client"], row["task"], row["backend"]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for the terminal."""
    heads = ("client", "version", "task", "backend", *STAGES, "seconds")
    return _table(heads, [[str(row.get(head, "")) for head in heads] for row in rows])


def _table(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells))


def page(clients: Mapping[str, Client], rows: Sequence[Mapping[str, Any]], text: str) -> str:
    """The page `text` with its part between the markers made anew: a row for each pair of client and task, and a folded
    section for each client."""
    cells = []
    for name, client in clients.items():
        for task in client.commands:
            ran = [row for row in rows if (row["client"], row["task"], row["version"]) == (name, task, client.version)]
            cells.append([f"{client.title} {client.version}", task, *(_outcome(ran, stage) for stage in STAGES)])
    parts = [HEAD, _table(("program", "task", *STAGES), cells), "\n", JSONS]
    jsons = (
        f"`ds_config.json` of {backend}:\n{_block('json', 'fragment: ds_config.json', _lines(config))}"
        for backend, config in CONFIGS.items()
    )
    parts.append(_folded("The JSONs", "\n".join(jsons)))
    parts += [_folded(client.title, _section(name, client)) for name, client in clients.items()]
    link = f"[cpu_clients.jsonl](../{ROWS.relative_to(REPO).as_posix()})"
    parts.append(_folded("Versions and rows", f"{_versions(clients, rows)}\nRows: {link}\n"))
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{''.join(parts)}{END}{rest.split(END)[1]}"


def _folded(title: str, text: str) -> str:
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text.strip()}\n\n</details>\n\n'


def _outcome(rows: Sequence[Mapping[str, Any]], stage: str) -> str:
    """The backends that passed, and those that did not."""
    passed = [row["backend"] for row in rows if row.get(stage) == "passed"]
    failed = [row["backend"] for row in rows if row.get(stage, "passed") != "passed"]
    shown = [", ".join(passed), f"fails: {', '.join(failed)}" if failed else ""]
    return "; ".join(filter(None, shown)) or ("" if rows else "not run")


def _versions(clients: Mapping[str, Client], rows: Sequence[Mapping[str, Any]]) -> str:
    found = {row["client"]: row["versions"] for row in rows if "versions" in row and row["client"] in clients}
    packages = ("python", "torch", "deepspeed", "transformers", "accelerate", "peft")
    cells = [[clients[name].title, *(found[name].get(package, "") for package in packages)] for name in found]
    return _table(("program", *packages), cells) + "\n" if cells else ""


def _section(name: str, client: Client) -> str:
    loads = WITH_PLUGIN if client.trains else ""
    variables = "".join(f"{key}={value} " for key, value in client.environment.items())
    lines = [f"{variables}{loads}{command}" for command in client.commands.values()]
    if client.resume:
        lines.append(f"# Continue from step {SAVE_STEPS}:\n{lines[0]} {client.resume}")
    if client.trains:
        lines.append(f"ds-zo export out/checkpoint-{NUM_STEPS} exported --tokenizer model")
    parts = [client.about, _block("bash", f"needs: {client.title}", "\n".join(lines) + "\n")]
    files = dict(client.files)
    if client.own_optimizer:
        files["ds_config.json"] = _lines(client.config("zo"))
    for file, text in files.items():
        language = "json" if file.endswith(".json") else "yaml"
        parts.append(f"`{file}`:")
        parts.append(_block(language, f"fragment: {name} {file}", text.replace("LEARNING_RATE", "1.0e-5")))
    parts += [f"- {limit}" for limit in client.limits]
    return "\n".join(filter(None, parts)) + "\n"


def _lines(config: Mapping[str, Any]) -> str:
    """A JSON with a line for each key of its top level."""
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in config.items()) + "\n}\n"


def _block(language: str, mark: str, text: str) -> str:
    return f"\n<!-- {mark} -->\n```{language}\n{text}```\n"
