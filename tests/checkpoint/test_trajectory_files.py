"""Who writes into which trajectory file, what damage to one costs, and files that an older ds_zo wrote."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file

from ds_zo import cli
from ds_zo.checkpoint import CheckpointError, files
from ds_zo.checkpoint import trajectory as trajectory_module
from ds_zo.checkpoint.rebuild import replay
from ds_zo.checkpoint.trajectory import UNSAVED, read_trajectory
from tests.helpers.checkpoint_runs import BATCHES, JSONS, assert_same_bits, loaded, planes, start, with_checkpoint
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Toy, engine_for, log_lines, toy_batches, train

pytestmark = pytest.mark.usefixtures("single_process")

FIXTURES = Path(__file__).parent / "fixtures" / "trajectory_v1"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(folder: Path, *, save_at: int, until: int, **settings: Any) -> Any:
    """An engine that saved once and was then killed."""
    engine = start("fp32", trajectory=True, **settings)
    train(engine, BATCHES[:save_at])
    engine.save_checkpoint(str(folder))
    train(engine, BATCHES[save_at:until])
    return engine


# Whose file it is


@pytest.mark.parametrize("how", ["recorded since a resume", "branched by a tag"])
def test_steps_of_a_log_that_is_younger_than_the_checkpoint_are_made_again(how: str, tmp_path: Path) -> None:
    first = start("fp32", trajectory=how != "recorded since a resume")
    train(first, BATCHES[:3])
    first.save_checkpoint(str(tmp_path))
    killed = loaded(tmp_path, tag=None if how == "recorded since a resume" else "global_step3")
    train(killed, BATCHES[3:6])
    again = loaded(tmp_path)
    assert again.global_steps == 6
    assert_same_bits(planes(again), planes(killed))
    train(again, BATCHES[6:7])
    again.save_checkpoint(str(tmp_path))
    assert not list(tmp_path.glob(f"{UNSAVED}*")), "the folder's log has all their steps"
    replay(tmp_path / "global_step3", tmp_path / "trajectory.bin", step=7, out=tmp_path / "out")
    assert_equal(load_file(tmp_path / "out" / "model.safetensors"), weights(again.module))


def test_a_named_tag_is_loaded_as_it_was_saved_and_recorded_steps_are_named(tmp_path: Path) -> None:
    run(tmp_path, save_at=2, until=4)
    with log_lines() as lines:
        assert loaded(tmp_path, tag="global_step2").global_steps == 2
    assert any("steps from 2 to 4" in line and "tag" in line for line in lines)


def test_two_runs_that_were_killed_before_they_saved_are_not_mixed(tmp_path: Path) -> None:
    first = run(tmp_path, save_at=2, until=3)
    one, other = loaded(tmp_path), loaded(tmp_path)
    train(one, BATCHES[3:5])
    train(other, BATCHES[7:8])
    with log_lines() as lines:
        again = loaded(tmp_path)
    assert again.global_steps == 3
    assert_same_bits(planes(again), planes(first))
    assert any("hold other steps after step 2" in line and line.count(UNSAVED) == 2 for line in lines)


def test_steps_of_a_run_that_is_alive_and_has_not_saved_are_its_own(tmp_path: Path) -> None:
    run(tmp_path, save_at=2, until=3)
    engine = loaded(tmp_path)
    train(engine, BATCHES[3:5])
    engine.destroy()
    [unsaved] = tmp_path.glob(f"{UNSAVED}*")
    lock = "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)"
    hold = f"import fcntl, sys; f = open(sys.argv[1], 'r+b'); {lock}; print(1, flush=True); input()"
    command = [sys.executable, "-c", hold, str(unsaved)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alive:
        assert alive.stdout is not None and alive.stdout.readline()
        with log_lines() as lines:
            other = loaded(tmp_path)
        alive.communicate("\n")
    assert other.global_steps == 3
    assert any(str(unsaved) in line and "a run that is still running" in line for line in lines)
    assert loaded(tmp_path).global_steps == 5, "it has ended"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_log_goes_with_each_save(asynchronous: bool, tmp_path: Path) -> None:
    """As HF Trainer saves: each time to another folder, and older ones are deleted."""
    engine = run(tmp_path / "one", save_at=1, until=3, asynchronous=asynchronous)
    engine.save_checkpoint(str(tmp_path / "two"))
    engine.wait_for_checkpoint()
    shutil.rmtree(tmp_path / "one")
    train(engine, BATCHES[3:5])
    resumed = loaded(tmp_path / "two")
    assert resumed.global_steps == 5
    assert_same_bits(planes(resumed), planes(engine))
    replay_from = read_trajectory(tmp_path / "two" / "trajectory.bin")
    assert (replay_from.first_step, sorted(replay_from.hashes)) == (0, [1, 3])


def test_a_save_that_fails_leaves_the_log_where_it_is_of_use(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, save_at=2, until=2)
    fork = loaded(a)
    train(fork, BATCHES[2:3])
    b.write_text("not a folder")
    with pytest.raises(CheckpointError):
        fork.save_checkpoint(str(b))
    train(fork, BATCHES[3:4])
    again = loaded(a)
    assert again.global_steps == 4
    assert_same_bits(planes(again), planes(fork))


def test_a_log_that_cannot_go_with_its_checkpoint_says_so_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, save_at=2, until=2)
    before = content(a)
    fork = loaded(a)
    train(fork, BATCHES[2:3])

    def full(path: Path, data: bytes) -> Any:
        if path.name.startswith(".trajectory"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    real = files.write_bytes
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", full)
        fork.save_checkpoint(str(b))
    with pytest.raises(CheckpointError, match=r"a checkpoint could not be recorded: .*No space left"):
        fork.backend.recorder.raise_error()  # the engine does
    train(fork, BATCHES[3:4])
    assert_same_bits(planes(loaded(a)), planes(fork))
    fork.save_checkpoint(str(b))
    train(fork, BATCHES[4:5])
    assert_same_bits(planes(loaded(b)), planes(fork))
    assert content(a) == before


def test_an_ended_log_leaves_the_folder_that_was_loaded_from_with_the_save(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    run(a, save_at=2, until=2)
    before = content(a)
    fork = loaded(a)
    train(fork, BATCHES[2:4])
    with deepspeed.zero.GatheredParameters([p := next(fork.module.parameters())], modifier_rank=0):
        p.data.zero_()
    fork.save_checkpoint(str(b))
    assert content(a) == before
    assert read_trajectory(b / "trajectory.1.bin").end_step == 4
    train(fork, BATCHES[4:5])
    assert_same_bits(planes(loaded(b)), planes(fork))


def test_another_run_that_is_in_the_folder_is_set_aside_and_named(tmp_path: Path) -> None:
    run(tmp_path, save_at=1, until=3)
    other = start("fp32", trajectory=True)
    train(other, BATCHES[5:7])
    with log_lines() as lines:
        other.save_checkpoint(str(tmp_path))
    assert any("kept as trajectory.1.bin" in line for line in lines)
    assert read_trajectory(tmp_path / "trajectory.1.bin").end_step == 3


def test_a_folder_that_cannot_be_written_to_is_loaded_and_steps_wait_for_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    first = run(a, save_at=2, until=4)
    before = content(a)

    def write_bytes(path: Path, data: bytes) -> Any:
        if path.parent == a:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, data)

    real = files.write_bytes
    monkeypatch.setattr(files, "write_bytes", write_bytes)
    engine = loaded(a)
    assert engine.global_steps == 4
    assert_same_bits(planes(engine), planes(first))
    with log_lines() as lines:
        train(engine, BATCHES[4:6])
    assert [line for line in lines if "in memory alone until the first save" in line and "Read-only" in line] == lines
    engine.save_checkpoint(str(b))
    train(engine, BATCHES[6:7])
    assert_same_bits(planes(loaded(b)), planes(engine))
    assert read_trajectory(b / "trajectory.bin").first_step == 0
    assert content(a) == before


def test_a_log_that_cannot_be_read_is_an_error_before_anything_changes(tmp_path: Path) -> None:
    run(tmp_path, save_at=2, until=4)
    (tmp_path / "trajectory.bin").rename(tmp_path / "elsewhere")
    (tmp_path / "trajectory.bin").mkdir()
    engine = start("fp32", trajectory=True)
    before = planes(engine)
    with pytest.raises(CheckpointError, match=r"must be readable, got .*move the file elsewhere.*trajectory\.bin\)"):
        engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == 0
    assert_same_bits(planes(engine), before)


# Damage


def damage(path: Path, at: int) -> bytes:
    altered = bytearray(path.read_bytes())
    altered[at] ^= 4
    path.write_bytes(altered)
    return bytes(altered)


def test_replay_by_a_header_that_was_altered_is_refused(tmp_path: Path, capsys: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    engine = engine_for(model, with_checkpoint(JSONS["fp32"], trajectory=True))
    batches = [tiny_batch("llama", seed=i, batch_size=2, length=6) for i in range(2)]
    train(engine, batches[:1])
    engine.save_checkpoint(str(tmp_path / "saves"))
    train(engine, batches[1:])
    path = tmp_path / "saves" / "trajectory.bin"
    data = path.read_bytes()
    assert data.count(b'"seed": 0') == 1
    path.write_bytes(data.replace(b'"seed": 0', b'"seed": 1'))
    arguments = ["replay", "--trajectory", str(path), "--step", "2", "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--base", str(tmp_path / "base")]) == 1
    assert "damaged header (it does not match its own hash)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with log_lines() as lines:
        resumed = engine_for(tiny_model("llama"), with_checkpoint(JSONS["fp32"], trajectory=True))
        resumed.load_checkpoint(str(tmp_path / "saves"))
    assert resumed.global_steps == 1 and any("damaged header" in line and "is kept" in line for line in lines)


def test_a_damaged_step_ends_what_is_made_again_and_the_rest_is_kept(tmp_path: Path) -> None:
    reference = start("fp32")
    train(reference, BATCHES[:4])
    run(tmp_path, save_at=1, until=8)
    path = tmp_path / "trajectory.bin"
    altered = damage(path, len(path.read_bytes()) - 3 * 17 - 5)  # in the record of step 4, the fifth
    with log_lines() as lines:
        engine = loaded(tmp_path)
    assert engine.global_steps == 4
    assert_same_bits(planes(engine), planes(reference))
    [line] = [line for line in lines if "is damaged" in line]
    assert "of step 4, is not as it was written" in line and "step 5" in line and "the file is kept" in line
    assert path.read_bytes() == altered
    with pytest.raises(CheckpointError, match=r"leads from step 1 to 4 because .*of step 4, is not as it was written"):
        replay(tmp_path / "global_step1", path, step=6, out=tmp_path / "out")
    train(engine, BATCHES[10:11])
    engine.save_checkpoint(str(tmp_path))
    assert (tmp_path / "trajectory.1.bin").read_bytes() == altered
    assert read_trajectory(path).end_step == 5


def test_a_damaged_hash_costs_no_step(tmp_path: Path) -> None:
    run(tmp_path, save_at=1, until=4)
    path = tmp_path / "trajectory.bin"
    damage(path, len(path.read_bytes()) - 3 * 17 - 9)
    found = read_trajectory(path)
    assert found.end_step == 4 and found.hashes == {} and "is not as it was written" in str(found.damage)
    assert loaded(tmp_path).global_steps == 4


def test_a_format_of_the_future_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trajectory.bin"
    path.write_bytes(b"ds_zo trajectory 9\n{}\n")
    with pytest.raises(CheckpointError, match="reads trajectory formats 1 to 2, got 9"):
        read_trajectory(path)
    path.write_bytes(b"ds_zo trajectory 2\n" + b"[" * 100_000 + b"\n")
    with pytest.raises(CheckpointError, match="damaged header"):
        read_trajectory(path)


# Older files


@pytest.mark.parametrize(("name", "step"), [("recorded", 6), ("recorded_since_a_resume", 5)])
def test_checkpoints_and_trajectories_without_checksums_load(name: str, step: int, tmp_path: Path) -> None:
    """Written by c5e0946: toy runs in float32 that were killed after `step`. Noise is computed by libm, which differs
    between machines, so weights are compared as numbers."""
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / "run"))
    before = content(folder)
    expected = load_file(FIXTURES / f"{name}_step{step}.safetensors")
    config = with_checkpoint(JSONS["fp32"], trajectory=True)
    engine = engine_for(Toy(width=4, vocab=8), config)
    with log_lines() as lines:
        engine.load_checkpoint(str(folder))
    assert engine.global_steps == step
    assert sum("older ds_zo, whose headers have no checksum" in line for line in lines) == 1
    torch.testing.assert_close(weights(engine.module), expected, rtol=1e-5, atol=1e-6)
    [tag] = [path.name for path in folder.glob("global_step*")]
    replay(folder / tag, folder / "trajectory.bin", step=step, out=tmp_path / "out")
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), expected, rtol=1e-5, atol=1e-6)
    assert content(folder) == before
    train(engine, toy_batches(8, vocab=8)[step : step + 2])
    engine.save_checkpoint(str(folder))
    found = read_trajectory(folder / "trajectory.bin")
    assert (found.version, found.end_step, found.damage) == (trajectory_module.VERSION, step + 2, None)
    assert not (folder / "trajectory.1.bin").exists(), "the new file has all of the old one"
