"""Measurements of one case: seconds of steps, peaks of memory, speed of the link and of the CPU's Adam."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ds_zo.records.environment import host_peak_gb

_FEWEST_STEPS = 2
_SETTLING_STEPS = 2
"""After these an engine has made its choices: what it placed where, how often it writes back."""


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
    """Median, fastest and slowest of `steps` calls after `warmup` untimed ones, with the peaks of memory.

    A step may return its loss, which is kept on the device and read once after the last step. On CUDA each step is
    timed by events on the current stream, so that nothing waits between steps. `max_s` makes fewer of them, two at
    least, where the warm-up says that they would take longer, and ends a warm-up of which two steps or more took half
    of it: the first, in which kernels are compiled, says nothing of those to come. Steps that differ in turns of
    `period` are warmed up and timed in whole turns, or their mean would depend on where it stops. `ages_after` is
    asked, once the engine has settled, how many steps it takes until they cost what they cost in the middle of a run:
    those are warmed up whatever they take.
    """
    device = torch.device(device)
    warmup_seconds: list[float] = []
    least = 0 if ages_after is None else _SETTLING_STEPS
    while len(warmup_seconds) < -(-max(warmup, least) // period) * period:
        if len(warmup_seconds) == _SETTLING_STEPS and ages_after is not None:
            least = max(least, ages_after())
        done, spent_s = len(warmup_seconds), sum(warmup_seconds)
        may_end = done >= max(least, _SETTLING_STEPS) and done % period == 0
        if may_end and max_s is not None and spent_s > max_s / 2:
            break
        start = time.perf_counter()
        step()
        synchronize(device)
        warmup_seconds.append(time.perf_counter() - start)
    if max_s is not None and warmup_seconds:
        steps = min(steps, max(_FEWEST_STEPS, int(max_s / statistics.median_low(warmup_seconds))))
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


def memory_peaks(device: torch.device | str) -> dict[str, float]:
    """GB (10**9 bytes) on the device since the last reset, and the largest this process's host memory ever was."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9 if on_gpu else 0.0,
        "host_peak_gb": host_peak_gb(),
    }


def start_device(name: str, *, cap_gb: float | None = None) -> torch.device:
    """The device that a case runs on, made the current one; `cap_gb` makes it smaller."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        if cap_gb is not None:
            cap_device_memory(cap_gb, device)
    return device


def cap_device_memory(gb: float, device: torch.device | str = "cuda") -> None:
    """Makes allocations beyond `gb` (10**9 bytes) fail as on a smaller card, and DeepSpeed see such a card.

    The limit binds PyTorch's allocator, cached blocks included; CUDA's own context (about 0.5 GB) is outside of it.
    DeepSpeed asks the driver what is free, and flattens on the host what a smaller card has no room for (stage 1 and
    2): not told of the cap, it would run out of memory where on such a card it does not.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    if gb * 1e9 > total:
        raise ValueError(f"a cap must be within the card's {total / 1e9:.1f} GB, got {gb} (--device-memory-gb)")
    index = torch.device(device).index  # which that function wants to be told
    index = torch.cuda.current_device() if index is None else index
    torch.cuda.set_per_process_memory_fraction(gb * 1e9 / total, index)
    from deepspeed.accelerator import get_accelerator

    seen: Any = get_accelerator()
    seen.total_memory = lambda device_index=None: int(gb * 1e9)
    seen.available_memory = lambda device_index=None: max(0, int(gb * 1e9) - torch.cuda.memory_reserved(index))


def link_gbps(device: torch.device | str) -> dict[str, float]:
    """Copy bandwidth between pinned host memory and the device: up, down, and both at once."""
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
    """Speed of DeepSpeed's AdamW on the CPU in G parameters/s, float32, the step ZeRO-Offload waits for."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    adam = DeepSpeedCPUAdam([parameter], lr=1e-4)
    adam.step()
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        adam.step()
        seconds.append(time.perf_counter() - start)
    return numel / statistics.median(seconds) / 1e9
