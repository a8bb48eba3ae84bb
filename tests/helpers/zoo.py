"""The models of the equivalence tests: transformers' own at toy sizes, and modules with forwards nobody expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from tests.helpers.tiny_models import VOCAB, tiny_batch, tiny_model

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """From a seed."""
    num_blocks: int = 3


def _hf(name: str, **overrides: Any) -> Case:
    return Case(
        lambda: _lively(tiny_model(name, **overrides)), lambda seed: tiny_batch(name, seed=seed, batch_size=2, length=8)
    )


def _lively(model: nn.Module) -> nn.Module:
    """Fresh weights are so small that losses hardly depend on them, and then a wrong update looks like a right one."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(6.0)
    return model


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(config).train()


def _ids(seed: int, *, batch_size: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def _sequence_pair(seed: int) -> Batch:
    return {"input_ids": _ids(seed), "labels": _ids(seed + 1000, length=6)}


class Listless(nn.Module):
    """No list of blocks, a parameter of the root's own, a convolution, and a bias shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.mix = nn.Conv1d(16, 16, 3, padding=1)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.bias = self.first.bias
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.second(torch.tanh(self.first(x)))
        return F.cross_entropy(self.head(x * self.scale).flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Wandering(nn.Module):
    """Visits its blocks in the order it is told: with gaps, repeats, backwards."""

    def __init__(self, *, num_blocks: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for i in range(len(self.layers)) if order is None else order:
            x = self.layers[i](x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def plain_batch(seed: int, **more: Any) -> Batch:
    ids = _ids(seed)
    return {"input_ids": ids, "labels": ids.clone(), **more}


class Sizes(list[int]):
    """The batch sizes that a block got. Unlike a plain list, it is no state of the block."""


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make().train()


CASES: dict[str, Case] = {
    "opt": _hf("opt"),
    "opt-untied": _hf("opt", tie_word_embeddings=False),
    "opt-350m": _hf("opt-350m"),
    "llama": _hf("llama", tie_word_embeddings=False),
    "llama-tied": _hf("llama", tie_word_embeddings=True),
    "gpt2": _hf("gpt2"),
    "gpt2-untied": _hf("gpt2", tie_word_embeddings=False),
    "qwen2": _hf("qwen2"),
    "bloom": _hf("bloom"),
    "mistral": _hf("mistral"),
    "gpt-neox": _hf("gpt-neox"),
    "roberta": _hf("roberta"),
    "mixtral": _hf("mixtral", output_router_logits=True, router_aux_loss_coef=0.1),
    "t5": Case(_t5, _sequence_pair, 4),
    "listless": Case(partial(seeded, Listless), plain_batch, 0),
    "wandering": Case(partial(seeded, Wandering), plain_batch, 4),
}
