"""Checks that every rank makes an engine of ours of the same model, before a collective of one rank waits for the
others.

A rank without ds_zo makes DeepSpeed's own engine from the same JSON, if the script has its own optimizer. The
collectives of both engines do not match, and all ranks would wait until the process group's timeout, without a reason.
Tensors of models with other shapes do not match either.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from ds_zo.checkpoint.adapters import settings
from ds_zo.checkpoint.files import hash_json
from ds_zo.config.agreement import check_agreement

REPORT_AFTER_S = 60.0
"""Seconds after which a warning names the ranks that are waited for. They may still be loading their model."""
_LONGEST_PAUSE_S = 0.5
_num_engines: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Engines made so far, by default process group. A group that is made anew, as after a failure, counts from 0."""


def wait_for_all_ranks(model: nn.Module | None = None) -> None:
    """Returns when all ranks of the default process group have called this as often as this rank.

    Raises after that group's timeout, and on every rank if the ranks' models differ in their parameters or in settings
    of PEFT. No key of a call is left in the store: a later group may have the same store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store: Any = _get_default_store()
    if store is None:  # MPI has none
        return
    group = dist.group.WORLD
    assert group is not None
    index = _num_engines.get(group, 0) + 1
    keys = [f"ds_zo/engine {index}/rank {other}" for other in range(num_ranks)]
    facts = {} if model is None else _facts_of(model)
    store.set(keys[rank], hash_json(facts))
    try:
        _wait(store, keys, rank)
    except BaseException:
        store.delete_key(keys[rank])
        raise
    facts_of_ranks: list[dict[str, str]] = []
    if len({store.get(key) for key in keys}) > 1:
        keys += [f"{key}/facts" for key in keys]
        store.set(keys[num_ranks + rank], json.dumps(facts))
        facts_of_ranks = [json.loads(store.get(key)) for key in keys[num_ranks:]]
    _num_engines[group] = index
    num_gone = f"ds_zo/engine {index}/gone"
    if store.add(num_gone, 1) == num_ranks:  # all ranks have seen all keys
        for key in (*keys, num_gone):
            store.delete_key(key)
    check_agreement(facts_of_ranks)


def _facts_of(model: nn.Module) -> dict[str, str]:
    """The name and the form of each parameter, in the model's order, and the settings of PEFT."""
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        shape = list(getattr(p, "ds_shape", p.shape))  # that of `zero.Init` for a parameter that it has partitioned
        kind = "trained" if p.requires_grad else "frozen"
        found[f"parameter {i} of the model"] = f"{name} of shape {shape}, {p.dtype}, {kind}"
    return found | {f"setting {name} of PEFT": value for name, value in settings(model).items()}


def _wait(store: Any, keys: list[str], rank: int) -> None:
    """Returns when the store has the keys of all ranks. Raises after the store's timeout."""
    began, pause_s, is_reported = time.monotonic(), 0.001, False
    timeout_s = store.timeout.total_seconds()
    while not store.check(keys):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s or (waited_s > REPORT_AFTER_S and not is_reported):
            is_reported = True
            has_come = [store.check([key]) for key in keys]
            missing = ", ".join(str(other) for other, is_here in enumerate(has_come) if not is_here)
            if missing and waited_s > timeout_s:
                raise RuntimeError(
                    f"every rank must make its engine with ds_zo, got none in {waited_s:.0f} s on rank {missing}: "
                    "install ds-zo on its host; load it on every rank (ds-zo run, DS_ZO_AUTOLOAD=1 or import ds_zo); "
                    f"use the same JSON on all ranks (rank {missing})"
                )
            if missing and rank == has_come.index(True):
                logger.warning(
                    f"ds_zo: rank {missing} has not made its engine after {waited_s:.0f} s. It may still be loading "
                    f"its model: the job stops after {timeout_s:.0f} s. If it runs without ds_zo, stop the job, and "
                    "start every rank with ds-zo run or DS_ZO_AUTOLOAD=1"
                )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
