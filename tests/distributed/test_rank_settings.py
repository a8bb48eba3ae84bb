"""Settings that decide an update and differ between ranks: refused by every rank, with the name of the key."""

from __future__ import annotations

import json
from collections.abc import Callable

SCRIPT = """
import json
import deepspeed, torch
import ds_zo.config
from tests.helpers.lomo_runs import config_for, streamed
from tests.helpers.zo_runs import Toy, toy_batches

deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
rank = torch.distributed.get_rank()

def engine_for(config, **kwargs):
    try:
        engine = deepspeed.initialize(model=Toy(), config=config, **kwargs)[0]
    except ds_zo.config.ConfigError as error:
        return str(error)
    engine.destroy()
    return "made"

LSP = {"subspace_dim": 2, "nonzeros_per_row": 1, "projector": "random"}
schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10 + rank}}
own = {"stream": {"device_memory_gb": 1 + rank, "device_slots": 2 + rank}, "checkpoint": {
    "trajectory_dir": f"rank{rank}", "keep_last": 1 + rank, "asynchronous": bool(rank)}}
found = {
    "ZO lr": engine_for(streamed("ZO", lr=1e-5 * (1 + rank))),
    "ZO seed": engine_for(streamed("ZO", lr=1e-5, params={"seed": rank})),
    "LOMO lr": engine_for(config_for("LOMO", lr=1e-2 * (1 + rank))),
    "LSP seed": engine_for(config_for("LSP", lr=1e-2, params={**LSP, "seed": rank})),
    "rounding": engine_for(config_for("LOMO", ds_zo={"rounding": "nearest" if rank else "stochastic"})),
    "clipping": engine_for(config_for("AdaLOMO", clipping=1.0 + rank)),
    "scheduler": engine_for(config_for("LOMO", scheduler=schedule)),
    "own": engine_for({**streamed("ZO", lr=1e-5), "ds_zo": own}),
    "same": engine_for(config_for("LSP", lr=1e-2, params=LSP)),
}
model = Toy()
groups = [{"params": list(model.parameters()), "lr": 1e-2 * (1 + rank)}]
config = {"train_micro_batch_size_per_gpu": 2, "ds_zo": {"backend": "lomo"}}
try:
    deepspeed.initialize(model=model, optimizer=torch.optim.SGD(groups), config=config)
except ds_zo.config.ConfigError as error:
    found["client's lr"] = str(error)
print("OUT" + json.dumps(found))
"""


def test_settings_that_differ_are_named_by_every_rank(run_ranks: Callable[..., list[str]]) -> None:
    outs = run_ranks(SCRIPT)
    found = [json.loads(next(line for line in out.splitlines() if line.startswith("OUT"))[3:]) for out in outs]
    assert found[0] == found[1]
    places = {
        "ZO lr": "optimizer.params.lr",
        "ZO seed": "optimizer.params.seed",
        "LOMO lr": "optimizer.params.lr",
        "LSP seed": "optimizer.params.seed",
        "rounding": "ds_zo.rounding",
        "clipping": "gradient_clipping",
        "scheduler": "scheduler.params.warmup_num_steps",
        "client's lr": "param_groups[0].lr",
    }
    for case, at in places.items():
        assert found[0][case].startswith(f"all ranks need the same {at},"), (case, found[0][case])
        assert "rank 1" in found[0][case]
    assert found[0]["own"] == found[0]["same"] == "made"
