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
AGAIN = """
import datetime, os
import deepspeed
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # registers the backend "fake"
from ds_zo.plugin.rank_check import wait_for_all_ranks

rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)


def wait_in_a_new_group(name, *ranks):
    # The backend makes no connections: gloo's own keys in the store may be those of an earlier group.
    dist.init_process_group("fake", store=store, rank=rank, world_size=2)
    # One second for the rank that stays away, a minute for one that comes.
    limit = datetime.timedelta(seconds=60 if len(ranks) == 2 else 1)
    dist.distributed_c10d._get_default_store().set_timeout(limit)
    outcome = "absent"
    if rank in ranks:
        try:
            wait_for_all_ranks()
            outcome = "all came"
        except RuntimeError as error:
            outcome = "named rank 1" if "on rank 1" in str(error) else str(error)
    dist.destroy_process_group()
    store.set(f"{name} {rank}", "")
    store.wait([f"{name} 0", f"{name} 1"], datetime.timedelta(seconds=60))
    return outcome


print([wait_in_a_new_group("first", 0, 1), wait_in_a_new_group("second", 0), wait_in_a_new_group("third", 0, 1)])
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


def test_a_group_made_anew_over_the_same_store_is_checked_anew(run_ranks: Callable[..., list[str]]) -> None:
    first, second = run_ranks(AGAIN)
    assert "['all came', 'named rank 1', 'all came']" in first
    assert "['all came', 'absent', 'all came']" in second
