"""One case: a client trains with one backend, resumes from its own checkpoint, and its checkpoint is exported."""

from __future__ import annotations

import json
import math
import shutil
import socket
from pathlib import Path
from typing import Any

from clients.client import NUM_STEPS, RATES, SAVE_STEPS, Client
from clients.data import write_data, write_model
from clients.environment import ClientFault, Environment, run_script

WITH_PLUGIN = "ds-zo run -- "
"""Loads the plugin in the processes of the command that follows."""
_LAST = f"checkpoint-{NUM_STEPS}"
_MIDDLE = f"checkpoint-{SAVE_STEPS}"


def prepare(client: Client, folder: Path, backend: str) -> None:
    """Makes the folder that a command runs in."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_data(folder / "data")
    write_model(folder / "model")
    (folder / "ds_config.json").write_text(json.dumps(client.config(backend), indent=2), encoding="utf-8")
    for name, text in client.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("LEARNING_RATE", str(RATES[backend])), encoding="utf-8")


def try_training(client: Client, environment: Environment, folder: Path, task: str, backend: str) -> dict[str, Any]:
    """The outcomes of training, resuming and exporting: "passed", or what went wrong. A fault ends the case."""
    outcomes: dict[str, Any] = {"train": "not reached", "resume": "not reached", "export": "not reached"}
    first, resumed = folder / "first", folder / "resumed"
    stage = "train"
    try:
        prepare(client, first, backend)
        losses = _train(client, environment, first, task, backend)
        outcomes["train"] = "passed"

        stage = "resume"
        prepare(client, resumed, backend)
        shutil.copytree(first / "out" / _MIDDLE, resumed / "out" / _MIDDLE)
        saved_at = _modified(resumed / "out" / _MIDDLE)
        again = _train(client, environment, resumed, task, backend, resume=True)
        if _modified(resumed / "out" / _MIDDLE) != saved_at:
            raise ClientFault(f"the resumed run wrote {_MIDDLE} again: it began at step 0")
        if again != losses:
            raise ClientFault(f"losses after resuming are {again}, uninterrupted {losses}")
        outcomes["resume"] = "passed"

        stage = "export"
        environment.run(f"ds-zo export out/{_LAST} exported --tokenizer model", cwd=first)
        outcomes["export"] = "passed"
        outcomes.update(_compare_weights(client, environment, first, resumed))
    except ClientFault as fault:
        outcomes[stage] = str(fault)
    return outcomes


def _modified(checkpoint: Path) -> int:
    return (checkpoint / "trainer_state.json").stat().st_mtime_ns


def _train(
    client: Client, environment: Environment, folder: Path, task: str, backend: str, *, resume: bool = False
) -> dict[int, float]:
    """Runs the client's command. Returns the loss of each step, of which the resumed run has read the first from its
    checkpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_PORT": port, **client.environment}
    words = " ".join(filter(None, [client.commands[task], client.resume if resume else "", client.cpu_only]))
    printed = environment.run(WITH_PLUGIN + words, cwd=folder, variables=variables)
    if f"ds_zo: backend {backend} on cpu" not in printed:
        raise ClientFault(f"the log does not say `ds_zo: backend {backend}`: another engine trained")
    state = json.loads((folder / "out" / _LAST / "trainer_state.json").read_text(encoding="utf-8"))
    losses = {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
    if state["global_step"] != NUM_STEPS or sorted(losses) != list(range(1, NUM_STEPS + 1)):
        raise ClientFault(f"expected a loss for each of {NUM_STEPS} steps, got {losses}")
    if not all(math.isfinite(loss) for loss in losses.values()):
        raise ClientFault(f"a loss is not finite: {losses}")
    return losses


def _compare_weights(client: Client, environment: Environment, first: Path, resumed: Path) -> dict[str, Any]:
    """The versions that ran, and an outcome for each stage whose weights are wrong."""
    adapter = first / "exported" / "adapter"
    folders = ("model", client.saved, str(resumed / client.saved), str(adapter) if adapter.exists() else "exported")
    found = run_script(environment, "weights.py", *folders, cwd=first)
    outcomes = {"versions": run_script(environment, "versions.py", cwd=first)}
    if not found["finite"] or not found["moved"]:
        outcomes["train"] = f"weights are finite: {found['finite']}; their largest change is {found['moved']}"
    after_resume, exported = found["differences"]
    if after_resume != 0:
        outcomes["resume"] = f"weights differ from those of the uninterrupted run by {after_resume}"
    if exported != 0:
        outcomes["export"] = f"weights differ from the client's own save by {exported}"
    return outcomes
