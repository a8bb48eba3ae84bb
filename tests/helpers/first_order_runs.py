"""Engines of first-order backends with everything that a resumed run must have again, and a user's shuffled epochs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_zo.checkpoint.encoding import encode
from ds_zo.checkpoint.snapshot import host_copy
from tests.helpers.checkpoint_runs import assert_same_bits
from tests.helpers.lomo_runs import config_for, lively, start, streamed
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.tiny_models import tiny_batch

SCHEDULE = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 5, "loss_scale_window": 2}}
LEARNED = {"projector": "learned", "check_interval": 2, "bias_threshold": 0.1, "fit_steps": 1, "calibration_batches": 1}
WINDOW = {"gradient_accumulation_steps": 3}
SEQUENTIAL = {**WINDOW, "params": {"accumulation": "sequential"}}


def _lomo(kind: str = "LOMO", *, make: Callable[..., dict[str, Any]] = config_for, **more: Any) -> dict[str, Any]:
    return make(kind, lr=1e-2, clipping=1.0, scheduler=SCHEDULE, **more)


JSONS: dict[str, dict[str, Any]] = {
    "LOMO, fp16, window": _lomo(**SEQUENTIAL, **FP16),
    "LOMO, bf16, streamed": _lomo(make=streamed, **BF16),
    "AdaLOMO, bf16, kahan, window": _lomo("AdaLOMO", **SEQUENTIAL, **BF16, ds_zo={"rounding": "kahan"}),
    "AdaLOMO, bf16, streamed": _lomo("AdaLOMO", make=streamed, **BF16),
    "LSP, refits, window": lsp_json(
        params={**LEARNED, "check_interval": 1, "calibration_batches": 3},
        clipping=0.1,
        scheduler=SCHEDULE,
        **WINDOW,
        **BF16,
    ),
    "LSP, on the device": lsp_json(offload=False, params=LEARNED, scheduler=SCHEDULE),
    "Adapter, nf4, window": _lomo(
        "AdamW", make=streamed, stream={"frozen_dtype": "nf4"}, ds_zo={"backend": "adapter"}, **WINDOW, **BF16
    ),
}
LOST = frozenset({1, 6})
"""Micro-batches whose loss overflows fp16. The last of a window that was saved in the middle: the step still counts."""


@dataclass
class Epochs:
    """Batches in an order that is drawn anew for each epoch, as a script's loader does."""

    order: list[int] = field(default_factory=list)
    at: int = 0
    num_seen: int = 0

    def draw(self) -> dict[str, torch.Tensor]:
        if self.at == len(self.order):
            self.order, self.at = torch.randperm(5).tolist(), 0
        self.at, self.num_seen = self.at + 1, self.num_seen + 1
        return tiny_batch("llama", seed=self.order[self.at - 1], batch_size=2, length=6)


def engine_of(name: str, *, seed: int = 0, **settings: Any) -> Any:
    json = copy.deepcopy(JSONS[name])
    json.setdefault("ds_zo", {})["checkpoint"] = settings
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "attention_dropout": 0.2}
    if "Adapter" not in name:
        return start(json, lively("llama", seed=seed, **sizes))
    model = lively("llama", seed=0, **sizes)  # a checkpoint belongs to one frozen base
    for key, p in model.named_parameters():
        p.requires_grad_("q_proj" in key or "norm" in key)
        p.data.mul_(1 + p.requires_grad * seed)
    return start(json, model, model_parameters=list(model.parameters()))


def play(engine: Any, epochs: Epochs, num: int, after: Callable[[], Any] = lambda: None) -> list[float]:
    losses = []
    for _ in range(num):
        loss = engine(**{name: value.to(engine.device) for name, value in epochs.draw().items()}).loss
        if engine.fp16_enabled() and epochs.num_seen in LOST:
            loss = loss * 1e8
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        after()
    return losses


def everything(engine: Any) -> dict[str, Any]:
    """All that decides how a run goes on, bit by bit."""
    tensors: dict[str, torch.Tensor] = {}
    names = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
    plain = {name: getattr(engine, name) for name in names} | {"lr": engine.get_lr()}
    states = engine.optimizer.state_dict()["state"]
    state = host_copy([engine.backend.state_dict(), engine.backend.rank_state(), states, plain])
    found = {"plain": encode(state, tensors)}
    weights = {name: value.cpu().clone() for name, value in engine.backend.module_state_dict().items()}
    return found | weights | tensors


def assert_same_run(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert_same_bits(_no_scalars(a), _no_scalars(b))


def _no_scalars(found: dict[str, Any]) -> dict[str, Any]:
    """A scalar can't be viewed as bytes."""
    return {k: v.reshape(-1).contiguous() if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def written(snapshot: Any) -> dict[str, Any]:
    """What a writer gets of a snapshot."""
    tensors: dict[str, torch.Tensor] = {}
    found = {"plain": encode(snapshot.state(), tensors)} | tensors
    found |= {name: value for file in snapshot.weights_files for name, value in file.tensors().items()}
    return {k: v.to("cpu", copy=True) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


def check_resumed_runs(name: str, folder: Path) -> None:
    """Saved asynchronously inside windows, epochs, schedules and fits, and resumed twice."""
    quiet = engine_of(name)
    expected = play(quiet, Epochs(), 11)
    saving, epochs = engine_of(name, asynchronous=True), Epochs()
    seen: dict[int, dict[str, Any]] = {}

    def save() -> None:
        if epochs.num_seen not in (4, 5, 11):
            return
        saving.save_checkpoint(str(folder), tag=f"at{epochs.num_seen}", client_state=vars(epochs))
        seen[epochs.num_seen] = everything(saving)

    assert play(saving, epochs, 11, after=save) == expected
    saving.wait_for_checkpoint()
    assert_same_run(seen[11], everything(quiet))
    assert torch.tensor(expected).isfinite().all() and quiet.skipped_steps == 0
    for at in (4, 5) if "window" in name else (4,):
        resumed = engine_of(name, seed=1)
        play(resumed, Epochs(), 1)  # whatever it was before
        _, client = resumed.load_checkpoint(str(folder), tag=f"at{at}")
        again = Epochs(client["order"], client["at"], client["num_seen"])
        assert_same_run(everything(resumed), seen[at])
        assert play(resumed, again, 2) == expected[at : at + 2]
        if at != 4:
            continue
        resumed.save_checkpoint(str(folder), tag="again", client_state=vars(again))
        third = engine_of(name, seed=2)
        _, client = third.load_checkpoint(str(folder), tag="again")
        assert play(third, Epochs(client["order"], client["at"], client["num_seen"]), 9 - at) == expected[at + 2 :]
        assert_same_run(everything(third), seen[11])


def check_held_snapshot(name: str) -> None:
    """A writer that gets no turn before four more micro-batches are done."""
    engine, epochs = engine_of(name), Epochs()
    play(engine, epochs, 4)
    now = written(engine.backend.snapshot(hold=False))
    late = engine.backend.snapshot(hold=True)
    play(engine, epochs, 4)
    assert_same_run(written(late), now)
