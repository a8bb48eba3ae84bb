"""Measurements of one case: seconds of steps, peaks of memory, speed of the link and of the CPU's Adam."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ds_zo.records.environment import host_peak_gb
from ds_zo.streaming.allocator import expand_segments

_FEWEST_STEPS = 2
_SETTLING_STEPS = 2
"""Steps after which an engine has chosen where blocks are placed and how often they are written back."""


def measure_steps(
    step: Callable[[], Any],
    *,
    warmup: int,
    steps: int,
    device: torch.device | str,
    max_s: float | None = None,
    period: int = 1,
    ages_after: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Returns the median, fastest and slowest seconds of `steps` calls after `warmup` untimed ones, and peaks of
    memory.

    A step may return its loss, which stays on the device and is read after the last step. On CUDA, events on the
    current stream time each step, so that nothing waits between steps. `max_s` limits the seconds of timed steps: if
    the warm-up shows that they would take longer, fewer are timed, at least two. It also ends the warm-up after two or
    more steps once they took half of `max_s`; the first step, in which kernels are compiled, does not count as typical.
    Steps of which `period` differ are warmed up and timed in whole periods, or their mean would depend on where it
    stops. `ages_after` is called once the engine has settled. It returns the number of warm-up steps after which a step
    costs what it costs in the middle of a run; these are made however long they take.
    """
    device = torch.device(device)
    warmup_seconds: list[float] = []
    least = 0 if ages_after is None else _SETTLING_STEPS
    while True:
        done = len(warmup_seconds)
        if done == _SETTLING_STEPS and ages_after is not None:
            least = max(least, ages_after())
        if done >= -(-max(warmup, least) // period) * period:
            break
        may_end = done >= max(least, _SETTLING_STEPS) and done % period == 0
        if may_end and max_s is not None and sum(warmup_seconds) > max_s / 2:
            break
        start = time.perf_counter()
        step()
        synchronize(device)
        warmup_seconds.append(time.perf_counter() - start)
    if max_s is not None and warmup_seconds:
        typical_s = statistics.median_low(warmup_seconds[-max(_FEWEST_STEPS, period) :])
        steps = min(steps, max(_FEWEST_STEPS, int(max_s / typical_s)))
    steps = max(period, steps - steps % period)
    reserved_before_gb = memory_peaks(device)["peak_reserved_gb"]
    returned: list[Any] = []
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        start = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            returned.append(_detached(step()))
            event.record()
        synchronize(device)
        wall_s = time.perf_counter() - start
        seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]
    else:
        stamps = [time.perf_counter()]
        for _ in range(steps):
            returned.append(_detached(step()))
            stamps.append(time.perf_counter())
        wall_s = stamps[-1] - stamps[0]
        seconds = [after - before for before, after in pairwise(stamps)]
    losses = [float(loss) for loss in returned if loss is not None]
    return {
        "step_s": statistics.median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "step_wall_s": wall_s / steps,
        "seconds": [round(s, 6) for s in seconds],
        "warmup_seconds": [round(s, 6) for s in warmup_seconds],
        "losses": losses,
        "loss": losses[-1] if losses else None,
        "reserved_before_gb": reserved_before_gb,
        **memory_peaks(device),
    }


def _detached(loss: Any) -> Any:
    return loss.detach().clone() if isinstance(loss, torch.Tensor) else loss


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """The median seconds of a few calls, after one that is not counted."""
    call()
    found = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def memory_peaks(device: torch.device | str) -> dict[str, float]:
    """Peak GB (10**9 bytes) on the device after the last reset, and the peak of this process's host memory."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9 if on_gpu else 0.0,
        "host_peak_gb": host_peak_gb(),
    }


def start_device(name: str, *, cap_gb: float | None = None, expands: bool = False) -> torch.device:
    """Makes the device of a case the current one and returns it. `cap_gb` limits its memory. Under a limit, and where
    `expands`, segments expand as PYTORCH_CUDA_ALLOC_CONF would have them: fragmentation must not decide whether a model
    fits."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        if expands or cap_gb is not None:
            expand_segments()
        if cap_gb is not None:
            cap_device_memory(cap_gb, device)
    return device


def cap_device_memory(gb: float, device: torch.device | str = "cuda") -> None:
    """Makes allocations beyond `gb` (10**9 bytes) fail as on a smaller card, and makes DeepSpeed see such a card.

    The limit binds PyTorch's allocator, cached blocks included. CUDA's own context (about 0.5 GB) is not counted.
    DeepSpeed asks the driver for free memory, and flattens weights on the host if a card has no room for them (stage 1
    and 2). If it did not know of the cap, it would run out of memory in a step that a real smaller card survives.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    if gb * 1e9 > total:
        raise ValueError(f"a cap must be within the card's {total / 1e9:.1f} GB, got {gb} (--device-memory-gb)")
    index = torch.device(device).index  # `set_per_process_memory_fraction` needs an index
    index = torch.cuda.current_device() if index is None else index
    torch.cuda.set_per_process_memory_fraction(gb * 1e9 / total, index)
    from deepspeed.accelerator import get_accelerator

    seen: Any = get_accelerator()
    seen.total_memory = lambda device_index=None: int(gb * 1e9)
    seen.available_memory = lambda device_index=None: max(0, int(gb * 1e9) - torch.cuda.memory_reserved(index))


def link_gbps(device: torch.device | str) -> dict[str, float]:
    """GB/s of copies between pinned host memory and the device: up, down, and both at once."""
    device, nbytes = torch.device(device), 2**30
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def timed(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for stream, (to, source) in zip(streams, copies, strict=False):
            with torch.cuda.stream(stream):
                for _ in range(4):
                    to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 4 * nbytes * len(copies) / (time.perf_counter() - start) / 1e9

    up, down = (there[0], host[0]), (host[1], there[1])
    timed([up, down])
    return {"up": timed([up]), "down": timed([down]), "both": timed([up, down])}


def cpu_adam_gparams_per_s(*, numel: int) -> float:
    """G parameters/s of DeepSpeed's AdamW on the CPU in float32: the step that ZeRO-Offload waits for."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    adam = DeepSpeedCPUAdam([parameter], lr=1e-4)
    return numel / seconds_of(adam.step, torch.device("cpu")) / 1e9
