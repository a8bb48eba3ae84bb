"""Blocks are found from a model's structure, or named."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from ds_zo.streaming.blocks import find_blocks, reached_elsewhere
from tests.helpers.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("opt", "model.decoder.layers"),
        ("gpt2", "transformer.h"),
        ("gpt-neox", "gpt_neox.layers"),
        ("mixtral", "model.layers"),
        ("roberta", "roberta.encoder.layer"),
    ],
)
def test_blocks_of_a_transformer_are_found(name: str, path: str) -> None:
    model = tiny_model(name)
    found = find_blocks(model)
    assert list(found) == [f"{path}.{i}" for i in range(3)]
    assert list(found.values()) == list(model.get_submodule(path).children())
    assert find_blocks(model, path) == find_blocks(model, [path]) == found


def test_both_stacks_of_an_encoder_decoder_are_found() -> None:
    config = hf.T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=3, num_heads=2)
    found = list(find_blocks(hf.T5ForConditionalGeneration(config)))
    assert found == [*(f"encoder.block.{i}" for i in range(2)), *(f"decoder.block.{i}" for i in range(3))]


def mlp(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        for name, child in children.items():
            self.add_module(name, child)


class Called(nn.Module):
    """With a forward, so it may be called whole."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_list_inside_a_block_is_part_of_it() -> None:
    experts = nn.ModuleList(Called(experts=nn.ModuleList(mlp() for _ in range(4))) for _ in range(2))
    assert list(find_blocks(Model(layers=experts))) == ["layers.0", "layers.1"]


def test_entries_without_a_forward_are_replaced_by_what_is_called_in_them() -> None:
    layers = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(4), None]), mlp(), nn.ReLU()]) for _ in range(2))
    called = ["layers.0.0.0", "layers.0.1", "layers.1.0.0", "layers.1.1"]
    assert list(find_blocks(Model(layers=layers))) == list(find_blocks(Model(layers=layers), "layers")) == called
    dicts = nn.ModuleList(nn.ModuleDict({"attention": mlp(), "feed": mlp()}) for _ in range(2))
    called = [f"layers.{i}.{name}" for i in range(2) for name in ("attention", "feed")]
    assert list(find_blocks(Model(layers=dicts))) == called


def test_a_module_in_several_places_is_one_block() -> None:
    shared = mlp()
    layers = nn.ModuleList(nn.ModuleList([mlp(), shared]) for _ in range(2))
    assert list(find_blocks(Model(layers=layers))) == ["layers.0.0", "layers.0.1", "layers.1.0"]


def test_what_stands_in_a_block_and_outside_of_it_is_reached_elsewhere() -> None:
    layers = nn.ModuleList(mlp() for _ in range(3))
    inner = nn.ModuleList([layers[0][0]])
    layers[1].append(layers[2][2])
    model = Model(layers=layers, alias=inner, again=layers)
    found = reached_elsewhere(model, layers)
    assert found == {id(layers[0][0]), id(layers[2][2])}


def test_lists_inside_a_list_that_is_no_stack_are_found() -> None:
    """A backbone in stages of unlike modules."""
    stage = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(2))})
    stages = nn.Sequential(nn.Flatten(), stage)
    assert list(find_blocks(Model(stages=stages))) == ["stages.1.blocks.0", "stages.1.blocks.1"]


def test_blocks_of_several_kinds_count_where_they_are_most_of_the_model() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), mlp(8), nn.Linear(4, 4)])
    assert list(find_blocks(Model(layers=layers))) == ["layers.0", "layers.1", "layers.2"]
    assert find_blocks(Model(layers=layers, rest=nn.Linear(64, 64))) == {}


def test_one_layer_counts_where_it_is_most_of_the_model() -> None:
    one = nn.ModuleList([nn.Linear(16, 16)])
    assert list(find_blocks(Model(layers=one))) == ["layers.0"]
    assert find_blocks(Model(layers=one, rest=nn.Linear(64, 64))) == {}


@pytest.mark.parametrize(
    "children",
    [
        {},
        {"head": nn.Linear(4, 3)},
        {"head": nn.Sequential(nn.Linear(4, 4), nn.ReLU())},
        {"drops": nn.ModuleList([nn.Dropout(), nn.Dropout()])},
        {"layers": nn.ModuleList()},
    ],
    ids=["nothing", "a layer", "an mlp", "no parameters", "an empty list"],
)
def test_a_model_without_a_stack_has_no_blocks(children: dict[str, nn.Module]) -> None:
    assert find_blocks(Model(**children)) == {}


def test_a_sequential_of_like_layers_is_a_stack() -> None:
    assert list(find_blocks(Model(stack=nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))))) == [
        "stack.0",
        "stack.1",
        "stack.2",
    ]


def test_named_lists_replace_found_ones() -> None:
    two = {"left": nn.ModuleList([mlp(), mlp()]), "right": nn.ModuleList([mlp(), mlp()])}
    model = Model(**two)
    assert list(find_blocks(model, "right")) == ["right.0", "right.1"]
    assert list(find_blocks(model, ["right", "left"])) == ["right.0", "right.1", "left.0", "left.1"]


def test_a_path_that_is_no_list_says_which_there_are() -> None:
    model = tiny_model("llama")
    with pytest.raises(
        ValueError, match=r"no submodule 'model.layer'; its lists are: model.layers .*ds_zo.stream.blocks"
    ):
        find_blocks(model, "model.layer")
    with pytest.raises(ValueError, match=r"'model.norm' is a LlamaRMSNorm, not a .* \(ds_zo.stream.blocks\)"):
        find_blocks(model, ["model.layers", "model.norm"])
    with pytest.raises(ValueError, match="not a non-empty ModuleList"):
        find_blocks(Model(layers=nn.ModuleList()), "layers")


def test_finding_touches_no_weights() -> None:
    with torch.device("meta"):
        model = Model(layers=nn.ModuleList(mlp() for _ in range(2)))
    assert len(find_blocks(model)) == 2
