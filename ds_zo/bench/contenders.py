"""The contenders of `contenders.json`. Each is a choice of `optimizer`, `zero_optimization`, `ds_zo` and further keys
of `bf16`; all other keys of the JSON are shared.

Stock DeepSpeed is set up as its documentation advises (tutorials on ZeRO-Offload, ZenFlow and SuperOffload): pinned
memory, copies overlapped with compute, its vectorised Adam on the CPU, all cores for the single rank. `settings` says
so in the table.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Section = dict[str, Any]
DIFFERING = ("optimizer", "zero_optimization", "ds_zo", "bf16")
"""The only keys of the JSON in which contenders may differ. Of `bf16`, `enabled` is the same for all."""

_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
_BUCKET_NUMEL = 500_000_000
_BUCKET_CARD_GB = 24
"""A card with less memory, in GB, gets buckets in proportion. DeepSpeed's documentation advises smaller buckets where
memory is short."""
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
    """Keys of the `bf16` section besides `enabled`. Such a contender trains in bf16 only. DeepSpeed's low-memory states
    take 10 bytes a parameter in place of 18. Bf16 moments need bf16 master weights, and with CPU offload both need
    DeepSpeedCPUAdam, which is not ZenFlow's optimizer."""
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


def _contenders() -> dict[str, Contender]:
    """The contenders of `contenders.json`, in the order of the table. One that is `like` another has its keys, apart
    from those of its own; keys of `zero_optimization` are added to the other's."""
    given: dict[str, Section] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for own in given.values():
        base = given.get(own.pop("like", ""), {})
        zero = {**base.get("zero_optimization", {}), **own["zero_optimization"]} if "zero_optimization" in own else None
        own.update({**base, **own}, **({"zero_optimization": zero} if zero else {}))
    return {name: Contender(name, **own) for name, own in given.items()}


ALL = _contenders()
"""By name."""


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
