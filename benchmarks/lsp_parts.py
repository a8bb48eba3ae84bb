"""Parts of a step of LSP, and ZeRO-Offload's Adam, that a case switches off.

[Note: taken apart by switching off] Work that overlaps has no time of its own. What of it a step waits for is the time
that the step saves when the work is left out: first the CPU's Adam, then the copies too. What remains above forward and
backward is the GPU's own update (for LSP: compressing and applying). The kinds of step take turns, so that a machine
that grows slower does so for all of them; a difference below `exposed_spread_s`, by which the same steps differ between
turns, is noise, and may be negative.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

from ds_zo.backends.lsp.backend import LSPBackend
from ds_zo.backends.lsp.host_adam import HostAdam
from ds_zo.backends.lsp.host_group import HostGroup
from ds_zo.backends.lsp.scheduler import ServiceOrder
from ds_zo.backends.lsp.transfers import Copy, CopyLane, Transfers, UploadBuffer
from ds_zo.records.rows import Row
from ds_zo.streaming.streams import Stream

TURNS = 3
"""Turns of each kind of step."""


def lsp_of(engine: Any) -> LSPBackend | None:
    """The LSP backend of an engine; None: the engine is of another method, or there is none."""
    backend = getattr(engine, "backend", None)
    return backend if isinstance(backend, LSPBackend) else None


def taken_apart(engine: Any, one_turn: Callable[[], list[float]]) -> Row:
    """Seconds that a step of LSP or ZeRO-Offload waits for its parts. `one_turn` makes some steps and returns the
    seconds of each."""
    backend = lsp_of(engine)
    left_out: dict[str, list[Callable[[], AbstractContextManager[None]]]] = {"as it is": []}
    if backend is None:
        left_out["no CPU"] = [partial(_no_zero_adam, engine)]
    else:
        no_adam, no_copies = partial(_no_lsp_adam, backend), partial(_no_lsp_copies, backend)
        left_out |= {"no CPU": [no_adam], "no copies": [no_adam, no_copies]}
    turns: dict[str, list[list[float]]] = {name: [] for name in left_out}
    for _ in range(TURNS):
        for name, parts in left_out.items():
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(part())
                turns[name].append(one_turn())
    as_is, no_cpu, *rest = (statistics.median(chain.from_iterable(found)) for found in turns.values())
    medians = [statistics.median(found) for found in turns["as it is"]]
    row: Row = {"exposed_cpu_s": as_is - no_cpu, "rest_s": no_cpu, "apart_step_s": as_is}
    if rest:
        row |= {"exposed_copy_s": no_cpu - rest[0], "rest_s": rest[0]}
    return {**row, "exposed_spread_s": max(medians) - min(medians), "apart_seconds": turns}


@contextmanager
def _no_lsp_adam(backend: LSPBackend) -> Iterator[None]:
    """Directions stay those of the last step that had them, and are uploaded as before."""
    with patch.object(HostAdam, "update", lambda adam, active, *, factor: torch.ones(len(active))):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_lsp_copies(backend: LSPBackend) -> Iterator[None]:
    issue = Copy.issue

    def issue_nothing(copy: Copy, stream: Stream) -> None:
        copy.pairs = ()
        issue(copy, stream)

    def upload(transfers: Transfers, group: object, source: torch.Tensor) -> UploadBuffer:
        free = (buffer for buffer in transfers.upload_buffers if buffer.owner is None)
        buffer = next(free, transfers.upload_buffers[0])
        buffer.owner = group
        return buffer

    with (
        patch.object(Transfers, "upload", upload),
        patch.object(Copy, "issue", issue_nothing),
        patch.object(HostGroup, "_gradient_pairs", lambda group, job, whole: []),
    ):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_early_uploads(backend: LSPBackend) -> Iterator[None]:
    """The Adam thread leaves uploads to the main thread, which issues them from `step` on."""
    uploads, advance = backend.groups.transfers.up, CopyLane.advance

    def from_step_on(lane: CopyLane) -> None:
        if lane is not uploads or threading.current_thread() is threading.main_thread():
            advance(lane)

    with patch.object(CopyLane, "advance", from_step_on):
        yield
        backend.apply_pending_updates()


@contextmanager
def _no_last_first(backend: LSPBackend) -> Iterator[None]:
    with patch.object(ServiceOrder, "pop", lambda order, waiting: waiting.popleft()):
        yield


@contextmanager
def _no_zero_adam(engine: Any) -> Iterator[None]:
    """ZeRO-Offload without its CPU step: gradients go down, parameters come up."""
    with patch.object(engine.optimizer.optimizer, "step", lambda *args, **kwargs: None):
        yield


WITHOUT: dict[str, Callable[[LSPBackend], AbstractContextManager[None]]] = {
    "early uploads": _no_early_uploads,
    "last first": _no_last_first,
}
"""By name: parts of LSP's schedule, and what switches each off."""
