"""One case: a client evaluates the folder that `ds-zo export` made of a run of TRL."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from clients.client import Client
from clients.environment import ClientFault, Environment, run_script
from clients.training import prepare


def try_evaluation(client: Client, environment: Environment, folder: Path, task: str, backend: str) -> dict[str, Any]:
    """The outcome of an evaluation: "passed", or what went wrong."""
    exported = folder.parents[1] / "trl" / f"sft_{backend}" / "first" / "exported"
    try:
        if not exported.exists():
            raise ClientFault(f"no export of TRL with {backend}: run `bash tools/clients.sh trl` first")
        prepare(client, folder, backend)
        shutil.copytree(exported, folder / "exported")
        environment.run(f"{client.commands[task]} {client.cpu_only}", cwd=folder)
        found, versions = _samples(folder / "results"), run_script(environment, "versions.py", cwd=folder)
        base, expected = run_script(environment, "likelihoods.py", "model", "exported", cwd=folder)
        if not _agree(found, expected):
            raise ClientFault(f"log-likelihoods are {found}, plain PyTorch gives {expected}")
        if _agree(found, base):
            raise ClientFault("log-likelihoods are those of the model before training")
    except ClientFault as fault:
        return {"evaluate": str(fault)}
    return {"evaluate": "passed", "versions": versions}


def _samples(results: Path) -> list[list[float]]:
    """The log-likelihoods of each row's answers, in the order of the data."""
    files = sorted(results.rglob("samples_*.jsonl"))
    if len(files) != 1:
        raise ClientFault(f"expected one file of samples in {results}, got {len(files)}")
    samples = [json.loads(line) for line in files[0].read_text(encoding="utf-8").splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples]


def _agree(a: list[list[float]], b: list[list[float]]) -> bool:
    """Whether all values are equal up to the rounding of sums."""
    pairs = [(x, y) for rows in zip(a, b, strict=True) for x, y in zip(*rows, strict=True)]
    return all(math.isclose(x, y, rel_tol=0, abs_tol=1e-4) for x, y in pairs)
