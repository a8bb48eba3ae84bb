"""Engines that are made, trained and destroyed leave nothing behind. (Memory that the process keeps then is the C
allocator's: it does not grow with their number, and `malloc_trim` gives it back.)"""

from __future__ import annotations

import gc
import weakref
from logging import LogRecord
from typing import Any

import pytest

from tests.helpers.lomo_runs import config_for, start, streamed
from tests.helpers.zo_runs import Toy, one_step, toy_batches

pytestmark = pytest.mark.usefixtures("single_process")

LSP = {"subspace_dim": 2, "nonzeros_per_row": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "zo": streamed("ZO", lr=1e-3),
    "lomo": streamed("LOMO"),
    "lsp": config_for("LSP", params=LSP, lr=1e-2, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_objects_do_not_grow_with_the_number_of_engines(kind: str) -> None:
    batches = toy_batches(2)

    def make_and_destroy() -> int:
        engine = start(CONFIGS[kind], Toy())
        for batch in batches:
            one_step(engine, batch)
        parts = [weakref.ref(part) for part in (engine, engine.module, engine.backend, engine.optimizer)]
        engine.destroy()
        del engine
        gc.collect()
        assert [part() for part in parts] == [None] * len(parts)
        return sum(not isinstance(found, (LogRecord, dict)) for found in gc.get_objects())  # pytest keeps logs

    counts = [make_and_destroy() for _ in range(4)]
    assert counts[-1] - counts[1] < 3, "less than one object an engine"
