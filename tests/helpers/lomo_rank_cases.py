"""What ranks do in the tests of LOMO. Each function runs in every rank of a job and returns what the test compares."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ablations import in_turn
from tests.helpers.batch_sizes import batch_sizes
from tests.helpers.lomo_runs import config_for, lively, start, streamed
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import weights
from tests.helpers.zo_rank_cases import counted, digest, mine

STAYS_OUT = {"resident_blocks": 0}
"""On a GPU, tiny models would otherwise come to stay."""
GROUPED = {"norm_scope": "group"}
CASES: dict[str, dict[str, Any]] = {
    "one pass": config_for(),
    "bare": config_for(),
    "clipped": config_for(clipping=0.5),
    "grouped": config_for(clipping=0.5, params=GROUPED),
    "adalomo": config_for("AdaLOMO", lr=1e-2, clipping=0.5),
    "bf16": config_for(lr=1e-2, clipping=0.5, bf16={"enabled": True}),
    "fp16": config_for(lr=1e-2, fp16={"enabled": True, "initial_scale_power": 8}),
    "poisoned": config_for(clipping=0.5),
    "streamed": streamed(clipping=0.5, stream=STAYS_OUT),
    "streamed, grouped": streamed(clipping=0.5, params=GROUPED, stream=STAYS_OUT),
    "streamed adalomo": streamed("AdaLOMO", lr=1e-2, stream=STAYS_OUT),
    "streamed, tiles, inputs on the host": streamed(
        clipping=0.5, stream={**STAYS_OUT, "tiles": 2, "offload_activations": True}
    ),
    "streamed bf16": streamed(lr=1e-2, bf16={"enabled": True}, stream=STAYS_OUT),
}
if torch.cuda.is_available():
    CASES["streamed, then filled"] = streamed(clipping=0.5)  # blocks come to stay after the first step


def small_buckets() -> None:
    """So that a tiny block takes several, where ranks have shards."""
    from ds_zo.backends.lomo import buckets

    buckets._SHARDS_NBYTES = 2048


def with_stage(config: dict[str, Any], stage: int) -> dict[str, Any]:
    return {**config, "zero_optimization": {**config.get("zero_optimization", {}), "stage": stage}}


def batch_of(size: int, *, seed: int, on: Any) -> dict[str, torch.Tensor]:
    return {k: v.to(on.device) for k, v in tiny_batch("llama", seed=seed, batch_size=size, length=8).items()}


def stored_nbytes(engine: Any) -> dict[str, int]:
    """What this rank keeps of streamed or sharded blocks, and how large they are."""
    block_store = engine.backend.blocks.store
    if block_store is None:
        return {"kept": 0, "blocks": 0}
    cut = [p for block in block_store.placement.blocks if block.is_sharded for p in block.module.parameters()]
    assert all(p.untyped_storage().nbytes() <= 8 for p in cut), "parameters take memory beside the shards"
    return {
        "kept": block_store.store.nbytes,
        "blocks": sum(b.nbytes for b in block_store.placement.blocks if b.streamed),
    }


class Watch:
    """What a reducer does from now on. `events`: with which bucket, `came` a gradient, `sent`, `taken`. `max_live`: how
    many buckets had buffers at once. `nbytes`: the size of the buffers sent."""

    def __init__(self, passes: Any) -> None:
        self.events: list[tuple[str, int]] = []
        self.max_live = self.nbytes = 0
        if dist.get_world_size() == 1:
            return
        reducer = passes.reducer
        bucket_of = {id(slot): i for i, bucket in enumerate(reducer._buckets) for slot in bucket.states}
        add, launch = reducer.add, reducer._launch
        consume, consume_shards = passes.consume_bucket, passes.consume_shards

        def watched_add(slot: Any, grad: torch.Tensor) -> None:
            self.events.append(("came", bucket_of[id(slot)]))
            add(slot, grad)

        def watched_launch(bucket: Any) -> None:
            self.events.append(("sent", bucket_of[id(bucket.states[0])]))
            launch(bucket)
            self.max_live = max(self.max_live, sum(bool(other.buffers) for other in reducer._buckets))
            self.nbytes += sum(buffer.nbytes for buffer in bucket.buffers.values())

        def watched_consume(gradients: Any, **guard: Any) -> None:
            self.events.append(("taken", bucket_of[id(gradients[0][0])]))
            consume(gradients, **guard)

        def watched_consume_shards(block: Any, shards: Any, **guards: Any) -> None:
            self.events.extend(("taken", bucket) for bucket in {bucket_of[id(slot)] for slot, _, _ in shards})
            consume_shards(block, shards, **guards)

        reducer.add, reducer._launch = watched_add, watched_launch
        passes.consume_bucket, passes.consume_shards = watched_consume, watched_consume_shards


def runs(rank: int, names: list[str], stage: int = 0) -> dict[str, Any]:
    """Three steps of each case on this rank's part of the global batch. Rank 0's weights count."""
    if torch.cuda.is_available():
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    num_ranks = dist.get_world_size()
    small_buckets()
    found = {}
    for name in names:
        model = lively("llama", seed=rank)
        sizes = batch_sizes(model)
        config = {**CASES[name], "train_micro_batch_size_per_gpu": 4 // num_ranks}
        engine = start(with_stage(config, stage), model)
        digests = []
        for step in range(3):
            if step == 2:
                watch = Watch(engine.backend._passes)
            batch = mine(batch_of(4, seed=step, on=engine), index=rank, of=num_ranks)
            loss = engine(**batch).loss
            if name == "poisoned" and step == 1 and rank == num_ranks - 1:
                loss = loss * float("nan")
            if name == "bare":
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            digests.append(digest(engine))
        found[name] = {
            "weights": weights(engine.module),
            "norm": engine.get_global_grad_norm(),
            "skipped": engine.skipped_steps,
            "digests": digests,
            "samples_at_once": sizes[-1],
            "max_live_buckets": watch.max_live,
            "events": watch.events,
            **stored_nbytes(engine),
        }
        engine.destroy()
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.spare = nn.Parameter(torch.ones(8))
        """Used by some ranks at some steps, and by none at others."""

    def forward(self, x: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        y = self.linear(x).tanh()
        return x + (y * self.spare if uses_spare else y)


class Uneven(nn.Module):
    """Which of its parameters get gradients depends on the rank and the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.inlet = nn.Linear(8, 8)
        self.side = nn.Linear(8, 8)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, used: list[int], spare: list[int], side: bool) -> torch.Tensor:
        x = self.inlet(x)
        for i in used:
            x = self.blocks[i](x, i in spare)
        return (self.side(x) if side else x).square().mean()


def uses(step: int, part: int, *, in_order: bool) -> dict[str, Any]:
    """What part 0 or 1 of the batch goes through: some blocks and, if not `in_order`, some twice or out of turn."""
    third = [[0, 1, 3], [1]] if in_order else [[0, 1, 0, 3], [3, 1]]
    used = [[[0, 1, 2, 3], [0, 3]], [[1, 2], [0, 1, 2, 3]], third, [[0], [1, 2]]][step][part]
    return {"used": used, "spare": [[2], [], [0], [0, 1]][step] if part else [3], "side": part == step % 2}


EVERYWHERE = {
    "resident": config_for(clipping=0.5, params={"weight_decay": 0.1}),
    "one pass": config_for(params={"weight_decay": 0.1}),
    "grouped": config_for(clipping=0.2, params=GROUPED),
}
STREAMED = {
    "streamed": streamed(clipping=0.5, params={"weight_decay": 0.1}, stream=STAYS_OUT),
    "one slot": streamed(stream=STAYS_OUT),
    "frozen": streamed(clipping=0.5, stream=STAYS_OUT),
}


def uneven(rank: int, stage: int | None) -> dict[str, Any]:
    """Both halves of a batch on one rank, one on each of two. With a stage: with blocks in order."""
    found = {}
    num_ranks = dist.get_world_size()
    small_buckets()
    for name, config in {**STREAMED, **EVERYWHERE}.items():
        model = Uneven()
        model.blocks[2].requires_grad_(name != "frozen")
        with in_turn() if name == "one slot" else nullcontext():
            engine = start(with_stage(config, stage or 0), model)
        digests = []
        for step in range(4):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step)).to(engine.device)
            parts = [rank] if num_ranks == 2 else [0, 1]
            losses = [engine(x[part : part + 1], **uses(step, part, in_order=stage is not None)) for part in parts]
            engine.backward(torch.stack(losses).mean())
            engine.step()
            digests.append(digest(engine))
        found[name] = {"weights": weights(engine.module), "digests": digests}
        engine.destroy()
    return found


def wire(rank: int) -> dict[str, Any]:
    """Bytes reduced in one step, and the trained model's."""
    found = {}
    sharded = {f"sharded {name}": with_stage(CASES[name], 3) for name in ("one pass", "clipped", "adalomo")}
    whole = {name: CASES[name] for name in ("one pass", "clipped", "bf16", "streamed")}
    for name, config in {**whole, **sharded}.items():
        engine = start(config, lively("llama"))
        _step(engine, 0)  # agrees on the order of buckets
        watch, block_store = Watch(engine.backend._passes), engine.backend.blocks.store
        gathered = 0 if block_store is None else block_store.transport.bytes_wire
        with counted() as counts:
            _step(engine, 1)
        parameters = list(engine.module.parameters())
        found[name] = {
            "reduced": watch.nbytes,
            "by_all_reduce": counts["all_reduce"],
            "gradient": sum(p.numel() * p.element_size() for p in parameters),
            "num_parameters": len(parameters),
            "num_buckets": len(engine.backend._passes.reducer._buckets),
            "in_blocks": sum(p.numel() * p.element_size() for p in engine.module.model.layers.parameters()),
            "gathered": 0 if block_store is None else block_store.transport.bytes_wire - gathered,
            **stored_nbytes(engine),
        }
        last = batch_of(2, seed=2, on=engine)
        if rank == dist.get_world_size() - 1:  # its last batch is shorter
            last = {key: value[:1, :5] for key, value in last.items()}
        engine.backward(engine(**last).loss)
        engine.step()
        found[name]["digest"] = digest(engine)
    return found


SAVED = {
    "adalomo": CASES["adalomo"],
    "streamed": CASES["streamed"],
    "sharded": with_stage(CASES["streamed adalomo"], 3),
    "on devices": with_stage(CASES["bf16"], 3),
    "adalomo on devices": with_stage(CASES["adalomo"], 3),
}


def save(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, config in SAVED.items():
        engine = start(config, lively("llama"))
        _step(engine, 0)
        engine.save_checkpoint(str(folder / name))
        on_devices = "on devices" in name and dist.get_world_size() > 1
        if rank == 0 or on_devices:
            engine.eval()
            with torch.no_grad():
                engine(**batch_of(2, seed=0, on=engine))  # by this rank alone, but where it has shards alone
            engine.train()
        _step(engine, 1)
        found[name] = weights(engine.module)
        if on_devices:
            _read_and_write(engine, folder / "whole")
            with pytest.raises(RuntimeError, match="an engine needs whole weights"):
                start(config, engine.module)  # which the first one's end leaves without
    return found


def _read_and_write(engine: Any, folder: Path) -> None:
    """What DeepSpeed and users do with the weights of a model whose ranks have shards."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    now = weights(engine.module)
    engine.save_16bit_model(str(folder), "whole.bin")
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        for written in (torch.load(folder / "whole.bin"), consolidated):
            assert all(torch.equal(value, now[name]) for name, value in written.items())
            assert written.keys() == now.keys()
    name, p = next((name, p) for name, p in engine.module.named_parameters() if "layers.1" in name and p.dim() == 2)
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
        assert torch.equal(p.detach().cpu(), now[name])
        if dist.get_rank() == 0:
            p.data.fill_(0.5)
    assert (safe_get_full_fp32_param(p) == 0.5).all()
    safe_set_full_fp32_param(p, torch.full(p.shape, 0.25, device=engine.device))
    assert (weights(engine.module)[name] == 0.25).all()
    engine.module.load_state_dict(now)
    assert all(torch.equal(value, now[name]) for name, value in weights(engine.module).items())
    copied = copy.deepcopy(engine.module).state_dict()
    assert all(torch.equal(value.cpu(), now[name]) for name, value in copied.items())


def resume(rank: int, folders: list[Path]) -> dict[str, Any]:
    found = {}
    for folder in folders:
        for name, config in SAVED.items():
            engine = start(config, lively("llama", seed=5))
            assert all(p.data.shape == p.shape for p in engine.module.parameters())  # some show copies until the load
            engine.load_checkpoint(str(folder / name))
            _step(engine, 1)
            if "on devices" in name:
                found[f"{folder.name} {name}"] = weights(engine.module)
                engine.destroy()
                if dist.get_world_size() > 1:
                    assert not any(p.numel() for p in engine.module.model.layers.parameters())
                continue
            engine.destroy()
            found[f"{folder.name} {name}"] = weights(engine.module)
    return found


def _step(engine: Any, seed: int) -> None:
    """On a batch that all ranks share, so that it is the same on any number of them."""
    engine.backward(engine(**batch_of(2, seed=seed, on=engine)).loss)
    engine.step()


def apart(rank: int) -> dict[str, Any]:
    """One rank evaluates where the other trains, and weights are in shards on both."""
    engine = start(with_stage(CASES["one pass"], 3), lively("llama"))
    _step(engine, 0)
    try:
        if rank == 0:
            _step(engine, 1)
        else:
            engine.eval()
            with torch.no_grad():
                engine(**batch_of(2, seed=1, on=engine))
    except RuntimeError as error:
        return {"message": str(error)}
    return {"message": "went on"}


def write_gathered(rank: int) -> dict[str, Any]:
    """What each rank has after rank 1 has written to a weight on the device, under `GatheredParameters`."""
    import deepspeed

    engine = start(CASES["adalomo"], lively("llama"))
    p = next(engine.module.parameters())
    with deepspeed.zero.GatheredParameters([p], modifier_rank=1):
        p.data.fill_(float(rank))
    _step(engine, 0)
    return {"written": p.detach(), "digest": digest(engine)}
