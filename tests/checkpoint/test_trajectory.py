"""A run as a list of numbers: replayed to any step, and recovered after a crash without losing one."""

from __future__ import annotations

import copy
import csv
import json
import random
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from ds_zo import cli
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.rebuild import replay
from ds_zo.checkpoint.trajectory import read_trajectory
from tests.helpers.checkpoint_runs import BATCHES, JSONS, assert_same_bits, loaded, planes, start, with_checkpoint
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import Toy, engine_for, log_lines, train, zo_json

pytestmark = pytest.mark.usefixtures("single_process")

FORMATS = ["fp32 some resident", "bf16 split", "bf16 wire", "fp8 split", "fp8 wire", "bf12 wire", "two directions"]


def crash(engine: Any) -> None:
    """What is left is what is on disk."""
    engine.backend.recorder.flush()


@pytest.mark.parametrize("name", FORMATS)
def test_recovery_loses_no_completed_step(name: str, tmp_path: Path) -> None:
    """The last full checkpoint is of step 3, the crash comes after step 9."""
    whole = start(name)
    expected = train(whole, BATCHES[:12])
    first = start(name, trajectory=True)
    train(first, BATCHES[:3])
    first.save_checkpoint(str(tmp_path))
    train(first, BATCHES[3:9])
    crash(first)
    resumed = loaded(tmp_path, name)
    assert resumed.global_steps == 9
    assert_same_bits(planes(resumed), planes(first))
    assert train(resumed, BATCHES[9:10]) == expected[9:10]
    crash(resumed)
    again = loaded(tmp_path, name)  # and the resumed run's steps are recorded too
    assert again.global_steps == 10
    assert train(again, BATCHES[10:12]) == expected[10:]
    assert_same_bits(planes(again), planes(whole))


@pytest.mark.parametrize("name", ["fp32 some resident", "bf16 split", "bf16 wire", "fp8 wire"])
def test_a_run_that_updated_in_a_sweep_after_each_step_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """Earlier versions ran so with `fuse_update: false`, which their checkpoints contain. They wrote back every
    step."""
    json = with_checkpoint(JSONS[name], trajectory=True)
    json["ds_zo"]["stream"]["writeback_interval"] = 1

    def unfused(engine: Any, batches: list[dict[str, Any]]) -> list[float]:
        store = engine.backend.store
        return train(engine, batches, lambda step: store.materialiser.fold_now(*store.blocks.placement.units))

    first = engine_for(Toy(), copy.deepcopy(json))
    unfused(first, BATCHES[:3])
    first.config["ds_zo"]["stream"]["fuse_update"] = False
    first.save_checkpoint(str(tmp_path))
    unfused(first, BATCHES[3:7])
    crash(first)
    resumed = engine_for(Toy(), json)
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.global_steps == 7
    assert train(resumed, BATCHES[7:8]) + unfused(resumed, BATCHES[8:9]) == unfused(first, BATCHES[7:9])
    assert_same_bits(planes(resumed), planes(first))


class Choosy(Toy):
    """Runs the blocks in `used` alone, and never its last module."""

    def __init__(self) -> None:
        super().__init__()
        self.never_used = nn.Linear(16, 16)
        self.used = [0, 1, 2]

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize("name", FORMATS)
def test_modules_that_a_forward_does_not_use_fold_as_a_replay_folds_them(name: str, tmp_path: Path) -> None:
    """Layer drop skips other blocks in each step. A recovered run has the weights of the run, and so has a replay."""
    engine = engine_for(Choosy(), with_checkpoint(JSONS[name], trajectory=True))
    (tmp_path / "base").mkdir()
    save_file({k: v.clone() for k, v in engine.module.state_dict().items()}, tmp_path / "base" / "model.safetensors")
    chosen = random.Random(FORMATS.index(name))

    def choose(step: int) -> None:
        engine.module.used = sorted(chosen.sample(range(3), chosen.randint(1, 3)))

    engine.save_checkpoint(str(tmp_path / "saves"))
    train(engine, BATCHES[:10], choose)
    crash(engine)
    recovered = engine_for(Choosy(), with_checkpoint(JSONS[name], trajectory=True))
    recovered.load_checkpoint(str(tmp_path / "saves"))
    assert_same_bits(planes(recovered), planes(engine))
    engine.save_checkpoint(str(tmp_path / "saves"))
    assert replay(tmp_path / "base", tmp_path / "saves" / "trajectory.bin", step=10, out=tmp_path / "ten") is True
    assert_equal(load_file(tmp_path / "ten" / "model.safetensors"), weights(engine.module))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_were_read_between_steps_do_not_stop_a_replay(name: str, tmp_path: Path) -> None:
    """A read of a parameter may fold its unit before its turn, so the save after it records no hash of the bytes. The
    next save whose units have all folded in their turn records one."""
    engine = start(name, trajectory=True)
    (tmp_path / "base").mkdir()
    save_file({k: v.clone() for k, v in engine.module.state_dict().items()}, tmp_path / "base" / "model.safetensors")
    chosen, saves = random.Random(FORMATS.index(name)), tmp_path / "saves"
    train(engine, BATCHES[:7])
    expected = {7: weights(engine.module)}
    for p in chosen.sample(list(engine.module.parameters()), chosen.randint(1, 3)):
        p.detach().norm()
    engine.module.head.bias.detach().norm()
    engine.save_checkpoint(str(saves))
    resumed = loaded(saves, name)
    resumed.save_checkpoint(str(saves), tag="again")
    train(resumed, BATCHES[7:12])
    resumed.save_checkpoint(str(saves))
    expected[12] = weights(resumed.module)
    for step, found in expected.items():
        is_checked = replay(tmp_path / "base", saves / "trajectory.bin", step=step, out=tmp_path / f"step{step}")
        assert is_checked is (step == 12)
        assert_equal(load_file(tmp_path / f"step{step}" / "model.safetensors"), found)


def test_a_checkpoint_of_another_fold_order_goes_on_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    """Steps that were recorded are made again, and later ones recorded apart from them."""
    first = start("bf16 wire", trajectory=True)
    train(first, BATCHES[:3])
    first.save_checkpoint(str(tmp_path))
    train(first, BATCHES[3:5])
    crash(first)
    before = {path: path.read_bytes() for path in tmp_path.glob("trajectory*.bin")}
    monkeypatch.setattr("ds_zo.backends.zo.checkpoint.FOLD_ORDER", 7)
    with log_lines() as lines:
        resumed = loaded(tmp_path, "bf16 wire")
    assert any("fold_order (2 there, 7 here)" in line for line in lines)
    assert resumed.global_steps == 5
    train(resumed, BATCHES[5:6])
    resumed.save_checkpoint(str(tmp_path))
    train(resumed, BATCHES[6:7])
    crash(resumed)
    [old] = before
    found = {path: read_trajectory(path) for path in tmp_path.glob("trajectory*.bin")}
    assert {t.header["facts"]["fold_order"]: (t.first_step, t.end_step) for t in found.values()} == {
        2: (0, 5),
        7: (5, 7),
    }
    assert any(path.read_bytes() == before[old] for path in found), "what was recorded stays as it was"
    again = loaded(tmp_path, "bf16 wire")
    assert again.global_steps == 7
    assert_same_bits(planes(again), planes(resumed))


def test_steps_of_another_seed_are_not_made_again(tmp_path: Path) -> None:
    first = start("bf16 wire", trajectory=True)
    train(first, BATCHES[:3])
    first.save_checkpoint(str(tmp_path))
    expected = weights(first.module)
    train(first, BATCHES[3:5])
    crash(first)
    config = with_checkpoint(JSONS["bf16 wire"], trajectory=True)
    config["optimizer"]["params"]["seed"] = 5
    other = engine_for(Toy(), config)
    other.load_checkpoint(str(tmp_path))
    assert other.global_steps == 3
    assert_equal(weights(other.module), expected)


def test_the_checkpoint_that_a_trajectory_goes_on_from_is_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    """Until it is whole there is nothing that recorded steps could be added to; later ones are written meanwhile."""
    engine = engine_for(Toy(), with_checkpoint(JSONS["fp8 split"], trajectory=True, asynchronous=True))
    begun: list[Any] = []
    monkeypatch.setattr(engine._background, "start", begun.append)
    for num_saves in range(3):
        engine.save_checkpoint(str(tmp_path), tag=f"at{num_saves}")
        assert (tmp_path / "at0" / "manifest.json").exists()
        assert len(begun) == num_saves
        train(engine, BATCHES[num_saves : num_saves + 1])


def test_recovery_further_than_the_replay_log_reaches_with_a_schedule(tmp_path: Path) -> None:
    schedule = {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 9, "total_num_steps": 99, "warmup_max_lr": 1e-3},
    }
    json_ = zo_json(interval=5, scheduler=schedule, bf16={"enabled": True}, gradient_accumulation_steps=1)
    json_ = with_checkpoint(json_, trajectory=True, trajectory_dir=str(tmp_path / "log"))
    batches = [BATCHES[i % len(BATCHES)] for i in range(75)]
    first = engine_for(Toy(), json_)
    train(first, batches[:1])
    first.save_checkpoint(str(tmp_path / "saves"))
    train(first, batches[1:])
    resumed = engine_for(Toy(), json_)
    resumed.load_checkpoint(str(tmp_path / "saves"))
    assert resumed.global_steps == 75 and resumed.get_lr() == first.get_lr()
    assert (resumed.global_samples, resumed.micro_steps) == (first.global_samples, first.micro_steps)
    assert_same_bits(planes(resumed), planes(first))


@pytest.mark.parametrize("num_saved", [3, 4, 5])
def test_a_replayed_run_begins_a_new_accumulation_window(num_saved: int, tmp_path: Path) -> None:
    """The first replayed step has completed the window that the checkpoint was saved in."""
    monitor = {"enabled": True, "output_path": str(tmp_path / "events"), "job_name": "job"}
    json_ = with_checkpoint(zo_json(gradient_accumulation_steps=3), trajectory=True)
    first = engine_for(Toy(), {**json_, "csv_monitor": {**monitor, "job_name": "first"}})
    train(first, BATCHES[:num_saved])
    first.save_checkpoint(str(tmp_path / "saves"))
    train(first, BATCHES[num_saved:11])  # three steps and two micro-batches that no step has used
    crash(first)
    resumed = engine_for(Toy(), {**json_, "csv_monitor": monitor})
    resumed.load_checkpoint(str(tmp_path / "saves"))
    assert (resumed.global_steps, resumed.micro_steps, resumed._window_has_sums) == (3, 9, False)
    losses = train(resumed, BATCHES[9:12])
    [file] = (tmp_path / "events" / "job").rglob("*train_loss.csv")
    [[_, found]] = list(csv.reader(file.open()))[1:]
    assert float(found) == pytest.approx(sum(losses) / 3)


class Poisoned(Toy):
    """A model whose losses are multiplied by `factor`."""

    factor = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor


@pytest.mark.parametrize("seed", range(4))
def test_replayed_steps_that_were_skipped_are_counted(seed: int, tmp_path: Path) -> None:
    """Steps at a learning rate of zero and steps with equal losses are not skipped, though they change no weight."""
    draw = random.Random(seed)
    params = {"num_directions": draw.choice([1, 2]), "weight_decay": draw.choice([0.0, 0.1])}
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 4}}
    schedule = {"scheduler": warmup} if draw.random() < 0.5 else {}
    json_ = with_checkpoint(zo_json(params=params, **schedule), trajectory=True)
    first = engine_for(Poisoned(), json_)
    first.save_checkpoint(str(tmp_path))
    for i in range(12):
        first.module.factor = draw.choice([1.0, -1.0, 0.0, -0.0, float("nan"), float("inf")])
        train(first, [BATCHES[i % len(BATCHES)]])
        if i == 3 and draw.random() < 0.5:
            first.save_checkpoint(str(tmp_path))
    crash(first)
    resumed = engine_for(Poisoned(), json_)
    resumed.load_checkpoint(str(tmp_path))
    assert (resumed.global_steps, resumed.skipped_steps) == (12, first.skipped_steps)
    assert 0 < first.skipped_steps < 12
    assert_same_bits(planes(resumed), planes(first))


@pytest.mark.parametrize("change", ["written", "frozen"])
def test_what_no_step_made_ends_the_recording_until_the_next_checkpoint(change: str, tmp_path: Path) -> None:
    """Rows that follow it would be applied to other weights than they were."""
    first = start("fp32", trajectory=True)
    train(first, BATCHES[:1])
    first.save_checkpoint(str(tmp_path))
    train(first, BATCHES[1:2])
    before = weights(first.module)
    parameter = next(first.module.parameters())
    if change == "written":
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.zero_()
    else:
        parameter.requires_grad_(False)
    train(first, BATCHES[2:3])
    crash(first)
    resumed = loaded(tmp_path)
    assert resumed.global_steps == 2
    assert_equal(weights(resumed.module), before)
    with deepspeed.zero.GatheredParameters([p := next(resumed.module.parameters())], modifier_rank=0):
        p.data.zero_()
    resumed.save_checkpoint(str(tmp_path))
    train(resumed, BATCHES[2:4])
    crash(resumed)
    again = loaded(tmp_path)
    assert_same_bits(planes(again), planes(resumed))


@pytest.fixture(params=["fp32", "bf16 split", "bf12 wire", "fp8 split"])
def recorded_run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A tiny LLaMA (untied) that trained 7 steps, with a checkpoint at 5, from the folder `base`."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    engine = engine_for(model, with_checkpoint(JSONS[request.param], trajectory=True))
    batches = [tiny_batch("llama", seed=i, batch_size=2, length=6) for i in range(7)]
    train(engine, batches[:5])
    engine.save_checkpoint(str(tmp_path / "saves"))
    train(engine, batches[5:])
    crash(engine)
    return engine, tmp_path


def test_replay_gives_the_weights_of_any_step(recorded_run: tuple[Any, Path]) -> None:
    engine, folder = recorded_run
    base, file = folder / "base", folder / "saves" / "trajectory.bin"
    assert replay(base, file, step=7, out=folder / "seven") is False  # no checkpoint, so no hash
    seven = AutoModelForCausalLM.from_pretrained(folder / "seven", dtype="auto")
    assert_equal(seven.state_dict(), weights(engine.module))
    assert replay(base, file, step=5, out=folder / "five") is True
    engine.load_checkpoint(str(folder / "saves"), tag="global_step5")
    five = AutoModelForCausalLM.from_pretrained(folder / "five", dtype="auto")
    assert_equal(five.state_dict(), weights(engine.module))
    assert replay(folder / "saves" / "global_step5", file, step=7, out=folder / "from5") is False
    from_five = AutoModelForCausalLM.from_pretrained(folder / "from5", dtype="auto")
    assert_equal(from_five.state_dict(), seven.state_dict())


def test_replay_from_another_model_or_altered_numbers_is_refused(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    engine = engine_for(model, with_checkpoint(JSONS["bf16 wire"], trajectory=True))
    train(engine, [tiny_batch("llama", seed=i, batch_size=2, length=6) for i in range(3)])
    engine.save_checkpoint(str(tmp_path / "saves"))
    file = tmp_path / "saves" / "trajectory.bin"
    tiny_model("llama", seed=3).save_pretrained(tmp_path / "other")
    arguments = ["replay", "--trajectory", str(file), "--step", "3", "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--base", str(tmp_path / "other")]) == 1
    assert "is not the model that the run started from" in capsys.readouterr().err
    assert cli.main([*arguments, "--base", str(tmp_path / "nowhere")]) == 1
    assert "must be a model folder with safetensors or a checkpoint" in capsys.readouterr().err
    assert cli.main([*arguments[:4], "9", *arguments[5:], "--base", str(tmp_path / "base")]) == 1
    assert "leads from step 0 to 3, got 9" in capsys.readouterr().err
    rules = {"ds_zo.checkpoint.rebuild.FOLD_ORDER": "fold order 2", "ds_zo.ops.NOISE_VERSION": "noise version"}
    for where, what in rules.items():  # by other rules weights would be others, and not every step has a hash
        with monkeypatch.context() as other:
            other.setattr(where, 7)
            assert cli.main([*arguments, "--base", str(tmp_path / "base")]) == 1
        error = capsys.readouterr().err
        assert f"was recorded with {what}" in error and "this ds_zo has 7" in error
    altered = bytearray(file.read_bytes())
    head = altered.index(b"\n", 30) + 1
    from ds_zo.checkpoint.trajectory import _record

    row = torch.frombuffer(altered[head + 1 : head + 13], dtype=torch.float32).clone()
    row[2] *= 1.5
    altered[head : head + 17] = _record(b"S", row.numpy().tobytes())
    (tmp_path / "altered.bin").write_bytes(altered)
    with pytest.raises(CheckpointError, match="are not those that the run had"):
        replay(tmp_path / "base", tmp_path / "altered.bin", step=3, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    for device in ("cpu:x", "gpu"):
        assert cli.main([*arguments, "--base", str(tmp_path / "base"), "--device", device]) == 1
        assert f"got {device}: name one of them (--device)" in capsys.readouterr().err
    assert cli.main([*arguments, "--base", str(tmp_path / "base")]) == 0
    assert "its hash is the recorded one" in capsys.readouterr().out


def test_a_few_bytes_a_step(tmp_path: Path) -> None:
    engine = start("fp32", trajectory=True, trajectory_dir=str(tmp_path))
    engine.save_checkpoint(str(tmp_path / "saves"))
    before = (tmp_path / "trajectory.bin").stat().st_size
    train(engine, BATCHES[:10])
    assert (tmp_path / "trajectory.bin").stat().st_size - before == 10 * 17
    header = json.loads((tmp_path / "trajectory.bin").read_bytes().split(b"\n")[1])
    assert header["facts"]["seed"] == 0 and header["base"]["step"] == 0


def test_a_step_that_can_not_be_recorded_is_an_error_and_later_ones_follow(tmp_path: Path, monkeypatch: Any) -> None:
    engine = start("fp32", trajectory=True)
    engine.save_checkpoint(str(tmp_path))
    train(engine, BATCHES[:2])
    import ds_zo.checkpoint.trajectory as module

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(module.os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            train(engine, BATCHES[2:3])
    assert engine.global_steps == 3, "the step is made before the error is raised"
    assert read_trajectory(tmp_path / "trajectory.bin").end_step == 2
    train(engine, BATCHES[3:4])  # with room on the disk
    assert engine.global_steps == 4
    assert read_trajectory(tmp_path / "trajectory.bin").end_step == 4
