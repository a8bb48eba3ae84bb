"""Blocks over slices of the batch: the run of whole batches, and the blocks for which that is not possible."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_zo.backends.recompute import compiled_blocks
from tests.helpers.adapter_runs import adapted, adapter_json
from tests.helpers.adapter_runs import start as start_adapter
from tests.helpers.batch_sizes import batch_sizes
from tests.helpers.lomo_runs import lively, start, streamed, train
from tests.helpers.lsp_runs import streamed_lsp
from tests.helpers.tile_number_cases import steps
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import assert_close, assert_equal, parameters_of, parts_have_bits_of_whole
from tests.helpers.zoo import Sizes, seeded

pytestmark = pytest.mark.usefixtures("single_process")

WIDTH, LENGTH = 8, 3


def engine_of(backend: str, tiles: int | None, *, name: str = "llama", **model: Any) -> Any:
    """`engine.sizes`: the batch sizes that the second block gets."""
    stream = {"tiles": tiles}
    module = adapted("rslora", name=name, **model) if backend == "adapter" else lively(name, **model).train()
    sizes = batch_sizes(module)
    if backend == "adapter":
        engine = start_adapter(module, adapter_json(tiles=tiles))
    elif backend == "lsp":
        engine = start(streamed_lsp(stream=stream, lr=1e-3), module)
    else:
        kind, _, clipping = backend.partition(", ")
        more: dict[str, Any] = {"by norm": {"clipping": 0.5}, "by value": {"params": {"clip_grad_value": 1e-3}}}
        engine = start(streamed(kind, lr=1e-2, stream=stream, **more.get(clipping, {})), module)
    engine.sizes = sizes
    return engine


def data(name: str = "llama", *, num: int = 3, batch_size: int = 5, length: int = 8) -> list[dict[str, torch.Tensor]]:
    return [tiny_batch(name, seed=seed, batch_size=batch_size, length=length) for seed in range(num)]


def trained(
    engine: Any, batches: list[dict[str, torch.Tensor]], *, tiles: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run whose second block gets no more than one of so many tiles."""
    torch.manual_seed(7)
    losses = train(engine, batches)
    found = parameters_of(engine)
    assert max(engine.sizes) == widest(len(batches[0]["input_ids"]), tiles)
    engine.destroy()
    return losses, found


def widest(batch_size: int, tiles: int) -> int:
    """Samples of the largest tile. The trial of whether a block can be tiled takes two."""
    return max(2, -(-batch_size // tiles))


@pytest.mark.parametrize("backend", ["LOMO", "LOMO, by norm", "LOMO, by value", "AdaLOMO", "lsp", "adapter"])
def test_tiled_runs_are_those_of_whole_batches(backend: str, log: pytest.LogCaptureFixture) -> None:
    """The first loss has the same bits where parts of a batch do. Gradients are summed in another order."""
    losses, expected = trained(engine_of(backend, None), data())
    model, first = lively("llama"), data(num=1)[0]
    keeps_bits = parts_have_bits_of_whole(
        lambda rows: model(**{key: value[rows] for key, value in first.items()}).logits, torch.arange(5), sizes=(1, 3)
    )
    for tiles in (2, 5, 8) if backend == "LOMO" else (2,):  # uneven tiles, and more than there are samples
        found, ours = trained(engine_of(backend, tiles), data(), tiles=tiles)
        assert found[0] == losses[0] or not keeps_bits
        assert found == pytest.approx(losses, rel=1e-5)
        assert_close(ours, expected, atol=1e-5)
    assert "whole batch" not in log.text


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "mixtral", "roberta"])
def test_arguments_with_a_batch_dimension_are_found(name: str, log: pytest.LogCaptureFixture) -> None:
    """Bloom's blocks get ALiBi's slopes, which have a row for each head of each sample."""
    none: dict[str, Any] = {"gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}}.get(name, {})
    losses, expected = trained(engine_of("LOMO", 1, name=name, **none), data(name))
    found, ours = trained(engine_of("LOMO", 3, name=name, **none), data(name), tiles=3)
    assert found == pytest.approx(losses, rel=1e-5)
    assert_close(ours, expected, atol=1e-5)
    assert "whole batch" not in log.text


class Block(nn.Module):
    """Attention over the tokens of a sample. `sizes`: the batch sizes that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.turn = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(64, WIDTH) / 4)
        self.sizes = Sizes()

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> Any:
        self.sizes.append(len(x))
        return self.of(x + self.table[places])

    def of(self, x: torch.Tensor) -> Any:
        scores = self.mix(x) @ x.transpose(-1, -2)
        return x + torch.tanh(self.turn(scores.softmax(-1) @ x))


class Flattened(Block):
    """Its second argument has a row for each token of the batch."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        self.sizes.append(len(x))
        return self.of(x + rows.view_as(x))


class BatchNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def of(self, x: torch.Tensor) -> Any:
        return super().of(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Average(Block):
    """Changes a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def of(self, x: torch.Tensor) -> Any:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().of(x - self.mean)


class Capacity(Block):
    """In training, each of two experts takes the first tokens of its kind in a batch. It drops out too."""

    def of(self, x: torch.Tensor) -> Any:
        if not self.training:
            return super().of(x)
        x = functional.dropout(x, 0.1)
        rows = x.reshape(-1, WIDTH)
        chosen = (rows[:, 0] > 0).long()
        turn = functional.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None]).squeeze(1)
        kept = turn <= 0.6 * len(rows)
        return super().of((rows + torch.tanh(self.turn(rows)) * kept[:, None]).view_as(x))


class Remembered(Block):
    """Its capacity is that of its first batch, as in NLLB."""

    capacity: int | None = None

    def of(self, x: torch.Tensor) -> Any:
        if self.training and self.capacity is None:
            self.capacity = len(x.flatten(0, 1))
        return super().of(x) / (self.capacity or 1)


class Tracked(Block):
    """Its statistics are a tensor that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(())

    def of(self, x: torch.Tensor) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().of(x) + 0.0 * self.mean  # NaN if the mean is


class CountingNaN(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_nan", torch.zeros((), dtype=torch.long))

    def of(self, x: torch.Tensor) -> Any:
        self.num_nan += x.isnan().sum()
        return super().of(x)


class Noisy(Block):
    def of(self, x: torch.Tensor) -> Any:
        return super().of(x * torch.rand_like(x)) if self.training else super().of(x)


class WithLoss(Block):
    """Drops out too, so that the trial draws random numbers."""

    def of(self, x: torch.Tensor) -> Any:
        return super().of(functional.dropout(x, 0.2, self.training)), x.square().mean()


class Writing(Block):
    def forward(self, x: torch.Tensor, places: torch.Tensor, held: Any = None) -> Any:
        found = super().forward(x, places)
        held["last"] = found
        return found


class Luck(Block):
    def of(self, x: torch.Tensor) -> Any:
        return super().of(x) * (0.5 + random.random())


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def of(self, x: torch.Tensor) -> Any:
        return super().of(self.memory(x)[0])


class HoldingList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held = [self.turn.weight]

    def of(self, x: torch.Tensor) -> Any:
        return super().of(x @ self.held[0])


class AddLoss(torch.autograd.Function):
    """Returns `x`, and adds the gradient of `loss` in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, grad.new_ones(())


class Balanced(Block):
    """Its auxiliary loss is a mean over the samples of a batch."""

    def of(self, x: torch.Tensor) -> Any:
        loss = self.turn(x).softmax(-1).mean(1).square().sum(-1).mean()
        return AddLoss.apply(super().of(x), loss)


class Normed(Block):
    """Divides the gradient of its output by the gradient's norm."""

    def of(self, x: torch.Tensor) -> Any:
        found = super().of(x)
        if found.requires_grad:
            found.register_hook(lambda grad: grad / grad.norm())
        return found


class Centred(Block):
    """Subtracts a thousandth of the mean of all samples."""

    def of(self, x: torch.Tensor) -> Any:
        return super().of(x - 1e-3 * x.mean((0, 1)))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        if tied:
            self.layers[2].turn.weight = self.layers[0].turn.weight
            self.layers[1].mix.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2])
        x, held = self.embed(x), dict[str, Any]()
        extra: Any = 0.0
        for layer in self.layers:
            more = [x.flatten(0, 1)] if isinstance(layer, Flattened) else [places]
            found = layer(x, *more, held) if isinstance(layer, Writing) else layer(x, *more)
            x, loss = found if isinstance(found, tuple) else (found, 0.0)
            extra = extra + loss
        return x.square().mean() + extra


def inputs(num: int = 3, *, batch: int = 4, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, length, WIDTH, generator=generator) for _ in range(num)]


def run(
    model: Any, batches: list[torch.Tensor], *, tiles: int, is_refused: bool = False, **more: Any
) -> tuple[list[float], Any]:
    engine = start(streamed(lr=0.05, stream={"tiles": tiles}, **more), model)
    losses = steps(engine, batches)
    assert max(model.layers[1].sizes) == widest(len(batches[0]), 1 if is_refused else tiles)
    found = {name: value.detach().clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, found


def test_a_block_has_the_activations_of_one_tile() -> None:
    """Also where the number of tokens is the number of samples, and in a last batch that is small."""
    model = seeded(lambda: Net(Block))
    engine = start(streamed(lr=0.05, stream={"tiles": 2}), model)
    sizes: list[list[int]] = []
    batches = [*inputs(batch=4, length=4), *inputs(1, batch=3), *inputs(1, batch=1)]
    losses = []
    for x in batches:
        model.layers[1].sizes.clear()
        losses += steps(engine, [x])
        sizes.append(list(model.layers[1].sizes))
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    first, *later, small, one = sizes
    assert max(first) == 2 and later == [[2, 2, 2, 2]] * 2
    assert max(small) == 2 and small[-4:] == [2, 1, 2, 1] and one == [1, 1]
    expected = run(seeded(lambda: Net(Block)), batches, tiles=1)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_close(found, expected[1], atol=1e-5)


def test_one_trial_serves_batches_of_all_lengths() -> None:
    model, batches = seeded(lambda: Net(Flattened)), [inputs(1, length=length)[0] for length in (3, 5, 6)]
    engine = start(streamed(lr=0.05, stream={"tiles": 2}), model)
    for x in batches:
        model.layers[1].sizes.clear()
        steps(engine, [x])
        assert max(model.layers[1].sizes) == 2
        assert len(model.layers[1].sizes) == 4 or x is batches[0]
    engine.destroy()


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (BatchNorm, "it changes its buffers"),
        (Average, "it changes its buffers"),
        (Capacity, "it mixes samples"),
        (Centred, "it mixes samples"),
        (Remembered, "it changes its attributes"),
        (Tracked, "it changes its attributes"),
        (CountingNaN, "it changes its buffers"),
        (Noisy, "it draws random numbers besides dropout"),
        (WithLoss, "one of its outputs has no batch dimension"),
        (Writing, "it writes to a dict or list that it is passed"),
        (Luck, "it draws from the random generators of Python"),
        (Recurrent, "keeps its weights in a list of its own"),
        (HoldingList, "keeps its weights in a list of its own"),
        (Balanced, "its backward pass adds gradients of its own"),
        (Normed, "its backward pass adds gradients of its own"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_that_cannot_be_tiled_run_as_without_tiles(
    block: type[nn.Module], reason: str, log: pytest.LogCaptureFixture
) -> None:
    losses, found = run(seeded(lambda: Net(block)), inputs(), tiles=2, is_refused=True)
    told = [line for line in log.messages if "whole batch" in line]
    assert len(told) == 1 and "layers.0" in told[0] and reason in told[0]
    expected = run(seeded(lambda: Net(block)), inputs(), tiles=1)
    assert losses == expected[0]
    assert_equal(found, expected[1])


def test_hooks_inside_a_block_run_once_for_a_batch(log: pytest.LogCaptureFixture) -> None:
    model, seen = seeded(lambda: Net(Block)), []
    handle = model.layers[1].turn.register_forward_hook(lambda m, args, output: seen.append(len(output)))
    engine = start(streamed(stream={"tiles": 2}), model)
    steps(engine, inputs(1))
    assert seen == [4, 4], "in the forward and in its recomputation"
    assert [line for line in log.messages if "whole batch" in line and "layers.1" in line and "hook" in line]
    handle.remove()
    steps(engine, inputs(1))
    assert model.layers[1].sizes[-4:] == [2, 2, 2, 2]
    engine.destroy()


def test_samples_without_a_batch_dimension_stay_together(log: pytest.LogCaptureFixture) -> None:
    packed = [x[0] for x in inputs(batch=1, length=6)]
    losses = run(seeded(lambda: Net(Block)), packed, tiles=2, is_refused=True)[0]
    assert "whole batch" in log.text
    assert losses == run(seeded(lambda: Net(Block)), packed, tiles=1)[0]


@pytest.mark.parametrize("clipping", [0.0, 0.01])
def test_weights_of_several_blocks_are_updated_once(clipping: float) -> None:
    losses, found = run(seeded(lambda: Net(Block, tied=True)), inputs(), tiles=3, clipping=clipping)
    expected = run(seeded(lambda: Net(Block, tied=True)), inputs(), tiles=1, clipping=clipping)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_close(found, expected[1], atol=1e-5)


def test_hooks_of_weights_run_once_for_a_batch() -> None:
    model, seen = seeded(lambda: Net(Block)), list[str]()
    for name, p in model.layers.named_parameters():
        p.register_hook(lambda grad, name=name: seen.append(name))
    engine = start(streamed(stream={"tiles": 4}), model)
    steps(engine, inputs(1))
    assert model.layers[1].sizes[-4:] == [1, 1, 1, 1]
    assert sorted(seen) == sorted(name for name, _ in model.layers.named_parameters())
    engine.destroy()


class Checkpointed(Block):
    reentrant = False

    def of(self, x: torch.Tensor) -> Any:
        return checkpoint(super().of, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_block(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    losses, found = run(seeded(lambda: Net(Checkpointed)), inputs(), tiles=2)
    expected = run(seeded(lambda: Net(Checkpointed)), inputs(), tiles=1)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_close(found, expected[1], atol=1e-5)


DROPOUT = {"resid_pdrop": 0.3, "attn_pdrop": 0.3}


def test_dropout_in_tiles_repeats_and_resumes(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    losses, expected = trained(engine_of("LOMO", 2, name="gpt2", **DROPOUT), data("gpt2", num=4), tiles=2)
    assert trained(engine_of("LOMO", 2, name="gpt2", **DROPOUT), data("gpt2", num=4), tiles=2)[0] == losses
    assert "whole batch" not in log.text

    engine = engine_of("LOMO", 2, name="gpt2", **DROPOUT)
    torch.manual_seed(7)
    train(engine, data("gpt2", num=4)[:2])
    engine.save_checkpoint(str(tmp_path))
    state = torch.get_rng_state()
    engine.destroy()
    resumed = engine_of("LOMO", 2, name="gpt2", **DROPOUT)
    resumed.load_checkpoint(str(tmp_path))
    torch.set_rng_state(state)
    assert train(resumed, data("gpt2", num=4)[2:]) == losses[2:]
    assert_equal(parameters_of(resumed), expected)
    resumed.destroy()


def test_gradients_of_many_tiles_lose_no_more_than_those_of_a_batch() -> None:
    """In bfloat16, against float32."""
    batch = data(batch_size=64, num=1)
    model = lively("llama").bfloat16().float()
    model.train()(**batch[0]).loss.backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def errors(tiles: int) -> float:
        model = lively("llama").bfloat16().train()
        sizes = batch_sizes(model)
        engine = start(streamed(stream={"tiles": tiles}, bf16={"enabled": True}), model)
        grads = dict[str, torch.Tensor]()
        for name, p in engine.module.named_parameters():
            p.register_hook(lambda grad, name=name: grads.update({name: grad.float()}))
        engine.backward(engine(**batch[0]).loss)
        assert max(sizes) == widest(64, tiles)
        engine.destroy()
        inside = [name for name in exact if ".layers." in name]
        wrong = sum((grads[name] - exact[name]).square().sum() for name in inside)
        return float((wrong / sum(exact[name].square().sum() for name in inside)).sqrt())

    assert errors(64) <= 1.1 * errors(1)


@pytest.mark.usefixtures("traced")
def test_compiled_blocks_are_compiled_once(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, sizes = lookup_backend(compiled_blocks.BACKEND), set[int]()

    def noted(graph: Any, inputs: Any) -> Any:
        sizes.update(len(x) for x in inputs if x.dim() == 3)  # weights have fewer dimensions
        return compiler(graph, inputs)

    monkeypatch.setattr(compiled_blocks, "BACKEND", noted)
    config = streamed(stream={"tiles": 2}, ds_zo={"compile_blocks": True}, lr=1e-2)
    engine = start(config, lively("llama").train())
    torch.manual_seed(7)
    losses, found = train(engine, data(batch_size=4)), parameters_of(engine)
    engine.destroy()
    assert counters["stats"]["unique_graphs"] == 1 and max(sizes) == 2
    assert "whole batch" not in log.text
    expected = trained(engine_of("LOMO", 1), data(batch_size=4))
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert_close(found, expected[1], atol=1e-5)
