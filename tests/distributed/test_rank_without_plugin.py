"""A rank without ds_zo is named by the ranks that have it, instead of being waited for in a collective."""

from __future__ import annotations

import re
from collections.abc import Callable

SCRIPT = """
import datetime, os, sys, time
import deepspeed, torch

rank = int(os.environ["RANK"])
if rank != 1:
    import ds_zo
    from ds_zo.plugin import rank_check
    rank_check.REPORT_AFTER_S = 0.3
timeout = datetime.timedelta(seconds=float(sys.argv[1]))
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=timeout)
if rank == 1:
    time.sleep(1.0)  # slower than the report
    if sys.argv[2] == "late":
        import ds_zo
model = torch.nn.Linear(2, 2)
# DeepSpeed's own engine ignores the section ds_zo and trains by this optimizer.
config = {"train_micro_batch_size_per_gpu": 1, "ds_zo": {"backend": "lomo"}}
try:
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    print("MADE", type(engine).__name__)
except Exception as error:
    print("RAISED", error)
"""
REPORT = "ds_zo: rank 1 has not made its engine after "


def test_a_rank_without_ds_zo_is_named(run_ranks: Callable[..., list[str]]) -> None:
    first, _ = run_ranks(SCRIPT, "3", "without")
    assert REPORT in first
    assert re.search("RAISED every rank must make its engine with ds_zo, got none in . s on rank 1: install", first)


def test_a_late_rank_is_waited_for(run_ranks: Callable[..., list[str]]) -> None:
    first, second = run_ranks(SCRIPT, "60", "late")
    assert REPORT in first
    assert "MADE PluginEngine" in first and "MADE PluginEngine" in second
