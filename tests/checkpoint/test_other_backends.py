"""A checkpoint of another backend: refused as a run to go on with, taken as weights; loading holds a unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_zo.checkpoint import CheckpointError
from tests.helpers.checkpoint_runs import JSONS as ZO
from tests.helpers.first_order_runs import JSONS, Epochs, play
from tests.helpers.lomo_runs import lively, start
from tests.helpers.lsp_runs import lsp_json

pytestmark = pytest.mark.usefixtures("single_process")

NUM_LAYERS = 5
CONFIGS: dict[str, dict[str, Any]] = {
    "zo": ZO["bf16 split"],
    "lomo": JSONS["LOMO, bf16, streamed"],
    "adalomo": JSONS["AdaLOMO, bf16, kahan, window"],
    "lsp": lsp_json(bf16={"enabled": True}),
}


def engine_of(backend: str, *, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": NUM_LAYERS}
    return start(CONFIGS[backend], lively("llama", seed=seed, tie_word_embeddings=False, **sizes))


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.backend.module_state_dict().items()}


class Allocations(TorchDispatchMode):
    """The most bytes that were alive at once of what operations made. Files that are mapped are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._made.values()))
        return out


def _storages(found: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(found):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage):
            yield leaf


@contextmanager
def holding_a_unit(engine: Any) -> Iterator[None]:
    """Within, tensors of at most two units are made, float32 values beside what they are made of, and the backend's own
    state anew."""
    layer = sum(p.numel() for p in engine.module.model.layers[0].parameters())
    total = sum(p.numel() for p in engine.module.parameters())
    assert total - NUM_LAYERS * layer < layer
    with Allocations() as allocations:
        yield
    state = sum(storage.nbytes() for storage in _storages(engine.backend.state_dict()))
    assert allocations.most <= state + 2 * 4 * layer < state + 2 * total


@pytest.mark.parametrize(("theirs", "ours"), [("zo", "lomo"), ("lomo", "lsp"), ("lsp", "adalomo"), ("adalomo", "zo")])
def test_another_backend_takes_the_weights_alone_and_a_unit_at_a_time(theirs: str, ours: str, tmp_path: Path) -> None:
    saved = engine_of(theirs, seed=0)
    play(saved, Epochs(), 3)
    saved.save_checkpoint(str(tmp_path), client_state={"epoch": 2})
    engine = engine_of(ours, seed=1)
    play(engine, Epochs(), 1)
    before, steps = weights_of(engine), engine.global_steps
    with pytest.raises(CheckpointError, match=f"of backend {theirs} in an engine of backend {ours}: load_optimizer"):
        engine.load_checkpoint(str(tmp_path))
    assert engine.global_steps == steps
    assert all(torch.equal(value, before[name]) for name, value in weights_of(engine).items())
    with holding_a_unit(engine):
        _, client = engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    expected = weights_of(saved)
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(engine).items())
    assert client is not None and client["epoch"] == 2 and engine.global_steps == saved.global_steps
    play(engine, Epochs(), 1)
    again = engine_of(theirs, seed=2)
    with holding_a_unit(again):
        again.load_checkpoint(str(tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in weights_of(again).items())
