"""Reads from the profiler's trace what the GPU did during a step, in the same way for every contender."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]


def profile_steps(step: Callable[[], Any], *, steps: int) -> dict[str, float]:
    """Bytes copied each way a step, and seconds a step in which the GPU copied, computed, or did neither.

    Empty where the profiler records no device activity.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return read_trace(trace_events(profiler), steps=steps)


def trace_events(profiler: torch.profiler.profile) -> list[dict[str, Any]]:
    """Returns the events of the profiler's trace in Chrome's format."""
    with tempfile.TemporaryDirectory(prefix="ds_zo_trace_") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def read_trace(events: Iterable[Mapping[str, Any]], *, steps: int) -> dict[str, float]:
    """Sums Chrome's trace events, whose times are in microseconds. Copies within the device count as computation."""
    computing: list[Interval] = []
    copying: list[Interval] = []
    nbytes = {"HtoD": 0.0, "DtoH": 0.0}
    for event in events:
        if event.get("ph") != "X" or event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        way = next((way for way in nbytes if way in event["name"]), None) if event["cat"] == "gpu_memcpy" else None
        if way is None:
            computing.append(interval)
            continue
        copying.append(interval)
        nbytes[way] += float(event.get("args", {}).get("bytes", 0))
    if not computing:
        return {}
    everything = [*computing, *copying]
    either = union_length(everything)
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    return {
        "up_gb": nbytes["HtoD"] / steps / 1e9,
        "down_gb": nbytes["DtoH"] / steps / 1e9,
        "gpu_compute_s": union_length(computing) / steps / 1e6,
        "gpu_copy_s": union_length(copying) / steps / 1e6,
        "copy_exposed_s": (either - union_length(computing)) / steps / 1e6,
        "gpu_idle_s": (span - either) / steps / 1e6,
    }


def union_length(intervals: Iterable[Interval]) -> float:
    """Length of the union, in the intervals' unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
