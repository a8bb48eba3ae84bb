"""The table of torch's flags: each pass finds its own flags after a pause, and the table has every flag of torch."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.backends.zo.lockstep import Lockstep
from ds_zo.backends.zo.thread_state import FLAGS, PAIRS, ThreadState

CPU = torch.device("cpu")
STATE = ThreadState(CPU)
NUM_BLOCKS = 6

NOT_CARRIED = {
    **dict.fromkeys(("_set_float32_matmul_precision", "_set_cublas_allow_tf32"), "sets float32 precisions"),
    **dict.fromkeys(("_set_cudnn_allow_tf32", "_set_onednn_allow_tf32"), "sets float32 precisions, or those of XPUs"),
    "_set_default_tensor_type": "sets the default dtype",
    **dict.fromkeys(("_set_miopen_immediate", "_set_rocm_fa_preferred_backend"), "for ROCm"),
    **dict.fromkeys(
        ("_set_blas_preferred_backend", "_set_linalg_preferred_backend"),
        "no context sets it, and its getter takes ten times as long as others",
    ),
    **dict.fromkeys(("_cuda_setCublasWorkspaceSize", "_cuda_setCublasLtWorkspaceSize"), "sizes of buffers"),
    "_cuda_cufft_set_plan_cache_max_size": "size of a cache",
    **dict.fromkeys(("mkl_set_verbose", "mkldnn_set_verbose"), "has no getter, and only logs"),
    **dict.fromkeys(("enabled", "strategy"), "of opt_einsum, a package that ds_zo does not install"),
}
"""Setters that the table lacks, and why."""


def setters_in(source: str) -> set[str]:
    """Names of torch's setters, and of global variables that functions assign."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.search(r"(^|_)set(_|[A-Z])", node.attr):
            if re.search(r"\b_C\b", ast.unparse(node.value)):
                found.add(node.attr)
        elif isinstance(node, ast.Global):
            found.update(name for name in node.names if not name.startswith("__"))
    return found


def torch_files() -> Iterator[Path]:
    folder = Path(torch.__file__).parent
    yield from (folder / "backends").rglob("*.py")
    yield folder / "nn/attention/__init__.py"
    yield folder / "utils/deterministic.py"


def missing(found: set[str]) -> set[str]:
    return found - {name.split()[0] for name in FLAGS} - {setter for _, setter in PAIRS} - {*NOT_CARRIED}


def test_the_table_has_every_flag_of_torch_backends() -> None:
    found = set().union(*(setters_in(path.read_text()) for path in torch_files()))
    assert {"_set_cudnn_enabled", "_set_fp32_precision_setter", "_is_fastpath_enabled"} <= found
    assert missing(found) == set()
    assert not {*NOT_CARRIED} & {*FLAGS}


def test_a_flag_that_the_table_lacks_is_noticed() -> None:
    source = (
        "def enable(on): torch._C._set_new_flag(on)\ndef other(on):\n  global _new_variable\n  _new_variable = on\n"
    )
    assert missing(setters_in(source)) == {"_set_new_flag", "_new_variable"}


def change_precision(value: Any) -> None:
    """Changes float32 precisions as users do, by an older or by a newer switch."""
    dice = random.randrange(5)
    if dice == 0:
        torch.set_float32_matmul_precision(random.choice(("highest", "high", "medium")))
    elif dice == 1:
        torch.backends.cudnn.allow_tf32 = random.random() < 0.5
    elif dice == 2:
        torch.backends.cuda.matmul.fp32_precision = random.choice(("ieee", "tf32"))
    elif dice == 3:
        torch.backends.mkldnn.matmul.fp32_precision = random.choice(("ieee", "bf16"))
    else:
        torch.backends.fp32_precision = random.choice(("ieee", "tf32", "none"))


CHANGES: dict[str, Callable[[Any], None]] = {
    "_set_fp32_precision_setter": change_precision,
    "_set_default_dtype": lambda value: torch.set_default_dtype(random.choice((torch.float32, torch.float64))),
    "set_autocast_dtype cpu": lambda value: torch.set_autocast_dtype(
        "cpu", random.choice((torch.bfloat16, torch.float16))
    ),
    "_set_sdp_priority_order": lambda value: torch._C._set_sdp_priority_order(random.sample(value, len(value))),
    "_set_cudnn_depthwise_kernel": lambda value: torch._C._set_cudnn_depthwise_kernel(
        random.choice(("auto", "cudnn", "native"))
    ),
    "_set_qengine": lambda value: torch._C._set_qengine(random.choice(torch._C._supported_qengines())),
    "set_num_threads": lambda value: torch.set_num_threads(random.randint(1, 4)),
    "_push_saved_tensors_default_hooks": lambda value: FLAGS["_push_saved_tensors_default_hooks"].set(
        tuple((abs, random.choice((abs, len))) for _ in range(random.randrange(3)))
    ),
}
"""How to change a flag whose value is not True or False."""


def change(name: str) -> None:
    flag = STATE.flags[name]
    value = flag.get()
    if name in CHANGES:
        CHANGES[name](value)
    elif isinstance(value, tuple):
        flag.set(random.choice(((True, True), (False, True), (False, False))))
    elif isinstance(value, bool):
        flag.set(not value)
    else:
        assert name in ("set_stream", "_cuda_set_cudnn_benchmark_limit"), f"say how to change {name}"


class Restless(nn.Module):
    """A model that changes flags between its blocks, and finds its own after each."""

    def __init__(self, lockstep: Lockstep) -> None:
        super().__init__()
        self.lockstep = lockstep

    def forward(self, seed: int) -> int:
        dice = random.Random(seed)
        for block in range(NUM_BLOCKS):
            random.seed(dice.random())  # `change` draws from Python's generator, which each pass has for itself
            for name in dice.sample([*STATE.flags], dice.randrange(len(STATE.flags))):
                change(name)
            own = STATE.read()
            self.lockstep.pause(block)
            found = STATE.read()
            assert found == own, [name for name, a, b in zip(STATE.flags, own, found, strict=True) if a != b]
        return seed


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("how", ["together", "one by one"])
def test_each_pass_finds_its_own_flags(seed: int, how: str) -> None:
    """The passes and the caller, whose own flags are random too."""
    outside = STATE.read()
    try:
        random.seed(seed)
        for name in random.sample([*STATE.flags], seed):
            change(name)
        before = STATE.read()
        lockstep = Lockstep(CPU)
        model = Restless(lockstep)
        if how == "together":
            calls = [lambda i=i: model(100 * seed + i) for i in range(3)]
            hub: list[tuple[Any, ...]] = []
            results = lockstep.together(calls, lambda block, index: hub.append(STATE.read()))
            assert results == [100 * seed + i for i in range(3)]
            assert len({*map(str, hub)}) == 1
        else:
            starts: list[tuple[Any, ...]] = []

            def run() -> None:
                starts.append(STATE.read())
                for name in random.sample([*STATE.flags], 10):
                    change(name)

            lockstep.one_by_one([run, run, run])
            assert starts[0] == starts[1] == starts[2]
        assert STATE.read() == before
    finally:
        STATE.restore(outside)
    assert STATE.read() == outside


def test_every_flag_can_be_changed_and_restored() -> None:
    """Else the random cases would not test it."""
    outside = STATE.read()
    random.seed(0)
    unchanged = set(STATE.flags)
    try:
        for _ in range(10):
            for name, flag in STATE.flags.items():
                value = flag.get()
                change(name)
                if flag.get() != value:
                    unchanged.discard(name)
    finally:
        STATE.restore(outside)
    fixed = {"_set_qengine"} if len(torch._C._supported_qengines()) == 1 else set[str]()  # it depends on the processor
    assert unchanged <= {"set_stream", "_cuda_set_cudnn_benchmark_limit"} | fixed
    assert STATE.read() == outside


def test_restored_precisions_agree_with_the_older_switches() -> None:
    """Reading an older switch that disagrees is an error."""
    outside = STATE.read()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        inside = STATE.read()
        STATE.restore(outside)
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32
        STATE.restore(inside)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    finally:
        STATE.restore(outside)


def test_a_restored_precision_follows_its_backend_again() -> None:
    outside = STATE.read()
    try:
        torch.backends.mkldnn.conv.fp32_precision = "ieee"
        STATE.restore(outside)
        torch.backends.fp32_precision = "tf32"
        assert torch.backends.mkldnn.conv.fp32_precision == "tf32"
    finally:
        STATE.restore(outside)
