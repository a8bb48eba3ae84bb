"""`DS_ZO_AUTOLOAD=1` and `ds-zo run`: ds_zo is imported after DeepSpeed, and by no process without DeepSpeed.

Tests of the mechanism have packages of one line in place of DeepSpeed and ds_zo, whose import takes seconds.
`tests/distributed/test_launchers.py` trains with the real ones; `tools/check_autoload.py` installs by pip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_zo.cli import main
from ds_zo.command_line import ENVIRONMENT
from ds_zo.commands import autoload
from ds_zo.commands.run import STARTUP, python_of
from ds_zo.plugin.patches import PATCHES
from ds_zo.versions import SUPPORTED
from tests.helpers.autoload_env import REPO, make_environment

Python = Callable[..., str]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has ds-zo."""
    return make_environment(tmp_path_factory.mktemp("with"))


@pytest.fixture(scope="module")
def switched_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which `ds-zo autoload on` has been run."""
    python = make_environment(tmp_path_factory.mktemp("switched_on"))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / autoload.FILE).write_text(autoload.LINE, encoding="utf-8")
    return python


@pytest.fixture(params=["ds-zo run", "ds-zo autoload on"])
def python(request: pytest.FixtureRequest, environment: Path, switched_on: Path, tmp_path: Path) -> Python:
    """Runs code with `DS_ZO_AUTOLOAD=1` as below that command, and returns what it prints."""
    on_path = request.param == "ds-zo run"
    for name, source in {
        "deepspeed/__init__.py": "from . import engine; print('deepspeed')",
        "deepspeed/engine.py": "",
        "ds_zo/__init__.py": "print('ds_zo begins'); from deepspeed import engine; print('ds_zo ends')",
        "sitecustomize.py": "import sys; sys.flags_of_site = 'sitecustomize ran'",
    }.items():
        (tmp_path / "stubs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stubs" / name).write_text(source + "\n")

    def run(code: str, *, fails: bool = False, **variables: str) -> str:
        folders = [str(STARTUP)] * on_path + [str(tmp_path / "stubs")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "DS_ZO_AUTOLOAD": "1", **variables}
        command = [str(environment if on_path else switched_on), "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else " ".join(done.stdout.split())

    return run


BOTH = "deepspeed ds_zo begins ds_zo ends"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import deepspeed", BOTH),
        ("from deepspeed.engine import __name__", BOTH),
        ("import deepspeed, ds_zo", BOTH),
        ("import ds_zo, deepspeed", "ds_zo begins deepspeed ds_zo ends"),
        ("import importlib.util as u; u.find_spec('deepspeed'); u.find_spec('deepspeed.engine')", BOTH),
        ("import importlib.util as u; u.find_spec('deepspeed'); print('looked'); import deepspeed", f"looked {BOTH}"),
        ("import deepspeed, importlib as i; i.reload(deepspeed)", f"{BOTH} deepspeed"),
        ("import sys; print(sys.flags_of_site); import deepspeed", f"sitecustomize ran {BOTH}"),
        ("import runpy; runpy.run_module('deepspeed.engine')", BOTH),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import deepspeed'])", BOTH),
        ("import deepspeed, sys; print([f for f in sys.meta_path if 'ds_zo' in type(f).__module__])", f"{BOTH} []"),
    ],
)
def test_ds_zo_is_imported_right_after_deepspeed(code: str, printed: str, python: Python) -> None:
    assert python(code) == printed


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_of_ours_is_imported(value: str, python: Python) -> None:
    ours = "import deepspeed, sys; print([name for name in sys.modules if 'ds_zo' in name])"
    assert python(ours, DS_ZO_AUTOLOAD=value) == "deepspeed []"


def test_a_process_without_deepspeed_imports_one_module(python: Python) -> None:
    names = "import sys; print(*sorted(sys.modules))"
    assert set(python(names).split()) - set(python(names, DS_ZO_AUTOLOAD="0").split()) <= {
        "ds_zo_autoload",
        "__future__",
    }


IMPORTS = (
    "import deepspeed",
    "import deepspeed.engine",
    "from deepspeed.engine import __name__",
    "import importlib as i; i.import_module('deepspeed.engine')",
    "import runpy; runpy.run_module('deepspeed.engine')",
)


@pytest.mark.parametrize("seed", range(3))
def test_every_import_raises_where_ds_zo_is_broken(seed: int, python: Python, tmp_path: Path) -> None:
    """Not an ImportError, which libraries take for a missing DeepSpeed."""
    (tmp_path / "stubs" / "ds_zo" / "__init__.py").write_text(
        "from deepspeed import engine\nimport a_library_that_is_missing\n"
    )
    code = f"""
import random
for line in random.Random({seed}).choices({IMPORTS}, k=4):
    try:
        exec(line)
    except ImportError:
        pass
    except RuntimeError as error:
        message = str(error)
        assert "No module named 'a_library_that_is_missing'" in message and "unset DS_ZO_AUTOLOAD" in message
        print("raised")
"""
    assert python(code) == "deepspeed raised raised raised raised"


def test_a_missing_deepspeed_stays_an_import_error(python: Python, tmp_path: Path) -> None:
    (tmp_path / "stubs" / "deepspeed" / "__init__.py").write_text("raise ImportError('no CUDA')\n")
    again = (
        "for _ in range(2):\n    try:\n        import deepspeed\n    except ImportError as error:\n        print(error)"
    )
    assert python(again) == "no CUDA no CUDA"


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_the_python_of_a_command(tmp_path: Path) -> None:
    assert python_of(sys.executable) == [sys.executable]
    assert python_of(executable(tmp_path / "a", "#!/opt/my/bin/python3.12 -s\n")) == ["/opt/my/bin/python3.12", "-s"]
    assert python_of(executable(tmp_path / "b", "#!/usr/bin/env -S python3 -E\n")) == ["python3", "-E"]
    long = "#!/bin/sh\n'''exec' \"/a folder/bin/python\" \"$0\" \"$@\"\n' '''\n"
    assert python_of(executable(tmp_path / "c", long)) == ["/a folder/bin/python"]
    assert python_of(executable(tmp_path / "d", "#!/bin/sh\nexec python train.py\n")) is None
    assert python_of("sh") is None
    with pytest.raises(ValueError, match="no-such-program"):
        python_of("no-such-program")


def test_sites_own_error_stays_where_there_is_no_other_sitecustomize(environment: Path) -> None:
    code = "import sys; print([folder for folder in sys.path if 'startup' in folder], 'sitecustomize' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(STARTUP), "DS_ZO_AUTOLOAD": "1"}
    command = [str(environment), "-c", code]
    plain = subprocess.run([*command[:1], "-I", *command[1:]], capture_output=True, text=True, timeout=60, check=True)
    if plain.stdout != "[] False\n":
        pytest.skip("this Python has a sitecustomize of its own")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("[] False\n", "")


def test_run_refuses_a_python_that_does_not_load_ds_zo(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", "")
    without = str(make_environment(tmp_path / "without", has_package=False))
    commands = {
        executable(tmp_path / "launcher", f"#!{without}\nprint('started')\n"): "install it there by pip",
        executable(tmp_path / "isolated", f"#!{environment} -I\nprint('started')\n"): "leave out its options",
    }
    for command, remedy in commands.items():
        assert main(["run", "--", command]) == 1
        assert main(["run", "--check", "--", command]) == 1
        shown = capsys.readouterr()
        errors = shown.err.splitlines()
        assert len(errors) == 2 and errors[0] == errors[1] and remedy in errors[0]
        assert "DOES NOT IMPORT ds_zo" in shown.out and "started" not in shown.out
    assert main(["run"]) == 1
    assert "needs a command" in capsys.readouterr().err


@pytest.mark.slow
def test_autoload_goes_on_and_off(tmp_path: Path) -> None:
    """Also in an environment in which pip has not installed ds-zo."""
    python, without = make_environment(tmp_path / "with"), make_environment(tmp_path / "without", has_package=False)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    env = {**os.environ, "PYTHONPATH": str(REPO), "DS_ZO_AUTOLOAD": "1"}
    code = "import os, sys; from ds_zo.cli import main\nfor action in sys.argv[2:]:\n"
    code += "    failed = main(['autoload', action]); print(failed, os.path.exists(sys.argv[1]), end='\\f')"

    def ds_zo(python: Path, *actions: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-c", code, str(packages / autoload.FILE), *actions]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)

    *shown, end = ds_zo(python, "status", "on", "status", "off").stdout.split("\f")
    assert len(shown) == 4 and not end
    for text, loads in zip(shown, (False, True, True, False), strict=True):
        assert text.endswith(f"\n0 {loads}") and ("imports ds_zo too" in text) == loads, text
        assert ("not there; ds-zo autoload on writes it" in text) != loads and "DS_ZO_AUTOLOAD=1" in text
    assert "error: ds-zo autoload writes beside an installed ds-zo, got" in ds_zo(without, "on").stderr


def test_check_says_what_would_happen(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--check", "--", str(environment), "train.py", "--", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"{environment} train.py -- --lr 1\n" in shown
    assert "`import deepspeed` imports ds_zo too" in shown
    for text in (*map(str, PATCHES), *(f"tested: {supported}\n" for supported in SUPPORTED.values())):
        assert text in shown
    assert main(["run", "--check", "--", "sh", "train.sh"]) == 0
    assert "sh is not a Python script" in capsys.readouterr().out


@pytest.mark.slow
def test_run_executes_the_command_with_its_exit_status(environment: Path, tmp_path: Path) -> None:
    """The command gets the environment that `ds-zo` was given, with two variables; nothing that DeepSpeed adds."""
    seen = "import json, os, sys; print(json.dumps(dict(os.environ))); sys.exit(37)"
    command = [str(environment), "-m", "ds_zo.cli", "run", "--", str(environment), "-c", seen]
    folders = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 37, done.stderr
    path = os.pathsep.join([str(STARTUP), env["PYTHONPATH"]])
    assert json.loads(done.stdout) == {**env, "DS_ZO_AUTOLOAD": "1", "PYTHONPATH": path}


def test_deepspeeds_launcher_sends_the_variable_to_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.launcher import runner

    executable(tmp_path / "pdsh", '#!/bin/sh\nprintf "%s\\n" "$@" > sent\n')
    (tmp_path / "hosts").write_text("first slots=1\nsecond slots=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DS_ZO_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(STARTUP))
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)  # main sets handlers that end this process
    hosts = ["--hostfile", "hosts", "--master_addr", "first", "--no_ssh_check"]
    runner.main([*hosts, "train.py"])
    sent = (tmp_path / "sent").read_text()
    assert "export DS_ZO_AUTOLOAD=1; " in sent and re.search(rf"export PYTHONPATH=\S*:{STARTUP}[:;]", sent), sent
