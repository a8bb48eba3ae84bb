"""`CaptureState` tells when a recording differs from the block's forward, `HostTraffic` what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from ds_zo.backends.zo.cuda_graphs import CaptureState, HostTraffic


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.mask = torch.zeros(4)


def longer_table(block: nn.Sequential) -> None:
    block[0].table = torch.zeros(8)


def other_memory(block: nn.Sequential) -> None:
    block[0].table.data = torch.zeros(4)


def no_mask(block: nn.Sequential) -> None:
    block[0].mask = None


@pytest.mark.parametrize("change", [longer_table, other_memory, no_mask])
def test_tensors_that_modules_keep_are_seen_to_move(change: Callable[[nn.Sequential], None]) -> None:
    block = nn.Sequential(Inner(), nn.ReLU())
    capture_state = CaptureState(block)
    block[0].table.add_(1.0)  # in place: kernels read the new values
    block[0].linear.weight.data = torch.zeros(4, 4)  # the materialiser moves parameters
    assert not capture_state.is_stale
    change(block)
    assert capture_state.is_stale


def test_hooks_inside_a_block_are_seen_while_they_are_there() -> None:
    block = nn.Sequential(Inner(), nn.ReLU())
    capture_state = CaptureState(block)
    block.register_forward_hook(lambda *_: None)  # runs around the forward
    assert not capture_state.has_hooks
    for register in (
        block[0].linear.register_forward_hook,
        block[1].register_forward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
    ):
        handle = register(lambda *_: None)
        assert capture_state.has_hooks
        handle.remove()
        assert not capture_state.has_hooks


X = torch.arange(12.0).view(3, 4)
Q = torch.ones(1, 1, 16, 16)
RECORDED = {
    "linear": lambda: nn.functional.linear(X, torch.ones(5, 4)),
    "attention": lambda: nn.functional.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None]),
    "indices": lambda: X[torch.tensor([0, 2]).sort()[0], 1:],
    "written indices": lambda: X.clone().index_put_((torch.arange(2).flip(0),), torch.zeros(4)),
    "another dtype": lambda: X.to(torch.bfloat16).add_(1).copy_(X),
    "a number": lambda: X * 2 + torch.zeros(()),
}
READ = {
    "item": lambda: X.sum().item(),
    "comparison": lambda: bool(X.max() > 3),
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 3],
    "written mask": lambda: X.clone().index_put_((X[:, 0] > 3,), torch.zeros(4)),
    "assigned mask": lambda: X.clone().__setitem__(X > 3, torch.zeros(8)),
    "unique": lambda: X.unique(),
    "copy": lambda: X.to("meta"),
    "copy in place": lambda: torch.empty(3, 4, device="meta").copy_(X),
    "indices on the host": lambda: torch.empty(3, 4, device="meta")[torch.arange(2)],
    "an operator over functions": lambda: flex_attention(Q, Q, Q),
}


@pytest.mark.parametrize("name", [*RECORDED, *READ])
def test_operations_that_the_host_waits_for_are_found(name: str) -> None:
    with HostTraffic() as traffic:
        (RECORDED | READ)[name]()
    assert traffic.found is (name in READ)


def test_a_function_whose_first_call_is_looked_at_is_compiled() -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with HostTraffic():
        compiled(X)
    compiled(X)
    assert len(graphs) == 1
