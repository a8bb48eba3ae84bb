"""Who is compared: each a choice of `optimizer`, `zero_optimization` and `ds_zo`, everything else being shared.

Stock DeepSpeed is set up as its documentation advises (tutorials on ZeRO-Offload, ZenFlow and SuperOffload): pinned
memory, copies overlapped with compute, its vectorised Adam on the CPU, all cores for the only rank. `settings` says so
in the table.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_zo.engines import available_backends

Section = dict[str, Any]
DIFFERING = ("optimizer", "zero_optimization", "ds_zo")
"""The only keys of the JSON in which contenders may differ."""

_HOST: Section = {"device": "cpu", "pin_memory": True}
_ADAMW: Section = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}}
_OFFLOAD2: Section = {
    "stage": 2,
    "offload_optimizer": _HOST,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 500_000_000,
    "allgather_bucket_size": 500_000_000,
}
_OFFLOAD3: Section = {
    "stage": 3,
    "offload_optimizer": _HOST,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 1_000_000,
    "sub_group_size": 1_000_000_000,
}


_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
_BUCKET_SHARE = 0.02
"""Of a smaller card, that one of stock DeepSpeed's buckets may take: its documentation says to shrink them there."""

_BUDGET_SHARE = 0.96
"""Of a smaller card, that ours are told of: what the allocator caches beyond what is used counts against the card."""


def _nothing(num_parameters: int) -> int:
    return 0


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    settings: str
    """How it is set up, in words for the table."""
    optimizer: Section
    zero_optimization: Section
    ds_zo: Section | None = None
    backend: str | None = None
    """Of ours: who places the parameters, and what this version must have."""
    host_bytes: Callable[[int], int] = field(default=_nothing, compare=False)
    """Host memory by number of parameters, at least: a case that cannot have it is not started."""
    peer: str | None = None
    """A package that trains without DeepSpeed, and must be installed."""

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        if self.backend is not None and self.backend not in available_backends():
            return f"backend {self.backend} is not in this version of ds_zo"
        if self.peer is not None and importlib.util.find_spec(self.peer) is None:
            return f"{self.peer} is not installed"
        return None


def _adam_on_host(num_parameters: int) -> int:
    """Master weights, two moments and gradients in float32, and 16-bit staging. The pinned ones of these (master,
    gradients) are rounded up to a power of two by PyTorch's allocator."""
    rounded = 1 << (4 * num_parameters - 1).bit_length()
    return 18 * num_parameters + 2 * (rounded - 4 * num_parameters)


def _adam_on_host_in_groups(num_parameters: int) -> int:
    return 18 * num_parameters


def _ours(name: str, title: str, settings: str, **sections: Any) -> Contender:
    optimizer = sections.pop("optimizer")
    return Contender(name, title, settings, optimizer, **sections, backend=str(optimizer["type"]).lower())


ALL: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "adamw",
            "AdamW on the GPU",
            "stage 0, torch's fused kernel, float32 master weights and moments on the GPU",
            {**_ADAMW, "params": {**_ADAMW["params"], "torch_adam": True, "fused": True}},
            {"stage": 0},
        ),
        Contender(
            "sgd",
            "SGD on the GPU",
            "stage 0, no momentum, float32 master weights on the GPU",
            {"type": "SGD", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            {"stage": 0},
        ),
        Contender(
            "zero2-offload",
            "ZeRO-Offload (stage 2)",
            "stock: pinned, overlap_comm, 500 M buckets, DeepSpeedCPUAdam on all cores",
            _ADAMW,
            _OFFLOAD2,
            host_bytes=_adam_on_host,
        ),
        Contender(
            "zero3-offload",
            "ZeRO-3, optimizer offloaded",
            "stock: pinned, overlap_comm, 500 M buckets and prefetch, DeepSpeedCPUAdam on all cores",
            _ADAMW,
            _OFFLOAD3,
            host_bytes=_adam_on_host_in_groups,
        ),
        Contender(
            "zero3-offload-param",
            "ZeRO-3, optimizer and parameters offloaded",
            "stock: the same with offload_param pinned",
            _ADAMW,
            {**_OFFLOAD3, "offload_param": _HOST},
            host_bytes=_adam_on_host_in_groups,
        ),
        Contender(
            "zenflow",
            "ZenFlow",
            "stock: stage 2 as above, zenflow as its tutorial: top 5%, update every 4 steps, overlap_step",
            _ADAMW,
            {
                **_OFFLOAD2,
                "zenflow": {
                    "topk_ratio": 0.05,
                    "select_strategy": "auto",
                    "select_interval": "auto",
                    "update_interval": 4,
                    "full_warm_up_rounds": 0,
                    "overlap_step": True,
                },
            },
            host_bytes=_adam_on_host,
        ),
        Contender(
            "superoffload",
            "SuperOffload",
            "stock: stage 3, pinned, 400 M groups, ratio 0.9, 90% of the cores for Adam, as its examples",
            _ADAMW,
            {
                "stage": 3,
                "overlap_comm": False,
                "reduce_bucket_size": 400_000_000,
                "sub_group_size": 400_000_000,
                "offload_optimizer": {**_HOST, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
            },
            host_bytes=_adam_on_host_in_groups,
        ),
        _ours(
            "zo",
            "ZO",
            "blocks stay on the GPU as far as its memory goes, the rest stream; master split",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {}},
            host_bytes=lambda n: 2 * n,
        ),
        _ours(
            "zo-streamed",
            "ZO, all blocks streamed",
            "no block stays on the GPU; master split",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {"resident_blocks": 0}},
            host_bytes=lambda n: 4 * n,
        ),
        _ours(
            "zo-wire",
            "ZO, all blocks streamed, lean host",
            "no block stays on the GPU; master wire: 16 bits a parameter are all there is",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {"resident_blocks": 0, "master": "wire"}},
            host_bytes=lambda n: 2 * n,
        ),
        _ours(
            "lomo",
            "LOMO",
            "parameters on the GPU, one backward pass, stochastic rounding",
            optimizer={"type": "LOMO", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            zero_optimization={"stage": 0},
        ),
        _ours(
            "lomo-streamed",
            "LOMO, streamed",
            "blocks stay on the GPU as far as its memory goes, the rest stream; one backward pass",
            optimizer={"type": "LOMO", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {}},
            host_bytes=lambda n: 2 * n,
        ),
        _ours(
            "adalomo",
            "AdaLOMO",
            "parameters on the GPU, factored second moments",
            optimizer={"type": "AdaLOMO", "params": {"lr": 5e-4, "weight_decay": 0.0}},
            zero_optimization={"stage": 0},
        ),
        _ours(
            "lsp",
            "LSP",
            "d = 512, r = 4, learned projectors, layer-wise schedule, float32 payload",
            optimizer={"type": "LSP", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}},
            zero_optimization={"stage": 0, "offload_optimizer": _HOST},
        ),
        Contender(
            "lomo-optim",
            "LOMO (lomo-optim)",
            "the authors' package, fused_backward, no clipping, nearest rounding",
            {"type": "Lomo", "params": {"lr": 1e-2}},
            {"stage": 0},
            peer="lomo_optim",
        ),
    )
}


def chosen(names: Sequence[str] | None) -> list[Contender]:
    """By name, in the order of the table; None: all."""
    unknown = set(names or ()) - ALL.keys()
    if unknown:
        raise ValueError(f"unknown contender {', '.join(sorted(unknown))}; there are {', '.join(ALL)} (--contenders)")
    return [contender for name, contender in ALL.items() if names is None or name in names]


def config_of(
    contender: Contender,
    shared: Mapping[str, Any],
    *,
    lr: float | None = None,
    device_memory_gb: float | None = None,
) -> Section:
    """The JSON of a contender. A smaller card is told to ours, and makes stock DeepSpeed's buckets smaller."""
    config: Section = copy.deepcopy({**shared, "optimizer": contender.optimizer})
    config["zero_optimization"] = copy.deepcopy(contender.zero_optimization)
    if contender.ds_zo is not None:
        config["ds_zo"] = copy.deepcopy(contender.ds_zo)
    if device_memory_gb is not None:
        if contender.ds_zo is not None:
            config["ds_zo"]["stream"]["device_memory_gb"] = round(device_memory_gb * _BUDGET_SHARE, 3)
        largest = int(device_memory_gb * 1e9 * _BUCKET_SHARE / 2)
        zero = config["zero_optimization"]
        zero |= {key: min(zero[key], largest) for key in _BUCKETS if key in zero}
    if lr is not None:
        config["optimizer"]["params"]["lr"] = lr
    return config


def shared_config(*, batch: int, dtype: str, gradient_clipping: float = 0.0) -> Section:
    """What every contender's JSON has. No clipping by default: it costs LOMO a second pass and the rest little."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
    }
