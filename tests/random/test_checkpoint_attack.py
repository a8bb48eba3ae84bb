"""Checkpoints that are damaged, crafted, or written by several processes of which some are killed, made from a seed.

Each one is refused in one line that names it, and changes nothing; or it loads exactly what was saved. Nothing that it
holds is executed.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_zo.checkpoint import CheckpointError, files, manifest
from ds_zo.checkpoint.reader import open_folder
from tests.helpers.checkpoint_runs import BATCHES, assert_same_bits, planes, start
from tests.helpers.first_order_runs import Epochs, assert_same_run, engine_of, everything, play
from tests.helpers.small_saves import save
from tests.helpers.zo_runs import train
from tests.random.sizes import first_seed, num_cases

pytestmark = pytest.mark.usefixtures("single_process")

NUM_CASES = num_cases(60)
SEED = first_seed(20)
TAGS = ("one", "two")
ODD: list[Any] = [
    *(None, True, -1, 2**70, 1.5, "", "x", "../../etc/passwd", "/etc/passwd", "\udcff", [], [1], {}, {"a": 1}),
    *(
        {"$tensor": "no such"},
        {"$array": "no such", "dtype": "|O"},
        {"$array": "no such", "dtype": 5},
        {"$float": "1e"},
    ),
    *({"$bytes": "%%%"}, {"$dtype": "os"}, {"$dtype": 5}, {"$device": "nowhere:1"}, {"$namespace": [1]}, {"$dict": 5}),
    *({"$set": [[1]]}, {"$tuple": None}, {"$import": "os"}),
]


class Boom:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['DS_ZO_BOOM']}",)


class Bench:
    """A backend's engine, what it saved, and what it is like."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.saves = name, folder
        self.engine = self._start()
        self.expected: dict[str, Any] = {}
        epochs = Epochs()
        for number, tag in enumerate(TAGS):
            if name == "zo":
                train(self.engine, BATCHES[number : number + 1])
            else:
                play(self.engine, epochs, 1)
            client = {"epoch": number, "ema": {"w": torch.full((3,), float(number))}, "path": Path("x")}
            self.engine.save_checkpoint(str(folder), tag=tag, client_state=client)
            self.expected[tag] = self.look()
        self.victim = self._start()
        if name == "zo":
            train(self.victim, BATCHES[4:5])
        else:
            play(self.victim, epochs, 1)

    def _start(self) -> Any:
        return start("bf16 split") if self.name == "zo" else engine_of(self.name)

    def look(self, engine: Any = None) -> dict[str, Any]:
        engine = engine or self.engine
        found = planes(engine) if self.name == "zo" else everything(engine)
        buffers = {f"buffer {name}": value.clone() for name, value in engine.module.named_buffers()}
        counters = {"steps": engine.global_steps, "lr": str([group["lr"] for group in engine.optimizer.param_groups])}
        return {**found, **buffers, **counters, "random": torch.get_rng_state()}

    def same(self, a: dict[str, Any], b: dict[str, Any]) -> None:
        (assert_same_bits if self.name == "zo" else assert_same_run)(a, b)


@pytest.fixture(scope="module", params=["zo", "LOMO, bf16, streamed", "LSP, on the device"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, single_process: None) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("saves"))


# Damage: hashes are those of what was written.


def flip(draw: random.Random, folder: Path) -> None:
    path = any_file(draw, folder)
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(draw: random.Random, folder: Path) -> None:
    path = any_file(draw, folder)
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def lengthen(draw: random.Random, folder: Path) -> None:
    path = any_file(draw, folder)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 99)))


def lose(draw: random.Random, folder: Path) -> None:
    any_file(draw, folder).unlink()


def swap(draw: random.Random, folder: Path) -> None:
    a, b = draw.sample(sorted(folder.iterdir()), 2)
    contents = a.read_bytes(), b.read_bytes()
    a.write_bytes(contents[1])
    b.write_bytes(contents[0])


def mix(draw: random.Random, folder: Path) -> None:
    """A file of the other checkpoint."""
    path = any_file(draw, folder)
    shutil.copy(folder.parent / TAGS[0] / path.name, path)


def add(draw: random.Random, folder: Path) -> None:
    (folder / draw.choice(["weights-99999.safetensors", "extra", ".hidden", "writer.json"])).write_bytes(b"\0" * 9)


def make_folder(draw: random.Random, folder: Path) -> None:
    path = any_file(draw, folder)
    path.unlink()
    path.mkdir()


def make_pickle(draw: random.Random, folder: Path) -> None:
    any_file(draw, folder).write_bytes(pickle.dumps(Boom()))


def any_file(draw: random.Random, folder: Path) -> Path:
    return draw.choice(sorted(folder.iterdir()))


# Crafted: hashes are made anew, so that only what is said is wrong.


def odd_manifest(draw: random.Random, folder: Path) -> None:
    body = json.loads((folder / manifest.FILE).read_text())
    put_odd(draw, body)
    seal(folder, body)


def odd_file_names(draw: random.Random, folder: Path) -> None:
    body = json.loads((folder / manifest.FILE).read_text())
    name = draw.choice(sorted(body["files"]))
    body["files"][draw.choice(["../two/" + name, "/etc/passwd", "..", "", ".", "weights-\0", "x" * 300])] = body[
        "files"
    ].pop(name)
    seal(folder, body)


def odd_state(draw: random.Random, folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    put_odd(draw, state)
    (folder / "state.json").write_text(json.dumps(state))
    reseal(folder, "state.json")


def odd_tensor(draw: random.Random, folder: Path) -> None:
    """Of another shape or dtype, or under another name."""
    from safetensors.torch import load_file, save_file

    path = draw.choice(sorted(folder.glob("*.safetensors")))
    tensors = load_file(path)
    if not tensors:
        return
    name = draw.choice(sorted(tensors))
    value = tensors.pop(name)
    kind = draw.randrange(4)
    if kind == 0:
        tensors[name] = torch.zeros([*value.shape, 2], dtype=value.dtype)
    elif kind == 1:
        tensors[name] = torch.zeros(value.shape, dtype=draw.choice([torch.int64, torch.bool, torch.complex64]))
    elif kind == 2:
        tensors[name + "x"] = value
    save_file(tensors, path)
    reseal(folder, path.name)


def odd_header(draw: random.Random, folder: Path) -> None:
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    size = draw.choice([0, 2**63, 2**64 - 1, 10**9, 7])
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    reseal(folder, path.name)


def sealed_pickle(draw: random.Random, folder: Path) -> None:
    path = draw.choice([path for path in sorted(folder.iterdir()) if path.name != manifest.FILE])
    path.write_bytes(pickle.dumps(Boom()))
    reseal(folder, path.name)


def put_odd(draw: random.Random, body: Any) -> None:
    """One value somewhere in it is another, or gone."""
    places = list(containers(body))
    place = draw.choice(places)
    key = draw.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
    if draw.random() < 0.25:
        del place[key]
    else:
        place[key] = copy.deepcopy(draw.choice(ODD))


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list)) and value:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def reseal(folder: Path, name: str) -> None:
    body = json.loads((folder / manifest.FILE).read_text())
    path = folder / name
    body["files"][name] = {"nbytes": path.stat().st_size, "sha256": files.sha256_of(path, progress=lambda n: None)}
    seal(folder, body)


def seal(folder: Path, body: dict[str, Any]) -> None:
    body.pop("sha256", None)
    (folder / manifest.FILE).write_text(json.dumps({**body, "sha256": files.hash_json(body)}))


ATTACKS: list[Callable[[random.Random, Path], None]] = [
    *(flip, cut, lengthen, lose, swap, mix, add, make_folder, make_pickle),
    *(odd_manifest, odd_file_names, odd_state, odd_state, odd_tensor, odd_header, sealed_pickle),
]


def test_a_checkpoint_loads_exactly_or_changes_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"DS_ZO_RANDOM_SEED={SEED}")
    monkeypatch.setenv("DS_ZO_BOOM", str(tmp_path / "executed"))
    wrong: list[str] = []
    num_refused = 0
    for number in range(NUM_CASES):
        draw = random.Random(f"{SEED} {bench.name} {number}")
        attack = ATTACKS[number % len(ATTACKS)]
        folder = tmp_path / "saves"
        shutil.copytree(bench.saves, folder)
        attack(draw, folder / "two")
        listed = sorted(folder.rglob("*"))
        options: dict[str, Any] = draw.choice([{}, {}, {"load_optimizer_states": False}, {"load_module_only": True}])
        before = bench.look(bench.victim)
        try:
            path, _ = bench.victim.load_checkpoint(str(folder), **options)
            assert path == str(folder / "two")
            if not options and attack not in (odd_state, odd_tensor):  # those may say something else that is valid
                bench.same(bench.look(bench.victim), bench.expected["two"])
        except CheckpointError as error:
            num_refused += 1
            if "\n" in str(error) or "checkpoint" not in str(error):
                wrong.append(f"case {number}, {attack.__name__}: {error}")
            try:
                bench.same(bench.look(bench.victim), before)
            except AssertionError as difference:
                wrong.append(f"case {number}, {attack.__name__}, {options}: changed {difference}; {error}")
        except Exception as error:
            wrong.append(f"case {number}, {attack.__name__}, {options}: {error!r}")
        if sorted(folder.rglob("*")) != listed or (tmp_path / "executed").exists():
            wrong.append(f"case {number}, {attack.__name__}: a load has written")
        bench.victim.load_checkpoint(str(bench.saves), tag="one")
        shutil.rmtree(folder)
    assert not wrong, "\n".join([f"{len(wrong)} of {NUM_CASES} cases", *wrong])
    assert num_refused > NUM_CASES // 2
    bench.victim.load_checkpoint(str(bench.saves))
    bench.same(bench.look(bench.victim), bench.expected["two"])


# Several writers


def test_processes_that_save_to_one_folder_and_are_killed_leave_whole_checkpoints(tmp_path: Path) -> None:
    print(f"DS_ZO_RANDOM_SEED={SEED}")
    for number in range(max(2, NUM_CASES // 15)):
        draw = random.Random(f"{SEED} writers {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "mine.writing-samples").mkdir()
        keep_last = draw.choice([None, None, 1, 2])
        same_tags = draw.random() < 0.5

        def write(who: int, told: int, options: Any = (folder, keep_last, same_tags)) -> None:
            folder, keep_last, same_tags = options
            for i in range(10_000):
                tag = f"step{i % 7}" if same_tags else f"step{who}{i % 7}"
                save(folder, tag, keep_last=keep_last, latest=i % 3 > 0)
                os.write(told, f"{tag}\n".encode())

        children, pipes = [], []
        for who in range(3):
            read, told = os.pipe()
            child = os.fork()
            if not child:
                try:
                    write(who + 1, told)
                finally:
                    os._exit(1)
            os.close(told)
            children.append(child)
            pipes.append(read)
        for child in draw.sample(children, 3):
            time.sleep(draw.uniform(0.02, 0.25))
            os.kill(child, signal.SIGKILL)
        assert all(os.WIFSIGNALED(os.waitpid(child, 0)[1]) for child in children), "a save has failed"
        reported = set()
        for pipe in pipes:
            with os.fdopen(pipe) as lines:
                reported |= {line.strip() for line in lines}
        for tag in reported if keep_last is None else ():
            open_folder(manifest.folder_of(folder, tag), progress=False)
        if (folder / manifest.LATEST).exists():
            tag = (folder / manifest.LATEST).read_text()
            open_folder(manifest.folder_of(folder, tag), progress=False)
        save(folder, "last")
        left = {path.name for path in folder.iterdir() if manifest.WRITING in path.name or path.name.startswith(".")}
        assert left == {"mine.writing-samples"}
        shutil.rmtree(folder)
