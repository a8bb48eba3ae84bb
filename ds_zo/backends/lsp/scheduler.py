"""The thread that runs Adam on the CPU, and the order in which it serves layers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ds_zo.streaming.streams import DONE, Event

Waiting = TypeVar("Waiting")


def transition_layer(num_layers: int, *, backward_s: float, download_s: float, update_s: float, upload_s: float) -> int:
    """The deepest layer whose update may still delay the first layer of the next forward (appendix of LSP's paper).

    `backward_s` is the time of the whole backward pass; the other times are of one layer. Deeper layers are served
    first come, first served. From this layer on, the last to come is served first, because the next forward needs it
    first.
    """
    slowest = max(download_s, update_s, upload_s)
    if slowest <= 0:
        return 0
    hidden = (backward_s - (download_s + update_s + upload_s)) / slowest
    return round(min(max(num_layers - hidden, 0), num_layers))


@dataclass
class ServiceOrder:
    """Who is served next of those that wait. Adam's queue and the copies of both directions share one object."""

    last_first: bool = False
    """The one that came last is served first; otherwise the one that came first."""

    def pop(self, waiting: deque[Waiting]) -> Waiting:
        return waiting.pop() if self.last_first else waiting.popleft()


class Job:
    """The Adam update of one layer on the CPU. One thread at a time has it, and hands it to the next one."""

    def __init__(self, work: Callable[[Job], torch.Tensor], active: Sequence[int] = ()) -> None:
        self._work = work
        self.active = list(active)
        """Indices of the layer's parameters that have a gradient in this step. They are set by the thread that finds
        them, before the job is handed on."""
        self.ready: Event = DONE
        """Recorded after the gradients were copied to host memory."""
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self.norms: torch.Tensor | None = None
        """Norms of the layer's gradients, which the work returns; None before it has run."""
        self.is_finite = False
        """The job has run, and all norms are finite."""
        self.seconds = 0.0
        """Time of the work, without the wait for the gradients."""

    @property
    def is_finished(self) -> bool:
        return self._finished.is_set()

    def run(self) -> None:
        try:
            self.ready.synchronize()
            begin = time.perf_counter()
            self.norms = self._work(self)
            self.is_finite = all(map(math.isfinite, self.norms.tolist()))
            self.seconds = time.perf_counter() - begin
        except BaseException as error:  # `wait` raises it
            self._error = error
        finally:
            self._finished.set()

    def fail(self, error: BaseException) -> None:
        """Ends a job that cannot run. `wait` raises the error."""
        self._error = error
        self._finished.set()

    def wait(self) -> torch.Tensor:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        assert self.norms is not None
        return self.norms


class RemoteJob(Job):
    """A job that another rank runs. The work here reads the norms that the other rank broadcasts; the first caller of
    `wait` does it."""

    def __init__(self, work: Callable[[Job], torch.Tensor]) -> None:
        super().__init__(work)
        self._is_ready = threading.Event()
        self._lock = threading.Lock()

    def set_ready(self, ready: Event) -> None:
        self.ready = ready
        self._is_ready.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._is_ready.set()

    def wait(self) -> torch.Tensor:
        self._is_ready.wait()
        with self._lock:
            if not self.is_finished:
                self.run()
                self.seconds = 0.0  # the time of reading norms says nothing about Adam
        return super().wait()


class UpdateQueue:
    """Queue of jobs for one Adam thread. Its kernels use all cores that it is given: a layer finishes soonest when it
    shares them with no other."""

    def __init__(self, *, num_threads: int | None = None, device: torch.device | None = None) -> None:
        """`device`: the device whose copies the thread waits for."""
        self.order = ServiceOrder()
        self._num_threads = num_threads
        self._device = device
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, job: Job) -> None:
        with self._changed:
            if self._is_closed:
                job.fail(RuntimeError("Adam's thread has ended"))
                return
            self._jobs.append(job)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ds_zo-lsp-adam", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after its queued jobs. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def take(self) -> Job | None:
        """The next job; None when the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None
            return self.order.pop(self._jobs)

    def _serve(self) -> None:
        if self._device is not None and self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread uses device 0 and would create a context there
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # holds for this thread only
        while (job := self.take()) is not None:
            job.run()
            del job
