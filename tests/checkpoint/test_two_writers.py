"""Several runs that save to one folder: a save that reports success is whole, and nobody's folder is tidied away."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from ds_zo.checkpoint import CheckpointError, files, manifest, owners
from ds_zo.checkpoint.reader import open_folder
from ds_zo.checkpoint.writer import BackgroundWriter, write_checkpoint
from tests.helpers.small_saves import make_save, save


def test_threads_share_a_background(tmp_path: Path) -> None:
    background, failed = BackgroundWriter(), []

    def run(who: str) -> None:
        try:
            for i in range(8):
                background.start(make_save(tmp_path, f"{who}{i}"))
                background.wait()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(who,)) for who in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    background.wait()
    background.raise_error()
    assert not failed
    assert len(manifest.complete_tags(tmp_path)) == 32


def test_folders_of_a_user_stay_whatever_their_names(tmp_path: Path) -> None:
    names = ["essay.writing-samples", "a.writing-77", ".removed-photos", ".removed-a-7", ".replaced-b", ".replaced-b-7"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("x")
    (tmp_path / "letter.writing-7").write_text("x")
    save(tmp_path, "step1", keep_last=1)
    save(tmp_path, "step2", keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "letter.writing-7", "step2", "latest"}
    assert all((tmp_path / name / "mine.txt").exists() for name in names)


def test_a_file_that_vanishes_while_a_save_is_written_fails_the_save(tmp_path: Path) -> None:
    def lose() -> None:
        for path in tmp_path.glob("*/weights-00001.safetensors"):
            path.unlink()

    save(tmp_path, "before")
    with pytest.raises(CheckpointError, match=r"was not written.*weights-00001\.safetensors is missing"):
        save(tmp_path, "after", written=lose, threads=1)
    assert {path.name for path in tmp_path.iterdir()} == {"before", "latest"}


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_folder_of_another_host_is_abandoned_when_nothing_in_it_has_changed_for_long(
    has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    theirs = tmp_path / "theirs.writing-5"
    theirs.mkdir()
    (theirs / owners.MARK).write_text(json.dumps({"host": "another", "pid": 5}))
    (theirs / "weights-00000.safetensors").write_text("half")
    save(tmp_path, "a")
    assert theirs.exists()
    long_ago = theirs.stat().st_mtime - owners.STALE_S - 60
    for path in (theirs, *theirs.iterdir()):
        os.utime(path, (long_ago, long_ago))
    save(tmp_path, "b")
    assert not theirs.exists()


def test_a_mark_that_is_tidied_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = files.make_locked, []

    def slow(path: Path, data: bytes) -> int | None:
        made.append(path)
        if len(made) == 1:
            path.parent.rmdir()
        return make(path, data)

    monkeypatch.setattr(files, "make_locked", slow)
    save(tmp_path, "a")
    assert [path.name for path in made[:2]] == [owners.MARK] * 2
    assert manifest.complete_tags(tmp_path) == ["a"]


@pytest.mark.parametrize("progress", [False, True])
def test_a_process_that_is_killed_inside_a_progress_bar_stops_no_save(progress: bool, tmp_path: Path) -> None:
    """Processes that are forked after the first bar share tqdm's lock, which nobody gives back for one that is killed.
    In a process of its own: the lock stays taken."""

    def save_after_a_kill() -> None:
        TqdmDefaultWriteLock.mp_lock = multiprocessing.RLock()
        tqdm.set_lock(TqdmDefaultWriteLock())
        killed = os.fork()
        if not killed:
            tqdm.get_lock().acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(killed, 0)
        write_checkpoint(dataclasses.replace(make_save(tmp_path, "after"), progress=progress))
        open_folder(tmp_path / "after", progress=progress)

    child = os.fork()
    if not child:
        code = 1
        try:
            save_after_a_kill()
            code = 0
        finally:
            os._exit(code)
    status = 0
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("a save waits for a lock that a killed process had")
    assert status == 0
