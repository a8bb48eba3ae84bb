"""How far a run has come, and its checkpoints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from ds_zo.checkpoint.files import replace_text
from ds_zo.config.json_text import parse_json
from ds_zo.records.run_summary import Best, Point
from ds_zo.training.engine import samples_per_step
from ds_zo.training.errors import UserError

PROGRESS = "progress.json"
KEPT = ("task", "seed", "data_seed", "num_train", "group_by_length", "objective")
"""Arguments that decide which examples come in which order, and what they are scored by. A resumed run must have the
checkpoint's values."""


@dataclass
class Progress:
    """Counts and scores of a run up to its last step."""

    step: int = 0
    num_seen: int = 0
    """Examples that all ranks have consumed: the position in the data order."""
    num_tokens: int = 0
    train_s: float = 0.0
    best: Best | None = None
    curve: list[Point] = field(default_factory=list)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, step: int, num_seen: int) -> Progress:
        """Reads what `asdict` made. A state of an older run may lack all but the step and the position."""
        return cls(
            step=step,
            num_seen=num_seen,
            num_tokens=state.get("num_tokens", 0),
            train_s=state.get("train_s", 0.0),
            best=Best(**state["best"]) if state.get("best") else None,
            curve=[Point(**point) for point in state.get("curve", [])],
        )


class RunCheckpoints:
    """The folder of a run's checkpoints. Each holds the run's progress beside the engine's state."""

    def __init__(self, engine: Any, args: argparse.Namespace, *, data: str, writes: bool) -> None:
        """`data` describes the rows of all splits and the training examples made of them. `writes`: this rank writes
        the file of the progress."""
        self.folder: Path = args.output_dir / "checkpoints"
        self._engine = engine
        self._args = args
        self._data = data
        self._writes = writes

    def save(self, progress: Progress) -> None:
        state = {**self._client_state(progress), "random": _gathered(random_states())}
        self._engine.save_checkpoint(str(self.folder), tag=f"step{progress.step}", client_state=state)
        self.note(progress)

    def note(self, progress: Progress) -> None:
        """Writes the run's progress beside its checkpoints. After a kill, a trajectory brings the weights further than
        the last checkpoint, past evaluations that are not repeated; their scores are read from this file."""
        if self._writes and self.folder.is_dir():
            replace_text(self.folder / PROGRESS, json.dumps(self._client_state(progress)))

    def _client_state(self, progress: Progress) -> dict[str, Any]:
        kept = {name: getattr(self._args, name) for name in KEPT}
        found = {**kept, "data": self._data, "micro_batch": self._micro_batch, "num_eval": self._args.num_eval}
        return {**found, **asdict(progress)}

    @property
    def _micro_batch(self) -> int:
        return int(self._engine.train_micro_batch_size_per_gpu())

    def resume(self, folder: Path) -> Progress:
        """Restores weights, optimizer, schedule, step count and data position from a folder's newest checkpoint."""
        path, state = self._engine.load_checkpoint(str(folder))
        if path is None:
            raise UserError(f"the checkpoint in {folder} could not be loaded (--resume)")
        self._check(state, path)
        # A trajectory may have brought the engine further than the checkpoint.
        further = self._engine.global_steps - state.get("global_steps", self._engine.global_steps)
        step = state["step"] + further
        num_seen = state["num_seen"] + further * samples_per_step(self._engine)
        if not further:
            states = state.get("random", [])
            if states and isinstance(states[0], str):  # an older run saved those of its first rank alone
                states = [states]
            if _rank() < len(states):
                set_random_states(states[_rank()])
        if further and (folder / PROGRESS).is_file():
            noted = parse_json((folder / PROGRESS).read_text(encoding="utf-8"))
            state = noted if state["step"] < noted["step"] <= step else state
        return Progress.from_state(state, step=step, num_seen=num_seen)

    def _check(self, state: Mapping[str, Any], path: str) -> None:
        if not {"task", "seed", "step", "num_seen"} <= state.keys():
            raise UserError(f"{path} was not written by this script: pass a folder of weights as --model (--resume)")
        for name in KEPT:
            if name in state and state[name] != getattr(self._args, name):
                flag = name.replace("_", "-")
                raise UserError(
                    f"a run resumes with the {flag} it began with: the checkpoint has {state[name]!r}, "
                    f"got {getattr(self._args, name)!r} (--{flag})"
                )
        if state.get("data", self._data) != self._data:  # a checkpoint of an older version has none
            raise UserError(
                f"a run resumes with the data it began with: the checkpoint has {state['data']}, got {self._data}: "
                "name the first run's (--data, --data-dir, --num-dev, --num-test, --max-length), or begin a run from "
                "the weights by --model"
            )
        num_eval = state.get("num_eval", self._args.num_eval)
        if state.get("best") and num_eval != self._args.num_eval:
            raise UserError(
                "a run that has evaluated resumes with the number of examples that its best score is of: the "
                f"checkpoint has {num_eval or 'all'}, got {self._args.num_eval or 'all'} (--num-eval)"
            )
        if self._args.group_by_length and state.get("micro_batch", self._micro_batch) != self._micro_batch:
            raise UserError(
                "a run with --group-by-length resumes with the batch size by which its examples are grouped: the "
                f"checkpoint has {state['micro_batch']}, got {self._micro_batch} (--batch-size)"
            )
        groups = getattr(self._engine.optimizer, "param_groups", [])  # an engine that only evaluates has no optimizer
        rates = [group["lr"] for group in groups]
        if self._args.lr is not None and rates and self._engine.lr_scheduler is None and self._args.lr not in rates:
            raise UserError(
                "a run without a scheduler resumes with the learning rate of its checkpoint, which is "
                f"{rates[0]:g}, got {self._args.lr:g}: leave it out, or begin a run from the weights by --model (--lr)"
            )


def find_checkpoints(args: argparse.Namespace) -> Path | None:
    """Finds the folder to resume from, before anything is loaded; None without --resume."""
    if args.resume is None:
        return None
    folder: Path = args.output_dir / "checkpoints" if args.resume == "latest" else Path(args.resume)
    if not (folder / "latest").is_file():
        raise UserError(f"looked for a checkpoint in {folder} (its file `latest`): not found (--resume)")
    return folder


def _rank() -> int:
    return int(dist.get_rank()) if dist.is_initialized() else 0


def _gathered(value: list[str]) -> list[list[str]]:
    """`value` of every rank, by rank. One rank writes the client state of all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def random_states() -> list[str]:
    """Returns the random states of host and device, which dropout needs after a resume. DeepSpeed's checkpoints have
    none."""
    return [state.numpy().tobytes().hex() for state in (torch.get_rng_state(), get_accelerator().get_rng_state())]


def set_random_states(states: list[str]) -> None:
    host, device = (torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for state in states)
    get_accelerator().set_rng_state(device)
    torch.set_rng_state(host)
