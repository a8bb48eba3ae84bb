"""Inputs of blocks on the host: the bits of inputs on the device, in copies that are ordered with all kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_zo.backends.common import chunked_head
from ds_zo.backends.recompute.host_inputs import HostInputs, KeptInput
from ds_zo.streaming.streams import InlineStreams
from tests.helpers.adapter_runs import adapted, adapter_json, batches, start, train
from tests.helpers.lomo_runs import lively, streamed
from tests.helpers.lsp_runs import streamed_lsp
from tests.helpers.stream_clocks import Buffer, Races, buffers_of, clocked
from tests.helpers.tiny_models import VOCAB
from tests.helpers.weights import Weights, assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")


JSONS: dict[str, Callable[..., dict[str, Any]]] = {
    "LOMO": streamed,
    "LOMO in two passes": partial(streamed, clipping=0.5),
    "LOMO by group": partial(streamed, clipping=0.5, params={"norm_scope": "group"}),
    "AdaLOMO": partial(streamed, "AdaLOMO", lr=1e-2, clipping=0.5),
    "LSP, several backwards": partial(streamed_lsp, clipping=0.1, params={"schedule": "sync"}),
    "LSP accumulated": partial(streamed_lsp, gradient_accumulation_steps=2),
    "adapter accumulated, several backwards": lambda *, stream: adapter_json(
        own=False, gradient_accumulation_steps=2, **stream
    ),
}


@pytest.mark.parametrize("name", JSONS)
def test_inputs_on_the_host_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With head and loss in chunks. The second passes of a graph that is kept fetch the inputs again."""
    monkeypatch.setattr(chunked_head, "HEAD_CHUNK_NUMEL", 3 * VOCAB)
    runs: list[tuple[list[float], Weights]] = []
    for on_host in (False, True):
        json = JSONS[name](stream={"resident_blocks": 1, "offload_activations": on_host})
        model = adapted() if "adapter" in name else lively("llama")
        engine: Any = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=json)[0]
        losses = []
        for batch in batches(4):
            loss = engine(**batch).loss
            if "several" in name:
                engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        inputs = engine.backend.blocks.recomputation.host_inputs
        assert inputs.nbytes > 0 if on_host else inputs is None
        runs.append((losses, parameters_of(engine)))
        engine.destroy()
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) > 1
    assert_equal(runs[1][1], runs[0][1])


def races_of(monkeypatch: pytest.MonkeyPatch, *, deaf: Collection[tuple[str, str]] = ()) -> Races:
    with clocked(deaf=deaf):
        engine: Any = start(adapted(num_hidden_layers=4), adapter_json(offload_activations=True, frozen_dtype="nf4"))
    store = engine.backend.blocks.store
    inputs = engine.backend.blocks.recomputation.host_inputs
    on_device: list[torch.Tensor] = []
    upload = KeptInput.upload

    def uploaded(kept: KeptInput) -> torch.Tensor:
        if kept._device is None:
            kept._device = torch.empty(kept._shape, dtype=kept._dtype)
            on_device.append(kept._device)  # before the copy writes to it, and for as long as the step reads it
            kept._copy(kept._device, kept._view())
        return upload(kept)

    monkeypatch.setattr(KeptInput, "upload", uploaded)

    def buffers() -> Iterator[Buffer]:
        yield from buffers_of(store.runtime)
        for kept in list(inputs._kept.values()):
            yield "host copy of an input", kept._host, False
        yield from (("input", tensor, True) for tensor in on_device)

    with Races(buffers) as races:
        train(engine, batches(3))
    assert races.num_writes and len(on_device) == 3 * 2  # neither the first block's input nor the last's
    return races


def test_copies_and_kernels_are_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not races_of(monkeypatch).found


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("input" in text for text in races_of(monkeypatch, deaf=[("compute", "inputs")]).found)


def test_batches_of_many_lengths_need_as_many_buffers_as_those_of_one() -> None:
    inputs = HostInputs(InlineStreams(torch.device("cpu")), pin=False)
    most = 0
    for length in (3, 9, 5, 7, 2, 8, 9, 4):
        first = torch.full((length, 4), 2.0, requires_grad=True)
        hidden = first
        for _ in range(3):
            with inputs.saving([hidden]):
                hidden = hidden**2
        most = max(most, 3 * first.nbytes)
        assert inputs.nbytes <= most
        hidden.sum().backward()
        assert first.grad is not None and (first.grad == 8 * 2.0**7).all()


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.shift + mask)


class Changing(nn.Module):
    """Changes an input of blocks in place: the mask between blocks, or the hidden states after the block `after`."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifted() for _ in range(3))
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        for number, layer in enumerate(self.layers):
            hidden, x = x, layer(x, mask)
            if self.after is None:
                mask.add_(0.1)
            elif number == self.after:
                hidden.mul_(2.0)
        return x.square().mean()


@pytest.mark.parametrize("after", [None, 1, 2])
@pytest.mark.parametrize("offload", [True, False])
def test_an_input_that_is_changed_after_its_block_is_refused(after: int | None, offload: bool) -> None:
    engine: Any = start(Changing(after), adapter_json(offload_activations=offload))
    with pytest.raises(RuntimeError, match="changed in place" if offload else "modified by an inplace operation"):
        engine.backward(engine(torch.ones(2, 4)))
