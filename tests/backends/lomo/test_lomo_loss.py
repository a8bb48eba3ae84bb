"""The loss that LOMO takes in chunks where logits are many: same gradients, bit for bit, in less memory."""

from __future__ import annotations

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_zo.backends.common import chunked_loss
from ds_zo.backends.common.chunked_loss import chunked_causal_lm_loss
from tests.helpers.lomo_runs import batches, config_for, lively, start, train, weights_of
from tests.helpers.weights import assert_equal

VOCAB = 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(7)])
def test_chunks_have_the_gradients_of_the_whole(
    num_items: int | torch.Tensor | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LOSS_CHUNK_NUMEL", 3 * VOCAB)
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 8, VOCAB)).to(dtype)
    labels = torch.randint(0, VOCAB, (2, 8))
    labels[0, 2:5] = -100
    results = []
    for loss_of in (ForCausalLMLoss, chunked_causal_lm_loss):
        leaf = logits.clone().requires_grad_()
        loss = loss_of(leaf, labels, VOCAB, num_items_in_batch=num_items)
        (2 * loss).backward(retain_graph=True)
        first, leaf.grad = leaf.grad, None
        (2 * loss).backward()
        assert torch.equal(first, leaf.grad)
        results.append((loss, first))
    assert results[0][0].item() == pytest.approx(results[1][0].item(), rel=1e-6)
    assert results[0][1].any() and torch.equal(results[0][1], results[1][1])


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_training_by_chunks_is_training(clipping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = start(config_for(clipping=clipping), lively("llama"))
    train(whole, batches("llama", 3))
    monkeypatch.setattr(chunked_loss, "LOSS_CHUNK_NUMEL", 5 * 67)
    engine = start(config_for(clipping=clipping), lively("llama"))
    train(engine, batches("llama", 3))
    assert_equal(weights_of(engine.module), weights_of(whole.module))
