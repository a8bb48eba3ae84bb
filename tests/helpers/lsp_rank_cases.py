"""What ranks of LSP jobs do in these tests. Each function runs in every rank of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.lomo_runs import start, train
from tests.helpers.lsp_runs import Strided, lsp_json, small
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import Weights, parameters_of

GLOBAL_BATCH = 4
NUM_STEPS, NUM_FITTED_STEPS = 3, 4
"""The second where projectors are fitted anew after two steps."""
EPS = 1e-5
"""Above the rounding noise of gradients, which Adam would blow up to steps of lr."""

LEARNED = {"projector": "learned", "check_interval": 2, "bias_threshold": 0.1, "fit_steps": 2, "calibration_batches": 1}
CASES: dict[str, dict[str, Any]] = {
    "random": {},
    "owned": {"stage": 2},
    "owned, learned": {"stage": 1, "clipping": 0.1, "params": LEARNED},
    "owned, learned, unclipped": {"stage": 1, "params": LEARNED},
    "owned, whole": {"stage": 2, "params": {"projector": "none"}},
    "owned, dense edge": {"stage": 2, "params": {"edge": "dense"}},
    "on the device": {"offload": False},
    "clipped together": {"stage": 2, "clipping": 0.1, "params": {"clip_scope": "global"}},
    "synchronous": {"stage": 2, "params": {"schedule": "sync"}},
    "poisoned": {"stage": 2},
    "poisoned, fp16": {"stage": 1, "fp16": {"enabled": True, "initial_scale_power": 4}, "params": {"edge": "dense"}},
    "two losses": {"stage": 2, "params": {"schedule": "sync"}},
    "forgotten": {"stage": 2},
    "bare": {"stage": 2},
}
ON_FOUR = ("random", "owned", "on the device")
"""What more ranks than two could change."""


def json_of(case: dict[str, Any], world_size: int) -> dict[str, Any]:
    settings = dict(case)
    stage = settings.pop("stage", 0)
    params = {"eps": EPS, **settings.pop("params", {})}
    json = lsp_json(lr=1e-3, params=params, **settings)
    json["zero_optimization"] = {**json["zero_optimization"], "stage": stage}
    return {**json, "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size}


def batch_of(rank: int, step: int, world_size: int) -> dict[str, torch.Tensor]:
    mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    whole = tiny_batch("llama", seed=step, batch_size=GLOBAL_BATCH, length=8)
    return {name: value[mine] for name, value in whole.items()}


def compare(rank: int) -> dict[str, Any]:
    """Weights, norm, skipped steps and bytes a step of every case."""
    world_size = torch.distributed.get_world_size()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if world_size == 4 and name not in ON_FOUR:
            continue
        depth = {"num_hidden_layers": 1} if "learned" in name else {}  # fits take most of the time
        engine = start(json_of(case, world_size), small(seed=rank, **depth))  # the first rank's weights count
        line = engine.backend.ranks
        for step in range(NUM_FITTED_STEPS if "learned" in name else NUM_STEPS):
            bytes_before = 0 if line is None else line.bytes_wire
            loss = engine(**batch_of(rank, step, world_size)).loss
            if name.startswith("poisoned") and step == 1 and rank == world_size - 1:
                loss = loss * float("nan")
            loss.backward() if name == "bare" else engine.backward(loss)
            if name == "two losses":
                engine.backward(engine(**batch_of(rank, step + 50, world_size)).loss)
            if name == "forgotten" and step == 1:
                engine.zero_grad()
                engine.backward(engine(**batch_of(rank, step, world_size)).loss)
            engine.step()
            weights = parameters_of(engine)
        results[name] = {
            "weights": weights,
            "norm": engine.get_global_grad_norm(),
            "skipped": engine.skipped_steps,
            "bytes": 0 if line is None else line.bytes_wire - bytes_before,
            "states": sum(m.num_bytes for group in engine.backend.groups.on_host for m in group.moments),
        }
        engine.destroy()
    return results


class Choosy(nn.Module):
    """A batch chooses which of its layers it uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, uses: list[int]) -> torch.Tensor:
        for i in uses:
            x = x + torch.tanh(self.layers[i](x))
        return x.square().mean()


def each(rank: int, work: Callable[..., Weights], cases: list[tuple[Any, ...]]) -> dict[str, Weights]:
    """The weights after work of each case."""
    return {str(case): work(rank, *case) for case in cases}


def halves(
    rank: int,
    engine: Any,
    forward: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    num_steps: int = 3,
    after_backward: Callable[[int], object] = lambda step: None,
) -> Weights:
    """Trains on both halves of a batch on one rank, and on one on each of two. Returns the weights."""
    for step in range(num_steps):
        losses = []
        for half in range(2) if torch.distributed.get_world_size() == 1 else [rank]:
            x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + half))
            losses.append(forward(x, half))
        engine.backward(torch.stack(losses).mean())
        after_backward(step)
        engine.step()
    weights = parameters_of(engine)
    engine.destroy()
    return weights


def choose(rank: int, stage: int, projector: str) -> Weights:
    """Each half leaves out another layer, and both leave out the last but one, which does not move."""
    case: dict[str, Any] = {"stage": stage, "params": {"projector": projector, "check_interval": 2}}
    engine = start(json_of(case, torch.distributed.get_world_size()), Choosy())
    before = parameters_of(engine)
    after = halves(rank, engine, lambda x, half: engine(x, [0, 3] if half else [1, 3]))
    moved = [any(not torch.equal(after[n], before[n]) for n in after if f"layers.{i}." in n) for i in range(4)]
    assert moved == [True, True, False, True]
    return after


def strided(rank: int, stage: int, offload: bool) -> Weights:
    """Only the first half of the batch uses all parameters."""
    case = {"stage": stage, "offload": offload}
    engine = start(json_of(case, torch.distributed.get_world_size()), Strided())
    return halves(rank, engine, lambda x, half: engine(x, half == 0))


def freeze(rank: int, case: dict[str, Any]) -> Weights:
    """Freezes a layer between two micro-batches of a step, and another between the second one and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
    json = {**json_of(case, torch.distributed.get_world_size()), "gradient_accumulation_steps": 2}
    engine = start(json, model)

    def freeze_some(step: int) -> None:
        model[:3].requires_grad_(False) if step else model[0].requires_grad_(False)

    return halves(rank, engine, lambda x, half: engine(x).square().mean(), num_steps=4, after_backward=freeze_some)


def overlap(rank: int) -> dict[str, Any]:
    """How far layers were when the backward pass returned, and what a rank can read alone."""
    engine = start(json_of({"stage": 2}, 2), small())
    train(engine, [batch_of(rank, 0, 2)])
    engine.backward(engine(**batch_of(rank, 1, 2)).loss)
    after_backward = {group.phase.name for group in engine.backend.groups.on_host}
    engine.step()
    after_step = {group.phase.name for group in engine.backend.groups.on_host}
    alone: dict[str, torch.Tensor] = {}
    if rank == 1:
        time.sleep(0.2)
    else:
        alone = {name: value.clone() for name, value in engine.module.state_dict().items()}
    weights = parameters_of(engine)
    engine.destroy()
    return {"after_backward": after_backward, "after_step": after_step, "alone": alone, "weights": weights}


CLIPPED = {"clipping": 0.1, "params": {**LEARNED, "fit_steps": 1, "clip_scope": "global"}}
MOMENTS = {"owned int8 learned": (3, 7, 11), "owned whole": (2, 4, 6)}
"""Steps: after the first one rank saves, after the second the four ranks that went on from there, and the last ends the
run. Norms that ranks add up in different orders show in the long run, which clips by the norm."""
RESUMED: dict[str, dict[str, Any]] = {
    "owned int8 learned": {"stage": 2, **CLIPPED},
    "owned whole": {"stage": 1, "params": {"projector": "none"}},
}


def save(rank: int, folder: Path) -> dict[str, Any]:
    """A whole run of each case, and a checkpoint on its way."""
    found: dict[str, Any] = {}
    for name, case in RESUMED.items():
        engine = start(json_of(case, GLOBAL_BATCH), small(num_hidden_layers=1))
        found[name] = _ended(engine, name, first=0, saved=MOMENTS[name][0], folder=folder / name)
        engine.destroy()
    return found


def resume(rank: int, folder: Path, moment: int, into: Path | None) -> dict[str, Any]:
    """The rest of each run from a moment's checkpoint. `into`: with a checkpoint of the next moment."""
    found: dict[str, Any] = {}
    for name, case in RESUMED.items():
        engine = start(json_of(case, GLOBAL_BATCH), small(seed=3, num_hidden_layers=1))
        engine.load_checkpoint(str(folder / name))
        saved = None if into is None else MOMENTS[name][moment + 1]
        found[name] = _ended(engine, name, first=MOMENTS[name][moment], saved=saved, folder=into and into / name)
        engine.destroy()
    return found


def _ended(engine: Any, name: str, *, first: int, saved: int | None, folder: Path | None) -> dict[str, torch.Tensor]:
    """Weights after the last step, and the norms on the way, which ranks must not add up in an order of their own.
    Every rank has the same batch: an average of equals is exact, so any number of ranks makes the same steps."""
    norms = []
    for step in range(first, MOMENTS[name][-1]):
        train(engine, [batch_of(0, step, GLOBAL_BATCH)])
        norms.append(engine.get_global_grad_norm())
        if step + 1 == saved:
            engine.save_checkpoint(str(folder))
    return {**parameters_of(engine), "norms": torch.tensor(norms)}
