"""Files that were damaged, lost or replaced: each is refused in one line that names it and a remedy, or does no harm.

Every case is drawn from a seed, which the name of a failing case shows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from ds_zo import load_pretrained
from ds_zo.checkpoint import CheckpointError
from ds_zo.checkpoint.manifest import FILE, LATEST
from ds_zo.checkpoint.reader import open_checkpoint, tag_to_load
from ds_zo.checkpoint.writer import check_tag
from tests.helpers.loaded_models import lora_over
from tests.helpers.small_saves import save
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.zo_runs import engine_for, zo_json
from tests.random.sizes import first_seed, num_cases

NUM_CASES = num_cases(150)
SEED = first_seed()
INDEX = "model.safetensors.index.json"


def nested(draw: random.Random) -> str:
    """As a value, or inside an object that is otherwise right."""
    depth = draw.choice([101, 300, 900, 5_000, 200_000])
    value = draw.choice(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth])
    return draw.choice([value, f'{{"weight_map": {value}}}', f'{{"weight_map": {{"x": {value}}}}}'])


def damage(path: Path, draw: random.Random) -> None:
    kind = draw.choice(["lose", "folder", "cut", "noise", "loop", *["forbid", "nest"] * 3])
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "cut":
        path.write_bytes(content[: draw.randrange(len(content))])
    elif kind == "noise":
        path.write_bytes(draw.randbytes(draw.choice([0, 3, 300])))
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "forbid":
        shard = draw.choice([min(os.listdir(path.parent)), None, "", ".", "..", "/a", "a\nb", "\0", "x" * 5_000])
        path.write_text(draw.choice(["null", "[]", "5", *[json.dumps({"weight_map": {"a\nb": shard}})] * 9]))
    elif kind == "nest":
        path.write_text(nested(draw))


def is_one_line(error: BaseException, *names: str) -> bool:
    text = str(error)
    return "\n" not in text and len(text) < 1_500 and any(name in text for name in names) and ": " in text


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small = tiny_model("llama", num_hidden_layers=2, hidden_size=8, intermediate_size=12).bfloat16()
    small.save_pretrained(folder, max_shard_size="2KB")
    assert (folder / INDEX).exists()
    return folder


def test_folders_of_models(shards: Path, tmp_path: Path) -> None:
    from ds_zo.streaming.loading import SafetensorsSource

    wrong = []
    for number in range(NUM_CASES):
        draw = random.Random(f"{SEED} model {number}")
        folder = tmp_path / str(number)
        shutil.copytree(shards, folder)
        path = draw.choice([folder / INDEX, draw.choice(sorted(folder.glob("model-*.safetensors")))])
        damage(path, draw)
        try:
            source = SafetensorsSource(folder)
            for name in source.names():
                source(name)
        except FileNotFoundError as error:
            if path.name != INDEX or "neither" not in str(error):
                wrong.append(f"{number}: {error!r}")
        except ValueError as error:
            if not is_one_line(error, str(folder if path.name == INDEX else path)):
                wrong.append(f"{number}: {error!r}"[:500])
        except BaseException as error:
            wrong.append(f"{number}: {error!r}"[:500])
    assert not wrong, "\n".join(wrong)


def test_checkpoints(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    save(saved, "step1")
    save(saved, "step2")
    wrong = []
    for number in range(NUM_CASES):
        draw = random.Random(f"{SEED} checkpoint {number}")
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        latest, tag = folder / LATEST, draw.choice([None, None, "x" * draw.choice([256, 5_000]), "é" * 200, "a\nb"])
        if draw.random() < 0.5:
            damage(draw.choice([latest, folder / "step2" / FILE]), draw)
        else:
            odd = draw.choice(["x" * 256, "x" * 70_000, "", "\0", "é" * 200, "../nowhere", "a\nb"]).encode()
            latest.write_bytes(odd + draw.choice([b"", b"\xff"]))
        try:
            found = tag_to_load(folder, tag)
            if found is not None:
                open_checkpoint(folder, found, progress=False)
        except CheckpointError as error:
            if not is_one_line(error, str(folder)):
                wrong.append(f"{number}: {error!r}"[:500])
        except BaseException as error:
            wrong.append(f"{number}: {error!r}"[:500])
        (folder / "step3.writing-5").mkdir()  # what a killed save has left, damaged
        (folder / "step3.writing-5" / "writer.json").write_text(nested(draw))
        if latest.is_dir():
            latest.rmdir()
        save(folder, "step4")
        open_checkpoint(folder, "step4", progress=False)
    assert not wrong, "\n".join(wrong)


def test_a_tag_with_a_line_break_is_not_saved() -> None:
    with pytest.raises(CheckpointError, match=r"of printable characters .*, got 'a\\nb': pass another name \(tag\)"):
        check_tag("a\nb")


@pytest.mark.parametrize("when", ["before initialize", "before a second engine"])
def test_files_that_are_replaced_before_they_are_read(
    when: str, shards: Path, tmp_path: Path, single_process: None
) -> None:
    """The second engine reads the frozen weights again."""
    folder = tmp_path / "model"
    shutil.copytree(shards, folder)
    json: dict[str, Any] = zo_json(frozen_dtype="nf4", bf16={"enabled": True})
    model = load_pretrained(hf.AutoModelForCausalLM, str(folder), frozen_dtype="nf4")
    model = lora_over(model)
    if when == "before a second engine":
        engine_for(model, json).destroy()
    for path in sorted(folder.glob("model-*.safetensors")):
        shutil.copy(path, tmp_path / "other")
        os.replace(tmp_path / "other", path)
    with pytest.raises(ValueError, match=r"files must stay as they are, got a replaced .*safetensors: load the model"):
        engine_for(model, json)
    model = load_pretrained(hf.AutoModelForCausalLM, str(folder))
    engine = engine_for(model, zo_json(bf16={"enabled": True}))
    engine.eval()
    with torch.no_grad():
        assert engine(**tiny_batch("llama")).loss.isfinite()
    engine.destroy()


def test_the_next_save_removes_what_a_kill_has_left_of_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the file of a process that is about to rename it."""
    read, told = os.pipe()
    children = []
    for is_killed in (True, False):
        child = os.fork()
        if not child:
            replace = os.replace

            def slow(old: Any, new: Any, is_killed: bool = is_killed, replace: Any = replace) -> None:
                os.write(told, b".")
                time.sleep(60 if is_killed else 2)
                replace(old, new)

            os.replace = slow
            code = 1
            try:
                save(tmp_path, f"step{is_killed:d}")
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert len(os.read(read, 1) + os.read(read, 1)) == 2
    os.kill(children[0], signal.SIGKILL)
    os.waitpid(children[0], 0)
    assert len(list(tmp_path.glob(f".{LATEST}-*"))) == 2
    save(tmp_path, "step2")
    assert len(list(tmp_path.glob(f".{LATEST}-*"))) == 1
    assert os.waitpid(children[1], 0)[1] == 0
    assert not list(tmp_path.glob(f".{LATEST}-*"))
