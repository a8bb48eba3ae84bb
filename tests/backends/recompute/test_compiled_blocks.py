"""Compiled blocks train as they do uncompiled, whatever stands around them, and one graph serves them all.

The backend here traces and cuts graphs as the real one does, and leaves out the C++ compiler, which takes a minute.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ds_zo.backends.recompute import compiled_blocks
from tests.helpers.lomo_runs import batches, checkpointed, config_for, lively, start, streamed, train, weights_of
from tests.helpers.lsp_runs import lsp_json, streamed_lsp
from tests.helpers.weights import assert_close, assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process", "traced")

LAYERS = {"llama": {"num_hidden_layers": 4}, "opt": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}


def run(
    name: str,
    *,
    compiled: bool,
    clipping: float = 0.0,
    reentrant: bool | None = None,
    stream: bool = False,
    **model: Any,
) -> dict[str, torch.Tensor]:
    make = streamed if stream else config_for
    config = make(clipping=clipping, ds_zo={"compile_blocks": compiled})
    engine = start(config, checkpointed(lively(name, **LAYERS[name], **model), reentrant))
    torch.manual_seed(7)
    train(engine, batches(name, 3))
    found = weights_of(engine.module)
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("name", "settings", "num_graphs"),
    [
        ("llama", {"clipping": 0.5}, 1),
        ("llama", {"clipping": 0.5, "stream": True}, 1),
        ("opt", {"reentrant": True}, 2),  # its first forward keeps no graph
    ],
    ids=str,
)
def test_one_graph_for_all_blocks_trains_alike(name: str, settings: dict[str, Any], num_graphs: int) -> None:
    found = run(name, compiled=True, **settings)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert_close(found, run(name, compiled=False, **settings))


@pytest.mark.parametrize("stream", [False, True], ids=["resident", "streamed"])
def test_lsp_trains_alike_on_one_graph(stream: bool) -> None:
    make = streamed_lsp if stream else lsp_json

    def trained(compiled: bool) -> dict[str, torch.Tensor]:
        config = make(clipping=0.5, ds_zo={"compile_blocks": compiled})
        engine = start(config, checkpointed(lively("llama", **LAYERS["llama"]), False))
        train(engine, batches("llama", 3))
        found = parameters_of(engine)
        engine.destroy()
        assert all(layer._compiled_call_impl is None for layer in engine.module.model.layers)
        return found

    found = trained(True)
    assert counters["stats"]["unique_graphs"] == 1
    assert_close(found, trained(False))


def test_dropout_masks_are_the_same_in_both_passes_and_recomputed() -> None:
    dropout = {"resid_pdrop": 0.3, "attn_pdrop": 0.3}
    runs = [run("gpt2", compiled=True, reentrant=False, clipping=clipping, **dropout) for clipping in (0.0, 1e9)]
    assert_close(*runs)


def test_hooks_run_as_they_are_and_copies_are_not_compiled(log: pytest.LogCaptureFixture) -> None:
    model = lively("llama")
    block, seen = model.model.layers[1], []
    block.register_forward_hook(lambda *args: seen.append(torch.compiler.is_compiling()))
    engine = start(config_for(ds_zo={"compile_blocks": True}), model)
    twin = copy.deepcopy(model)
    train(engine, batches("llama", 2))
    assert seen == [False, False]
    assert all(layer._compiled_call_impl is None and "forward" not in vars(layer) for layer in twin.model.layers)
    batch = next(batches("llama", 1))
    assert model(**batch).loss != twin(**batch).loss
    assert sum("compiling blocks" in line for line in log.messages) == 1
    model.eval()
    num_graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model.generate(input_ids=batch["input_ids"][:, :4], max_new_tokens=2)
    assert counters["stats"]["unique_graphs"] == num_graphs
    engine.destroy()
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_where_the_compiler_fails_blocks_run_as_they_are(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.backends.common import aot_autograd

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such compiler")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=broken)
    monkeypatch.setattr(compiled_blocks, "BACKEND", backend)
    assert_equal(run("opt", compiled=True), run("opt", compiled=False))
    assert sum("could not be compiled" in line and "no such compiler" in line for line in log.messages) == 1
