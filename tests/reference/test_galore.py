"""The steps of the GaLore reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.grids import lsp_glue
from ds_zo.reference.galore import GaLoreAdamW, galore_engine
from ds_zo.tasks import make_task, pad_token_id
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.encoding import collate


def _matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("single_process")
def test_galore_trains_through_deepspeed() -> None:
    task, tokenizer = make_task("code_or_text"), AutoTokenizer.from_pretrained(FOLDER)
    batch = collate(task.sequences("train", tokenizer, max_length=32)[:4], pad_token_id=pad_token_id(tokenizer))
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    config = {**lsp_glue(576).methods["galore"].config, "train_micro_batch_size_per_gpu": 4}
    params = {"rank": 4, "lr": 5e-3, "refresh_interval": 3}
    engine = galore_engine(model, {**config, "optimizer": {"type": "GaLore", "params": params}})
    losses = []
    for _ in range(5):
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    state = engine.optimizer.state[model.get_parameter("model.layers.0.mlp.gate_proj.weight")]
    assert state["mean"].shape == (384, 4)
    assert engine.optimizer.state[model.get_parameter("model.embed_tokens.weight")]["mean"].shape == (1024, 128)
    with pytest.raises(ValueError, match=r"optimizer\.params\.rank"):
        galore_engine(model, {"optimizer": {"type": "GaLore"}})


def test_galore_without_rank_is_adamw() -> None:
    ours, theirs = (torch.nn.Parameter(_matrix(5, 4)) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = GaLoreAdamW([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for step in range(5):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = _matrix(5, 4, seed=step + 1)
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_galore_moves_in_the_directions_of_its_last_refresh(shape: tuple[int, int]) -> None:
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = GaLoreAdamW([p], lr=1.0, rank=2, refresh_interval=2, scale=1.0)
    gradients = [_matrix(*shape, seed=seed) for seed in range(3)]
    for step, G in enumerate(gradients):
        before = p.detach().clone()
        p.grad = G
        optimizer.step()
        U, _, V_t = torch.linalg.svd(gradients[0 if step < 2 else 2], full_matrices=False)
        moved = p.detach() - before
        kept = U[:, :2] @ U[:, :2].t() @ moved if shape[0] < shape[1] else moved @ V_t[:2].t() @ V_t[:2]
        assert torch.allclose(kept, moved, atol=1e-5)
        assert moved.norm() > 0.1
        if step == 0:  # Adam's first direction is a sign: known size
            assert float(moved.norm()) == pytest.approx(math.sqrt(2 * max(shape)), rel=1e-4)
