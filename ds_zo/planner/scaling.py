"""A plan on several GPUs and machines: what crosses the wires, what each host holds, what a step then takes.

Ranks are data parallel, each with a batch of its own. Sums are ring reductions inside a machine and then between
machines; they are not hidden behind anything, so the figures are the worst case. What a machine's CPUs update falls
with the number of machines where states are divided among ranks (ZeRO, LSP). Every GPU is taken to have its link to
host memory for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_zo.planner.estimate import Estimate, Limits
from ds_zo.planner.models import DTYPES
from ds_zo.planner.plan import Plan
from ds_zo.planner.rates import Rates
from ds_zo.planner.table import grid
from ds_zo.streaming.budget import MARGIN_NBYTES

SHARED_STORES = {
    "zo": frozenset({"weights", "low_plane"}),
    "lomo": frozenset({"weights"}),
    "adalomo": frozenset({"weights"}),
}
"""Parts of the host's memory that `zero_optimization.stage: 3` divides among the ranks of a machine."""

_GATHERING = frozenset({"zero-3-gpu-params"})


@dataclass(frozen=True)
class Scaled:
    """One contender on `gpus` x `nodes` ranks."""

    contender: str
    gpus: int
    nodes: int
    host_nbytes: int
    """Of each machine, once the blocks that stay on its GPUs are there."""
    sharded_host_nbytes: int
    """The same at ZeRO stage 3."""
    device_nbytes: int
    """Of each GPU."""
    sharded_device_nbytes: int
    """The same at ZeRO stage 3 without `offload_param`, for those whose weights then are divided among all GPUs."""
    wire_nbytes: int
    """Sent by each rank a step."""
    sharded_wire_nbytes: int
    """The same at ZeRO stage 3 without `offload_param`."""
    reduce_s: float
    step_s: float
    tokens_per_s: float
    """Of all ranks."""
    efficiency: float
    """Of so many GPUs on their own."""
    fits: str
    """Within a GPU's and a machine's memory: "yes", "at stage 3", or "no" and of what there is too little, or that the
    plan is one of a single rank."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scale(plan: Plan, *, gpus: int, nodes: int = 1) -> list[Scaled]:
    if gpus < 1 or nodes < 1:
        raise ValueError(f"gpus and nodes must be >= 1, got {gpus} and {nodes} (--gpus, --nodes)")
    return [_scaled(plan, estimate, gpus, nodes) for estimate in plan.estimates]


def _scaled(plan: Plan, e: Estimate, gpus: int, nodes: int) -> Scaled:
    ranks = gpus * nodes
    reduce_s = _reduce_s(e.reduced_nbytes, plan.rates, gpus=gpus, nodes=nodes)
    step_s = e.step_s - e.divided_s * (1 - 1 / nodes) + reduce_s
    tokens = ranks * plan.batch * plan.seq
    at_stage_3 = replace(e, sharded=e.sharded | SHARED_STORES.get(e.contender, frozenset()))
    host_nbytes = _host_nbytes(e, gpus=gpus, ranks=ranks)
    sharded_host_nbytes = _host_nbytes(at_stage_3, gpus=gpus, ranks=ranks)
    sharded_device_nbytes = _sharded_device_nbytes(plan, e, ranks=ranks)
    stores = 1 if e.contender in SHARED_STORES else gpus
    ways = (
        (e.device_nbytes, host_nbytes + gpus * e.filling_nbytes),
        (
            sharded_device_nbytes,
            sharded_host_nbytes + stores * e.filling_nbytes,
        ),
    )
    return Scaled(
        contender=e.contender,
        gpus=gpus,
        nodes=nodes,
        host_nbytes=host_nbytes,
        sharded_host_nbytes=sharded_host_nbytes,
        device_nbytes=e.device_nbytes,
        sharded_device_nbytes=sharded_device_nbytes,
        wire_nbytes=2 * (ranks - 1) * e.reduced_nbytes // ranks,
        sharded_wire_nbytes=(
            2 * (ranks - 1) * e.reduced_nbytes // ranks if e.shards is None else e.shards.wire_nbytes(ranks=ranks)
        ),
        reduce_s=reduce_s,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        efficiency=e.step_s / step_s,
        fits="no: streams on one rank only" if ranks > 1 and _is_of_one_rank(e) else _fits(e.limits, *ways),
    )


def _is_of_one_rank(e: Estimate) -> bool:
    return e.contender == "lsp" and "offload_param" in e.config["zero_optimization"]


def _fits(limits: Limits, *ways: tuple[int, int]) -> str:
    """`ways`: (a GPU's, a machine's) bytes as they are, and at stage 3."""
    lacking = [_lacking(limits, *way) for way in ways]
    return "yes" if lacking[0] is None else "at stage 3" if lacking[1] is None else f"no: {lacking[0]}"


def _lacking(limits: Limits, device_nbytes: int, host_nbytes: int) -> str | None:
    if limits.device_nbytes is not None and device_nbytes + MARGIN_NBYTES > limits.device_nbytes:
        return "GPU"
    return "host" if limits.host_nbytes is not None and host_nbytes > limits.host_nbytes else None


def _host_nbytes(e: Estimate, *, gpus: int, ranks: int) -> int:
    """ds_zo's stores are divided within a machine (every machine needs all weights), DeepSpeed's among all ranks."""
    total = 0
    for part, nbytes in e.host.items():
        if part not in e.sharded:
            total += gpus * nbytes
        elif part in SHARED_STORES.get(e.contender, frozenset()):
            total += nbytes
        else:
            total += gpus * nbytes // ranks
    return total


def _sharded_device_nbytes(plan: Plan, e: Estimate, *, ranks: int) -> int:
    """A GPU's share of the weights, and two blocks gathered: one computing, one arriving."""
    rest = e.device_nbytes - e.device.get("weights", 0) - e.device.get("slots", 0)
    if e.shards is not None:
        return rest + e.shards.device_nbytes(ranks=ranks)
    if e.contender not in _GATHERING:
        return e.device_nbytes
    weights = plan.num_parameters * DTYPES[plan.dtype].itemsize
    return rest + weights // ranks + 2 * weights // max(1, plan.num_blocks)


def _reduce_s(nbytes: int, rates: Rates, *, gpus: int, nodes: int) -> float:
    inside = 2 * nbytes * (gpus - 1) / gpus / (rates.interconnect_gbps * 1e9)
    between = 2 * nbytes * (nodes - 1) / nodes / (rates.network_gbps * 1e9)
    return inside + between


def render_scaling(scaled: Sequence[Scaled]) -> str:
    first = scaled[0]
    header = [
        "backend",
        "wire",
        "stage 3",
        "GPU GB",
        "stage 3",
        "host GB",
        "stage 3",
        "ms/step",
        "tokens/s",
        "efficiency",
    ]
    rows = [
        [
            s.contender,
            _size(s.wire_nbytes),
            _size(s.sharded_wire_nbytes),
            f"{s.device_nbytes / 1e9:,.1f}",
            f"{s.sharded_device_nbytes / 1e9:,.1f}",
            f"{s.host_nbytes / 1e9:,.1f}",
            f"{s.sharded_host_nbytes / 1e9:,.1f}",
            f"{s.step_s * 1e3:.0f}",
            f"{s.tokens_per_s:,.0f}",
            f"{s.efficiency:.0%}",
        ]
        for s in scaled
    ]
    title = (
        f"{first.gpus} GPUs a machine, {first.nodes} machines, data parallel. wire: what a rank sends a step; GPU: of "
        "each; host: of each machine; stage 3: weights divided, those on GPUs among all of them (lomo without "
        "offload_param), host stores among a machine's (zo, lomo with it)"
    )
    lacking = [f"{s.contender} ({s.fits})" for s in scaled if s.fits != "yes"]
    notes = ["", f"without room on so many as it is: {', '.join(lacking)}"] if lacking else []
    return "\n".join([title, "", *grid(header, rows), *notes])


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} GB"
