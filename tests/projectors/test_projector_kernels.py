"""The projectors' kernels without a GPU: Triton's interpreter, in a process of its own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
_SOURCE = ast.parse((HERE / "projector_checks.py").read_text())
CHECKS = [
    node.name.removeprefix("check_")
    for node in _SOURCE.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def errors() -> dict[str, str | None]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(HERE / "projector_checks.py"), "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CHECKS), done.stderr
    return {line["check"]: line["error"] for line in lines}


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted_kernel_matches_reference(errors: dict[str, str | None], check: str) -> None:
    error = errors[check]
    assert error is None, error
