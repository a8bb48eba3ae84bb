"""Models, losses and scripts made at random, trained by ZO and by plain passes over perturbed copies.

Each case draws a model whose forward leaves something on its modules, a form of output, and a script. The script adds
terms to the loss. A term that depends on nothing trained changes nothing. A term that ZO would drop is refused. The
losses of every pass, the weights and the state of the modules are those of plain passes.

A failure tells the seed of its case.
"""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo import ops
from tests.helpers.mezo_reference import PlainMeZO
from tests.helpers.weights import assert_equal, weights
from tests.helpers.zo_runs import EPS, LR, Recorder, Toy, engine_for, log_lines, toy_batches, zo_json
from tests.random.sizes import seeds

pytestmark = pytest.mark.usefixtures("single_process")


# What a forward leaves on modules. Each takes a module and a tensor that it works on, and returns a factor.


def counts(m: Any, x: torch.Tensor) -> Any:
    m.count = getattr(m, "count", 0) + 1
    return 1 + 0.01 * m.count


def keeps_last(m: Any, x: torch.Tensor) -> Any:
    factor = 1 + 0.01 * getattr(m, "last", torch.zeros(())).mean()
    m.last = x.mean()
    return factor


def writes_buffer(m: Any, x: torch.Tensor) -> Any:
    if "running" not in m._buffers:
        m.register_buffer("running", torch.zeros(()))
    m.running += x.mean()
    return 1 + 0.01 * m.running


def replaces_buffer(m: Any, x: torch.Tensor) -> Any:
    """A table for the longest batch so far, as dynamic RoPE keeps one."""
    if x.shape[1] > getattr(m, "longest", 0):
        m.register_buffer("table", torch.linspace(0.9, 1.1, x.shape[1])[:, None], persistent=False)
        m.longest = x.shape[1]
    return m.table[: x.shape[1]]


def writes_tensor(m: Any, x: torch.Tensor) -> Any:
    if not hasattr(m, "plain"):
        m.plain = torch.ones(())
    m.plain.mul_(1.01)
    return m.plain


def appends(m: Any, x: torch.Tensor) -> Any:
    m.seen.append(x.detach().mean())
    return 1 + 0.01 * len(m.seen) + 0.1 * m.seen[-1]


def fills_dict(m: Any, x: torch.Tensor) -> Any:
    inner = m.memo.setdefault("inner", {"calls": 0, "sums": [torch.zeros(())]})
    inner["calls"] += 1
    inner["sums"][0] += x.mean()
    return 1 + 0.01 * inner["calls"] + 0.01 * inner["sums"][0]


def fills_others(m: Any, x: torch.Tensor) -> Any:
    m.queue.append(x.shape[1])
    m.names.add(f"call {len(m.names)}")
    m.order[len(m.order)] = None
    return 1 + 0.01 * (len(m.queue) + len(m.names) + len(m.order))


def installs_hooks(m: Any, x: torch.Tensor) -> Any:
    """Once, in the first forward, as transformers does."""
    if not getattr(m, "has_hooks", False):
        for child in m.modules():
            if isinstance(child, nn.Linear):
                child.register_forward_hook(lambda module, args, output: output * 1.1)
        m.has_hooks = True
    return 1.0


STATES = [
    counts,
    keeps_last,
    writes_buffer,
    replaces_buffer,
    writes_tensor,
    appends,
    fills_dict,
    fills_others,
    installs_hooks,
]


_NOT_STATE = frozenset(
    "_parameters _modules _apply zero_grad forward order_of_state form _load_state_dict_pre_hooks".split()
)


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that modules keep, in a form that can be compared."""
    return {
        f"{path}.{name}": num_hooks(value) if "_hooks" in name and isinstance(value, dict) else plain(value)
        for path, m in module.named_modules()
        for name, value in vars(m).items()
        if name not in _NOT_STATE
    }


def num_hooks(hooks: dict[int, Any]) -> int:
    """Without the engine's own."""
    return sum(not getattr(hook, "__module__", "ds_zo").startswith("ds_zo") for hook in hooks.values())


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque, set)):
        return [plain(item) for item in (sorted(value) if isinstance(value, set) else value)]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def is_near(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_near(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(is_near(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return abs(a - b) <= tolerance * max(1.0, abs(b))
    return bool(a == b)


# Forms of output


@dataclass
class Record:
    loss: torch.Tensor
    logits: torch.Tensor


FORMS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda loss, logits: (loss, logits),
    lambda loss, logits: {"loss": loss, "logits": logits},
    lambda loss, logits: {"loss": loss, "deep": [{"logits": logits}]},
    lambda loss, logits: Record(loss, logits),
    lambda loss, logits: UserDict(loss=loss, logits=logits),
    lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
    lambda loss, logits: {"loss": loss, "deep": Record(loss * 1, logits)},
]


def parts_of(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, logits)"""
    if isinstance(output, tuple):
        return output[0], output[1]
    fields = output if isinstance(output, (dict, UserDict)) else vars(output)
    if "deep" not in fields:
        return fields["loss"], fields["logits"]
    deep = fields["deep"]
    return fields["loss"], deep[0]["logits"] if isinstance(deep, list) else deep.logits


class Drawn(Toy):
    """A toy with the states that were drawn, on itself and on blocks."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.form = draw.randrange(len(FORMS))
        states = [draw.choice(STATES) for _ in range(draw.randrange(3))]
        self.order_of_state = [(state, draw.choice([-1, 0, 1, 2])) for state in states]
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        for m in (self, *self.blocks):
            m.seen, m.memo, m.queue = [], {}, deque(maxlen=4)
            m.names, m.order = set(), OrderedDict()

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            for state, at in self.order_of_state:
                if at == index or (at < 0 and index == 1):
                    x = x * state(self if at < 0 else block, x)
            x = block(x)
        return x

    def forward(self, ids: torch.Tensor, shift: torch.Tensor | None = None) -> Any:
        logits = self.head(self.middle(self.embed(ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return FORMS[self.form](loss if shift is None else loss + shift.sum(), logits)


# Terms of a loss. Each takes the engine, the output and a batch.

Term = Callable[[Any, Any, dict[str, torch.Tensor]], torch.Tensor]
OUTSIDE, ENCODER = nn.Linear(32, 3), nn.Linear(3, 3)
HARMLESS: list[Term] = [
    lambda engine, output, batch: torch.tensor(2.0),
    lambda engine, output, batch: parts_of(output)[1].detach().square().mean(),
    lambda engine, output, batch: (parts_of(output)[1].argmax(-1) == batch["ids"]).float().mean(),
    lambda engine, output, batch: parts_of(output)[0].detach() * 3,
    lambda engine, output, batch: OUTSIDE.weight.square().sum(),
    lambda engine, output, batch: torch.no_grad()(z_loss)(engine, output, batch),
    lambda engine, output, batch: parts_of(in_evaluation(engine, batch))[1].mean(),
    lambda engine, output, batch: engine.module.frozen.sum(),
]
DROPPED: list[Term] = [
    lambda engine, output, batch: parts_of(output)[1].square().mean(),
    lambda engine, output, batch: parts_of(output)[1].log_softmax(-1)[..., 0].mean().exp(),
    lambda engine, output, batch: OUTSIDE(parts_of(output)[1]).mean(),
    lambda engine, output, batch: parts_of(output)[1].mul_(2).max(),
    lambda engine, output, batch: 0 * parts_of(output)[1].sum(),
    lambda engine, output, batch: z_loss(engine, output, batch).sqrt(),
    lambda engine, output, batch: torch.distributions.Categorical(logits=parts_of(output)[1]).entropy().mean(),
    lambda engine, output, batch: z_loss(engine, output, batch),
    lambda engine, output, batch: sum(p.square().sum() for p in engine.module.parameters()),
    lambda engine, output, batch: engine.module.head.bias.abs().max(),
    lambda engine, output, batch: engine.module.blocks[2].norm.weight[3] * parts_of(output)[0],
    lambda engine, output, batch: engine.module.head(torch.ones(1, 16)).sum(),
    lambda engine, output, batch: engine.module.blocks[1](torch.ones(1, 16)).sum(),
    lambda engine, output, batch: engine.module.embed(torch.tensor([1])).sum(),
    lambda engine, output, batch: parts_of(engine.module(**batch))[1].mean(),
    lambda engine, output, batch: parts_of(engine(**batch, shift=torch.ones(2, requires_grad=True)))[0],
    lambda engine, output, batch: parts_of(engine(**batch, shift=ENCODER(torch.ones(3))))[0],
]


def z_loss(engine: Any, output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return parts_of(output)[1].float().logsumexp(-1).square().mean()


def in_evaluation(engine: Any, batch: dict[str, torch.Tensor]) -> Any:
    engine.eval()
    try:
        return engine(**batch)
    finally:
        engine.train()


def draw_json(draw: random.Random) -> dict[str, Any]:
    params = {"num_directions": draw.choice([1, 1, 2])}
    return zo_json(offload=draw.random() < 0.6, interval=draw.choice([1, 2, 3]), params=params)


def check_update(engine: Any, before: torch.Tensor, losses: list[float], *, scale: float, step: int, case: str) -> None:
    """The last parameter moved along the noise of each direction, as far as the scaled loss says."""
    offset = sum(p.numel() for p in engine.module.parameters()) - before.numel()
    directions = len(losses) // 2
    expected = before.clone()
    for d in range(directions):
        g = scale * (losses[2 * d] - losses[2 * d + 1]) / (2 * EPS)
        expected -= LR / directions * g * ops.noise(0, step, d, offset, before.numel())
    torch.testing.assert_close(weights(engine.module)["head.bias"], expected, rtol=1e-4, atol=2e-6, msg=case)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    with log_lines() as found:
        yield found


@pytest.mark.parametrize("seed", seeds(30))
def test_a_drawn_script_trains_as_plain_passes_do(seed: int, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    passes, json = Recorder(monkeypatch), draw_json(draw)
    engine = engine_for(Drawn(draw), json)
    states = [(state.__name__, at) for state, at in engine.module.order_of_state]
    case = f"seed {seed}: {states}, form {engine.module.form}, {json}"
    one_direction = json["optimizer"]["params"]["num_directions"] == 1
    for step in range(3):
        batch = toy_batches(step + 1, length=draw.choice([4, 6, 9]))[-1]
        reference = PlainMeZO(engine.module, copies_model=True)
        reference.steps = step
        plus, (minus, last) = reference.passes(lambda m, b=batch: (parts_of(m(**b))[0].item(), m))
        output = engine(**batch)
        losses = [loss.item() for loss in passes.passes[-1]]
        assert losses[:2] == pytest.approx([plus[0], minus], rel=2e-6), case
        ours, theirs = state_of(engine.module), state_of(last)
        tolerance = 1e-5 if one_direction else 0.1  # the last pass is that of another direction
        differs = [name for name in theirs if not is_near(ours.get(name), theirs[name], tolerance)]
        assert ours.keys() == theirs.keys(), case
        assert not differs, f"{case}: {differs}"
        scale = draw.choice([1.0, 0.5, -2.0])
        total = scale * parts_of(output)[0]
        for term in draw.sample(HARMLESS, draw.randrange(3)):
            total = total + term(engine, output, batch)
        before = weights(engine.module)
        at = 3 * seed + step
        for term in (
            DROPPED[at % len(DROPPED)],
            DROPPED[(at + 10) % len(DROPPED)],
            *draw.sample(DROPPED, draw.randrange(3)),
        ):
            wrong = draw.choice([0, 1]) * total + term(engine, output, batch)
            for backward in (engine.backward, torch.Tensor.backward):
                with pytest.raises(ValueError, match=r"This loss also depends on .*: .*\(engine.backward\)"):
                    backward(wrong, retain_graph=True)
                    pytest.fail(case)
            engine.zero_grad()
        trained = {name for name, _ in engine.module.named_parameters()}  # a second forward may change buffers
        ours, theirs = ({n: v for n, v in every.items() if n in trained} for every in (weights(engine.module), before))
        assert_equal(ours, theirs)
        engine.backward(total)
        engine.step()
        check_update(engine, before["head.bias"], losses, scale=scale, step=step, case=case)
    assert not any("one pass after the other" in line for line in lines), case
    hooks = {name: value for name, value in state_of(engine.module).items() if "_hooks" in name}
    engine.destroy()
    assert {name: value for name, value in state_of(engine.module).items() if "_hooks" in name} == hooks, case
    OUTSIDE.zero_grad()
