"""Whatever breaks while a checkpoint is written or read: what was there stays, and the error says what and where."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_zo.checkpoint import CheckpointError, files, manifest
from ds_zo.checkpoint import writer as writer_module
from ds_zo.checkpoint.encoding import decode
from ds_zo.checkpoint.trajectory import TrajectoryFile
from tests.helpers.checkpoint_runs import BATCHES, assert_same_bits, planes, start
from tests.helpers.first_order_runs import JSONS as FIRST_ORDER
from tests.helpers.first_order_runs import Epochs, assert_same_run, engine_of, everything, play
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.zo_runs import engine_for, one_step, train, zo_json

pytestmark = pytest.mark.usefixtures("single_process")

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "replace")


class BrokenOs:
    """`os` whose n-th file operation fails."""

    def __init__(self, *, fail_at: int, operation: str | None = None) -> None:
        self.calls = 0
        self._fail_at, self._operation = fail_at, operation

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS or (self._operation is not None and name != self._operation):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._fail_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module.SaveRequest, "threads", 1)
    original = writer_module.SaveRequest.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "threads": 1})

    monkeypatch.setattr(writer_module.SaveRequest, "__init__", init)


def break_os(monkeypatch: pytest.MonkeyPatch, broken: BrokenOs) -> None:
    monkeypatch.setattr(files, "os", broken)


def num_operations(engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    folder.mkdir()
    with monkeypatch.context() as patch:
        counting = BrokenOs(fail_at=-1)
        break_os(patch, counting)
        engine.save_checkpoint(str(folder), tag="counted")
    return counting.calls


@pytest.mark.parametrize("same_tag", [False, True])
def test_an_error_at_every_file_operation(
    same_tag: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    engine = start("bf16 split")
    train(engine, BATCHES[:2])
    engine.save_checkpoint(str(tmp_path / "a"), tag="good")
    good = planes(engine)
    train(engine, BATCHES[2:3])
    total = num_operations(engine, tmp_path / "b", monkeypatch)
    assert total > 30
    failures = 0
    reader = start("bf16 split")
    for at in range(1, total + 5):
        folder = tmp_path / f"run{at}"
        shutil.copytree(tmp_path / "a", folder)
        with monkeypatch.context() as patch:
            break_os(patch, BrokenOs(fail_at=at))
            try:
                engine.save_checkpoint(str(folder), tag="good" if same_tag else "new")
            except CheckpointError as error:
                failures += 1
                assert "No space left" in str(error) and str(folder) in str(error)
        tag = (folder / "latest").read_text()
        reader.load_checkpoint(str(folder))
        step = reader.backend.store.log.length
        assert (tag, step) in ([("good", 2), ("good", 3)] if same_tag else [("good", 2), ("new", 3)])
        if step == 2:
            assert_same_bits(planes(reader), good)
        shutil.rmtree(folder)
    assert failures >= total - 2  # the last ones are tidying up
    assert engine.global_steps == 3
    one_step(engine, BATCHES[3])


def test_a_full_disk_in_the_background_surfaces_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, same = start("bf16 split", asynchronous=True), start("bf16 split")
    expected = train(same, BATCHES[:6])
    losses = train(engine, BATCHES[:2])
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_checkpoint()
    losses += train(engine, BATCHES[2:3])
    with monkeypatch.context() as patch:
        break_os(patch, BrokenOs(fail_at=3, operation="write"))
        engine.save_checkpoint(str(tmp_path))
        engine._background.wait()
    loss = engine(**BATCHES[3])
    engine.backward(loss)
    with pytest.raises(CheckpointError, match="No space left"):
        engine.step()
    assert engine.global_steps == 4  # a loop that goes on with the next batch has lost no step
    losses += [loss.item(), *train(engine, BATCHES[4:6])]
    assert losses == expected
    assert manifest.complete_tags(tmp_path) == ["global_step2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step2", "latest"]
    reader = start("bf16 split")
    reader.load_checkpoint(str(tmp_path))
    assert reader.global_steps == 2
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_checkpoint()
    assert (tmp_path / "latest").read_text() == "global_step6"


@pytest.mark.parametrize(
    "name", ["bf16 split", "LOMO, bf16, streamed", "AdaLOMO, bf16, kahan, window", "LSP, refits, window"]
)  # one of each backend
def test_a_loop_that_logs_a_failed_background_save_and_goes_on_loses_no_step(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def run(*, fails: bool) -> tuple[int, dict[str, Any]]:
        torch.manual_seed(0)
        engine = engine_of(name, asynchronous=True) if name in FIRST_ORDER else start(name, asynchronous=True)
        epochs, num_errors = Epochs(), 0
        for i in range(7):
            try:
                play(engine, epochs, 1) if name in FIRST_ORDER else one_step(engine, BATCHES[i])
            except CheckpointError:
                num_errors += 1
            if i == 2 and fails:
                engine.save_checkpoint(str(tmp_path / "file" / "x"))
                engine._background.wait()
        assert num_errors == fails
        return engine.global_steps, everything(engine) if name in FIRST_ORDER else planes(engine)

    steps, expected = run(fails=False)
    found_steps, found = run(fails=True)
    assert found_steps == steps
    assert_same_run(found, expected) if name in FIRST_ORDER else assert_same_bits(found, expected)


@pytest.mark.parametrize("broken", ["client state", "memory", "thread"])
def test_a_save_that_fails_before_it_is_written_holds_nothing(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever rewrites weights next waits until nobody holds them: for ever, if nobody is left to let them go."""
    engine = start("bf16 split", asynchronous=True)
    claims = engine.backend.store.claims
    claim, made = claims.claim, []

    def no_memory(unit: Any) -> Any:
        if len(made) == 2:
            raise MemoryError
        made.append(unit)
        return claim(unit)

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises((TypeError, MemoryError, RuntimeError)):
        if broken == "memory":
            patch.setattr(claims, "claim", no_memory)
        if broken == "thread":
            patch.setattr(threading.Thread, "start", no_thread)
        client = {"lock": threading.Lock()} if broken == "client state" else {}
        engine.save_checkpoint(str(tmp_path), client_state=client)
    assert not claims._unwritten
    engine.save_checkpoint(str(tmp_path))
    engine.wait_for_checkpoint()
    assert engine.load_checkpoint(str(tmp_path))[0] is not None


def test_a_folder_that_is_a_file_or_vanishes(tmp_path: Path) -> None:
    engine = start("fp32")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not written"):
        engine.save_checkpoint(str(tmp_path / "file"))
    engine.save_checkpoint(str(tmp_path / "gone"))
    shutil.rmtree(tmp_path / "gone")
    engine.save_checkpoint(str(tmp_path / "gone"))  # made anew
    assert start("fp32").load_checkpoint(str(tmp_path / "gone"))[0] is not None


@pytest.mark.parametrize("tag", ["", "../up", "a/b", ".hidden", "latest"])
def test_tags_that_are_not_folder_names(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tag is a folder name"):
        start("fp32").save_checkpoint(str(tmp_path), tag=tag)
    assert list(tmp_path.iterdir()) == []


# Damage


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory, single_process: None) -> Path:
    folder = tmp_path_factory.mktemp("saves")
    engine = start("bf16 split")
    for part in (BATCHES[:2], BATCHES[2:4]):
        train(engine, part)
        engine.save_checkpoint(str(folder))
    return folder


def damaged(two_saves: Path, tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(two_saves, tmp_path / "saves")
    return tmp_path / "saves", tmp_path / "saves" / "global_step4"


def test_every_file_truncated_flipped_or_missing_is_found_and_another_checkpoint_offered(
    two_saves: Path, tmp_path: Path
) -> None:
    saves, folder = damaged(two_saves, tmp_path)
    engine = start("bf16 split")
    train(engine, BATCHES[:1])
    before = planes(engine)
    names = sorted(p.name for p in folder.iterdir())
    assert {"manifest.json", "state.json", "state.safetensors", "weights-00000.safetensors"} <= set(names)
    for name in names:
        path = folder / name
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = bytearray(whole)
        flipped[middle] ^= 4
        for content in (whole[:-2], b"", bytes(flipped), None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            if content is None and name == "manifest.json":
                expected = "no complete checkpoint .*'global_step2'"
            else:
                expected = f"{folder}.* is damaged: .*{name}.*newest complete one besides it is 'global_step2'"
            with pytest.raises(CheckpointError, match=expected):
                engine.load_checkpoint(str(saves))
            assert_same_bits(planes(engine), before)
        path.write_bytes(whole)
    assert engine.load_checkpoint(str(saves), tag="global_step2")[0] == str(saves / "global_step2")
    assert engine.global_steps == 2


def test_latest_that_names_nothing(two_saves: Path, tmp_path: Path) -> None:
    saves, folder = damaged(two_saves, tmp_path)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*global_step4; .*'global_step2'"):
        start("bf16 split").load_checkpoint(str(saves))
    (saves / "latest").unlink()
    assert start("bf16 split").load_checkpoint(str(saves)) == (None, None)


def test_a_newer_format_is_refused(two_saves: Path, tmp_path: Path) -> None:
    saves, folder = damaged(two_saves, tmp_path)
    body = json.loads((folder / "manifest.json").read_text())
    body["version"] = 99
    (folder / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"reads checkpoint formats up to 1, got 99: .*'global_step2'"):
        start("bf16 split").load_checkpoint(str(saves))


def test_another_model_is_refused_before_anything_changes(two_saves: Path) -> None:
    engine = engine_for(tiny_model("opt"), zo_json(interval=3))
    before = planes(engine)
    for options in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
        with pytest.raises(CheckpointError, match="is of another model: it lacks"):
            engine.load_checkpoint(str(two_saves), **options)
    assert_same_bits(planes(engine), before)
    assert engine.global_steps == 0
    one_step(engine, tiny_batch("opt", batch_size=2, length=6))


def test_client_state_of_every_plain_kind_comes_back(tmp_path: Path) -> None:
    import argparse

    import numpy as np

    client = {
        "epoch": 3, "best": float("nan"), "worst": float("-inf"), "tuple": (1, (2, None)), 5: "key", "set": {1, 2},
        "bytes": b"\x00\xff", "tensor": torch.arange(4, dtype=torch.bfloat16), "array": np.arange(3, dtype=np.uint32),
        "args": argparse.Namespace(lr=1e-3, dtype=torch.float16), "$odd": {"$tensor": "not one"}, "global_steps": 77,
    }  # fmt: skip
    engine = start("fp32")
    engine.save_checkpoint(str(tmp_path), client_state=client)
    _, found = engine.load_checkpoint(str(tmp_path))
    assert found["tuple"] == client["tuple"] and found[5] == "key" and found["set"] == {1, 2}
    assert found["best"] != found["best"] and found["worst"] == float("-inf") and found["bytes"] == b"\x00\xff"
    assert torch.equal(found["tensor"], client["tensor"]) and found["args"] == client["args"]
    assert found["array"].dtype == np.uint32 and found["array"].tolist() == [0, 1, 2]
    assert found["$odd"] == {"$tensor": "not one"} and found["global_steps"] == 77 and engine.global_steps == 0


def test_client_state_that_is_code_is_refused(tmp_path: Path) -> None:
    engine = start("fp32")
    with pytest.raises(CheckpointError, match=r"plain data and tensors, got a .*Toy.*\(engine\.client\.model\)"):
        engine.save_checkpoint(str(tmp_path), client_state={"model": engine.module})
    assert [p.name for p in tmp_path.iterdir()] == []


# Retention


def test_the_last_k_are_kept_and_never_the_only_complete_one_deleted(tmp_path: Path) -> None:
    engine = start("fp32", keep_last=2)
    (tmp_path / "notes").mkdir(parents=True)
    (tmp_path / "incomplete").mkdir()
    for step in range(5):
        train(engine, BATCHES[step : step + 1])
        engine.save_checkpoint(str(tmp_path))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["global_step4", "global_step5", "incomplete", "latest", "notes"]
    one = start("fp32", keep_last=1)
    one.save_checkpoint(str(tmp_path), tag="unnamed", save_latest=False)
    assert set(manifest.complete_tags(tmp_path)) == {"unnamed", "global_step5"}  # latest's stays


def test_the_newest_is_the_one_of_most_steps_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("fp32", keep_last=2)
    for step, clock_s in enumerate([1000.0, 1001.0, 2.0, 3.0, 4.0]):
        clock = SimpleNamespace(time=lambda clock_s=clock_s: clock_s, perf_counter=time.perf_counter)
        monkeypatch.setattr(writer_module, "time", clock)
        train(engine, BATCHES[step : step + 1])
        engine.save_checkpoint(str(tmp_path))
    assert manifest.complete_tags(tmp_path) == ["global_step5", "global_step4"]
    assert "besides it is 'global_step4'" in manifest.suggest_complete(tmp_path, but="global_step5")


def test_a_latest_or_a_manifest_that_nobody_wrote_is_named_and_another_one_offered(tmp_path: Path) -> None:
    engine = start("fp32")
    for step in range(2):
        train(engine, BATCHES[step : step + 1])
        engine.save_checkpoint(str(tmp_path))
    (tmp_path / "global_step1" / "manifest.json").write_text('{"sha256": ' + "[" * 200_000)
    assert manifest.complete_tags(tmp_path) == ["global_step2"]
    with pytest.raises(CheckpointError, match=r"global_step1 is damaged: manifest\.json .*'global_step2'"):
        engine.load_checkpoint(str(tmp_path), tag="global_step1")
    (tmp_path / "latest").write_bytes(b"global_step\xff")
    with pytest.raises(CheckpointError, match=r"as UTF-8 text, got .*'global_step2'.*latest\)"):
        engine.load_checkpoint(str(tmp_path))
    other = start("fp32", keep_last=1)
    other.save_checkpoint(str(tmp_path), tag="unnamed", save_latest=False)
    assert set(manifest.complete_tags(tmp_path)) == {"unnamed", "global_step2"}, "nothing is deleted meanwhile"


@pytest.mark.parametrize("tag", ["a", "run[1]"])
def test_a_folder_set_aside_is_found_for_its_own_tag_only(tag: str, two_saves: Path, tmp_path: Path) -> None:
    """A crash came while the tag was being replaced; another tag's name begins like it."""
    saves = tmp_path / "saves"
    whole = next(folder for folder in sorted(two_saves.iterdir()) if manifest.is_checkpoint(folder))
    for name in (f"{manifest.REPLACED}{tag}-77", f"{manifest.REPLACED}{tag}-b-78"):
        shutil.copytree(whole, saves / name)
    assert manifest.folder_of(saves, tag).name == f"{manifest.REPLACED}{tag}-77"
    assert manifest.folder_of(saves, f"{tag}-b").name == f"{manifest.REPLACED}{tag}-b-78"
    shutil.rmtree(saves / f"{manifest.REPLACED}{tag}-77")
    assert manifest.folder_of(saves, tag) == saves / tag


def test_arrays_of_objects_are_refused() -> None:
    """Their bytes would be taken for addresses."""
    with pytest.raises(CheckpointError, match="does not know"):
        decode({"$array": "a", "dtype": "|O"}, {"a": torch.zeros(8, dtype=torch.uint8)})


def test_a_checkpoint_stays_whole_if_the_trajectory_cannot_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("fp32", trajectory=True)
    train(engine, BATCHES[:2])
    engine.save_checkpoint(str(tmp_path))
    train(engine, BATCHES[2:3])

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(TrajectoryFile, "add_hash", full)
        engine.save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="No space left"):
        one_step(engine, BATCHES[3])
    other = start("fp32")
    other.load_checkpoint(str(tmp_path))
    assert other.global_steps == 3
