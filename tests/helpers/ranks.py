"""Jobs of several ranks on this machine, whose work is a function that can be imported by name."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.forkserver import forkserver_context
from tests.helpers.processes import let_cpus_have_fp16, rank_environment


def job(work: Callable[..., Any], num_ranks: int, *args: Any, **settings: Any) -> list[Any]:
    """As `run_job`, of work that returns a dictionary in every rank."""
    found = run_job(work, num_ranks, *args, **settings)
    for rank, answer in enumerate(found):
        assert isinstance(answer, dict), f"rank {rank}: {answer}"
    return found


def run_job(work: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 120, wait: int = 60) -> list[Any]:
    """`work(rank, *args)` in every rank of a gloo job, forked from one process that has imported everything. Returns
    what each returned, an exception as its text, and None for a rank that died. `wait`: the group's timeout."""
    context = forkserver_context()
    ends = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    ranks = []
    for rank, (_, out) in enumerate(ends):
        environment = rank_environment(rank=rank, world_size=num_ranks, port=0)
        ranks.append(context.Process(target=_rank_main, args=(environment, meeting, wait, out, work, args)))
        ranks[-1].start()
        out.close()
    found = []
    try:
        for process, (end, _) in zip(ranks, ends, strict=True):
            try:
                found.append(pickle.loads(end.recv_bytes()) if end.poll(timeout_s) else "no answer")
            except EOFError:
                found.append(None)
            process.join(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(meeting.parent)
    return found


def _rank_main(
    environment: dict[str, str], meeting: Path, wait: int, out: Any, work: Callable[..., Any], args: Any
) -> None:
    import deepspeed

    torch.set_num_threads(1)
    os.environ.update(environment)
    let_cpus_have_fp16()
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = "0"  # gloo lets ranks share a GPU, NCCL does not
    for name in deepspeed.ops.__compatible_ops__:
        deepspeed.ops.__compatible_ops__[name] = False  # nothing here needs DeepSpeed's compiled extensions
    try:
        deepspeed.init_distributed(
            dist_backend="gloo",
            auto_mpi_discovery=False,
            timeout=timedelta(seconds=wait),
            init_method=f"file://{meeting}",
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
        )
        result = work(dist.get_rank(), *args)
    except BaseException:
        result = traceback.format_exc()
    out.send_bytes(pickle.dumps(result))  # tensors by value: this process ends
    if isinstance(result, dict):
        dist.barrier()  # the rank that others came to by has to stay until they leave
    os._exit(0)
