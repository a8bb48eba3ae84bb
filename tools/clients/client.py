"""A client: the releases that it needs, its files and its commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]

NUM_STEPS = 4
SAVE_STEPS = 2


@dataclass(frozen=True)
class Client:
    """A program of another project, as a user runs it.

    A command runs in a folder with `model` (a tiny LLaMA and its tokenizer), `data`, `ds_config.json` and `files`. It
    makes NUM_STEPS steps in float32 on the CPU, logs the loss of each step, saves every SAVE_STEPS steps to
    `out/checkpoint-N` and the final model to `saved`.
    """

    title: str
    """Name on the page."""
    requires: Sequence[str]
    """Pinned releases for pip. The first is the client itself; ds_zo is added."""
    commands: Mapping[str, str]
    """The command line of each task."""
    files: Mapping[str, str]
    """Texts by file name. LEARNING_RATE stands for the rate of the backend."""
    resume: str = ""
    """Words after the command that continue from `out/checkpoint-2`."""
    backends: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Backends tested with each task; ALL where a task is missing."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the client needs, and that a user sets too."""
    cpu_only: str = ""
    """Words after the command that the test on a CPU needs, and a user with a GPU does not; the page omits them."""
    about: str = ""
    """Sentences of the page before the command."""
    limits: Sequence[str] = ()
    """Sentences of the page on what does not work."""
    saved: str = "out"
    """Folder of the final model."""
    own_optimizer: bool = False
    """True: the client fails if the JSON names an optimizer, so its JSON names the backend in the section ds_zo."""
    trains: bool = True
    """False: the client evaluates an exported model."""

    @property
    def version(self) -> str:
        return self.requires[0].partition("==")[2]

    def cases(self) -> list[tuple[str, str]]:
        """Pairs of task and backend."""
        return [(task, backend) for task in self.commands for backend in self.backends.get(task, ALL)]

    def config(self, backend: str) -> dict[str, Any]:
        """The client's DeepSpeed JSON for a backend."""
        if not self.own_optimizer:
            return CONFIGS[backend]
        rest = dict(CONFIGS[backend])
        params = rest.pop("optimizer")["params"]
        own = {name: value for name, value in params.items() if value != "auto"}
        section = {"backend": backend, "params": own, **rest.pop("ds_zo", {})}
        return {**rest, "zero_optimization": {**rest["zero_optimization"], "ds_zo": section}}


def read_clients() -> dict[str, Client]:
    """The clients of `clients.yaml`, by name."""
    given = yaml.safe_load(Path(__file__).with_name("clients.yaml").read_text(encoding="utf-8"))
    return {name: Client(**fields) for name, fields in given.items()}


def _config(optimizer: str, params: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": optimizer, "params": {"lr": "auto", "weight_decay": "auto", **params}},
        "zero_optimization": {"stage": 0, **zero},
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "zo": {
        **_config("ZO", {"zo_eps": 1e-3}, {"offload_param": {"device": "cpu"}}),
        "ds_zo": {"stream": {"writeback_interval": 2}},
    },
    "adalomo": _config("AdaLOMO", {}, {"offload_param": {"device": "cpu"}}),
    "lsp": _config("LSP", {"subspace_dim": 32}, {"offload_optimizer": {"device": "cpu"}}),
}
"""The DeepSpeed JSON of each backend, for all clients. Trainer fills in each "auto" from the client's settings."""
RATES = {"zo": 1e-5, "adalomo": 5e-4, "lsp": 1e-4}
ALL = tuple(CONFIGS)
