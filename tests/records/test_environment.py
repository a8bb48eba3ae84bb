"""The description of the machine is of this process and this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from ds_zo.records.environment import environment, host_free_bytes, host_peak_gb


def test_host_memory_is_this_processs_and_the_machines() -> None:
    before = host_peak_gb()
    block = bytearray(int((before + 0.05) * 1e9 - _resident_bytes()))
    assert host_peak_gb() >= before + 0.04
    del block
    assert 0 < host_free_bytes() < 2**50


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_the_environment_is_found_without_initialising_cuda() -> None:
    found = environment()
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["deepspeed"]
    assert found["cpus"] >= 1 and "commit" in found and "gpu" in found
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
