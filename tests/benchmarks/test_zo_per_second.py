"""The batched estimators of `benchmarks.zo_per_second` against autograd, and the study on the embedded model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import zo_per_second
from benchmarks.zo_per_second import (
    MEZO,
    VARIANTS,
    Bucket,
    Llama,
    Noise,
    Settings,
    Step,
    coefficients_of,
    losses_of,
    make_buckets,
)
from ds_zo.records.rows import read_objects
from ds_zo.tasks import make_task
from ds_zo.tasks.embedded_model import folder_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of("embedded")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(loaded: tuple[Any, Any]) -> Iterator[Llama]:
    yield Llama(loaded[0], device=CPU, dtype=torch.float32)


def shortest(loaded: tuple[Any, Any], loss: str = "choice") -> Bucket:
    return make_buckets(make_task("code_or_text"), loaded[1], loss=loss, device=CPU)[0]


def with_lora(noise: Noise, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The output `y` of a Linear with the LoRA and without noise."""
    product = noise.product(name)
    return y if product is None else y + x @ product.T


def test_forward_equals_transformers(loaded: tuple[Any, Any], model: Llama) -> None:
    """Also after training: of the weights that scoring copies to the model of transformers, with a LoRA's product."""
    ids = torch.randint(1000, (2, 17))
    theirs = copy.deepcopy(loaded[0])

    def assert_equal(noise: Any) -> None:
        with torch.no_grad():
            found = model.norm("norm", model.hidden_states(ids, noise)) @ model.weights["embed"].T
            torch.testing.assert_close(found, theirs(ids).logits, atol=2e-4, rtol=1e-4)

    assert_equal(None)
    for tensor in (model.flat_master, model.flat_weights):
        tensor.mul_(0.9)
    lora = Noise(model, Settings("", 0.0, space="lora"))
    assert lora.factors is not None
    lora.factors.add_(torch.randn_like(lora.factors), alpha=0.02)
    model.copy_to(theirs.state_dict(), lora.product)
    assert_equal(partial(with_lora, lora))


@pytest.mark.parametrize("space", ["rank1", "lora"])
@pytest.mark.parametrize("loss", ["choice", "lm"])
def test_coefficients_equal_directional_derivatives(
    loaded: tuple[Any, Any], model: Llama, space: Any, loss: Any
) -> None:
    """Each direction of a batched pass estimates <gradient, noise>, and the update adds the noise times its factor."""
    torch.manual_seed(0)
    settings = Settings("", 0.0, space=space, loss=loss, groups=2, directions=2, examples=2, eps=1e-3)
    chosen = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    batch = shortest(loaded, loss).take(torch.cat((chosen, chosen)))
    noise = Noise(model, settings)
    if noise.factors is not None:  # a second factor of zeros has no gradient in the first
        noise.factors.add_(torch.randn_like(noise.factors), alpha=0.02)
    noise.draw()
    noise.z.mul_(0.2)
    noise.used.mul_(0.2)
    with torch.no_grad():
        losses = losses_of(model, batch, noise.added, loss=loss).view(2, 4, 2).mean(-1)
    trained = model.flat_weights if noise.factors is None else noise.factors
    before = trained.clone()
    for k, estimate in enumerate(coefficients_of(losses, settings).tolist()):
        noise.update(torch.eye(4)[k])
        direction = trained - before
        slope = []
        for sign in (1, -1):
            trained.copy_(before + sign * 1e-3 * direction)
            with torch.no_grad():
                mine = batch.take(torch.tensor([2 * k, 2 * k + 1]))
                slope.append(losses_of(model, mine, partial(with_lora, noise), loss=loss).mean().item() * sign / 2e-3)
        model.reset()
        trained.copy_(before)
        assert estimate == pytest.approx(sum(slope), rel=0.03, abs=2e-3)


def test_one_sided_coefficients_compare_with_the_other_members() -> None:
    settings = Settings("", 0.0, groups=2, directions=3, two_sided=False, eps=0.5)
    losses = torch.tensor([[1.0, 2.0, 6.0, 4.0, 4.0, 4.0]])
    expected = torch.tensor([1 - 4, 2 - 3.5, 6 - 1.5, 0, 0, 0]) / 0.5
    torch.testing.assert_close(coefficients_of(losses, settings), expected)


@pytest.mark.parametrize("name", [MEZO, "fzoo-n8"])
def test_full_step_follows_the_mean_slope(loaded: tuple[Any, Any], model: Llama, name: str) -> None:
    """The update equals sum_k c_k z_k / K at the rate, where c_k is measured again here with the same noise."""
    settings = Settings(name, 0.0, **{**VARIANTS[name][0], "examples": 2, "eps": 1e-3})
    bucket = shortest(loaded)
    step = Step(model, Noise(model, settings), settings)
    step.lr.fill_(1e-4)
    torch.manual_seed(0)
    step(bucket)
    found = model.flat_master - model.pristine
    model.reset()

    torch.manual_seed(0)
    batch = bucket.take(torch.randint(len(bucket.ids), (1, 1, 2)).flatten())

    def loss_at(z: torch.Tensor, eps: float) -> float:
        model.flat_weights.copy_(model.pristine + eps * z)
        with torch.no_grad():
            return losses_of(model, batch, None, loss="choice").mean().item()

    expected, ahead = torch.zeros_like(found), []
    for _ in range(settings.directions):
        z = zo_per_second.random_(torch.empty_like(found), settings)
        ahead.append(loss_at(z, 1e-3))
        c = (ahead[-1] - loss_at(z, -1e-3)) / 2e-3 if settings.two_sided else (ahead[-1] - loss_at(z, 0.0)) / 1e-3
        expected -= 1e-4 * c * z / settings.directions
    if settings.normalise:
        expected /= torch.tensor(ahead).std() / 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=float(expected.abs().max()) * 1e-2)


def test_a_stopped_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages run on the embedded model, and a repeated command skips what has a row."""
    few = {name: VARIANTS[name] for name in ("rank1-one-sided", MEZO, "lora-512")}
    monkeypatch.setattr(zo_per_second, "VARIANTS", few)
    rows = tmp_path / "rows.jsonl"
    lengths = "--short-s 0.01 --long-s 0.02 --task-s 0.02 --reach-s 0.03 --target 2 --seeds 1"
    command = f"run --out {rows} --tasks code_or_text {lengths} --size 0.004 --num-eval 4 --device cpu"
    monkeypatch.setattr("sys.argv", ["zo_per_second", *command.split()])
    zo_per_second.main()
    found = read_objects(rows)
    assert [row["config"]["seconds"] for row in found] == [0.01] * 6 + [0.02] * 3 + [0.03]
    assert all(row["curve"][-1]["steps"] >= 2 for row in found)
    with rows.open("w") as file:
        file.writelines(line + "\n" for line in map(zo_per_second.json.dumps, found[:-1]))
    zo_per_second.main()
    assert [row["config"] for row in read_objects(rows)] == [row["config"] for row in found]
