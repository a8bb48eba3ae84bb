"""Measures the fields of `planner.Rates`; each takes a fraction of a second."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch

from ds_zo.bench.measure import link_gbps, seconds_of


def device_rates(device: torch.device) -> dict[str, Any]:
    """Measures a CUDA device: its link, matrix products, memory, launches and ds_zo's noise."""
    link = link_gbps(device)
    size = 8192
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    matmul_s = seconds_of(lambda: square @ square, device)
    flat = torch.zeros(2**28, device=device)
    sweep_s = seconds_of(lambda: flat.add_(1.0), device)
    small = torch.zeros(16, device=device)
    launch_s = seconds_of(lambda: [small.add_(1.0) for _ in range(1000)], device) / 1000
    return {
        "name": torch.cuda.get_device_name(device),
        "link_up_gbps": link["up"],
        "link_down_gbps": link["down"],
        "link_both_gbps": link["both"],
        # The matrix products of a block are smaller and less square than this one.
        "matmul_tflops": 0.88 * 2 * size**3 / matmul_s / 1e12,
        "device_memory_gbps": 2 * flat.nbytes / sweep_s / 1e9,
        # A model's operation costs several times a bare launch: modules, hooks, checks.
        "launch_us": 5 * launch_s * 1e6,
        "backward_launch_us": 3 * launch_s * 1e6,
    } | noise_rate(device)


def noise_rate(device: torch.device, *, numel: int = 2**26) -> dict[str, float]:
    """Measures noise values per second inside the fused kernel: the slope between replaying few updates and many."""
    from ds_zo import ops

    table = ops.build_table([ops.Segment(0, numel, 0, 0, True)], device)
    storage, copy = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    log = torch.zeros(64, 3, device=device)
    log[:, 1] = 1.0

    def replay(num_entries: int) -> None:
        ops.replay_perturb(
            ops.Planes(storage),
            table=table,
            noise=ops.Noise(seed=0, step=64, rounding="nearest"),
            pending=ops.Pending(log, first_entry=0, num_entries=num_entries),
            copies=ops.Copies(copy),
        )

    few, many = 2, 18
    for _ in range(3):  # on a busy machine, many updates may seem faster than few
        slope_s = (seconds_of(lambda: replay(many), device) - seconds_of(lambda: replay(few), device)) / (many - few)
        if slope_s > 0:
            return {"noise_gdraws": numel / slope_s / 1e9}
    return {}


def host_rates() -> dict[str, Any]:
    """Measures the CPU: torch's fused Adam, and matrix products."""
    device = torch.device("cpu")
    size = 1024
    square = torch.randn(size, size)
    matmul_s = seconds_of(lambda: square @ square, device)
    return {"cpu_adam_gparams": _torch_adam_gparams_per_s(numel=2**24), "cpu_gflops": 2 * size**3 / matmul_s / 1e9}


def deepspeed_adam_gparams_per_s(*, timeout_s: float) -> float | None:
    """Measures DeepSpeed's CPU Adam in a process of its own, because loading it may build it, or wait for ever for the
    lock of a killed build. None: no answer within `timeout_s`."""
    code = "from ds_zo.bench.measure import cpu_adam_gparams_per_s as f; print('SPEED', f(numel=2**25))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None
    found = [line for line in done.stdout.splitlines() if line.startswith("SPEED ")]
    return float(found[-1].split()[1]) if found else None


def _torch_adam_gparams_per_s(*, numel: int) -> float:
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    adam = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    return numel / seconds_of(adam.step, torch.device("cpu")) / 1e9
