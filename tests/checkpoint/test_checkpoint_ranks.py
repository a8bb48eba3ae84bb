"""Two ranks: one writes, both resume with their own random states and half-summed windows, and both learn of errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
import deepspeed
import ds_zo
from ds_zo.checkpoint import CheckpointError
from tests.helpers.checkpoint_runs import assert_same_bits, planes, with_checkpoint
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.zo_runs import engine_for, train, zo_json

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank = torch.distributed.get_rank()
saves = Path(sys.argv[1])
json = zo_json(interval=3, gradient_accumulation_steps=2, bf16={"enabled": True})
batches = [tiny_batch("opt", seed=10 * i + rank, batch_size=2, length=6) for i in range(9)]

def engine(**settings):
    return engine_for(tiny_model("opt", dropout=0.2), with_checkpoint(json, **settings))

torch.manual_seed(rank)
whole = engine()
torch.manual_seed(100 + rank)
expected = train(whole, batches)
first = engine(asynchronous=True, trajectory=True)
torch.manual_seed(100 + rank)
losses = train(first, batches[:5])
first.save_checkpoint(str(saves))
first.wait_for_checkpoint()
torch.distributed.barrier()
torch.manual_seed(5)
resumed = engine()
_, client = resumed.load_checkpoint(str(saves))
losses += train(resumed, batches[5:])
assert losses == expected, (losses, expected)
assert_same_bits(planes(resumed), planes(whole))

# Recovery from the trajectory, which one rank has written, on both.
train(first, batches[5:8])
recovered = engine(trajectory=True)
recovered.load_checkpoint(str(saves))
assert recovered.global_steps == 4, recovered.global_steps
assert_same_bits(planes(recovered), planes(first))

# One rank can't write; both raise.
(saves / "file").write_text("")
torch.distributed.barrier()
try:
    whole.save_checkpoint(str(saves / "file"))
except CheckpointError as error:
    print("RAISED", error)
print("OUT done")
"""


@pytest.mark.slow
def test_two_ranks(run_ranks: Callable[..., list[str]], tmp_path: Path) -> None:
    outputs = run_ranks(SCRIPT, str(tmp_path))
    assert all("OUT done" in out and "RAISED" in out for out in outputs)
    assert "another rank failed: checkpoint" in outputs[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "global_step2", "latest", "trajectory.bin"]
