"""The contenders: each is a choice of `optimizer`, `zero_optimization`, `ds_zo` and further keys of `bf16`; all other
keys of the JSON are shared.

Stock DeepSpeed is set up as its documentation advises (tutorials on ZeRO-Offload, ZenFlow and SuperOffload): pinned
memory, copies overlapped with compute, its vectorised Adam on the CPU, all cores for the single rank. `settings` says
so in the table.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Section = dict[str, Any]
DIFFERING = ("optimizer", "zero_optimization", "ds_zo", "bf16")
"""The only keys of the JSON in which contenders may differ. Of `bf16`, `enabled` is the same for all."""

_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
_BUCKET_NUMEL = 500_000_000
_BUCKET_CARD_GB = 24
"""A card with less memory, in GB, gets buckets in proportion. DeepSpeed's documentation advises smaller buckets where
memory is short."""
_GROUP_NUMEL = 1_000_000_000
"""Elements of ZeRO-3's `sub_group_size`: DeepSpeed's default."""
_SUPER_GROUP_NUMEL = 400_000_000

_HOST: Section = {"device": "cpu", "pin_memory": True}
_ADAMW: Section = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}}
_FUSED_ADAMW: Section = {**_ADAMW, "params": {**_ADAMW["params"], "torch_adam": True, "fused": True}}
_OFFLOAD2: Section = {
    "stage": 2,
    "offload_optimizer": _HOST,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": _BUCKET_NUMEL,
    "allgather_bucket_size": _BUCKET_NUMEL,
}
_OFFLOAD3: Section = {
    "stage": 3,
    "offload_optimizer": _HOST,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": _BUCKET_NUMEL,
    "stage3_prefetch_bucket_size": _BUCKET_NUMEL,
    "stage3_param_persistence_threshold": 1_000_000,
    "sub_group_size": _GROUP_NUMEL,
}

_BF16_STATES: Section = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
"""DeepSpeed's low-memory states: master weights, gradients and moments in bf16, 10 bytes a parameter in place of 18. It
refuses the second key without the first, and with CPU offload it needs DeepSpeedCPUAdam: not ZenFlow's."""
_ACTIVATION_OFFLOAD = "deepspeed.runtime.activation_checkpointing.offload_activations"

_BUDGET_SHARE = 0.96
"""Share of an emulated card that ds_zo's budget may use. Memory that the allocator caches beyond it counts against the
card."""


ORDER = (
    *("zo", "lomo", "lsp", "lomo-streamed", "adamw", "sgd", "lomo-optim", "zero2-offload"),
    *("zero3-offload-param", "zero3-offload", "zenflow", "superoffload"),
    *("adamw-lean", "adamw-flat", "zero2-offload-bf16", "zero3-offload-bf16", "zero3-offload-param-bf16"),
    *("zero2-offload-bf16-act", "zo-streamed", "adalomo", "zo-wire", "lsp-projected"),
)
"""The order of runs: the contenders that a table needs most, then stock DeepSpeed and AdamW in the least memory that
they can do with, then variants."""
EXACT_PINNING = {"DS_PIN_MEMORY_BACKEND": "native"}
"""Variables that select DeepSpeed's own pinned memory. The default, PyTorch's, takes up to twice as much."""
EXACTLY = "; pinned in exact sizes by DeepSpeed (" + ", ".join(f"{k}={v}" for k, v in EXACT_PINNING.items()) + ")"


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    settings: str
    """The set-up in words, for the table."""
    optimizer: Section
    zero_optimization: Section
    ds_zo: Section | None = None
    backend: str | None = None
    """Backend of ds_zo, which places the parameters itself; None: stock DeepSpeed or another package."""
    planned_as: str = ""
    """The planner's method whose memory and seconds are this contender's own, or nearly."""
    more_host_bytes_each: int = 0
    """Bytes of host memory per parameter that the planner's method does not have."""
    period: int = 1
    """Steps after which the kinds of step repeat: timing fewer of them says little."""
    peer: str | None = None
    """A package that trains without DeepSpeed and must be installed; None: DeepSpeed trains."""
    bf16: Section = field(default_factory=dict)
    """Keys of the `bf16` section besides `enabled`. Such a contender trains in bf16 only."""
    accumulates: bool = True
    """Whether a step may have several micro-batches. LOMO frees a gradient once it is applied."""
    offloads_activations: bool = False
    """Whether the inputs of recomputed blocks are kept in host memory, by DeepSpeed's context manager for that."""

    def missing(self, dtype: str) -> str | None:
        """Why the contender cannot run on this machine, or in this dtype; None: it can."""
        if self.bf16 and dtype != "bf16":
            return f"its states are in bf16, and the table's dtype is {dtype} (--dtype)"
        if self.offloads_activations and importlib.util.find_spec(_ACTIVATION_OFFLOAD) is None:
            return "this version of DeepSpeed does not offload activations"
        absent = self.peer is not None and importlib.util.find_spec(self.peer) is None
        return f"{self.peer} is not installed" if absent else None


def _ours(name: str, title: str, settings: str, **sections: Any) -> Contender:
    optimizer = sections.pop("optimizer")
    backend = str(optimizer["type"]).lower()
    return Contender(name, title, settings, optimizer, **sections, backend=backend, planned_as=backend)


ALL: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "adamw",
            "AdamW on the GPU",
            "stage 0, torch's fused kernel, float32 master weights and moments on the GPU",
            _FUSED_ADAMW,
            {"stage": 0},
            planned_as="adamw",
        ),
        Contender(
            "adamw-flat",
            "AdamW on the GPU, flat",
            "stage 1, whose only rank keeps all: torch's fused kernel over one flat float32 buffer, no norm computed",
            _FUSED_ADAMW,
            {"stage": 1, "overlap_comm": True, "contiguous_gradients": True, "compute_grad_norm": False},
            planned_as="adamw",
        ),
        Contender(
            "adamw-lean",
            "AdamW on the GPU, no master weights",
            "torch alone, fused kernel, weights, gradients and moments in the model's dtype",
            _ADAMW,
            {"stage": 0},
            peer="torch",
            planned_as="torch-adamw",
        ),
        Contender(
            "sgd",
            "SGD on the GPU",
            "stage 0, no momentum, float32 master weights on the GPU",
            {"type": "SGD", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            {"stage": 0},
            planned_as="sgd",
        ),
        Contender(
            "zero2-offload",
            "ZeRO-Offload (stage 2)",
            "stock: pinned, overlap_comm, 500 M buckets, DeepSpeedCPUAdam on all cores",
            _ADAMW,
            _OFFLOAD2,
            planned_as="zero-offload",
        ),
        Contender(
            "zero3-offload",
            "ZeRO-3, optimizer offloaded",
            "stock: pinned, overlap_comm, 500 M buckets and prefetch, DeepSpeedCPUAdam on all cores",
            _ADAMW,
            _OFFLOAD3,
            planned_as="zero-3-gpu-params",
        ),
        Contender(
            "zero3-offload-param",
            "ZeRO-3, optimizer and parameters offloaded",
            "stock: as zero3-offload, with offload_param pinned",
            _ADAMW,
            {**_OFFLOAD3, "offload_param": _HOST},
            planned_as="zero-3",
        ),
        Contender(
            "zero2-offload-bf16",
            "ZeRO-Offload (stage 2), bf16 states",
            "stock: as zero2-offload, bf16_master_weights_and_grads and bf16_optimizer_states",
            _ADAMW,
            _OFFLOAD2,
            bf16=_BF16_STATES,
            planned_as="zero-offload-bf16",
        ),
        Contender(
            "zero2-offload-bf16-act",
            "ZeRO-Offload (stage 2), bf16 states, activations offloaded",
            "stock: as zero2-offload-bf16, inputs of recomputed blocks in pinned host memory",
            _ADAMW,
            _OFFLOAD2,
            bf16=_BF16_STATES,
            offloads_activations=True,
            planned_as="zero-offload-bf16",
        ),
        Contender(
            "zero3-offload-bf16",
            "ZeRO-3, optimizer offloaded, bf16 states",
            "stock: as zero3-offload, bf16_master_weights_and_grads and bf16_optimizer_states",
            _ADAMW,
            _OFFLOAD3,
            bf16=_BF16_STATES,
            planned_as="zero-3-gpu-params-bf16",
        ),
        Contender(
            "zero3-offload-param-bf16",
            "ZeRO-3, optimizer and parameters offloaded, bf16 states",
            "stock: as zero3-offload-param, bf16_master_weights_and_grads and bf16_optimizer_states",
            _ADAMW,
            {**_OFFLOAD3, "offload_param": _HOST},
            bf16=_BF16_STATES,
            planned_as="zero-3-bf16",
        ),
        Contender(
            "zenflow",
            "ZenFlow",
            "stock: as zero2-offload, zenflow as its tutorial: top 5%, update every 4 steps, overlap_step",
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
            period=4,
            planned_as="zero-offload",
            more_host_bytes_each=14,
        ),
        Contender(
            "superoffload",
            "SuperOffload",
            "stock: stage 3, pinned, 400 M groups, ratio 0.9, 90% of the cores for Adam, as its examples",
            _ADAMW,
            {
                "stage": 3,
                "overlap_comm": False,
                "reduce_bucket_size": _SUPER_GROUP_NUMEL,
                "sub_group_size": _SUPER_GROUP_NUMEL,
                "offload_optimizer": {**_HOST, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9},
            },
            planned_as="zero-3-gpu-params",
            more_host_bytes_each=4,
        ),
        _ours(
            "zo",
            "ZO",
            "blocks stay on the GPU as far as its memory goes, the rest stream; master split",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {}},
        ),
        _ours(
            "zo-streamed",
            "ZO, all blocks streamed",
            "no block stays on the GPU; master split",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {"resident_blocks": 0}},
        ),
        _ours(
            "zo-wire",
            "ZO, all blocks streamed, lean host",
            "no block stays on the GPU; master wire: 16 bits a parameter are all there is",
            optimizer={"type": "ZO", "params": {"lr": 1e-6, "weight_decay": 0.0, "zo_eps": 1e-3}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {"resident_blocks": 0, "master": "wire"}},
        ),
        _ours(
            "lomo",
            "LOMO",
            "parameters on the GPU, one backward pass, stochastic rounding",
            optimizer={"type": "LOMO", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            zero_optimization={"stage": 0},
            accumulates=False,
        ),
        _ours(
            "lomo-streamed",
            "LOMO, streamed",
            "blocks stay on the GPU as far as its memory goes, the rest stream; one backward pass",
            optimizer={"type": "LOMO", "params": {"lr": 1e-2, "weight_decay": 0.0}},
            zero_optimization={"stage": 0, "offload_param": _HOST},
            ds_zo={"stream": {}},
            accumulates=False,
        ),
        _ours(
            "adalomo",
            "AdaLOMO",
            "parameters on the GPU, factored second moments",
            optimizer={"type": "AdaLOMO", "params": {"lr": 5e-4, "weight_decay": 0.0}},
            zero_optimization={"stage": 0},
            accumulates=False,
        ),
        *(
            _ours(
                name,
                title,
                f"d = 512, r = 4, learned projectors, {edge_settings}, float32 payload",
                optimizer={"type": "LSP", "params": {**_ADAMW["params"], "edge": edge}},
                zero_optimization={"stage": 0, "offload_optimizer": _HOST},
            )
            for name, title, edge, edge_settings in (
                ("lsp", "LSP", "dense", "embedding and head trained whole"),
                ("lsp-projected", "LSP, embedding projected", "lsp", "embedding and head projected"),
            )
        ),
        Contender(
            "lomo-optim",
            "LOMO (lomo-optim)",
            "the authors' package, fused_backward, no clipping, nearest rounding",
            {"type": "Lomo", "params": {"lr": 1e-2}},
            {"stage": 0},
            peer="lomo_optim",
            accumulates=False,
            planned_as="lomo",
        ),
    )
}


def in_order_of_runs(names: Sequence[str] | None) -> list[Contender]:
    """Returns the contenders of `chosen` in the order of `ORDER`."""
    return sorted(chosen(names), key=lambda contender: ORDER.index(contender.name))


def settings_of(
    contender: Contender, env: Mapping[str, str], *, accumulation: int = 1, starts_uncapped: bool = False
) -> str:
    """The set-up in words, with what its case was given: environment variables, micro-batches, a cap that only its
    steps have."""
    told = all(env.get(key) == value for key, value in EXACT_PINNING.items())
    pins = contender.backend is None and "offload_optimizer" in contender.zero_optimization
    words = contender.settings + (f"; {accumulation} micro-batches a step" if accumulation > 1 else "")
    words += "; started on the whole card, within the cap from the first step on" if starts_uncapped else ""
    return words + (EXACTLY if told and pins else "")


def chosen(names: Sequence[str] | None) -> list[Contender]:
    """Returns contenders by name in the order of the table; None: all."""
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
    """Returns the JSON of a contender. A smaller card sets ds_zo's memory budget, and makes stock DeepSpeed's buckets
    smaller."""
    config: Section = copy.deepcopy({**shared, "optimizer": contender.optimizer})
    config["zero_optimization"] = copy.deepcopy(contender.zero_optimization)
    if shared["gradient_clipping"]:
        config["zero_optimization"].pop("compute_grad_norm", None)  # clipping needs the norm
    if contender.bf16:
        config["bf16"] = {"enabled": True, **contender.bf16}
    if contender.ds_zo is not None:
        config["ds_zo"] = copy.deepcopy(contender.ds_zo)
    if device_memory_gb is not None:
        if contender.ds_zo is not None:
            config["ds_zo"]["stream"]["device_memory_gb"] = round(device_memory_gb * _BUDGET_SHARE, 3)
        largest = int(_BUCKET_NUMEL * device_memory_gb / _BUCKET_CARD_GB)
        zero = config["zero_optimization"]
        zero |= {key: min(zero[key], largest) for key in _BUCKETS if key in zero}
    if lr is not None:
        config["optimizer"]["params"]["lr"] = lr
    return config


def shared_config(*, batch: int, dtype: str, gradient_clipping: float = 0.0, accumulation: int = 1) -> Section:
    """Keys that every contender's JSON has. `batch` is a step's, in `accumulation` micro-batches. Clipping is off by
    default: it costs LOMO a second pass and the other methods little."""
    return {
        "train_micro_batch_size_per_gpu": batch // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": gradient_clipping,
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "steps_per_print": 1_000_000,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},  # this timer waits for the device twice a step
    }
