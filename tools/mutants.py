"""Seeded mutants of the package, each run against tests that call its function: which does no test notice?

    python tools/mutants.py --draw 120 --list mutants.jsonl --out before.jsonl    draws mutants, and runs them
    python tools/mutants.py --list mutants.jsonl --out after.jsonl                runs the same ones on another tree

All runs happen in a copy of the tree. Tests of the folders `TESTS`, but for those marked slow, run once on code that
notes its calls. With `--calls before.calls.json` this is left out for test files that are as they were then. A mutant
meets the cheapest tests that called its function, `--budget-s` seconds of them, in a process forked from one that has
the libraries. `--log` keeps what the last of these processes printed. Outcomes: killed, survived, timeout, uncalled (no
such test calls the function), gone (it is not there).
"""

from __future__ import annotations

import argparse
import ast
import collections
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

GROUPS = [
    *("streaming", "backends/zo", "backends/lomo", "backends/lsp", "backends/adapter", "backends/recompute"),
    *("backends/common", "checkpoint", "config", "planner"),
]
TESTS = ["streaming", "backends", "checkpoint", "config", "planner", "random", "test_config.py"]
_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub)),
]
CHANGES: dict[type, type] = {
    **dict(_PAIRS),
    **{second: first for first, second in _PAIRS},
    **dict.fromkeys((ast.Mult, ast.Mod), ast.Add),
    **dict.fromkeys((ast.FloorDiv, ast.Div), ast.Mult),
}
"""Operators, and what takes their place."""
CALLS: set[str] = set()
"""Functions that ran since it was emptied."""


def functions(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{name}:{node.name}", node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from functions(node, f"{name}:{node.name}")


def mutants(function: ast.FunctionDef) -> Iterator[tuple[str, Callable[[], None]]]:
    """What each changes, and the call that changes it in place. Messages and nested functions are left out."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assert, ast.JoinedStr)):
            continue
        text = ast.unparse(node)[:300]
        if isinstance(node, (ast.Raise, ast.AugAssign)) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log" not in text.split("(")[0]
        ):
            yield f"remove {text}", lambda node=node: become(node, ast.Pass())  # type: ignore[misc]
        if isinstance(node, ast.Raise):
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in CHANGES:
            changed = CHANGES[type(node.ops[0])]()
            yield f"compare {text}", lambda node=node, to=changed: node.ops.__setitem__(0, to)  # type: ignore[misc]
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and type(node.op) in CHANGES:
            changed = CHANGES[type(node.op)]()
            yield f"operator {text}", lambda node=node, to=changed: setattr(node, "op", to)  # type: ignore[misc]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield f"not {text}", lambda node=node: become(node, node.operand)  # type: ignore[misc]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            yield f"constant {text}", lambda node=node, to=other: setattr(node, "value", to)  # type: ignore[misc]
        skipped = [getattr(node, "annotation", None)]
        waiting[:0] = [child for child in ast.iter_child_nodes(node) if child not in skipped]


def become(node: ast.AST, other: ast.AST) -> None:
    node.__class__ = other.__class__  # type: ignore[assignment]
    node.__dict__ = {**node.__dict__, **other.__dict__}


def all_mutants(source: str, path: str) -> dict[str, tuple[str, ast.Module, Callable[[], None]]]:
    """By their names: the function, the module, the change."""
    tree, found = ast.parse(source), dict[str, tuple[str, ast.Module, Callable[[], None]]]()
    for name, function in functions(tree, path):
        seen: collections.Counter[str] = collections.Counter()
        for text, change in mutants(function):
            seen[text] += 1
            found[f"{name} #{seen[text]} {text}"] = (name, tree, change)
    return found


class Recorder:
    """Which test called which functions, how long it took, and which fail in the copy without a mutant."""

    def __init__(self) -> None:
        self.calls: dict[str, list[str]] = collections.defaultdict(list)
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        CALLS.clear()
        began = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - began
        for name in CALLS if item.nodeid not in self.failed else ():
            self.calls[name].append(item.nodeid)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)


def forked(job: Callable[[], object], timeout_s: float, log: Path) -> int | None:
    """The exit status of a child, which the job returns; None where it takes longer."""
    child = os.fork()
    if not child:
        os.setsid()
        with log.open("w") as printed:
            os.dup2(printed.fileno(), 1)
        status: Any = 1
        try:
            status = job() or 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    deadline = time.monotonic() + timeout_s
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    status = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its ranks too
        if status is None:
            os.waitpid(child, 0)
    return status


def run_tests(*arguments: str, plugins: list[object] | None = None) -> int:
    return int(pytest.main(["-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *arguments], plugins=plugins))


def hashes_of_tests(copy: Path) -> dict[str, str]:
    """Of the text of each file of `TESTS`."""
    chosen = [copy / "tests" / name for name in TESTS]
    files = [file for place in chosen for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
    return {str(file.relative_to(copy)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def record(copy: Path, sources: dict[str, str], file: Path, earlier: dict[str, Any]) -> None:
    """Runs the tests of files that have changed since `earlier` was recorded, and writes what is known of all."""
    import builtins

    vars(builtins)["_mutants_note"] = CALLS.add
    (copy / "sitecustomize.py").write_text("import builtins\nbuiltins._mutants_note = len\n")  # for processes of tests
    for path, source in sources.items():
        tree = ast.parse(source)
        for name, function in functions(tree, path):
            place = 1 if ast.get_docstring(function) is not None else 0
            function.body.insert(place, ast.parse(f"_mutants_note({name!r})").body[0])
        (copy / path).write_text(ast.unparse(tree))
    recorder, hashes = Recorder(), hashes_of_tests(copy)
    kept = {name for name, value in hashes.items() if earlier["hashes"].get(name) == value}
    chosen = [name for name in hashes if name not in kept]
    if chosen:
        run_tests("-m", "not gpu and not slow", "--maxfail=1000", "--durations=100", *chosen, plugins=[recorder])
    for name, tests in earlier["calls"].items():
        recorder.calls[name] += [test for test in tests if test.partition("::")[0] in kept]
    seconds = {test: s for test, s in earlier["seconds"].items() if test.partition("::")[0] in kept}
    found = {"calls": recorder.calls, "seconds": {**seconds, **recorder.seconds}, "hashes": hashes}
    file.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, help="draw so many, and write --list; else read it")
    parser.add_argument("--seed", type=int, default=51)
    parser.add_argument("--list", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=Path, help="what an earlier run recorded")
    parser.add_argument("--budget-s", type=float, default=10)
    parser.add_argument("--log", type=lambda path: Path(path).resolve(), default=Path(os.devnull))
    given = parser.parse_args()
    repo = Path(__file__).resolve().parent.parent
    given.list, given.out = given.list.resolve(), given.out.resolve()
    calls_file = given.out.with_suffix(".calls.json")
    earlier = json.loads(given.calls.read_text()) if given.calls else {"calls": {}, "seconds": {}, "hashes": {}}

    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    files = subprocess.run(["git", "ls-files", "-z"], cwd=repo, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repo / name, copy / name, follow_symlinks=False)
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(folder for folder in sys.path if Path(folder or ".").resolve() not in (repo, copy))]
    import deepspeed  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    assert "ds_zo" not in sys.modules
    paths = [path for group in GROUPS for path in sorted(copy.glob(f"ds_zo/{group}/*.py"))]
    sources = {str(path.relative_to(copy)): path.read_text() for path in paths}
    if not calls_file.exists():
        if forked(lambda: record(copy, sources, calls_file, earlier), 7200, given.log) != 0:
            sys.exit(f"{calls_file.name} was not recorded within two hours: see the error above, or --log")
        for path, source in sources.items():
            (copy / path).write_text(source)
        (copy / "sitecustomize.py").unlink()
    recorded = json.loads(calls_file.read_text())
    seconds = recorded["seconds"]

    if given.draw:
        drawn, generator = [], random.Random(given.seed)
        for group in GROUPS:
            of_group = {path: all_mutants(text, path) for path, text in sources.items() if f"ds_zo/{group}/" in path}
            called = recorded["calls"]
            names = [(path, name) for path in of_group for name, found in of_group[path].items() if found[0] in called]
            sample = generator.sample(names, given.draw // len(GROUPS))
            drawn += [{"group": group, "path": path, "mutant": name} for path, name in sample]
        given.list.write_text("".join(json.dumps(row) + "\n" for row in drawn))

    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in map(json.loads, given.list.read_text().splitlines()):
        path, began = row["path"], time.perf_counter()
        found = all_mutants(sources[path], path).get(row["mutant"]) if path in sources else None
        chosen, left_s = list[str](), given.budget_s
        for test in sorted(recorded["calls"].get(found[0], []), key=seconds.__getitem__) if found else []:
            left_s -= seconds[test]
            if chosen and left_s < 0:
                break
            chosen.append(test)
        if found is None or not chosen:
            outcome = "gone" if found is None else "uncalled"
        else:
            found[2]()
            (copy / path).write_text(ast.unparse(ast.fix_missing_locations(found[1])))
            status = forked(partial(run_tests, *chosen), 60 + 3 * given.budget_s, given.log)
            (copy / path).write_text(sources[path])
            outcome = {None: "timeout", 0: "survived"}.get(status, "killed")
        outcomes[row["group"]][outcome] += 1
        row |= {"outcome": outcome, "tests": len(chosen), "seconds": round(time.perf_counter() - began, 1)}
        with given.out.open("a") as out:
            out.write(json.dumps(row) + "\n")
    shutil.rmtree(copy)
    total = sum(outcomes.values(), collections.Counter())
    for group, counts in {**outcomes, "all": total}.items():
        sys.stdout.write(f"{group:20} {dict(counts)}\n")


if __name__ == "__main__":
    main()
