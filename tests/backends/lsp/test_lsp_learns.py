"""On a toy that memorises four batches of random tokens, learned projectors beat random ones at AdamW's own rate."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.lomo_runs import start

pytestmark = pytest.mark.usefixtures("single_process")

LR = 6e-3
NUM_STEPS = 40
CONFIG = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **CONFIG))


def batch(number: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + number % 4)
    ids = torch.randint(3, 100, (2, 12), generator=random)
    return {"input_ids": ids, "labels": ids}


@cache
def losses_of_lsp(projector: str, *, check_interval: int = 1000) -> list[float]:
    params = {"lr": LR, "subspace_dim": 16, "projector": projector, "fit_steps": 20}
    params |= {"check_interval": check_interval, "edge": "lsp"}  # the embedding of a toy would learn all by itself
    json = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "LSP", "params": params},
        "zero_optimization": {"stage": 0},
    }
    engine = start(json, model())
    losses = []
    for number in range(NUM_STEPS):
        loss = engine(**batch(number)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def losses_of_adamw() -> list[float]:
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for number in range(NUM_STEPS):
        loss = net(**batch(number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def last(losses: list[float]) -> float:
    """Mean over all four batches."""
    return sum(losses[-4:]) / 4


def test_learned_projectors_beat_random_ones() -> None:
    assert last(losses_of_lsp("learned")) < last(losses_of_lsp("random")) - 0.3


def test_the_loss_falls_at_adamws_own_rate() -> None:
    lsp, adamw = losses_of_lsp("learned"), losses_of_adamw()
    assert lsp[0] - last(lsp) > 0.6 * (adamw[0] - last(adamw))


def test_a_refit_does_not_raise_the_loss() -> None:
    """A check at step 16, fits until 19, a test at 20: other projectors from step 21 on. The eight steps before and the
    twelve from there see every batch equally often."""
    losses, without = (losses_of_lsp("learned", check_interval=interval) for interval in (16, 1000))
    assert losses[:22] == without[:22] and losses[22] != without[22]
    assert sum(losses[21:33]) / 12 < sum(losses[13:21]) / 8
