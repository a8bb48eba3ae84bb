"""Rows of a comparison as a GPU would have given them, for what is drawn from rows alone."""

from __future__ import annotations

import math
from typing import Any

from ds_zo.bench.contenders import ALL

MEASURED = {
    # name: (step s, GPU GB, host GB, forward, backward, update, copies alone, up GB, down GB)
    "adamw": (0.247, 28.3, 1.6, 0.062, 0.13, 0.05, 0.0, 0.0, 0.0),
    "sgd": (0.221, 12.1, 1.6, 0.062, 0.13, 0.02, 0.0, 0.0, 0.0),
    "zero2-offload": (0.9, 5.65, 32.0, 0.062, 0.296, 0.55, 0.05, 2.7, 2.7),
    "zero3-offload": (1.614, 5.9, 28.0, 0.08, 0.45, 1.05, 0.2, 2.7, 5.4),
    "zero3-offload-param": (1.044, 4.4, 30.0, 0.16, 0.4, 0.5, 0.2, 8.1, 5.4),
    "zenflow": (0.991, 6.2, 34.0, 0.062, 0.3, 0.6, 0.04, 2.7, 2.7),
    "zo": (0.11, 4.9, 1.5, 0.108, 0.0, 0.001, 0.0, 0.0, 0.0),
    "zo-streamed": (0.16, 1.9, 6.5, 0.158, 0.0, 0.001, 0.02, 2.4, 0.6),
    "lomo": (0.2, 4.7, 1.5, 0.062, 0.137, 0.0, 0.0, 0.0, 0.0),
    "lomo-streamed": (0.26, 2.4, 6.2, 0.07, 0.18, 0.0, 0.03, 4.8, 2.4),
    "adalomo": (0.24, 4.8, 1.5, 0.062, 0.17, 0.0, 0.0, 0.0, 0.0),
    "lsp": (0.22, 5.1, 2.5, 0.062, 0.14, 0.01, 0.005, 0.2, 0.2),
}
SPEC = {
    "model": "random:llama-1.3b",
    "layers": None,
    "batch": 4,
    "length": 1024,
    "dtype": "bf16",
    "device_memory_gb": None,
    "checkpointing": True,
}


def rows(*, num_steps: int = 24) -> list[dict[str, Any]]:
    """All contenders but the peer; SuperOffload ran out of memory."""
    common = {"run_id": "r1", "gpu": "NVIDIA H200", "cpus": 16, "commit": "abc1234", "device": "cuda", "versions": {}}
    link = {"up": 55.2, "down": 55.1, "both": 90.6}
    made: list[dict[str, Any]] = [
        {**common, "case": "machine", "status": "ok", "params": {}, "link_gbps": link, "cpu_adam_gparams_per_s": 4.2}
    ]
    for index, (name, numbers) in enumerate(MEASURED.items()):
        step_s, gpu, host, forward, backward, update, alone, up, down = numbers
        made.append(
            {
                **common,
                "case": name,
                "contender": name,
                "status": "ok",
                "params": {"contender": name, "spec": SPEC},
                "settings": ALL[name].settings,
                "parameters": 1_345_423_360,
                "step_s": step_s,
                "step_s_min": 0.97 * step_s,
                "step_s_max": 1.1 * step_s,
                "step_wall_s": 1.02 * step_s,
                "seconds": [0.97 * step_s, step_s, 1.1 * step_s],
                "tokens_per_s": 4096 / step_s,
                "tokens_per_s_mean": 4096 / step_s / 1.02,
                "peak_gb": gpu,
                "peak_reserved_gb": 1.1 * gpu,
                "host_peak_gb": host,
                "host_drop_gb": 0.5,
                "forward_s": forward,
                "backward_s": backward,
                "update_s": update,
                "gpu_compute_s": 0.9 * min(step_s, 0.2),
                "copy_exposed_s": alone,
                "up_gb": up,
                "down_gb": down,
                "gpu_idle_s": max(0.0, step_s - 0.9 * min(step_s, 0.2) - alone),
                "losses": [10.4 - (1 + 0.1 * index) * math.log1p(step / 4) for step in range(num_steps)],
            }
        )
    words = "torch.OutOfMemoryError: CUDA out of memory & <no more>"
    failed = {
        "status": "oom",
        "error": words,
        "last_words": words,
        "params": {"contender": "superoffload", "spec": SPEC},
    }
    return [*made, {**common, "case": "superoffload", **failed}]
