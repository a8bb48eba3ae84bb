"""Torch's flags on CUDA in a process of its own, where torch has chosen no kernels yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CODE = """
import torch
from ds_zo.backends.zo.thread_state import FLAGS, ThreadState

device = torch.device("cuda", 0)
before = [flag.get() for flag in FLAGS.values()]
state = ThreadState(device)
made = state.read()
for dtype in (torch.bfloat16, torch.float32):
    x = torch.randn(2, 4, 64, 64, device=device, dtype=dtype)
    attended = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.nn.functional.conv2d(attended, attended[:, :, :3, :3]).relu() @ torch.ones(62, 8, device=device, dtype=dtype)
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, device=device, dtype=dtype)
    layer(x[:, 0]).sum().backward()
after = state.read()
print("by a forward:", [name for name, a, b in zip(state.flags, made, after) if a != b])
print("by the state:", [name for name, a, b in zip(FLAGS, before, made) if a != b])
"""


def test_a_forward_without_setters_changes_no_flag() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    by_a_forward, by_the_state = run.stdout.splitlines()[-2:]
    assert by_a_forward == "by a forward: []"
    assert by_the_state in ("by the state: []", "by the state: ['_set_sdp_priority_order']")
