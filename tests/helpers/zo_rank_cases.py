"""What ranks do in these tests. Each function runs in every rank of a job and returns what the test compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.weights import weights

BF16 = {"bf16": {"enabled": True}}
GLOBAL_BATCH = 4
NUM_STEPS = 4
"""One more than most runs' interval of write-backs: an update is pending at each step but that of a write-back."""


# Models and runs


def json_for(*, stage: int = 0, interval: int = 3, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    from tests.helpers.zo_runs import zo_json

    json = zo_json(interval=interval, params=params, **{"resident_blocks": 0, **more})
    json["train_micro_batch_size_per_gpu"] = 1
    json["zero_optimization"]["stage"] = stage
    json["zero_optimization"]["offload_param"]["pin_memory"] = True
    return json


def global_batches(num: int = NUM_STEPS, *, size: int = GLOBAL_BATCH) -> list[dict[str, torch.Tensor]]:
    from tests.helpers.zo_runs import toy_batches

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [{name: ids.to(device) for name, ids in batch.items()} for batch in toy_batches(num, size=size)]


def mine(batch: dict[str, torch.Tensor], *, index: int, of: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(of)[index] for name, value in batch.items()}


def engine(json: dict[str, Any], model: Any = None) -> Any:
    """The first rank's weights count: those of other ranks differ."""
    from tests.helpers.zo_runs import Toy, engine_for

    model = Toy(width=512 if torch.cuda.is_available() else 16) if model is None else model
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank())
    return engine_for(model, json)


def trained(json: dict[str, Any], rank: int, *, model: Any = None, groups: int | None = None, **steps: Any) -> Any:
    """An engine after some steps, each rank with its part of the global batch; with `groups`, ranks of a group but its
    first are given nonsense."""
    from tests.helpers.zo_runs import one_step

    made = engine(json, model)
    num_ranks = dist.get_world_size()
    share = 1 if groups is None else num_ranks // groups
    made.norms, made.digests = [], []
    for batch in global_batches(**steps):
        given = mine(batch, index=rank // share, of=num_ranks // share)
        if rank % share:
            given = {name: torch.full_like(ids[:1, :3], rank) for name, ids in given.items()}
        one_step(made, given)
        made.norms.append(made.get_global_grad_norm())
        made.digests.append(digest(made))
    return made


def digest(engine: Any) -> str:
    """Of the weights' bits as this rank sees them."""
    from ds_zo.checkpoint.files import hash_tensors

    return str(hash_tensors({name: value.contiguous() for name, value in weights(engine.module).items()}))


def result(engine: Any) -> dict[str, Any]:
    return {
        "state": weights(engine.module),
        "norms": engine.norms,
        "digests": engine.digests,
        "skipped": engine.skipped_steps,
    }


# Jobs


STORAGES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 split": BF16,
    "bf16 wire": {"master": "wire", **BF16},
    "some resident": {"resident_blocks": 1, **BF16},
    "no overlap": {},
    "two directions": {"params": {"num_directions": 2, "weight_decay": 0.1}},
    "fp8": {"wire_dtype": "fp8", **BF16},
    "bf12": {"wire_dtype": "bf12", "master": "wire", **BF16},
}


WHOLE: dict[str, dict[str, Any]] = {
    "resident": {"offload": False, "resident_blocks": None},
    "accumulated": {"gradient_accumulation_steps": 2},
}
"""Runs whose weights no rank shares with another."""


def storages(rank: int, names: list[str], stages: tuple[int, ...] = (0, 3)) -> dict[str, Any]:
    """Every way to store weights, whole on each rank and sharded."""
    from benchmarks.ablations import in_turn

    found: dict[str, Any] = {}
    for name in names:
        for stage in stages:
            json = json_for(stage=stage, **{**STORAGES, **WHOLE}[name])
            with in_turn() if name == "no overlap" else nullcontext():
                made = trained(json, rank)
            block_store = made.backend.store.blocks
            found[f"{name} {stage}"] = {
                **result(made),
                "host_nbytes": block_store.store.nbytes,
                "bytes_up": block_store.runtime.transport.bytes_up,
                "bytes_down": block_store.runtime.transport.bytes_down,
            }
    return found


def from_folder(rank: int, folder: Path) -> dict[str, Any]:
    """A model that is read from files, and the same model in memory: losses and weights of two steps."""
    from transformers import AutoModelForCausalLM

    from ds_zo.streaming.loading import load_pretrained
    from tests.helpers.tiny_models import tiny_batch
    from tests.helpers.zo_runs import engine_for, train

    found = {}
    for stage in (0, 3):
        for read in (load_pretrained, lambda auto, path: auto.from_pretrained(path)):
            made = engine_for(read(AutoModelForCausalLM, str(folder)).train(), json_for(stage=stage))
            torch.manual_seed(rank)  # of dropout
            losses = train(made, [tiny_batch("llama", seed=seed + rank, batch_size=1, length=8) for seed in (0, 2)])
            found[f"{stage} {len(found)}"] = {"losses": losses, "digest": digest(made)}
    return found


def machines(rank: int) -> dict[str, Any]:
    """Four ranks that believe to be on two machines."""
    from ds_zo.streaming import node
    from ds_zo.streaming.streams import InlineStreams

    node._place = lambda: (str(rank // 2),)  # type: ignore[assignment]
    found = storages(rank, ["bf16 split"])
    found["ranks of this machine"] = node.Node(None, streams=InlineStreams(torch.device("cpu"))).ranks
    return found


def filled(rank: int) -> dict[str, Any]:
    """A GPU with room to spare: every block is on it after the first step."""
    found = {}
    for stage in (0, 3):
        made = trained(json_for(stage=stage, resident_blocks=None, **BF16), rank)
        block_store = made.backend.store.blocks
        streamed = sum(unit.streamed for unit in block_store.placement.blocks)
        found[str(stage)] = {**result(made), "streamed": streamed, "host_nbytes": block_store.store.nbytes}
    return found


def directions(rank: int) -> dict[str, Any]:
    """Four directions on the ranks of this job, divided in every way."""
    num_ranks = dist.get_world_size()
    found = {}
    for divided in (1, 2, 4):
        if num_ranks % divided == 0:
            params = {"num_directions": 4, "direction_parallel": divided}
            for stage in (0, 3) if divided == num_ranks else (0,):
                made = trained(json_for(stage=stage, params=params), rank, groups=num_ranks // divided)
                found[f"{divided} at stage {stage}"] = result(made)
    return found


def refusal(rank: int) -> str:
    from ds_zo.config import ConfigError

    try:
        engine(json_for(params={"num_directions": 3, "direction_parallel": 3}))
    except ConfigError as error:
        return f"refused: {error}"
    return "accepted"


def uneven(rank: int) -> dict[str, Any]:
    """The last batch is short, and shorter on the last rank; and one rank's loss is not a number at one step."""
    from tests.helpers.zo_runs import one_step

    found = {}
    for stage in (0, 3):
        made = engine(json_for(stage=stage, **BF16))
        made.norms, made.digests = [], []
        for step, batch in enumerate(global_batches(4, size=8)):
            given = mine(batch, index=rank, of=dist.get_world_size())
            if step == 3 and rank == dist.get_world_size() - 1:
                given = {name: value[:1, :4] for name, value in given.items()}
            if step == 1:
                loss = made(**given)
                made.backward(loss * float("nan") if rank == 0 else loss)
                made.step()
            else:
                one_step(made, given)
            made.digests.append(digest(made))
        found[str(stage)] = result(made)
    return found


def _read_slowly(block_store: Any) -> None:
    """A rank that reads whole blocks by itself in a pass of all gives the others time to write, if they may."""
    import time

    copy_whole = block_store.store.copy_whole

    def late(*args: Any) -> None:
        time.sleep(0.1 * block_store.runtime.is_collective)
        copy_whole(*args)

    block_store.store.copy_whole = late


def alone(rank: int) -> dict[str, Any]:
    """One rank reads, evaluates and saves by itself between steps; each rank skips blocks of its own; and all write
    weights. Sharded or not, the same bits."""
    import torch.nn as nn

    from tests.helpers.zo_runs import Toy, one_step

    class Skipping(Toy):
        """Leaves out other blocks, or calls one twice, on every rank and at every step."""

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            step = self.steps
            for i, block in enumerate(self.blocks):
                if (i + rank + step) % 3:
                    x = block(x)
            return self.blocks[rank % 3](x) if step % 2 else x

        steps = 0

    found = {}
    for stage in (0, 3):
        model = Skipping(width=512 if torch.cuda.is_available() else 16)
        made = engine(json_for(stage=stage, interval=2), model)
        if stage == 3 and rank == 0:
            _read_slowly(made.backend.store.blocks)
        seen: list[Any] = []
        for step, batch in enumerate(global_batches(6)):
            model.steps = step
            one_step(made, mine(batch, index=rank, of=dist.get_world_size()))
            if rank == step % dist.get_world_size():
                seen.append(digest(made))
                bare = {name: p.data.cpu() for name, p in model.named_parameters()}
                assert all(torch.equal(bare[name], value) for name, value in weights(made.module).items())
                if stage == 3:
                    model.blocks[0].linear.weight.data.zero_()  # a copy, not memory that the others read
                made.module.eval()
                with torch.no_grad():
                    seen.append(made(**batch).item())
                made.module.train()
            if step == 3:
                made.module.load_state_dict({name: value + 1e-3 for name, value in weights(made.module).items()})
            if step == 4:
                for p in nn.ModuleList([model.blocks[1]]).parameters():
                    p.requires_grad_(False)
        found[str(stage)] = {"state": weights(made.module), "seen": seen}
        made.destroy()
        dist.barrier()
        found[f"left by {stage}"] = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        with torch.no_grad():
            model.blocks[0].linear.weight += rank  # memory of its own, not the other ranks'
        dist.barrier()
        found[f"left by {stage}, changed"] = model.blocks[0].linear.weight.detach().cpu().clone()
    return found


def save(rank: int, folder: Path, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A checkpoint a setting, also as one file of weights, and what each rank had then."""
    from tests.helpers.checkpoint_runs import with_checkpoint

    found = {}
    for name, setting in settings.items():
        made = trained(with_checkpoint(json_for(**setting), asynchronous=name.endswith("async")), rank, num=4)
        made.save_checkpoint(str(folder / name))
        found[name] = bits(made)
        one_more(made, rank)  # must not reach what is being written
        made.wait_for_checkpoint()
        made.save_16bit_model(str(folder / name), "model.bin")
        found[f"{name} next"] = digest(made)
        dist.barrier()
        if name.endswith("async"):
            found["loaded"] = _load_while_written(made, folder / "slow")
    return found


def _load_while_written(engine: Any, folder: Path) -> str:
    """The tag of a checkpoint that is loaded as the newest while one rank still writes it."""
    from ds_zo.checkpoint import files

    engine.save_checkpoint(str(folder), tag="first")
    engine.save_checkpoint(str(folder), tag="second")  # after the first is whole
    write = files.replace_text
    files.replace_text = lambda *args: (time.sleep(0.5), write(*args))  # type: ignore[assignment]
    try:
        engine.save_checkpoint(str(folder), tag="third")
        path, _ = engine.load_checkpoint(str(folder))
    finally:
        files.replace_text = write
    return Path(path).name


def resume(rank: int, folders: list[Path], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every checkpoint of every folder: of as many ranks as here under the other setting, of others under its own."""
    found: dict[str, Any] = {}
    for folder in folders:
        for saved, theirs in settings.items():
            for name, setting in settings.items():
                assert {**setting, "stage": 0} == {**theirs, "stage": 0}
                if (folder.name == str(dist.get_world_size())) == (name != saved):
                    made = engine(json_for(**setting))
                    made.load_checkpoint(str(folder / saved))
                    loaded = bits(made)
                    one_more(made, rank)
                    found[f"{folder.name}, {saved}, {name}"] = {"bits": loaded, "next": digest(made)}
    return found


def save_in_window(rank: int, folder: Path) -> bool:
    """Saves after one step and two of its three micro-batches."""
    from tests.helpers.zo_runs import one_step

    made = engine(json_for(gradient_accumulation_steps=3))
    for batch in global_batches(5):
        one_step(made, mine(batch, index=rank, of=dist.get_world_size()))
    return bool(made.save_checkpoint(str(folder)))


def resume_in_window(rank: int, folder: Path) -> dict[str, Any]:
    """The global step after each of seven micro-batches, and the projected gradients right after loading."""
    from tests.helpers.zo_runs import one_step

    made = engine(json_for(gradient_accumulation_steps=3))
    one_step(made, mine(global_batches(1)[0], index=rank, of=dist.get_world_size()))  # this run's own sums end too
    made.load_checkpoint(str(folder))
    found: dict[str, list[Any]] = {"projected": made.backend._projected.tolist(), "steps": []}
    for batch in global_batches(7):
        one_step(made, mine(batch, index=rank, of=dist.get_world_size()))
        found["steps"].append(made.global_steps)
    return found


class Failing(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError("no memory")


def failed_backward(rank: int, folder: Path) -> dict[str, Any]:
    """In the second step the last rank drops its batch, because its backward raises, and makes the step."""
    monitor = {"enabled": True, "output_path": str(folder), "job_name": "job"}
    made = engine(json_for(csv_monitor=monitor))
    losses, num_ranks = [], dist.get_world_size()
    for step, batch in enumerate(global_batches(3)):
        loss = made(**mine(batch, index=rank, of=num_ranks))
        losses.append(loss.item())
        if step == 1 and rank == num_ranks - 1:
            try:
                made.backward(Failing.apply(loss))
            except RuntimeError:
                made.zero_grad()
        else:
            made.backward(loss)
        made.step()
    return {"losses": losses, "digest": digest(made)}


def objective(rank: int, stage: int, params: dict[str, Any]) -> dict[str, Any]:
    """Steps by the loss, and by minus the loss as a score. In the third one the last rank's score fails once."""
    from tests.helpers.zo_runs import one_step

    num_ranks = dist.get_world_size()
    batches = [mine(batch, index=rank, of=num_ranks) for batch in global_batches()]
    found: dict[str, Any] = {"by loss": [], "by score": []}
    by_loss, by_score = (engine(json_for(stage=stage, params=params)) for _ in range(2))
    for batch in batches:
        one_step(by_loss, batch)
        found["by loss"].append(digest(by_loss))

    def fails(output: Any, batch: Any) -> Any:
        return float("nan") if rank == num_ranks - 1 else -output

    for step, batch in enumerate(batches):
        if step == 2:
            try:
                by_score.zo_step(batch, fails)
            except RuntimeError as error:
                found["error"] = str(error)
        by_score.zo_step(batch, lambda output, batch: -output)
        found["by score"].append(digest(by_score))
    by_score.zo_step(batches[0], fails, on_error=-3.0)
    return {**found, "failed": by_score.failed_scores, "steps": by_score.global_steps, "last": digest(by_score)}


def members(rank: int, stage: int) -> dict[str, Any]:
    """Steps with four members of rank-1 noise, divided among the ranks."""
    from tests.helpers.tiny_models import tiny_batch, tiny_model
    from tests.helpers.zo_runs import one_step

    json = json_for(stage=stage, params={"noise": "rank1", "num_members": 4})
    made = engine(json, tiny_model("llama", num_hidden_layers=2))
    for step in range(NUM_STEPS):
        one_step(made, mine(tiny_batch("llama", seed=step), index=rank, of=dist.get_world_size()))
    return {"digest": digest(made), "weights": {name: value.clone() for name, value in weights(made.module).items()}}


def bits(engine: Any) -> dict[str, Any]:
    """Everything a run consists of."""
    from tests.helpers.checkpoint_runs import planes

    for unit in engine.backend.store.blocks.placement.units:
        engine.backend.store.blocks.runtime.host_wait(unit)
    found = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in planes(engine).items()}
    return {**found, "digest": digest(engine)}


def one_more(engine: Any, rank: int) -> None:
    """The next step, on a batch that all ranks share, so that it is the same on any number of them."""
    from tests.helpers.zo_runs import one_step

    one_step(engine, global_batches()[-1])


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this process hands to the collectives of torch.distributed meanwhile, by name."""
    names = [
        name
        for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather_single", "all_gather", "reduce")
        if hasattr(dist, name)
    ]
    names += ["all_gather_object", "broadcast_object_list", "reduce_scatter_tensor", "all_to_all_single", "send"]
    before = {name: getattr(dist, name) for name in names}
    counts: dict[str, int] = {}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            counts[name] = counts.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)
            return before[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, counting(name))
        yield counts
    finally:
        for name, original in before.items():
            setattr(dist, name, original)


def wire(rank: int) -> dict[str, Any]:
    """Collectives of one step, for two sizes of model, in each way to divide the work."""
    from tests.helpers.zo_runs import Toy, one_step

    found = {}
    ways = {
        "data": json_for(params={"num_directions": 2}),
        "directions": json_for(params={"num_directions": 2, "direction_parallel": 2}),
        "sharded": json_for(stage=3, interval=1),
    }
    for way, json in ways.items():
        for width in (16, 48):
            made = engine(json, Toy(width=width))
            batch = mine(global_batches()[0], index=rank, of=dist.get_world_size())
            one_step(made, batch)
            sent, transport = made.backend.ranks.bytes_wire, made.backend.store.blocks.transport
            gathered = transport.bytes_wire
            with counted() as counts:
                one_step(made, batch)
            found[f"{way} {width}"] = {
                "counts": counts,
                "ranks": made.backend.ranks.bytes_wire - sent,
                "gathered": transport.bytes_wire - gathered,
                "stored": sum(u.nbytes for u in made.backend.store.blocks.placement.blocks),
            }
    return found


def _arguments(rank: int, folder: Path, config: dict[str, Any]) -> Any:
    """What `ds-zo train` reads from its command line for one epoch."""
    import json

    from ds_zo.training.arguments import parse_args

    path = folder / f"{rank}.json"
    path.write_text(json.dumps(config))
    return parse_args(["--deepspeed", str(path), "--output-dir", str(folder), "--epochs", "1"])


def resumed_random_states(rank: int, folder: Path) -> dict[str, Any]:
    """Random states of this rank when `ds-zo train` saves, and after it resumes."""
    from ds_zo.training.progress import Progress, RunCheckpoints

    args, made = _arguments(rank, folder, json_for()), engine(json_for())
    torch.manual_seed(10 + rank)  # dropout of other lengths leaves another state on each rank
    before = torch.get_rng_state()
    checkpoints = RunCheckpoints(made, args, data="", writes=rank == 0)
    checkpoints.save(Progress(step=0))
    torch.manual_seed(99)
    checkpoints.resume(checkpoints.folder)
    return {"before": before, "after": torch.get_rng_state()}


def trained_positions(rank: int, folder: Path, direction_parallel: int) -> dict[str, Any]:
    """Positions of the examples that `ds-zo train` gives this rank in two steps, and its counts after them."""
    from ds_zo.training.loop import TrainingLoop

    params = {"lr": 1e-6, "num_directions": 2, "direction_parallel": direction_parallel}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config |= {"optimizer": {"type": "ZO", "params": params}}
    loop = TrainingLoop(_arguments(rank, folder, config), config)
    given, at = [], loop.batches.at
    loop.batches.at = lambda position: given.append(position) or at(position)  # type: ignore[method-assign,func-returns-value]
    for _ in range(2):
        loop._step()
    counts = {"num_seen": loop.progress.num_seen, "num_steps": loop.num_steps(), "num_examples": len(loop.batches)}
    return {"given": given, **counts}
