"""The cases of ZO's presets: `targets`, what the project set out to reach, and `paper`, the ZO paper's tables.

They are ordered so that a run that is cut off has its most telling rows. Random token ids stand for SST-2: a step costs
what its shapes cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.zo_case import ZOCase
from ds_zo.bench.runner import Case
from ds_zo.planner.shapes import BLOOM, OPT

CASE, MACHINE = "benchmarks.zo_case:run_case", "benchmarks.zo_case:run_machine"
CAP_GB = 24.0
_STREAMED: Mapping[str, Any] = {"master": "wire", "resident_blocks": 0}
_NBYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "bf12": 1 + 33 / 64, "fp8": 1}
_LOW_NBYTES = {"fp32": 0, "bf16": 2, "fp16": 2, "bf12": 2, "fp8": 2}
"""Of a parameter's low plane under `master: split`."""
_FLOPS = {"fp32": 45e12, "bf16": 450e12, "fp16": 450e12}
_LINK, _NOISE, _PIN = 52e9, 250e9, 5e9
"""A second's bytes over the link, parameters perturbed, bytes pinned and filled: rough, to tell a case's duration
beforehand; from walls of forked cases on an H200."""
_SWEEPS = {"mezo": 3.0, "zo": 0.5}
"""What a step's noise takes, in passes over all parameters at that rate."""
_START_S, _ENGINE_S, _LOOK_S, _MACHINE_S, _TIMELINE_S = 2.0, 1.7, 1.0, 6.0, 10.0
"""CUDA's start and end, the first launches (imports are there before the fork, kernels compiled); what DeepSpeed takes
to start; a case that finds too little memory; the rates; a recorded step."""
_INTERVALS = ((1.5, 2), (1.0, 6), (0.0, 16))
"""About what is chosen where computing takes so many times as long as the link. A streamed case makes steps for a whole
interval before it is timed."""
_FIRST_FORWARDS = 5
"""The first step's: in lockstep, one pass after the other, three rehearsals."""
_DEVICE_BYTES, _HOST_GB = 140e9, 133.0


def targets() -> list[Case]:
    """In-memory MeZO first where several rows are compared with it; the large models, which take minutes, last."""
    return [_MACHINE_CASE, *_targets()]


def _targets() -> Iterator[Case]:
    yield _case("6.7b.mezo", "opt-6.7b", "mezo")
    yield _case("6.7b.resident", "opt-6.7b", resident=True, stream={"master": "wire"})
    yield _case("6.7b.streamed", "opt-6.7b", stream=_STREAMED)
    yield _case("6.7b.bf12", "opt-6.7b", stream={**_STREAMED, "wire_dtype": "bf12"})
    yield _case("6.7b.fp8", "opt-6.7b", stream={**_STREAMED, "wire_dtype": "fp8"})
    yield _case("6.7b.half", "opt-6.7b", stream={"master": "wire", "resident_blocks": 16})
    yield _case("1.3b.mezo", "opt-1.3b", "mezo")
    yield _case("1.3b.resident", "opt-1.3b", resident=True, stream={"master": "wire"})
    yield _case("13b.mezo", "opt-13b", "mezo", steps=6)
    yield _case("13b.resident", "opt-13b", resident=True, stream={"master": "wire"}, steps=6)
    yield _case("13b.bf12", "opt-13b", stream={**_STREAMED, "wire_dtype": "bf12"}, steps=6)
    yield _case("13b.fp8", "opt-13b", stream={**_STREAMED, "wire_dtype": "fp8"}, steps=6)
    yield _case("6.7b.batch4.mezo", "opt-6.7b", "mezo", batch=4, steps=6)
    yield _case("6.7b.batch4.streamed", "opt-6.7b", stream=_STREAMED, batch=4, steps=6)
    yield _case("13b.streamed", "opt-13b", stream=_STREAMED, steps=6)
    yield _case("6.7b.split", "opt-6.7b", stream={**_STREAMED, "master": "split"})
    yield _case("6.7b.directions2", "opt-6.7b", stream=_STREAMED, params={"num_directions": 2})
    yield _case("6.7b.resident.split", "opt-6.7b", resident=True, stream={"master": "split"})
    capped = {**_STREAMED, "device_memory_gb": CAP_GB}
    twenty: dict[str, Any] = {"warmup": 8, "steps": 5, "fill_steps": 7}
    yield _case("66b.capped.fp8", "opt-66b", stream={**capped, "wire_dtype": "fp8"}, cap_gb=CAP_GB, **twenty)
    yield _case("30b.capped", "opt-30b", stream=capped, cap_gb=CAP_GB, **twenty)


_TABLE_1 = (
    # shape, dtypes: as far as 128 GiB of host memory go
    *((f"opt-{size}", ("fp16", "fp32")) for size in ("13b", "6.7b", "1.3b")),
    ("opt-30b", ("fp16",)),
    *((f"opt-{size}", ("fp16", "fp32")) for size in ("2.7b", "350m", "125m")),
)
_ABLATED = ("overlap", "reuse_buffers", "fuse_update")
_SWEEP = ((1, 2048), (2, 2048), (4, 2048), (8, 2048), (1, 1024), (1, 4096), (1, 8192))


def paper(*, host_gb: float = 24.0) -> list[Case]:
    """Tables 1 to 3, 5 and 7 to 10 at full depth, MeZO beside ZO in one run. `checkpoint_speed` has Table 6. `host_gb`
    is what the models too large for any host may take of it: it decides their depth (Table 10)."""
    return [_MACHINE_CASE, *_paper(host_gb)]


def _paper(host_gb: float) -> Iterator[Case]:
    for shape, dtypes in _TABLE_1:
        for dtype in dtypes:
            yield from _table_1(shape, dtype)
    largest: dict[str, Any] = {"dtype": "fp16", "warmup": 2, "steps": 4}
    yield _case("t1.66b.fp16.mezo", "opt-66b", "mezo", **largest)
    yield _case("t1.66b.fp8.zo", "opt-66b", stream={**_STREAMED, "wire_dtype": "fp8"}, **largest)
    for size in ("6.7b", "1.3b", "13b"):
        yield from _ablations(size)
    for size in ("6.7b", "2.7b", "1.3b"):
        yield from _amp(size)
    for size in ("6.7b", "2.7b", "1.3b"):
        yield from _sweep(size)
    yield from _table_10(host_gb)
    yield from _too_large()


def _table_1(shape: str, dtype: str) -> Iterator[Case]:
    """MeZO and ZO, every block streamed."""
    slow = dtype == "fp32" and _num_parameters(shape) > 2e9
    common: dict[str, Any] = {"dtype": dtype, "warmup": 2, "steps": 3 if slow else 6}
    name = f"t1.{shape.partition('-')[2]}.{dtype}"
    yield _case(f"{name}.mezo", shape, "mezo", **common)
    # Where float32 products take most of a step, a few pending updates more are not seen.
    yield _case(f"{name}.zo", shape, stream=_STREAMED, **common, age=not slow)


def _ablations(size: str) -> Iterator[Case]:
    """Tables 2 and 5: each feature off, written back every step as in the paper, and at the automatic interval. MeZO,
    and all features at the automatic interval, are the fp16 cases of Table 1."""
    common: dict[str, Any] = {"dtype": "fp16", "steps": 5}
    every_step = {**_STREAMED, "writeback_interval": 1}
    yield _case(f"t2.{size}.1.all", f"opt-{size}", stream=every_step, **common)
    for label, stream, features in (("1", every_step, _ABLATED), ("auto", _STREAMED, _ABLATED[:2])):
        for feature in features:  # without a fused update, every step writes back
            name = f"t2.{size}.{label}.no_{feature}"
            yield _case(name, f"opt-{size}", stream={**stream, feature: False}, **common)


def _amp(size: str) -> Iterator[Case]:
    """Tables 3 and 9: a float32 model, computed under autocast, stored and carried in fewer bits."""
    for compute in ("fp16", "bf16"):
        for wire in ("fp32", "fp16", "bf16", "fp8"):
            yield _case(
                f"amp.{size}.{compute}.{wire}",
                f"opt-{size}",
                dtype="fp32",
                params={"compute_dtype": compute},
                stream={**_STREAMED, "wire_dtype": wire},
                steps=5,
            )


def _sweep(size: str) -> Iterator[Case]:
    """Tables 7 and 8: batches of 1 to 8 and lengths of 1,024 to 8,192. MeZO's on one loaded model; ZO chooses its
    interval by the first step, so each input has an engine of its own. ZO's first input is in Table 1."""
    common: dict[str, Any] = {"dtype": "fp16", "warmup": 2, "steps": 3}
    yield _case(f"t78.{size}.mezo", f"opt-{size}", "mezo", inputs=[list(pair) for pair in _SWEEP], **common)
    for batch, length in _SWEEP[1:]:
        name = f"t78.{size}.zo.{batch}x{length}"
        yield _case(name, f"opt-{size}", stream=_STREAMED, batch=batch, length=length, **common)


def _table_10(host_gb: float) -> Iterator[Case]:
    """True layer shapes and edges, as many layers as `host_gb` holds, within what a 24 GB card has.

    BLOOM's embedding alone is 7.2 GB, and a step needs a working copy of it: only fp8 slots fit beside them. Its
    attention keeps the scores of 112 heads, 8 GB in all at 2,048 tokens, which do not: there it attends in pieces. The
    logits of 2,048 tokens may still be too many for 24 GB, so that length also runs on the whole card.
    """
    for name, shape, dtype, wire, length, cap_gb in (
        ("opt-175b", "opt-175b", "fp16", "fp16", 2048, CAP_GB),
        ("bloom-176b", "bloom-176b", "bf16", "fp8", 512, CAP_GB),
        ("bloom-176b.2048", "bloom-176b", "bf16", "fp8", 2048, CAP_GB),
        ("bloom-176b.2048.uncapped", "bloom-176b", "bf16", "fp8", 2048, None),
    ):
        layers = max(2, int(host_gb * 1e9 / (_block_numel(shape) * _NBYTES[wire])))
        yield _case(
            f"t10.{name}",
            shape,
            dtype=dtype,
            layers=min(layers, _shape(shape)[0]),
            length=length,
            attention="pieces" if length == 2048 and shape in BLOOM else None,
            stream={**_STREAMED, "wire_dtype": wire, "device_memory_gb": cap_gb},
            cap_gb=cap_gb,
            warmup=2,
            steps=3,
        )


def _too_large() -> Iterator[Case]:
    """The cells of Table 1 at full depth that neither 128 GiB of host memory nor this GPU hold: rows that say what they
    need."""
    for shape, dtype in (("opt-66b", "fp32"), ("opt-175b", "fp16"), ("opt-175b", "fp32")):
        size = shape.partition("-")[2]
        yield _case(f"t1.{size}.{dtype}.mezo.whole", shape, "mezo", dtype=dtype, warmup=1, steps=2)
        yield _case(f"t1.{size}.{dtype}.zo.whole", shape, stream=_STREAMED, dtype=dtype, warmup=1, steps=2)


def everything(*, host_gb: float = 24.0) -> list[Case]:
    """Both presets and a recorded step, as one run: what they share is measured once."""
    step = {"shape": "opt-6.7b", "layers": 8, "dtype": "bf16", "stream": dict(_STREAMED)}
    timeline = Case("timeline", "benchmarks.timeline:record", step, timeout_s=90, expected_s=_TIMELINE_S)
    return [_MACHINE_CASE, *_targets(), timeline, *_paper(host_gb)]


def hosts() -> list[Case]:
    """Resident ZO of a small model, also on two cores: its step is as long as Python takes to launch it."""
    alike: dict[str, Any] = {"resident": True, "stream": {"master": "wire"}, "slow_host": True, "steps": 20}
    inputs = ((1, 2048), (4, 512))
    return [_case(f"hosts.1.3b.{b}x{t}", "opt-1.3b", batch=b, length=t, **alike) for b, t in inputs]


PRESETS = {"targets": targets, "paper": paper, "hosts": hosts, "all": everything}
_MACHINE_CASE = Case("machine", MACHINE, timeout_s=90, expected_s=_MACHINE_S)


def tiny(case: Case, *, device: str) -> Case:
    """The same case in kind, on a model that a CPU trains in no time: a rehearsal."""
    if case.target != CASE:  # needs a GPU
        return case
    whole = ZOCase(**case.params)
    stream = {key: value for key, value in (whole.stream or {}).items() if key != "device_memory_gb"}
    if stream.get("resident_blocks"):
        stream["resident_blocks"] = 1
    small = replace(
        whole,
        shape="bloom-tiny" if whole.shape in BLOOM else "opt-tiny",
        layers=4,
        length=8,
        inputs=[[2, 4], [1, 8]] if whole.inputs else None,
        stream=stream,
        warmup=1,
        steps=1,
        age=False,
        cap_gb=None,
        device=device,
    )
    return small.to_run(case.name, CASE, timeout_s=case.timeout_s)


def _case(name: str, shape: str, method: str = "zo", **params: Any) -> Case:
    if "stream" in params:
        params["stream"] = {key: value for key, value in params["stream"].items() if value is not None}
    case = ZOCase(shape, method, **params)
    host_gb = stored_gb(case)
    planned = 1.05 * host_gb + 2 if host_gb else None
    expected_s = estimate_s(case) if planned is None or planned < _HOST_GB else 0.0  # recorded, not run
    limits = {"timeout_s": round(30 + 3 * expected_s), "planned_host_gb": planned, "expected_s": expected_s}
    return case.to_run(name, CASE, **limits)


def stored_gb(case: ZOCase) -> float:
    """GB (10**9 bytes) that a case keeps in the host store."""
    if case.method != "zo" or case.resident:
        return 0.0
    stream = case.stream or {}
    wire = stream.get("wire_dtype", case.dtype)
    nbytes = _NBYTES[wire] + (_LOW_NBYTES[wire] if stream.get("master", "split") == "split" else 0)
    num_streamed = (case.layers or _shape(case.shape)[0]) - (stream.get("resident_blocks") or 0)
    return max(0, num_streamed) * _block_numel(case.shape) * nbytes / 1e9


def estimate_s(case: ZOCase) -> float:
    """About how long a case takes, start and loading included, on the machine the presets are cut for: 128 GiB of
    host memory, a GPU of 140 GB."""
    stream = case.stream or {}
    compute = (case.params or {}).get("compute_dtype", case.dtype)
    numel = _num_parameters(case.shape, case.layers)
    gb = stored_gb(case)
    crossing_gb = stored_gb(replace(case, stream={**stream, "master": "wire"}))  # low planes seldom cross the link
    if case.method == "mezo" and numel * _NBYTES[case.dtype] > _DEVICE_BYTES:
        return _LOOK_S  # recorded, not run
    total = _START_S + gb * 1e9 / _PIN + (_ENGINE_S if case.method == "zo" else 0.0)
    for i, (batch, length) in enumerate(case.pairs):
        busy = 2 * 2 * numel * batch * length / _FLOPS[compute]
        busy += numel / _NOISE * _SWEEPS[case.method]
        link = crossing_gb * 1e9 / _LINK
        step = max(busy, link)
        warmup = case.warmup
        if gb and i == 0:
            chosen = next(interval for times, interval in _INTERVALS if busy >= times * link)
            interval = stream.get("writeback_interval", chosen)
            warmup = max(warmup, interval if case.age else 0) + _FIRST_FORWARDS
        total += (warmup + case.steps + case.fill_steps) * step
    return total


def _shape(shape: str) -> tuple[int, int]:
    """(layers, hidden size)."""
    found = OPT[shape] if shape in OPT else BLOOM[shape]
    return found[0], found[1]


def _block_numel(shape: str) -> int:
    hidden = _shape(shape)[1]
    return 12 * hidden**2 + 13 * hidden


def _num_parameters(shape: str, layers: int | None = None) -> int:
    depth, hidden = _shape(shape)
    edge = (50272 + 2048 if shape in OPT else 250880) * hidden
    return (layers or depth) * _block_numel(shape) + edge
