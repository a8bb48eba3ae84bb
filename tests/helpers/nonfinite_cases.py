"""Random LOMO runs in which something is not finite, and the plain loop that skips it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_zo.optim import AdamMoments, Dither, FactoredMoments, adalomo_update_, adamw_update_, sgd_update_
from ds_zo.optim.rules import OFFSET_ALIGNMENT
from tests.helpers.lomo_runs import config_for, start

WIDTH, NUM_BATCHES = 8, 5
LR, CLIPPING, ADAPTER = 0.05, 0.5, {"lr": 0.01, "weight_decay": 0.1}


class Block(nn.Module):
    adapter_layer_names = ("lora",)
    """As PEFT marks its layers: `adapter` trains these by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.lora = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x)) + 0.1 * self.lora(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return ((self.outlet(x) - y) ** 2).mean()


@dataclass(frozen=True)
class Case:
    kind: str
    clips: str
    is_bf16: bool
    rounding: str
    streamed: bool
    stage: int
    bare: bool
    accumulation: int
    adapter: bool
    place: str
    """What is not finite: an element of the `batch`, the `loss`, or a `gradient`'s element."""
    value: float
    when: int
    rank: int
    parameter: str

    @property
    def updates_shards(self) -> bool:
        """Each rank updates its own shards of blocks, so that no rank sees all of a gradient."""
        whole = self.kind == "AdaLOMO" or self.clips in ("group", "global") or self.adapter
        return self.stage == 3 and not self.streamed and not whole

    @property
    def config(self) -> dict[str, Any]:
        params: dict[str, Any] = {"weight_decay": 0.1, "accumulation": "sequential"}
        if self.clips == "value":
            params["clip_grad_value"] = 0.05
        if self.clips == "group":
            params["norm_scope"] = "group"
        if self.adapter:
            params["adapter"] = ADAPTER
        place: dict[str, Any] = {"stage": self.stage}
        if self.streamed:
            place["offload_param"] = {"device": "cpu"}
        return config_for(
            self.kind,
            clipping=CLIPPING if self.clips in ("global", "group") else 0.0,
            lr=LR,
            params=params,
            zero_optimization=place,
            gradient_accumulation_steps=1 if self.bare else self.accumulation,
            bf16={"enabled": self.is_bf16},
            ds_zo={"rounding": self.rounding, "stream": {"resident_blocks": 0} if self.streamed else {}},
        )


def draw(seed: int, *, num_ranks: int) -> Case:
    dice = random.Random(f"{seed} of {num_ranks} ranks")  # numbers in a row draw alike
    clips = dice.choice(["none", "none", "value", "group", "global"])
    streamed = dice.random() < 0.4
    bare = clips in ("none", "value") and not streamed and dice.random() < 0.2
    stage = dice.choice([0, 3]) if num_ranks > 1 else 0
    is_bf16 = dice.random() < 0.5
    keeps_residues = is_bf16 and stage == 0 and not streamed
    bare = bare and stage == 0
    return Case(
        kind=dice.choice(["LOMO", "LOMO", "AdaLOMO"]),
        clips=clips,
        is_bf16=is_bf16,
        rounding=dice.choice(["stochastic", "nearest", "kahan"] if keeps_residues else ["stochastic", "nearest"]),
        streamed=streamed,
        stage=stage,
        bare=bare,
        accumulation=dice.choice([1, 1, 2]),
        adapter=dice.random() < 0.3,
        place=dice.choice(["batch", "gradient", *([] if bare else ["loss", "gradient"])]),  # bare, no loss is seen
        value=dice.choice([math.nan, math.inf, -math.inf]),
        when=dice.randrange(NUM_BATCHES - 1),
        rank=dice.randrange(num_ranks),
        parameter=dice.choice([name for name, _ in Net().named_parameters()]),
    )


def batch_of(case: Case, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    y = x.sum(1, keepdim=True)
    if case.place == "batch" and (number, rank) == (case.when, case.rank):
        x[1, 2] = case.value
    dtype = torch.bfloat16 if case.is_bf16 else torch.float32
    return x.to(dtype), y.to(dtype)


def spoilt(case: Case, loss: torch.Tensor, number: int, rank: int) -> torch.Tensor:
    """By a sum, so that gradients stay finite: the loss alone says that the batch is bad."""
    return loss + case.value if case.place == "loss" and (number, rank) == (case.when, case.rank) else loss


class PlainLoop:
    """Gradients of all ranks' batches, averaged; then updates, but for those that are skipped."""

    def __init__(self, case: Case, settings: Any, *, num_ranks: int) -> None:
        self.case, self.settings, self.num_ranks = case, settings, num_ranks
        self.net = Net().to(torch.bfloat16 if case.is_bf16 else torch.float32)
        self.num_updates = 0
        self.offsets: dict[str, int] = {}
        self.moments: dict[str, Any] = {}
        self.residues: dict[str, torch.Tensor] = {}
        end = 0
        for name, p in self.net.named_parameters():
            self.offsets[name] = end
            end += -(-p.numel() // OFFSET_ALIGNMENT) * OFFSET_ALIGNMENT

    def step(self, number: int) -> list[str]:
        """Names of the parameters that keep their values."""
        named, losses = dict(self.net.named_parameters()), []
        sums = {name: torch.zeros_like(p) for name, p in named.items()}
        for rank in range(self.num_ranks):
            self.net.zero_grad()
            loss = spoilt(self.case, self.net(*batch_of(self.case, number, rank)), number, rank)
            losses.append(loss.item())
            (loss / self.case.accumulation).backward()
            for name, p in named.items():
                assert p.grad is not None
                if self.case.place == "gradient" and (number, rank) == (self.case.when, self.case.rank):
                    spoil(p.grad, name, self.case)
                sums[name] += p.grad
        grads = {name: total / self.num_ranks for name, total in sums.items()}
        norms = {name: torch.linalg.vector_norm(g, dtype=torch.float32) for name, g in grads.items()}
        good = [name for name, g in grads.items() if g.isfinite().all()]
        if not all(map(math.isfinite, losses)) or (self.case.clips == "global" and len(good) < len(named)):
            good = []
        for name in good:
            self._update(name, named[name], grads[name], self._coef(name, {n: norms[n] for n in good}))
        self.num_updates += bool(good)
        return [name for name in named if name not in good]

    def _coef(self, name: str, norms: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if self.case.clips not in ("global", "group"):
            return None
        layer = name[: len("blocks.0")] if name.startswith("blocks") else name
        counted = [n for other, n in norms.items() if self.case.clips == "global" or other.startswith(layer)]
        return (CLIPPING / (torch.stack(counted).norm() + 1e-6)).clamp(max=1.0)

    def _update(self, name: str, p: nn.Parameter, grad: torch.Tensor, coef: torch.Tensor | None) -> None:
        rounding = self.case.rounding if self.case.is_bf16 else "nearest"
        given: dict[str, Any] = {"coef": coef}
        if rounding == "stochastic":
            given["dither"] = Dither(step=self.num_updates, offset=self.offsets[name])
        if rounding == "kahan":
            given["residue"] = self.residues.setdefault(name, torch.zeros_like(p))
        if self.case.adapter and "lora" in name:
            moments = self.moments.setdefault(name, AdamMoments.zeros(p))
            decay = 1.0 - ADAPTER["lr"] * ADAPTER["weight_decay"]
            adamw_update_(p, grad, moments, self.settings, lr=ADAPTER["lr"], decay=decay, **given)
        elif self.case.kind == "LOMO":
            sgd_update_(p, grad, lr=LR, decay=1.0 - LR * 0.1, clip_value=self.settings.clip_grad_value, **given)
        else:
            moments = self.moments.setdefault(name, FactoredMoments.zeros(p))
            adalomo_update_(p, grad, moments, self.settings, lr=LR, decay=1.0 - LR * 0.1, **given)


def spoil(grad: torch.Tensor, name: str, case: Case) -> torch.Tensor:
    if name == case.parameter:
        grad.view(-1)[-1] = case.value
    return grad


def spoilt_copy(case: Case, grad: torch.Tensor) -> torch.Tensor:
    return spoil(grad.clone(), case.parameter, case)


def check(seed: int, *, rank: int = 0, num_ranks: int = 1) -> None:
    case = draw(seed, num_ranks=num_ranks)
    engine = start({**case.config, "train_micro_batch_size_per_gpu": 4}, Net())
    plain = PlainLoop(case, engine.backend.settings, num_ranks=num_ranks)
    num_windows = num_skipped = 0
    skipped_in_window: list[bool] = []
    for number in range(NUM_BATCHES - NUM_BATCHES % case.accumulation):
        before = weights(engine)
        loss = spoilt(case, engine(*batch_of(case, number, rank)), number, rank)
        handle = None
        if case.place == "gradient" and (number, rank) == (case.when, case.rank):
            handle = dict(engine.module.named_parameters())[case.parameter].register_hook(partial(spoilt_copy, case))
        if case.bare:
            (loss / case.accumulation).backward()
        else:
            engine.backward(loss)
        if handle is not None:
            handle.remove()
        if not case.bare or (number + 1) % case.accumulation == 0:
            engine.step()
        after, kept = weights(engine), plain.step(number)
        for name, value in after.items():
            assert value.isfinite().all(), f"{name} is not finite after batch {number}"
            if name in kept:
                assert torch.equal(value, before[name]), f"{name} moved by batch {number}"
        compare(after, {name: p.detach() for name, p in plain.net.named_parameters()}, number)
        skipped_in_window.append(len(kept) == len(after))
        if len(skipped_in_window) == case.accumulation:
            num_windows += 1
            num_skipped += all(skipped_in_window)
            skipped_in_window = []
    assert (engine.global_steps, engine.skipped_steps) == (num_windows, num_skipped)
    assert engine.backend.state_dict()["step"] == plain.num_updates
    moments = {name: m.num_updates for name, m in plain.moments.items()}
    saved = {name: m["num_updates"] for name, m in engine.backend.state_dict()["moments"].items()}
    assert {name: n for name, n in saved.items() if n} == moments
    engine.destroy()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], number: int) -> None:
    """Ranks add in another order, whose last bit may tip a rounding to bf16."""
    for name, value in found.items():
        tolerance = 2.0**-5 if value.dtype is torch.bfloat16 else 1e-5
        difference = (value.float() - expected[name].float()).abs().max().item()
        assert difference <= tolerance, f"{name} is {difference} off after batch {number}"


def check_all(rank: int, seeds: list[int]) -> dict[int, str]:
    """In every rank of a job: what failed, by seed."""
    from traceback import format_exc

    failed: dict[int, str] = {}
    for seed in seeds:
        try:
            check(seed, rank=rank, num_ranks=dist.get_world_size())
        except Exception:
            failed[seed] = format_exc()
    return failed
