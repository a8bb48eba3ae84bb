"""Norms outside of the blocks, in chunks of tokens: the outputs and gradients of the whole batch in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ds_zo.backends.common import chunked_norm
from ds_zo.backends.common.chunked_loss import CausalLosses
from ds_zo.backends.common.chunked_norm import ChunkedNorms
from tests.helpers.adapter_runs import adapted, adapter_json
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.lomo_runs import lively, start, streamed, train
from tests.helpers.lsp_runs import CPU, lsp_json
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import assert_close, parameters_of

WIDTH, ROWS = 16, 3
"""`ROWS` of a chunk."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_norm, "NORM_CHUNK_NUMEL", ROWS * WIDTH)


class Model(nn.Module):
    """Records the shapes that the norm computes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        found: torch.Tensor = self.norm(x)
        return found


def made(norm: Any, **more: Any) -> Model:
    torch.manual_seed(0)
    model = Model(norm(WIDTH, **more))
    with torch.no_grad():
        for p in model.norm.parameters():
            p.add_(torch.randn_like(p) / 4)
    return model


def in_chunks(model: Model) -> Any:
    return ChunkedNorms(model, list(model.layers)).in_chunks()


def x_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def gradients(model: Model, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    out = model(x)
    out.square().sum().backward()
    found = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
    model.zero_grad()
    x.grad = None
    return out.detach(), found


def sizes_of(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the inputs that the norm's own forward gets from now on."""
    sizes: list[torch.Size] = []
    own = type(model.norm).forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        sizes.append(x.shape)
        return own(self, x)

    monkeypatch.setattr(type(model.norm), "forward", forward)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, LlamaRMSNorm, GemmaRMSNorm])
def test_chunks_have_outputs_and_gradients_of_the_whole(
    norm: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = made(norm).to(dtype), x_of(4, 5, dtype=dtype)
    expected, theirs = gradients(model, x)
    sizes = sizes_of(model, monkeypatch)
    with in_chunks(model):
        found, ours = gradients(model, x)
    assert sizes.count((ROWS, WIDTH)) == 2 * 6 and (4, 5, WIDTH) not in sizes
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **tolerance)
    assert ours.keys() == theirs.keys() and "norm.weight" in ours
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, **tolerance, msg=name)
    assert "forward" not in vars(model.norm)


def test_frozen_norms_and_two_backwards() -> None:
    model, x = made(LlamaRMSNorm), x_of(4, 5)
    model.norm.requires_grad_(False)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    with in_chunks(model):
        out = model(x)
    for _ in range(2):
        (out.square().sum() / 2).backward(retain_graph=True)
    torch.testing.assert_close(x.grad, expected)
    assert model.norm.weight.grad is None


def test_float32_tensors_of_the_whole_batch_never_exist() -> None:
    model, x = made(LlamaRMSNorm).bfloat16(), x_of(64, 16, dtype=torch.bfloat16)
    del model.layers[:]

    def peak(*, chunks: bool) -> int:
        out = None
        with LiveBytes() as live:
            if chunks:
                with ChunkedNorms(model, [nn.Identity()]).in_chunks():
                    out = model(x)
            else:
                out = model(x)
            out.backward(torch.ones_like(out))
        x.grad = None
        return live.peak

    assert peak(chunks=True) <= 4 * x.nbytes  # the output, its gradient, and the gradient of the input
    assert peak(chunks=False) > 8 * x.nbytes


class MixingRows(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 1e-3 * x.mean((0, 1), keepdim=True)) if x.ndim > 2 else super().forward(x)


class MixingAlways(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - 1e-3 * x.flatten(0, -2).mean(0))


class Remembering(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach()
        return super().forward(x)


class OfThreeDimensions(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return super().forward(x.view(batch, length, -1))


class Noisy(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.randn_like(x))


class WithBuffer(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(()))


@pytest.mark.parametrize("norm", [MixingRows, MixingAlways, Remembering, OfThreeDimensions, Noisy, WithBuffer])
def test_other_modules_get_the_whole_batch(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(norm), x_of(4, 5)
    torch.manual_seed(0)
    expected = gradients(model, x)[0]
    sizes = sizes_of(model, monkeypatch)
    torch.manual_seed(0)
    with in_chunks(model):
        assert torch.equal(gradients(model, x)[0], expected)
    assert sizes.count((4, 5, WIDTH)) == 1
    sizes.clear()
    with in_chunks(model):
        model(x[:1, :ROWS])
    assert sizes == [(1, ROWS, WIDTH)], "a small batch makes no trial"


@pytest.mark.parametrize("backend", ["LOMO", "LOMO, clipped", "lsp", "adapter"])
def test_backends_run_norms_in_chunks(backend: str, monkeypatch: pytest.MonkeyPatch, single_process: None) -> None:
    def engine() -> Any:
        if backend == "adapter":
            return start_adapter(adapted("rslora"), adapter_json())
        if backend == "lsp":
            return start(
                lsp_json(zero_optimization={**CPU, "offload_param": {"device": "cpu"}}), lively("llama").train()
            )
        return start(streamed(lr=1e-2, clipping=0.5 if "clipped" in backend else 0.0), lively("llama").train())

    def trained() -> Any:
        runs = engine()
        losses = train(runs, [tiny_batch("llama", seed=seed, batch_size=4, length=16) for seed in range(2)])
        found = parameters_of(runs)
        runs.destroy()
        return losses, found

    sizes: list[int] = []
    own = hf.models.llama.modeling_llama.LlamaRMSNorm.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        sizes.append(x.shape[:-1].numel())
        return own(self, x)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    losses, found = trained()
    assert ROWS in sizes and 64 in sizes, "norms inside of blocks are whole"
    monkeypatch.setattr(chunked_norm, "NORM_CHUNK_NUMEL", 10**6)
    sizes.clear()
    expected = trained()
    assert set(sizes) == {64}
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_close(found, expected[1], atol=1e-5)


def test_models_without_blocks_are_left_alone() -> None:
    model = made(LlamaRMSNorm)
    with CausalLosses(model.norm).in_chunks({}):
        assert "forward" not in vars(model.norm)
