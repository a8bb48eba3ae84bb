"""LOMO on blocks that depend on more than their input, and on losses of several forwards."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations

from tests.helpers.lomo_runs import batches, config_for, start, streamed, train, weights_of
from tests.helpers.lsp_runs import lsp_json
from tests.helpers.weights import assert_close, assert_equal, parameters_of
from tests.helpers.zoo import seeded

pytestmark = pytest.mark.usefixtures("single_process")

LENGTH, WIDTH, VOCAB = 6, 8, 11


class Odd(nn.Module):
    """Keeps statistics, draws from Python's generator and its own, drops out, and adds a parameter whose gradient is a
    view. One is a scalar, one transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.bent = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)
        self.shift = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.generator = torch.Generator().manual_seed(3)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        y = self.norm((x + self.shift.unsqueeze(0)).transpose(1, 2)).transpose(1, 2)
        y = torch.tanh(self.bent(y)) * self.gain + torch.tanh(x @ self.turned)
        y = y * torch.rand(y.shape, generator=self.generator) + mask
        return x + self.drop(y) * (1.0 if random.random() < 0.5 else 0.2)


class Prompt(nn.Module):
    """Its output is its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.weight.expand(length, -1)


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=sparse)
        self.prompts = nn.ModuleList(Prompt() for _ in range(4))
        self.layers = nn.ModuleList(Odd() for _ in range(3))

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        prompts = [prompt(LENGTH) for prompt in self.prompts]
        x = self.embed(ids) + sum(prompts) * prompts[0] + shift
        with torch.inference_mode():
            mask = torch.full((WIDTH,), 0.1)
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


class Own:
    """What a user trains beside the engine: what goes into it and what its losses are weighed by."""

    def __init__(self) -> None:
        self.shift, self.weight = nn.Parameter(torch.full((WIDTH,), 0.1)), nn.Parameter(torch.ones(()))
        self.sgd = torch.optim.SGD([self.shift, self.weight], lr=0.05)

    def step(self) -> None:
        self.sgd.step()
        self.sgd.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        return {"shift": self.shift.detach(), "weight": self.weight.detach()}


def loss_of(engine: Any, ids: torch.Tensor, own: Own) -> torch.Tensor:
    """Of a forward in training, one with a frozen block and one in evaluation, all made before the backward."""
    layer = getattr(engine, "module", engine).layers[1]
    loss = engine(ids, own.shift)
    layer.requires_grad_(False)
    loss = loss + own.weight * engine((ids + 1) % VOCAB, shift=own.shift * own.weight)
    layer.requires_grad_(True)
    engine.eval()  # last: torch's own batch norm goes back through whatever its statistics have become
    loss = loss + engine(ids.flip(1), own.shift)
    engine.train()
    return loss


@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_everything_is_as_it_was_when_blocks_are_computed_again(clipping: float) -> None:
    data = [torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    reference, theirs = seeded(Net), Own()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.05)
    torch.manual_seed(7)
    random.seed(7)
    for ids in data:
        loss_of(reference, ids, theirs).backward()
        if clipping:
            nn.utils.clip_grad_norm_(reference.parameters(), clipping)
        sgd.step()
        sgd.zero_grad()
        theirs.step()
    for config in (config_for(lr=0.05, clipping=clipping), streamed(lr=0.05, clipping=clipping)):
        engine, own = start(config, seeded(lambda: Net(sparse=True))), Own()
        torch.manual_seed(7)
        random.seed(7)
        for ids in data:
            engine.backward(loss_of(engine, ids, own))
            engine.step()
            own.step()
        assert_close(own.values(), theirs.values())
        assert_close(engine.module_state_dict(), reference.state_dict(), atol=1e-5)
    engine.eval()
    reference.eval()
    random.seed(7)
    with torch.no_grad():
        found = engine(data[0], theirs.shift)
        random.seed(7)
        torch.testing.assert_close(found, reference(data[0], theirs.shift), rtol=1e-4, atol=0.0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("seed", range(3))
def test_statistics_change_once_a_forward_whichever_norms_are_frozen(seed: int) -> None:
    """Other norms are in eval mode in each step. Recomputing a block leaves the statistics of the others alone."""
    rng = random.Random(seed)
    reference, engine = seeded(Normed), start(streamed(lr=0.05), seeded(Normed))
    sgd = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step in range(5):
        frozen = [i for i in range(3) if rng.random() < 0.5]
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for module in (reference, engine.module):
            for i, block in enumerate(module.train().blocks):
                block[1].train(i not in frozen)
        reference(x).backward()
        sgd.step()
        sgd.zero_grad()
        engine.backward(engine(x))
        engine.step()
    assert_close(engine.module_state_dict(), reference.state_dict(), atol=1e-5)


class Subclass(dict):
    pass


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        found = self.inner(x["x"] if isinstance(x, dict) else x)
        return Subclass(x=found) if isinstance(x, dict) else found


class Bare(nn.Module):
    """Blocks alone: nothing around them would notice that their weights changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hidden() for _ in range(3))

    def forward(self, x: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = (x["x"] if isinstance(x, dict) else x).square().mean()
        return found


def test_a_streamed_backward_through_changed_weights_or_past_outputs_is_an_error_not_garbage() -> None:
    engine = start(streamed(), seeded(Bare))
    x = torch.randn(2, WIDTH)
    loss, other = engine(x), engine(2 * x)
    engine.backward(loss, retain_graph=True)
    engine.step()
    for stale in (loss, other):
        with pytest.raises(RuntimeError, match=r"a forward after the last update.*add the losses up"):
            engine.backward(stale)
    loss = engine(x)
    engine.module.load_state_dict({name: 2 * value for name, value in engine.module.state_dict().items()})
    with pytest.raises(RuntimeError, match=r"layers\.2 is computed again.*changed since"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"through its outputs alone.*offload_param"):
        engine.backward(engine({"x": x}))
    engine.backward(engine(x))


class Sharing(nn.Module):
    """Each block leaves its keys to the next one, some under a name that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int, *, left: Any) -> torch.Tensor:
        keys = self.keys(x)
        x = x + torch.tanh(self.values(x)) + (left[number % 2][0] if number > 1 else 0.0)
        if number < 4:
            left[number % 2] = keys, number
        return x


class Shared(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing() for _ in range(6))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.kind()
        for i, layer in enumerate(self.layers):
            x = layer(x, i, left=left)
        assert left[0][1] == 2 and left[1][1] == 3
        return x.square().mean() + left[1][0].mean()


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_blocks_may_leave_tensors_for_later_ones_in_a_mapping(kind: type, clipping: float) -> None:
    engines = [start(make(clipping=clipping), seeded(lambda: Shared(kind))) for make in (config_for, streamed)]
    for engine in engines:
        for seed in range(3):
            engine.backward(engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))))
            engine.step()
    assert_equal(weights_of(engines[1].module), weights_of(engines[0].module))
    engines[1].eval()
    with torch.no_grad():
        assert engines[1](torch.ones(2, WIDTH)) == engines[0](torch.ones(2, WIDTH))


class Collecting(nn.Module):
    """Leaves a loss of its own in one container, replaces an entry of another, and removes one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, losses: Any, *, state: tuple[Any, Any]) -> torch.Tensor:
        entries, last = state
        y = torch.tanh(self.inner(x)) + last[0]
        losses.append(y.square().mean())
        last[0] = y.mean()
        if "first" in entries:
            del entries["first"]
        entries[f"number {len(losses)}"] = y
        return x + y


class Collected(nn.Module):
    def __init__(self, sequence: type, mapping: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Collecting() for _ in range(4))
        self.kinds = sequence, mapping

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses, entries, last = self.kinds[0](), self.kinds[1](first=x), [torch.zeros(())]
        for layer in self.layers:
            x = layer(x, losses, state=(entries, last))
        assert list(entries) == [f"number {i}" for i in range(1, 5)] and len(losses) == 4
        found: torch.Tensor = x.square().mean() + sum(losses) + last[0] + entries["number 2"].mean()
        return found


@pytest.mark.parametrize(
    ("sequence", "mapping"), [(list, dict), (deque, OrderedDict), (list, partial(defaultdict, int))]
)
def test_blocks_may_change_lists_and_dicts_anywhere_in_their_arguments(sequence: type, mapping: Any) -> None:
    engines = [start(make(), seeded(lambda: Collected(sequence, mapping))) for make in (config_for, streamed)]
    for engine in engines:
        for seed in range(3):
            engine.backward(engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))))
            engine.step()
    assert_equal(weights_of(engines[1].module), weights_of(engines[0].module))


class Steered(nn.Module):
    """A forward with a hook inside each block that is there for this forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hidden() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hooks = [layer.inner.register_forward_hook(lambda m, given, found: torch.tanh(found)) for layer in self.layers]
        for layer in self.layers:
            x = x + layer(x)
        for hook in hooks:
            hook.remove()
        return x.square().mean()


def test_hooks_of_a_forward_are_there_when_blocks_are_computed_again() -> None:
    engines = [start(make(), seeded(Steered)) for make in (config_for, streamed)]
    for engine in engines:
        engine.backward(engine(torch.ones(2, WIDTH)))
        engine.step()
    assert_equal(weights_of(engines[1].module), weights_of(engines[0].module))
    assert not any(m._forward_hooks for layer in engines[1].module.layers for m in layer.modules())


GEMMA: dict[str, Any] = {
    "vocab_size": 67,
    "vocab_size_per_layer_input": 67,
    "hidden_size": 16,
    "hidden_size_per_layer_input": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
GEMMAS: dict[str, dict[str, Any]] = {
    "Gemma3n": {
        "intermediate_size": [24] * 4,
        "altup_num_inputs": 2,
        "laurel_rank": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "Gemma4": {"intermediate_size": 24, "global_head_dim": 8},
}


@pytest.mark.parametrize("name", GEMMAS)
def test_layers_that_share_keys_and_values_stream(name: str) -> None:
    if not hasattr(hf, f"{name}ForCausalLM"):
        pytest.skip(f"this transformers has no {name}")

    def make() -> nn.Module:
        config = getattr(hf, f"{name}TextConfig")(**GEMMA, **GEMMAS[name])
        return seeded(lambda: getattr(hf, f"{name}ForCausalLM")(config)).train()

    lsp = lsp_json()
    on_host = {**lsp, "zero_optimization": {**lsp["zero_optimization"], "offload_param": {"device": "cpu"}}}
    for resident, other in ((config_for(lr=0.01), streamed(lr=0.01)), (lsp, on_host)):
        engines = [start(config, make()) for config in (resident, other)]
        before = parameters_of(engines[0])
        losses = [train(engine, batches("llama", 2)) for engine in engines]
        assert losses[0] == losses[1]
        assert_equal(parameters_of(engines[1]), parameters_of(engines[0]))
        source = "model.layers.1.self_attn.k_proj.weight"  # whose keys layer 3 takes
        assert not torch.equal(parameters_of(engines[1])[source], before[source])
