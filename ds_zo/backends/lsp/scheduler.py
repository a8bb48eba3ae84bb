"""The thread that runs Adam on the CPU, and the order in which it takes the layers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

import torch


def transition_layer(num_layers: int, *, backward_s: float, download_s: float, update_s: float, upload_s: float) -> int:
    """The deepest layer whose work may still block the first layer of the next forward pass (the paper's appendix).

    `backward_s` is of the whole backward pass, the others of one layer. Layers deeper than that are served first come,
    first served; from it on the last to come is served first, since the next forward pass needs it first.
    """
    slowest = max(download_s, update_s, upload_s)
    if slowest <= 0:
        return 0
    hidden = (backward_s - (download_s + update_s + upload_s)) / slowest
    return round(min(max(num_layers - hidden, 0), num_layers))


class Job:
    """One layer's turn on the CPU."""

    def __init__(self, work: Callable[[], torch.Tensor], *, ready: torch.cuda.Event | None = None) -> None:
        self._work = work
        self.ready = ready
        """Its payload is in host memory."""
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self.norms: torch.Tensor | None = None
        """What its work returned."""
        self.is_finite = False
        """All of them are."""
        self.seconds = 0.0

    @property
    def is_finished(self) -> bool:
        return self._finished.is_set()

    def run(self) -> None:
        try:
            if self.ready is not None:
                self.ready.synchronize()
            begin = time.perf_counter()
            self.norms = self._work()
            self.is_finite = all(map(math.isfinite, self.norms.tolist()))
            self.seconds = time.perf_counter() - begin
        except BaseException as error:  # raised where somebody waits
            self._error = error
        finally:
            self._finished.set()

    def fail(self, error: BaseException) -> None:
        """It will never run."""
        self._error = error
        self._finished.set()

    def wait(self) -> torch.Tensor:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        assert self.norms is not None
        return self.norms


class ToldJob(Job):
    """One that another rank does. Its work is to read what that rank told, done by whoever asks first."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        super().__init__(work)
        self._told = threading.Event()
        self._lock = threading.Lock()

    def told(self, ready: torch.cuda.Event | None) -> None:
        self.ready = ready
        self._told.set()

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._told.set()

    def wait(self) -> torch.Tensor:
        self._told.wait()
        with self._lock:
            if not self.is_finished:
                self.run()
                self.seconds = 0.0  # nobody's measure of Adam
        return super().wait()


class UpdateQueue:
    """Jobs for one thread, whose kernels use all the cores it is given: a layer is done soonest when nobody shares
    them with it."""

    def __init__(self, *, num_threads: int | None = None, device: torch.device | None = None) -> None:
        """`device`: whose copies the thread waits for."""
        self.last_first = False
        """Serve what came last; else what came first."""
        self._num_threads = num_threads
        self._device = device
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, job: Job) -> None:
        with self._changed:
            assert not self._is_closed
            self._jobs.append(job)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ds_zo-lsp-adam", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after the jobs it has. Safe to call twice."""
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
            return self._jobs.pop() if self.last_first else self._jobs.popleft()

    def _serve(self) -> None:
        if self._device is not None and self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first, and would make a context there
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)  # of this thread
        while (job := self.take()) is not None:
            job.run()
            del job
