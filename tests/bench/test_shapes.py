"""Shapes are the published ones; random weights are drawn once, and wherever they are asked for."""

from __future__ import annotations

import pytest
import torch

from ds_zo.bench.shapes import config_of_model, lazy_model, materialise

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-1.3b", 1.35),
        ("llama-7b", 6.74),
        ("llama-65b", 65.3),
        ("bloom-176b", 176.2),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
    ],
)
def test_a_shape_has_as_many_parameters_as_published_and_takes_no_memory(shape: str, billions: float) -> None:
    model = lazy_model(f"random:{shape}", dtype=torch.bfloat16, device=CPU)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-3)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("family", ["opt", "llama", "bloom", "qwen3-moe", "gpt-oss"])
def test_a_materialised_model_is_whole_seeded_and_computes(family: str) -> None:
    models = [
        materialise(lazy_model(f"random:{family}-tiny", dtype=torch.float32, device=CPU, num_layers=1, seed=7))
        for _ in range(2)
    ]
    ids = torch.arange(12).reshape(2, 6)
    first, second = (model(input_ids=ids, labels=ids).loss for model in models)
    assert torch.equal(first, second) and torch.isfinite(first)
    assert models[0].config.num_hidden_layers == 1
    assert not any(p.is_meta for p in models[0].parameters())


def test_a_model_is_random_a_folder_or_a_name_and_errors_say_so() -> None:
    with pytest.raises(ValueError, match="write random:opt-125m"):
        config_of_model("opt-125m")
    with pytest.raises(ValueError, match="unknown shape 'opt-7b'; there are opt-tiny"):
        config_of_model("random:opt-7b")
    with pytest.raises(ValueError, match="--layers"):
        config_of_model("some-org/some-model", num_layers=2)
