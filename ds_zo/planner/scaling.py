"""A plan for several GPUs and machines: bytes sent, host memory of each machine, and seconds of a step.

Ranks are data parallel, each with a batch of its own. Reductions are rings inside a machine and then between machines.
They overlap with nothing, so the figures are the worst case. Where ranks divide optimizer states among them (ZeRO,
LSP), the update time of a machine's CPUs falls with the number of machines. Every GPU has a link to host memory of its
own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_zo.planner.estimate import Estimate, Limits
from ds_zo.planner.plan import Plan
from ds_zo.planner.rates import Rates
from ds_zo.planner.table import grid
from ds_zo.streaming.budget import fits


@dataclass(frozen=True)
class Scaled:
    """The estimate of one method on `gpus` x `nodes` ranks."""

    contender: str
    gpus: int
    nodes: int
    host_nbytes: int
    """Host memory of each machine after the first step, when blocks that stay on the GPUs have left host memory."""
    sharded_host_nbytes: int
    """The same at ZeRO stage 3."""
    device_nbytes: int
    """Memory of each GPU."""
    sharded_device_nbytes: int
    """The same at ZeRO stage 3 without `offload_param`. Equal to `device_nbytes` for a method that does not divide its
    weights among GPUs."""
    wire_nbytes: int
    """Bytes that each rank sends in a step."""
    sharded_wire_nbytes: int
    """The same at ZeRO stage 3 without `offload_param`."""
    reduce_s: float
    """Seconds of the reductions in a step."""
    step_s: float
    tokens_per_s: float
    """Tokens per second of all ranks together."""
    efficiency: float
    """Tokens per second as a share of those of as many separate GPUs."""
    fits: str
    """Whether it fits the memory of a GPU and of a machine: "yes", "at stage 3", or "no: " and the reason: "GPU",
    "host", or that the method streams on one rank only."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scale(plan: Plan, *, gpus: int, nodes: int = 1) -> list[Scaled]:
    """Every estimate of a plan on `gpus` GPUs in each of `nodes` machines."""
    if gpus < 1 or nodes < 1:
        raise ValueError(f"gpus and nodes must be >= 1, got {gpus} and {nodes} (--gpus, --nodes)")
    return [_scaled(plan, estimate, gpus, nodes) for estimate in plan.estimates]


def _scaled(plan: Plan, e: Estimate, gpus: int, nodes: int) -> Scaled:
    ranks = gpus * nodes
    reduce_s = _reduce_s(e.reduced_nbytes, plan.rates, gpus=gpus, nodes=nodes)
    step_s = e.step_s - e.divided_s * (1 - 1 / nodes) + reduce_s
    tokens = ranks * plan.batch * plan.seq
    host_nbytes = _host_nbytes(e, gpus=gpus, ranks=ranks)
    sharded_host_nbytes = _host_nbytes(replace(e, sharded=e.sharded | e.shared), gpus=gpus, ranks=ranks)
    sharded_device_nbytes = _sharded_device_nbytes(e, ranks=ranks)
    wire_nbytes = 2 * (ranks - 1) * e.reduced_nbytes // ranks
    stores = 1 if e.shared else gpus
    ways = (
        (e.device_nbytes, host_nbytes + gpus * e.filling_nbytes),
        (sharded_device_nbytes, sharded_host_nbytes + stores * e.filling_nbytes),
    )
    return Scaled(
        contender=e.contender,
        gpus=gpus,
        nodes=nodes,
        host_nbytes=host_nbytes,
        sharded_host_nbytes=sharded_host_nbytes,
        device_nbytes=e.device_nbytes,
        sharded_device_nbytes=sharded_device_nbytes,
        wire_nbytes=wire_nbytes,
        sharded_wire_nbytes=wire_nbytes if e.shards is None else e.shards.wire_nbytes(ranks=ranks),
        reduce_s=reduce_s,
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        efficiency=e.step_s / step_s,
        fits="no: streams on one rank only" if ranks > 1 and e.streams_on_one_rank else _fits(e.limits, *ways),
    )


def _fits(limits: Limits, *ways: tuple[int, int]) -> str:
    """`ways` are two pairs (bytes of a GPU, bytes of a machine): as configured, and at stage 3."""
    lacking = [_lacking(limits, *way) for way in ways]
    return "yes" if lacking[0] is None else "at stage 3" if lacking[1] is None else f"no: {lacking[0]}"


def _lacking(limits: Limits, device_nbytes: int, host_nbytes: int) -> str | None:
    if not fits(device_nbytes, budget_nbytes=limits.device_nbytes):
        return "GPU"
    return "host" if limits.host_nbytes is not None and host_nbytes > limits.host_nbytes else None


def _host_nbytes(e: Estimate, *, gpus: int, ranks: int) -> int:
    """Host memory of a machine. ds_zo divides the weights among the ranks of a machine, so that every machine has all
    of them. DeepSpeed divides its buffers among all ranks."""
    total = 0
    for part, nbytes in e.host.items():
        if part not in e.sharded:
            total += gpus * nbytes
        elif part in e.shared:
            total += nbytes
        else:
            total += gpus * nbytes // ranks
    return total


def _sharded_device_nbytes(e: Estimate, *, ranks: int) -> int:
    """Memory of a GPU at stage 3, where the method divides its weights among GPUs."""
    if e.shards is None:
        return e.device_nbytes
    rest = e.device_nbytes - e.device.get("weights", 0) - e.device.get("slots", 0)
    return rest + e.shards.device_nbytes(ranks=ranks)


def _reduce_s(nbytes: int, rates: Rates, *, gpus: int, nodes: int) -> float:
    inside = 2 * nbytes * (gpus - 1) / gpus / (rates.interconnect_gbps * 1e9)
    between = 2 * nbytes * (nodes - 1) / nodes / (rates.network_gbps * 1e9)
    return inside + between


def render_scaling(scaled: Sequence[Scaled]) -> str:
    """The scaled estimates as a table for a terminal."""
    first = scaled[0]
    columns: tuple[tuple[str, Callable[[Scaled], str]], ...] = (
        ("backend", lambda s: s.contender),
        ("wire", lambda s: _size(s.wire_nbytes)),
        ("stage 3", lambda s: _size(s.sharded_wire_nbytes)),
        ("GPU GB", lambda s: f"{s.device_nbytes / 1e9:,.1f}"),
        ("stage 3", lambda s: f"{s.sharded_device_nbytes / 1e9:,.1f}"),
        ("host GB", lambda s: f"{s.host_nbytes / 1e9:,.1f}"),
        ("stage 3", lambda s: f"{s.sharded_host_nbytes / 1e9:,.1f}"),
        ("ms/step", lambda s: f"{s.step_s * 1e3:.0f}"),
        ("tokens/s", lambda s: f"{s.tokens_per_s:,.0f}"),
        ("efficiency", lambda s: f"{s.efficiency:.0%}"),
    )
    table = grid([name for name, _ in columns], [[cell(s) for _, cell in columns] for s in scaled])
    title = (
        f"{first.gpus} GPUs a machine, {first.nodes} machines, data parallel. wire: bytes that a rank sends in a step; "
        "GPU: memory of each GPU; host: memory of each machine; stage 3: the same with weights divided among all GPUs "
        "(lomo without offload_param), or with host memory divided among the GPUs of a machine (zo and lomo with it)"
    )
    lacking = [f"{s.contender} ({s.fits})" for s in scaled if s.fits != "yes"]
    notes = ["", f"does not fit as configured: {', '.join(lacking)}"] if lacking else []
    return "\n".join([title, "", *table, *notes])


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} GB"
