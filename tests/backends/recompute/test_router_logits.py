"""Router logits leave streamed blocks with gradients, so losses on them train streamed models as resident ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import families
from tests.helpers.equivalence_runs import on_device
from tests.helpers.lomo_runs import batches, config_for, lively, start, streamed, weights_of
from tests.helpers.ranks import job
from tests.helpers.support_matrix import config_of, with_lora
from tests.helpers.weights import Weights, assert_close, assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")

WITH_LOSS = {
    "mixtral": "LOMO",
    "qwen3_moe": "AdaLOMO",
    "qwen3_next": "LSP",
    "gpt_oss": "Adapter",
    "granitemoe": "LOMO",
    "olmoe": "ZO",
    "jamba": "AdaLOMO",
}
"""Families with an auxiliary loss of their own, and a backend for each."""
WITHOUT_LOSS = ("deepseek_v3", "glm4_moe", "llama4_text")
NUM_STEPS = 2
Run = tuple[list[Any], Weights]
"""What each step's forward gave, and the weights after the last step."""
LossOf = Callable[[Any], torch.Tensor]


def model_of(kind: str, *, coefficient: float = 0.5, **config: Any) -> Any:
    """With its auxiliary loss switched on, unless the family has none."""
    model: Any = families.case(kind).make()
    for name, value in {"use_cache": False, "output_router_logits": True, **config}.items():
        setattr(model.config, name, value)
    model.router_aux_loss_coef = coefficient
    return model


def own_loss(output: Any) -> torch.Tensor:
    """A user's loss on router logits beside that of the model."""
    loss: torch.Tensor = output.loss
    for logits in output.router_logits:
        loss = loss + 0.1 * logits.float().logsumexp(-1).square().mean()
    return loss


def run(engine: Any, kind: str, *, loss_of: LossOf = lambda output: output.loss, rank: int = 0) -> Run:
    torch.manual_seed(1)
    found = []
    for step in range(NUM_STEPS):
        output = engine(**on_device(engine, families.case(kind).batch(10 * step + rank)))
        engine.backward(loss_of(output))
        engine.step()
        found += [output.loss.item(), *(logits.detach().clone() for logits in output.router_logits)]
        if getattr(output, "aux_loss", None) is not None:
            found.append(output.aux_loss.item())
    end = parameters_of(engine)
    engine.destroy()
    return found, end


def plain_run(model: nn.Module, kind: str, loss_of: LossOf, *, lr: float = 0.1) -> Run:
    """The same by plain SGD."""
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        output = model(**families.case(kind).batch(10 * step))
        loss_of(output).backward()
        sgd.step()
        sgd.zero_grad()
        found += [output.loss.item(), *(logits.detach().clone() for logits in output.router_logits)]
    return found, weights_of(model)


def assert_same(ours: Run, theirs: Run) -> None:
    """Losses, router logits and weights are equal bit for bit."""
    assert len(ours[0]) == len(theirs[0])
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert_equal(ours[1], theirs[1])


@pytest.mark.parametrize(("kind", "backend"), WITH_LOSS.items())
def test_the_auxiliary_loss_trains_streamed_models_as_resident_ones(kind: str, backend: str) -> None:
    def made(placement: str, coefficient: float = 0.5) -> Run:
        model = model_of(kind, coefficient=coefficient)
        model = with_lora(model) if backend == "Adapter" else model
        return run(start(config_of(backend, placement), model, model_parameters=list(model.parameters())), kind)

    ours = made("streamed")
    assert_same(ours, made("resident"))
    without = made("streamed", coefficient=0.0)
    moved = {name for name, value in ours[1].items() if not torch.equal(value, without[1][name])}
    routers = {name for name in ours[1] if name.endswith(("gate.weight", "router.weight", "router.layer.weight"))}
    assert routers
    assert moved > routers if backend != "Adapter" else moved  # LoRA has frozen routers


@pytest.mark.parametrize("kind", WITHOUT_LOSS)
def test_a_users_loss_on_router_logits_gives_the_bits_of_plain_sgd(kind: str) -> None:
    ours = run(start(streamed(), model_of(kind)), kind, loss_of=own_loss)
    assert_same(ours, plain_run(model_of(kind), kind, own_loss))
    assert not all(map(torch.equal, ours[1].values(), run(start(streamed(), model_of(kind)), kind)[1].values()))


def test_a_loss_on_router_logits_alone_reaches_the_blocks_before_each_router() -> None:
    def loss_of(output: Any) -> torch.Tensor:
        assert len(output.router_logits) == 2 and all(logits.requires_grad for logits in output.router_logits)
        first, last = output.router_logits
        return first.square().mean() + 3 * last.square().mean()

    ours = run(start(streamed(), model_of("mixtral", coefficient=0.0)), "mixtral", loss_of=loss_of)
    assert_same(([], ours[1]), ([], plain_run(model_of("mixtral"), "mixtral", loss_of)[1]))


def test_a_coefficient_of_zero_changes_nothing() -> None:
    def end(wanted: bool) -> Weights:
        engine = start(streamed(), model_of("qwen3_moe", coefficient=0.0, output_router_logits=wanted))
        engine.backward(engine(**families.text_batch(0)).loss)
        engine.step()
        return parameters_of(engine)

    assert_equal(end(True), end(False))


@pytest.mark.parametrize("settings", [{"clipping": 0.05}, {"clipping": 0.05, "params": {"norm_scope": "group"}}])
def test_gradients_are_clipped_with_those_of_the_auxiliary_loss(settings: dict[str, Any]) -> None:
    runs = [run(start(make(**settings), model_of("qwen3_moe")), "qwen3_moe") for make in (streamed, config_for)]
    assert_same(*runs)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_logits_of_tiles_are_those_of_the_whole_batch(kind: str) -> None:
    def made(tiles: int) -> tuple[Run, int]:
        sizes: list[int] = []

        def noted(forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
            sizes.append(len(hidden))
            return forward(hidden)

        model = model_of(kind)
        for layer in model.model.layers:
            layer.mlp.forward = partial(noted, layer.mlp.forward)
        return run(start(streamed(stream={"tiles": tiles}), model), kind, loss_of=own_loss), sizes[-1]

    (whole, batch_size), (tiled, tile_size) = made(1), made(2)
    assert 0 < tile_size < batch_size
    assert len(whole[0]) == len(tiled[0])
    for a, b in zip(whole[0], tiled[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_close(tiled[1], whole[1], atol=1e-5)


def test_router_logits_can_be_asked_for_in_a_call() -> None:
    runs = []
    for make in (streamed, config_for):
        engine = start(make(), model_of("olmoe", output_router_logits=False))
        engine.module.register_forward_pre_hook(_ask, with_kwargs=True)
        runs.append(run(engine, "olmoe", loss_of=own_loss))
    assert_same(*runs)


def _ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {**kwargs, "output_router_logits": True}


def test_each_router_chooses_the_same_experts_when_its_block_is_computed_again() -> None:
    def chosen(noise: float) -> list[list[torch.Tensor]]:
        """What each router chooses in each of its passes."""
        found: list[list[torch.Tensor]] = []
        model = model_of("mixtral", router_jitter_noise=noise)
        for layer in model.model.layers:
            passes: list[torch.Tensor] = []
            layer.mlp.gate.register_forward_hook(lambda *call, passes=passes: passes.append(call[-1][2]))
            found.append(passes)
        run(start(streamed(), model), "mixtral")
        return found

    for jittered, plain in zip(chosen(0.5), chosen(0.0), strict=True):
        assert len(jittered) == 2 * NUM_STEPS
        for first, again in zip(jittered[::2], jittered[1::2], strict=True):
            assert torch.equal(first, again)
        assert not torch.equal(jittered[0], plain[0]), "the noise changes what is chosen"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_block_records_logits_once(reentrant: bool) -> None:
    def made(make: Callable[[], dict[str, Any]]) -> Run:
        model = model_of("gpt_oss")
        for layer in model.model.layers:
            layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=reentrant)
        return run(start(make(), model), "gpt_oss")

    ours = made(streamed)
    assert sum(isinstance(found, torch.Tensor) for found in ours[0]) == NUM_STEPS * 2
    assert_same(ours, made(config_for))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_weights_leave_blocks_in_the_same_way(compiled: bool) -> None:
    def end(make: Callable[..., dict[str, Any]]) -> Weights:
        model: Any = lively("llama")
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        engine = start(make(ds_zo={"compile_blocks": compiled}), model)
        for batch in batches("llama", NUM_STEPS):
            output = engine(**batch)
            assert len(output.attentions) == len(model.model.layers)
            engine.backward(output.loss - sum(weights.square().sum() for weights in output.attentions))
            engine.step()
        return parameters_of(engine)

    assert_equal(end(streamed), end(config_for))


def on_rank(rank: int) -> dict[str, Run]:
    resident, on_host = config_of("LOMO", "resident"), config_of("LOMO", "streamed")
    shared = {**on_host, "zero_optimization": {**on_host["zero_optimization"], "stage": 3}}
    configs = {"resident": resident, "streamed": on_host, "shared": shared}
    return {name: run(start(config, model_of("mixtral")), "mixtral", rank=rank) for name, config in configs.items()}


def test_two_ranks_add_their_auxiliary_losses_up() -> None:
    ranks = job(on_rank, 2)
    for found in ranks:
        assert_same(found["streamed"], found["resident"])
        assert_same(found["shared"], found["resident"])
        assert_equal(found["resident"][1], ranks[0]["resident"][1])
