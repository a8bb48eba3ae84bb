"""Samples per second without stopping the device.

[Note: timing without waiting] DeepSpeed's throughput timer empties the device twice a step to read the clock. The
host can then issue nothing ahead: kernels and uploads of the next step start only after the last one has ended, some
milliseconds a step that no schedule wins back. Events on the compute stream measure the same spans, and the host reads
them once the device has passed them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer


class EventTimer(ThroughputTimer):
    """DeepSpeed's timer, by events; see [Note: timing without waiting]. Only a report waits, for its own step."""

    @classmethod
    def instead_of(cls, timer: ThroughputTimer) -> ThroughputTimer:
        """`timer` itself where it waits for nothing: switched off, told not to, or on a device without events."""
        config = timer.config
        if not (config.enabled and config.synchronized) or get_accelerator().Event is None:
            return timer
        return cls(
            config,
            timer.batch_size,
            start_step=timer.start_step,
            steps_per_output=timer.steps_per_output,
            logging_fn=timer.logging,
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_elapsed_time: float = 0.0
        self._begun: Any = None
        self._spans: deque[tuple[Any, Any, int]] = deque()
        """Begin, end and global step of what has not been added up yet."""
        self._last_step = -1
        """The one that `step_elapsed_time` is of."""

    def start(self) -> None:
        self._init_timer()
        self.started = True
        if self.global_step_count >= self.start_step:
            self._begun = _now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._begun is not None:
            self._spans.append((self._begun, _now(), self.global_step_count))
            self._begun = None
        self._add_up(wait=False)
        if not global_step:
            return
        self.global_step_count += 1
        if report_speed and self._is_report_boundary() and self.global_step_count > self.start_step:
            self._add_up(wait=True)
            memory = get_accelerator()
            self.logging(
                f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
                f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, "
                f"CurrSamplesPerSec={self.batch_size / max(self.step_elapsed_time, 1e-9)}, "
                f"MemAllocated={round(memory.memory_allocated() / 1024**3, 2)}GB, "
                f"MaxMemAllocated={round(memory.max_memory_allocated() / 1024**3, 2)}GB"
            )

    def avg_samples_per_sec(self) -> float:
        self._add_up(wait=True)
        return float(super().avg_samples_per_sec())

    def _add_up(self, *, wait: bool) -> None:
        while self._spans and (wait or self._spans[0][1].query()):
            begin, end, step = self._spans.popleft()
            if wait:
                end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
            self.total_elapsed_time += seconds
            self.step_elapsed_time = seconds + (self.step_elapsed_time if step == self._last_step else 0.0)
            self._last_step = step


def _now() -> Any:
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
