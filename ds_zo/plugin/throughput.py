"""Measures samples per second without synchronising the device.

[Note: timing without waiting] DeepSpeed's throughput timer synchronises the device twice a step to read the clock. The
host can then issue no work ahead: kernels and uploads of the next step start only after the last one has ended. This
costs some milliseconds a step. Events on the compute stream measure the same times, and the host reads them when the
device has passed them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer


class EventTimer(ThroughputTimer):
    """DeepSpeed's timer with events: see [Note: timing without waiting]. Only a report waits for the device."""

    @classmethod
    def instead_of(cls, timer: ThroughputTimer) -> ThroughputTimer:
        """An `EventTimer` with the settings of `timer`, or `timer` itself where it does not synchronise or the device
        has no events."""
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
        self._begin: Any = None
        """Event at the start of the running micro-step; None outside of one."""
        self._spans: deque[tuple[Any, Any, int]] = deque()
        """Begin event, end event and global step of each micro-step that is not in the sums yet."""
        self._last_step = -1
        """Global step whose time `step_elapsed_time` is."""

    def start(self) -> None:
        self._init_timer()
        self.started = True
        if self.global_step_count >= self.start_step:
            self._begin = _now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self._begin is not None:
            self._spans.append((self._begin, _now(), self.global_step_count))
            self._begin = None
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
        """Adds the times of finished micro-steps to the sums. With `wait` it waits for those that are not finished."""
        while self._spans and (wait or self._spans[0][1].query()):
            begin, end, step = self._spans.popleft()
            if wait:
                end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
            self.total_elapsed_time += seconds
            self.step_elapsed_time = seconds + (self.step_elapsed_time if step == self._last_step else 0.0)
            self._last_step = step


def _now() -> Any:
    """An event recorded on the current stream."""
    event = get_accelerator().Event(enable_timing=True)
    event.record()
    return event
