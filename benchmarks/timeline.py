"""One picture of a streamed step: what the upload, compute and download streams did, and when.

A recording is JSON: `spans` of (lane, kind, start, end) in seconds from the first one. `record` makes one on a GPU from
the profiler's trace, `draw` needs nothing but the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Recording = dict[str, Any]
LANES = ("upload", "compute", "download")
_LANE_NAMES = {"upload": "uploads", "compute": "computing", "download": "downloads"}
_KINDS = {
    "upload": ("upload of a block", "#4878a8"),
    "noise": ("updates and noise", "#d08a3c"),
    "forward": ("forward passes", "#8a8a8a"),
    "download": ("download of a block", "#6aa06a"),
}
"""By kind of span: its name and its colour in the picture."""
_GAP_S = 20e-6
"""Kernels closer than this are one span: a block's forward is dozens of them."""
_NUM_WARMUPS = 12
_NOISE_KERNELS = ("replay", "perturb", "fold", "noise")


def record(**settings: Any) -> Recording:
    """The last but one of a few profiled steps, whose uploads began in the step before and go on into the next."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.methods import method_of
    from benchmarks.training_case import TrainingCase, random_batch
    from ds_zo.bench.measure import start_device
    from ds_zo.bench.traces import trace_events

    case = TrainingCase(**settings)
    where = start_device(case.device)
    model = case.lazy_model(where)
    trainer = method_of(case).make(case, model, where)
    batch = random_batch(model, case.batch, case.length, where)
    for _ in range(_NUM_WARMUPS):
        trainer.step(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for i in range(3):
            with torch.profiler.record_function(f"ds_zo step {i}"):
                trainer.step(batch)
        torch.cuda.synchronize()
    about = {"shape": case.shape, "layers": case.layers, "dtype": case.dtype, "stream": dict(case.stream or {})}
    return about | {"method": "timeline"} | from_trace(trace_events(profiler), num_steps=3)


def from_trace(events: Iterable[Mapping[str, Any]], *, num_steps: int) -> Recording:
    """Spans of the middle one of `num_steps` equal steps of a Chrome trace (microseconds)."""
    spans = []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy") or "dur" not in event:
            continue
        lane, kind = _lane_and_kind(str(event["cat"]), str(event["name"]))
        if lane is not None:
            start = float(event["ts"]) / 1e6
            spans.append((lane, kind, start, start + float(event["dur"]) / 1e6))
    if not any(lane == "compute" for lane, *_ in spans):
        raise ValueError(
            "the profiler's trace has no kernels, so there is no timeline to make of it: record on a machine whose "
            "driver lets CUPTI trace (NVreg_RestrictProfilingToAdminUsers=0)"
        )
    first = min(start for lane, _, start, _ in spans if lane == "compute")
    last = max(end for lane, _, _, end in spans if lane == "compute")
    step_s = (last - first) / num_steps
    begin = first + (num_steps // 2) * step_s
    inside = [
        (lane, kind, max(start, begin) - begin, min(end, begin + step_s) - begin)
        for lane, kind, start, end in spans
        if end > begin and start < begin + step_s
    ]
    return {"step_s": step_s, "spans": merged(inside)}


def _lane_and_kind(category: str, name: str) -> tuple[str | None, str]:
    if category == "gpu_memcpy":
        if "HtoD" in name:
            return "upload", "upload"
        return ("download", "download") if "DtoH" in name else (None, "")
    noise = any(sign in name.lower() for sign in _NOISE_KERNELS)
    return "compute", "noise" if noise else "forward"


def merged(spans: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """In order of time, neighbouring kernels of one kind less than `_GAP_S` apart as one; a copy stays one block's."""
    result: list[list[Any]] = []
    last_of: dict[str, list[Any]] = {}
    for lane, kind, start, end in sorted(spans, key=lambda span: span[2]):
        last = last_of.get(lane)
        if lane == "compute" and last is not None and last[1] == kind and start - last[3] <= _GAP_S:
            last[3] = max(last[3], end)
            continue
        last_of[lane] = [lane, kind, start, end]
        result.append(last_of[lane])
    return result


def busy(recording: Mapping[str, Any]) -> dict[str, float]:
    """The part of the step in which each lane was at work."""
    from ds_zo.bench.traces import union_length

    spans = {lane: [(start, end) for on, _, start, end in recording["spans"] if on == lane] for lane in LANES}
    return {lane: union_length(found) / recording["step_s"] for lane, found in spans.items()}


def draw(recording: Mapping[str, Any]) -> Figure:
    """A lane a stream, time from left to right."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(8.0, 2.8), layout="constrained")
    axes = figure.subplots()
    share = busy(recording)
    kinds = [kind for kind in _KINDS if any(span[1] == kind for span in recording["spans"])]
    for row, lane in enumerate(reversed(LANES)):
        for kind in kinds:
            bars = [
                (start * 1e3, (end - start) * 1e3)
                for on, is_kind, start, end in recording["spans"]
                if on == lane and is_kind == kind
            ]
            if bars:
                colour = _KINDS[kind][1]
                axes.broken_barh(bars, (row - 0.38, 0.76), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(LANES)), [f"{_LANE_NAMES[lane]}\n{share[lane]:.0%} of the step" for lane in LANES[::-1]])
    axes.set_xlim(0, recording["step_s"] * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(_title(recording), fontsize=10, loc="left")
    handles = [Patch(color=colour, label=label) for kind, (label, colour) in _KINDS.items() if kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def _title(recording: Mapping[str, Any]) -> str:
    model = str(recording.get("shape", "")).upper()
    layers = f" cut to {recording['layers']} layers" if recording.get("layers") else ""
    stream = recording.get("stream") or {}
    stored = stream.get("wire_dtype", recording.get("dtype"))
    parts = [f"one ZO step of {model}{layers}", f"streamed as {stored}" if stored else "", recording.get("gpu") or ""]
    return ", ".join(part for part in parts if part)
