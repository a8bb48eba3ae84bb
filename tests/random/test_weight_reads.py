"""Weights that a script reads at odd moments, by whatever means, are the current step's. Reading changes nothing.

Every case is drawn from a seed, which the name of a failing test shows.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ds_zo  # noqa: F401
from tests.helpers.loaded_models import lora_over
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import Weights
from tests.random.sizes import seeds

NUM_STEPS = 3
LEARNING_RATE = {"zo": 1e-3, "lomo": 1e-1, "lsp": 1e-3}


@dataclass(frozen=True)
class Case:
    backend: str
    stream: bool
    lora: bool
    dtype: torch.dtype
    section: dict[str, Any]

    @property
    def ulp(self) -> float:
        """A fold may round another way than `state_dict` does, by one place."""
        return 0.0 if self.dtype is torch.float32 else 2.0**-7


def drawn(rng: random.Random) -> Case:
    backend = rng.choice(["zo", "zo", "zo", "lomo", "lsp"])
    stream, lora = rng.random() < 0.7, rng.random() < 0.5
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16]) if backend == "zo" else torch.float32
    section: dict[str, Any] = {}
    if stream:
        section = {"resident_blocks": rng.choice([0, 1]), "device_slots": rng.choice([2, 3])}
    if backend == "zo":
        section |= {"writeback_interval": rng.choice([1, 2, 3, None]), "master": rng.choice(["split", "wire"])}
    if backend == "zo" and stream:
        section["wire_dtype"] = rng.choice(["auto", "auto", "fp8", "bf16"])
    return Case(backend, stream, lora, dtype, section)


def model_of(case: Case) -> nn.Module:
    model = tiny_model("llama", num_hidden_layers=3, hidden_size=8, intermediate_size=12)
    return lora_over(model, target_modules=["q_proj", "v_proj"]) if case.lora else model


def engine_of(case: Case) -> Any:
    places = ["param"] * case.stream + ["optimizer"] * (case.backend == "lsp")
    offload = {f"offload_{place}": {"device": "cpu"} for place in places}
    model = model_of(case).to(case.dtype)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": case.backend, "params": {"lr": LEARNING_RATE[case.backend]}},
        "zero_optimization": {"stage": 0, **offload},
        "bf16": {"enabled": case.dtype is torch.bfloat16},
        "ds_zo": {"stream": case.section},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def promised(engine: Any) -> Weights:
    parameters = dict(engine.module.named_parameters())
    return {name: value.clone() for name, value in engine.module.state_dict().items() if name in parameters}


# Means of reading: each returns copies by name

Read = Callable[[Any, dict[str, nn.Parameter], random.Random], Weights]


def by_data(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    return {name: p.data.clone() for name, p in engine.module.named_parameters()}


def by_one_parameter(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    name = rng.choice(sorted(held))
    return {name: held[name].detach().clone()}


def by_held_parameters(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    return {name: torch.zeros_like(p).lerp_(p.detach(), 1.0) for name, p in held.items()}


def by_foreach(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    with torch.no_grad():
        return dict(zip(held, torch._foreach_add(list(held.values()), 0.0), strict=True))


def by_vector(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    flat = nn.utils.parameters_to_vector(held.values()).detach().split([p.numel() for p in held.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(held.items(), flat, strict=True)}


def by_state_dict(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    return promised(engine)


def by_deepcopy(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    return {name: p.detach() for name, p in copy.deepcopy(engine.module).named_parameters()}


def by_average(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    averaged = AveragedModel(engine.module)
    with torch.no_grad():
        for p in averaged.parameters():
            p.zero_()
    averaged.update_parameters(engine.module)  # the first one is a copy
    return {name: p.detach() for name, p in averaged.module.named_parameters()}


def by_gathering(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    with deepspeed.zero.GatheredParameters(list(held.values())):
        return {name: p.data.clone() for name, p in held.items()}


def by_full_parameters(engine: Any, held: dict[str, nn.Parameter], rng: random.Random) -> Weights:
    return {name: safe_get_full_fp32_param(p).to(p.dtype) for name, p in held.items() if hasattr(p, "_hp_mapping")}


READS: list[Read] = [
    by_data,
    by_one_parameter,
    by_held_parameters,
    by_foreach,
    by_vector,
    by_state_dict,
    by_deepcopy,
    by_average,
    by_gathering,
    by_full_parameters,
]


def moments(engine: Any, rng: random.Random) -> Iterator[str]:
    """One training run, which stops wherever somebody might read."""
    first = promised(engine)
    yield "at the start"
    for step in range(NUM_STEPS):
        loss = engine(**tiny_batch("llama", seed=step)).loss
        yield f"after the forward of step {step}"
        engine.backward(loss)
        yield f"after the backward of step {step}"
        engine.step()
        yield f"after step {step}"
        if rng.random() < 0.3:
            engine.eval()
            with torch.no_grad():
                engine(**tiny_batch("llama", seed=99))
            engine.train()
            yield f"after an evaluation at step {step}"
        if rng.random() < 0.2:
            engine.module.load_state_dict({name: value * 2 for name, value in first.items()}, strict=False)
            yield f"after loading at step {step}"


def assert_read(found: Weights, expected: Weights, *, ulp: float, what: str) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=ulp, atol=0.0, msg=lambda m, n=name: f"{what}: {n}: {m}")


@pytest.mark.parametrize("seed", seeds(8))
def test_reads_at_odd_moments(seed: int, single_process: None) -> None:
    rng = random.Random(seed)
    case = drawn(rng)
    print(f"seed {seed}: {case}")
    engine, twin = engine_of(case), engine_of(case)
    held = dict(engine.module.named_parameters())
    script = rng.randrange(1 << 30)
    for moment, _ in zip(moments(engine, random.Random(script)), moments(twin, random.Random(script)), strict=True):
        expected = promised(twin)
        for read in rng.sample(READS, rng.choice([0, 1, 1, 2])):
            found = read(engine, held, rng)
            assert_read(found, expected, ulp=case.ulp, what=f"{read.__name__} {moment}")
    # Whoever has looked, training goes the same way, and the module is left with its weights.
    for each in (engine, twin):
        each(**tiny_batch("llama", seed=98))  # both have folded then what is due
    expected = promised(twin)
    assert_read(promised(engine), expected, ulp=0.0, what="at the end")
    engine.destroy()
    assert all(type(p) is nn.Parameter for p in held.values())
    assert_read({name: p.detach() for name, p in held.items()}, expected, ulp=case.ulp, what="destroyed")
