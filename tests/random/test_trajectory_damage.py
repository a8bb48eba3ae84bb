"""Random damage to a trajectory, and random runs over two folders, held against a model of what must come out.

A case that fails prints its own seed.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.trajectory import Trajectory, read_trajectory
from tests.helpers.checkpoint_runs import BATCHES, JSONS, assert_same_bits, planes, with_checkpoint
from tests.helpers.zo_runs import Toy, engine_for, log_lines, train
from tests.random.sizes import first_seed, num_cases

pytestmark = pytest.mark.usefixtures("single_process")

NUM_CASES = num_cases(200)
SEED = first_seed(26)
NUM_LOADED = 8
"""Damaged files that an engine loads, besides the reader."""


def engine(**settings: Any) -> Any:
    return engine_for(Toy(width=4), with_checkpoint(JSONS["fp32"], **settings))


# Damage


def damaged(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        # Half of the damage hits the records, which are the smaller part of a tiny model's file.
        at = draw.randrange(data.index(b"\n", 30), len(data)) if draw.random() < 0.5 else draw.randrange(len(data))
        length = draw.choice([1, 4, 17, 41, draw.randrange(1, 200)])
        piece = data[at : at + length]
        kind = draw.choice(["flip", "flip", "flip", "cut", "cut out", "append", "append a piece", "insert", "zero"])
        if kind == "flip" and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del changed[at:]
        elif kind == "cut out":
            del changed[at : at + length]
        elif kind == "append":
            changed += draw.randbytes(length)
        elif kind == "append a piece":
            changed += piece
        elif kind == "insert":
            changed[at:at] = piece
        elif kind == "zero":
            changed[at : at + length] = bytes(len(changed[at : at + length]))
    return bytes(changed)


def read(path: Path, whole: Trajectory, data: bytes, original: bytes) -> Trajectory | None:
    """What the reader makes of it; None: it refused. Fails where that is not what must come out."""
    header_end = original.index(b"\n", 30) + 1
    common = next((i for i, (a, b) in enumerate(zip(data, original, strict=False)) if a != b), len(data))
    try:
        found = read_trajectory(path)
    except CheckpointError as error:
        assert str(path) in str(error) and common < header_end, error
        return None
    num = found.rows.shape[0]
    assert found.header == whole.header
    assert torch.equal(found.rows.view(torch.int32), whole.rows[:num].view(torch.int32)), "a step that nobody made"
    assert found.hashes.items() <= whole.hashes.items()
    ends = [header_end + 17 * (i + 1) + 41 * sum(at <= i for at in whole.hashes) for i in range(whole.rows.shape[0])]
    assert num >= sum(end <= common for end in ends), "steps before the damage are lost"
    if num < whole.rows.shape[0]:
        is_cut_between_records = data == original[: len(data)] and found.damage is None
        assert found.damage is not None or is_cut_between_records, "steps are lost without a word"
    return found


def test_no_damage_makes_other_weights_or_loses_a_step_without_a_word(tmp_path: Path) -> None:
    first, path = engine(trajectory=True), tmp_path / "run" / "trajectory.bin"
    at_step = []
    for step, batch in enumerate(BATCHES[:9]):
        at_step.append(planes(first))
        if step in (2, 5):
            first.save_checkpoint(str(path.parent))
        train(first, [batch])
    at_step.append(planes(first))
    original, whole = path.read_bytes(), read_trajectory(path)
    assert (whole.end_step, sorted(whole.hashes)) == (9, [2, 5])
    reader = engine(trajectory=True)
    for case in range(NUM_CASES):
        print(f"seed {SEED + case}")
        data = damaged(original, random.Random(SEED + case))
        path.write_bytes(data)
        found = read(path, whole, data, original)
        if case % (NUM_CASES // NUM_LOADED or 1) == 0:
            with log_lines() as lines:
                reader.load_checkpoint(str(path.parent))
            assert reader.global_steps == max(5, 0 if found is None else found.end_step)
            assert_same_bits(planes(reader), at_step[reader.global_steps])
            assert any(path.name in line for line in lines) == (found is None or found.damage is not None)
            assert path.read_bytes() == data, "the file is kept"


# Runs

History = tuple[int, ...]
"""A number that no other run has, then one for each step, which no other step has."""


@dataclass
class Log:
    """A trajectory file, as the model of a folder has it."""

    base: int
    """Length of the history that it goes on from."""
    history: History

    def leads_from(self, history: History) -> bool:
        return self.base <= len(history) and self.history[: len(history)] == history


@dataclass
class Folder:
    """What a folder must hold."""

    path: Path
    tags: dict[str, History] = field(default_factory=dict)
    latest: str = ""
    own: Log | None = None
    unsaved: list[Log] = field(default_factory=list)

    def log_of(self, history: History, *, newest: bool) -> Log | None:
        """The log that a run which loads the checkpoint goes on from."""
        logs = [log for log in [self.own, *self.unsaved] if log is not None and log.leads_from(history)]
        if not newest:
            return min(logs, key=lambda log: log.base, default=None)
        longest = max(logs, key=lambda log: len(log.history), default=None)
        if longest is None or all(longest.history[: len(log.history)] == log.history for log in logs):
            return longest
        return self.own if self.own in logs else None

    def content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.path.rglob("*") if path.is_file()}


class Runs:
    """Runs one after the other, each killed at its end."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        self.folders = [Folder(root / "a"), Folder(root / "b")]
        self.draw = draw
        self.made: dict[History, Any] = {}
        """The weights of every history."""
        self.num_steps = self.num_runs = 0

    def run(self) -> None:
        draw = self.draw
        recording = draw.random() < 0.85
        current = engine(trajectory=recording)
        self.num_runs += 1
        log = Log(1, (-self.num_runs,))
        origin, before = None, {}
        sources = [folder for folder in self.folders if folder.latest]
        if sources and draw.random() < 0.9:
            origin = draw.choice(sources)
            before = origin.content()
            log = self.load(current, origin, recording=recording)
            assert origin.content() == before, "loading writes nothing"
        has_saved: list[Folder] = []
        num_steps = 0
        for _ in range(draw.randrange(1, 5)):
            for _ in range(draw.randrange(0, 4)):
                self.num_steps += 1
                num_steps += 1
                train(current, [BATCHES[self.num_steps % len(BATCHES)]])
                log.history += (self.num_steps,)
                self.made[log.history] = planes(current)
                if recording and origin is not None and not has_saved and all(log is not x for x in origin.unsaved):
                    origin.unsaved.append(log)
            if num_steps and draw.random() < 0.4:
                folder = draw.choice(self.folders)
                self.save(current, folder, log, recording=recording)
                has_saved.append(folder)
                if recording and origin is not None:
                    origin.unsaved = [other for other in origin.unsaved if other is not log]
        if has_saved and all(origin is not folder for folder in has_saved) and origin is not None:
            assert origin.content() == before, "a folder that was only read is as it was"
        current.destroy()

    def load(self, current: Any, folder: Folder, *, recording: bool) -> Log:
        newest = self.draw.random() < 0.7
        tag = folder.latest if newest else self.draw.choice(sorted(folder.tags))
        history = folder.tags[tag]
        log = folder.log_of(history, newest=newest) if recording else None
        expected = log.history if log is not None and newest else history
        with log_lines() as lines:
            current.load_checkpoint(str(folder.path), tag=None if newest else tag)
        assert current.global_steps == len(expected) - 1, (expected, history, folder)
        assert_same_bits(planes(current), self.made[expected])
        lost = [] if folder.own is None or not recording else [folder.own]
        lost = [other for other in [*lost, *folder.unsaved] if other.history[: len(expected)] != other.history]
        told = any("not replayed" in line for line in lines)
        assert told or not recording or all(len(other.history) <= len(history) for other in lost), lines
        return Log(len(history) if log is None else log.base, expected)

    def save(self, current: Any, folder: Folder, log: Log, *, recording: bool) -> None:
        folder.latest = self.draw.choice([f"global_step{current.global_steps}", f"run{self.num_runs}"])
        current.save_checkpoint(str(folder.path), tag=folder.latest)
        folder.tags[folder.latest] = log.history
        if recording:
            for other in self.folders:
                if other.own is log:  # from now on steps are recorded in `folder`
                    other.own = Log(log.base, log.history)
            folder.own = log


@pytest.mark.parametrize("case", range(max(4, NUM_CASES // 100)))
def test_runs_that_load_save_fork_and_are_killed_never_mix(case: int, tmp_path: Path) -> None:
    print(f"seed {SEED + case}")
    runs = Runs(tmp_path, random.Random(SEED + case))
    for _ in range(10):
        runs.run()
    longest = max(runs.made, key=len)
    reference = engine()
    train(reference, [BATCHES[step % len(BATCHES)] for step in longest if step > 0])
    assert_same_bits(planes(reference), runs.made[longest])
    shutil.rmtree(tmp_path)
