"""Computes the weights of any recorded step from a trajectory and the model its run started from: `ds-zo replay`.

Units are independent of one another once the coefficients are known, so one unit is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import logger
from tqdm import tqdm

from ds_zo import ops
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.checkpoint.export import Spec, specs_of, write_model_folder
from ds_zo.checkpoint.files import hash_json, hash_tensors
from ds_zo.checkpoint.layout import allocate_buffers, fill_unit, host_tensors, rebuild, unit_key
from ds_zo.checkpoint.manifest import is_checkpoint
from ds_zo.checkpoint.progress import AFTER_S
from ds_zo.checkpoint.reader import Saved, open_folder, point_of
from ds_zo.checkpoint.replay import Recipe, fold, values
from ds_zo.checkpoint.stock import Weights, model_source
from ds_zo.checkpoint.trajectory import Trajectory, read_trajectory
from ds_zo.streaming.fold_schedule import FOLD_ORDER, due
from ds_zo.streaming.units import Unit

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges*",
)


class _Base:
    """The weights from which a replay starts: a model folder at the run's first step, or one of its checkpoints."""

    def __init__(self, folder: Path, trajectory: Trajectory) -> None:
        self.folder = folder
        self._header = trajectory.header
        self.weights: Weights | None = None
        self.saved: Saved | None = None
        self.step, self.sha256 = trajectory.first_step, trajectory.header["base"]["sha256"]
        if is_checkpoint(folder):
            self.saved = open_folder(folder)
            self.step, self.sha256 = self.saved.backend_state["step"], self.saved.manifest.weights_sha256
            if not trajectory.continues(point_of(self.saved)) or not _stores_alike(self.saved, self._header):
                raise CheckpointError(
                    f"the base must be a checkpoint of the run that the trajectory records, got {folder} of another "
                    "run: name another checkpoint or the model that the run started from (--base)"
                )
            self._versions = {unit_key(u): u["version"] for u in self.saved.backend_state["units"]}
            return
        self.weights = model_source(folder)
        if self.weights is None:
            raise CheckpointError(
                f"the base must be a model folder with safetensors or a checkpoint, got {folder}, which has neither "
                "model.safetensors, model.safetensors.index.json nor manifest.json: name another folder (--base)"
            )

    def unit(self, description: dict[str, Any], device: torch.device) -> Unit:
        unit = rebuild(description)
        allocate_buffers(unit, device)
        if self.saved is not None:
            fill_unit(unit, self.saved.tensor)
            unit.rewritten(self._versions[unit_key(description)])
        else:
            unit.store(lambda placed: self._read(placed.name).to(placed.parameter.dtype))
            unit.rewritten(self.step)
        return unit

    def _read(self, name: str) -> torch.Tensor:
        assert self.weights is not None
        names = [name, *(alias for alias, of in self._header["aliases"].items() if of == name)]
        found = next((n for n in names if n in self.weights), None)
        if found is None:
            raise CheckpointError(
                f"the base must have the tensors of the trajectory's model, got {self.folder} without {name}: name the "
                "model that the run started from (--base)"
            )
        return self.weights[found]

    def rows(self, trajectory: Trajectory) -> tuple[int, torch.Tensor]:
        """The step of the first update that a replay may need, and all updates from it on.

        Units of a checkpoint may lag behind the step at which the trajectory begins. The updates that they lack are in
        the checkpoint's own log.
        """
        if self.saved is None:
            return trajectory.first_step, trajectory.rows
        log = self.saved.backend_state["rows"]
        lagging = [self._versions[unit_key(u)] for u in self.saved.backend_state["units"] if _is_trained(u)]
        first = min([self.step, *lagging])
        before = log[torch.arange(first, self.step) % log.shape[0]]
        return first, torch.cat([before, trajectory.rows[self.step - trajectory.first_step :]])

    def buffer(self, name: str) -> torch.Tensor | None:
        if self.saved is not None:
            return self.saved.tensor(name)
        return self.weights[name] if self.weights is not None and name in self.weights else None

    def text_files(self) -> dict[str, str]:
        """The text files that a model folder has besides weights, by name."""
        paths = {p.name: p for pattern in _TEXT_FILES for p in self.folder.glob(pattern) if p.is_file()}
        found = {}
        for name, path in paths.items():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                logger.warning(f"ds_zo: {path} is not text and is not copied")
        return found


def replay(base: Path, trajectory_file: Path, *, step: int, out: Path, device: torch.device | str = "cpu") -> bool:
    """Writes the model folder of `step`.

    Returns True if a hash of the weights was recorded at that step and the replayed weights have it. Returns False if
    none was recorded, or on another kind of device. If the hash differs, raises and writes nothing.
    """
    device = torch.device(device)
    trajectory = read_trajectory(trajectory_file)
    for text in trajectory.warnings():
        logger.warning(f"ds_zo: {text}")
    header, facts = trajectory.header, trajectory.header["facts"]
    for what, there, here in (
        ("noise version", facts["noise_version"], ops.NOISE_VERSION),
        ("fold order", facts.get("fold_order", 1), FOLD_ORDER),
    ):
        if there != here:
            raise CheckpointError(
                f"{trajectory_file} was recorded with {what} {there}, and this ds_zo has {here}: replay it with the "
                "ds_zo that recorded it (--trajectory)"
            )
    start = _Base(base, trajectory)
    if not start.step <= step <= trajectory.end_step:
        damage = "" if trajectory.damage is None else f" because {trajectory.damage}"
        raise CheckpointError(
            f"{trajectory_file} leads from step {start.step} to {trajectory.end_step}{damage}, got {step}: name a step "
            "between them (--step)"
        )
    _check_base(start, header["units"])
    recipe = Recipe(
        **{name: facts[name] for name in ("seed", "distribution", "rounding", "num_directions", "interval")},
        capacity=header["capacity"],
    )
    first_row_step, rows = start.rows(trajectory)
    rows = rows.to(device)
    if rows.shape[0] == 0:
        rows = torch.zeros(1, header["width"], device=device)
    recorded = trajectory.hashes.get(step)
    comparable = recorded is not None and facts["device"] == device.type
    buffers = {name: value for name in header["buffers"] if (value := start.buffer(name)) is not None}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        digests = {}
        for description in tqdm(header["units"], desc="replaying", unit="unit", delay=AFTER_S):
            unit = start.unit(description, device)
            for at in range(start.step, step):
                if at > unit.version and due(unit, step=at, interval=recipe.interval, capacity=recipe.capacity):
                    fold(unit, rows=rows, first_row_step=first_row_step, step=at, recipe=recipe)
            digests[unit_key(description)] = hash_tensors(host_tensors(unit))
            found = values(unit, rows=rows, first_row_step=first_row_step, step=step, recipe=recipe)
            yield from ((placed.name, value.cpu()) for placed, value in found)
        if comparable and hash_json(digests) != recorded:
            raise CheckpointError(
                f"the weights replayed to step {step} are not those that the run had: their hash is not the one "
                f"recorded in {trajectory_file}. Name the unchanged trajectory of that run (--trajectory)"
            )
        yield from buffers.items()

    of_buffers = [Spec(name, value.dtype, tuple(value.shape)) for name, value in buffers.items()]
    write_model_folder(out, ([*specs_of(header["units"]), *of_buffers], tensors()), extra=start.text_files())
    return comparable


def _check_base(base: _Base, descriptions: list[dict[str, Any]]) -> None:
    """Compares the hash of the base with the recorded one: a replay from other weights would give a wrong model."""
    host = torch.device("cpu")
    found = hash_json({unit_key(d): hash_tensors(host_tensors(base.unit(d, host))) for d in descriptions})
    if found != base.sha256:
        raise CheckpointError(
            f"{base.folder} is not the model that the run started from: its weights, stored as the run stored them, "
            "have another hash. Name that model (--base)"
        )


def _stores_alike(saved: Saved, header: dict[str, Any]) -> bool:
    """Whether the run of the trajectory stores weights in the form in which the checkpoint holds them."""
    state = {"fold_order": 1, **saved.backend_state}
    units = [{name: value for name, value in unit.items() if name != "version"} for unit in state["units"]]
    facts = {"fold_order": 1, **header["facts"]}
    return units == header["units"] and all(state[name] == facts[name] for name in facts if name != "device")


def _is_trained(description: dict[str, Any]) -> bool:
    return any(p["trainable"] for part in description["parts"] for p in part["params"])
