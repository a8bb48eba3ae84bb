"""Users' own subclasses of nn.Parameter: reads of their weights between steps, and the ones that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ds_zo.streaming.intercepted import Intercepted
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, train
from tests.helpers.weights import assert_equal

pytestmark = pytest.mark.usefixtures("single_process")
OFFLOAD = {f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")}
ADAM_ON_CPU = {"offload_optimizer": {"device": "cpu"}}
PROJECTED = {"projector": "random", "subspace_dim": 8}
RUNS: dict[str, dict[str, Any]] = {
    "zo": config_for("ZO", lr=1e-3),
    "zo, streamed": streamed("ZO", lr=1e-3, stream={"writeback_interval": 3}),
    "zo, fp8": streamed("ZO", lr=1e-3, stream={"wire_dtype": "fp8"}),
    "lomo, streamed": streamed("LOMO"),
    "lsp": config_for("LSP", lr=1e-3, params=PROJECTED, zero_optimization=ADAM_ON_CPU),
    "lsp, streamed": config_for("LSP", lr=1e-3, params=PROJECTED, zero_optimization=OFFLOAD),
}


class Tagged(nn.Parameter):
    """A subclass as users write it: with a method of its own."""

    def doubled(self) -> torch.Tensor:
        return self * 2


class Logged(nn.Parameter):
    """A subclass that changes what torch functions do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def model_of(cls: type[nn.Parameter]) -> nn.Module:
    module = lively("llama").train()
    for m in module.modules():
        for name, p in list(m._parameters.items()):
            if p is not None and name == "weight":
                m._parameters[name] = cls(p.detach(), p.requires_grad)
    return module


@pytest.mark.parametrize("kind", RUNS)
def test_reads_of_a_subclass_give_the_weights_of_the_step(kind: str) -> None:
    """As those of plain parameters. Afterwards the parameters have their own class again, and training goes on."""
    engine, plain = (start(RUNS[kind], model_of(cls)) for cls in (Tagged, nn.Parameter))
    for one in (engine, plain):
        train(one, batches("llama", 2))
    assert any(isinstance(p, Intercepted) for p in engine.module.parameters())
    ours, theirs = ({n: (p * 2).detach().cpu() for n, p in e.module.named_parameters()} for e in (engine, plain))
    assert_equal(ours, theirs)
    assert_equal({n: p.doubled().detach().cpu() for n, p in engine.module.named_parameters()}, theirs)
    assert all(type(p) is Tagged for n, p in copy.deepcopy(engine.module).named_parameters())
    for one in (engine, plain):
        train(one, batches("llama", 2, first=2))
    module = engine.module
    expected = {name: value.cpu().clone() for name, value in plain.module.state_dict().items()}
    engine.destroy()
    assert all(type(p) is Tagged for p in module.parameters())
    assert_equal({name: value.cpu() for name, value in module.state_dict().items()}, expected)


@pytest.mark.parametrize("kind", RUNS)
def test_a_subclass_with_its_own_torch_function_is_refused_by_name(kind: str) -> None:
    """The refused engine leaves nothing in the module: an engine that takes any class then trains all weights."""
    module = model_of(Logged)
    with pytest.raises(ValueError, match=r"got model\.\S+ of Logged, which defines __torch_function__.*nn\.Parameter"):
        start(RUNS[kind], module)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    train(start(config_for("LOMO"), module), batches("llama", 2))
    assert [name for name, p in module.named_parameters() if torch.equal(p, before[name])] == []


def test_parameters_that_have_no_updates_may_have_any_class() -> None:
    """LSP on the device does not intercept parameters of integers, such as weights that a library has quantised."""
    module = lively("llama").train()
    module.register_parameter("packed", Logged(torch.zeros(4, dtype=torch.uint8), requires_grad=False))
    engine = start(RUNS["lsp"], module)
    train(engine, batches("llama", 2))
    assert type(module.packed) is Logged


def test_a_model_on_the_device_may_have_any_class() -> None:
    engine = start(config_for("LOMO"), model_of(Logged))
    train(engine, batches("llama", 2))
    assert all(type(p) is Logged for p in engine.module.parameters())
