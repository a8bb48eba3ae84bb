"""ZO with rank-1 noise: all members are evaluated in one pass, with their noise outside the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from ds_zo import ops
from ds_zo.backends.zo.members import MemberRows, differences
from ds_zo.config import ConfigError
from tests.helpers.checkpoint_runs import with_checkpoint
from tests.helpers.tiny_models import tiny_batch, tiny_model
from tests.helpers.weights import assert_equal, parameters_of
from tests.helpers.zo_runs import EPS, LR, FunctionalTie, Toy, engine_for, one_step, toy_batches, zo_json

pytestmark = pytest.mark.usefixtures("single_process")


def rank1_json(num_members: int = 4, *, offload: bool = False, **more: Any) -> dict[str, Any]:
    params = {"noise": "rank1", "num_members": num_members, **more.pop("params", {})}
    return zo_json(offload=offload, params=params, **more)


class PlainMembers:
    """The same training, by passes over a model with the noise in its weights, one after the other."""

    def __init__(self, model: nn.Module, *, num_members: int, antithetic: bool = True) -> None:
        self.model = copy.deepcopy(model)
        self.num_members, self.signs = num_members, (1.0, -1.0) if antithetic else (1.0,)
        self.steps = 0
        offset = start = 0
        self.segments = {}
        for name, p in self.model.named_parameters():
            if p.dim() > 1 and p.requires_grad:
                matrix = ops.Matrix(offset, p.numel() // p.shape[-1], p.shape[-1])
                self.segments[name] = ops.Segment(start, p.numel(), offset, matrix=matrix)
                start += -(-p.numel() // ops.SEGMENT_ALIGNMENT) * ops.SEGMENT_ALIGNMENT
            offset += p.numel()

    def noise(self, member: int) -> dict[str, torch.Tensor]:
        table = ops.build_table(list(self.segments.values()), "cpu")
        out = torch.empty(1, table.factors.numel)
        ops.factors(table, noise=ops.Noise(0, self.steps, member, "rank1"), out=out)
        views = table.factors.views(out)
        return {name: views[s.offset][0][0].outer(views[s.offset][1][0]) for name, s in self.segments.items()}

    @torch.no_grad()
    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """[member, sign]."""
        num_sequences = len(batch["input_ids"])
        found = torch.empty(self.num_members, len(self.signs))
        for member in range(self.num_members):
            first = member * num_sequences // self.num_members
            rows = slice(first, first + max(1, num_sequences // self.num_members))
            noise = self.noise(member)
            for i, sign in enumerate(self.signs):
                model = copy.deepcopy(self.model)
                for name, z in noise.items():
                    model.get_parameter(name).add_(z, alpha=sign * EPS)
                found[member, i] = model(**{k: v[rows] for k, v in batch.items()}).loss
        return found

    @torch.no_grad()
    def logits(self, batch: dict[str, torch.Tensor], *, member: int) -> torch.Tensor:
        """With the member's noise."""
        model = copy.deepcopy(self.model)
        for name, z in self.noise(member).items():
            model.get_parameter(name).add_(z, alpha=EPS)
        found: torch.Tensor = model(**batch).logits
        return found

    def g(self, losses: torch.Tensor, *, num_sequences: int) -> torch.Tensor:
        if len(self.signs) == 2:
            return (losses[:, 0] - losses[:, 1]) / (2 * EPS)
        groups = losses.view(num_sequences if self.num_members > num_sequences else 1, -1)
        return ((groups - groups.mean(1, keepdim=True)) / EPS).flatten()

    @torch.no_grad()
    def step(self, batch: dict[str, torch.Tensor]) -> float:
        losses = self.losses(batch)
        g = self.g(losses, num_sequences=len(batch["input_ids"]))
        for member in range(self.num_members):
            for name, z in self.noise(member).items():
                self.model.get_parameter(name).sub_(z * (LR / self.num_members * g[member]))
        self.steps += 1
        return losses.mean().item()


def small(name: str = "llama") -> nn.Module:
    return tiny_model(name, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 2})


def per_sequence(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of each sequence."""
    targets = batch["labels"][:, 1:]
    return cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none").mean(1)


@pytest.mark.parametrize(
    ("name", "num_members", "antithetic"),
    [("llama", 4, True), ("llama", 2, True), ("llama", 8, False), ("opt", 4, False), ("gpt2", 2, True)],
)
def test_a_step_equals_passes_with_the_noise_in_the_weights(name: str, num_members: int, antithetic: bool) -> None:
    model = small(name)
    if name == "opt":
        model.model.decoder.embed_positions.requires_grad_(False)  # type: ignore[operator, union-attr]
    plain = PlainMembers(model, num_members=num_members, antithetic=antithetic)
    engine = engine_for(model, rank1_json(num_members, params={"antithetic": antithetic}))
    for step in range(2):
        before = {key: p.detach().clone() for key, p in plain.model.named_parameters()}
        batch = tiny_batch(name, seed=step)
        loss = engine.zo_step(batch, per_sequence, minimise=True).item() if name == "gpt2" else one_step(engine, batch)
        assert loss == pytest.approx(plain.step(batch), rel=1e-6)
        ours, theirs = parameters_of(engine), dict(plain.model.named_parameters())
        for key, value in ours.items():
            assert torch.allclose(value, theirs[key], atol=2e-5), key
            assert (value - before[key]).abs().max() > 2e-4 or key not in plain.segments, key
        plain.model.load_state_dict(ours, strict=False)


class OwnUse(Toy):
    """Uses a weight of a linear module by a function."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.middle(x) + linear(x, self.head.weight.T @ self.head.weight))


def test_scores_are_shaped_among_the_members_of_a_sequence() -> None:
    rows = MemberRows(num_sequences=2, num_members=4, antithetic=True)
    losses = torch.tensor([[1.0, 2.0], [2.0, 5.0], [10.0, 10.0], [30.0, 20.0]])
    assert differences(losses, rows, shaping="none").tolist() == [-1.0, -3.0, 0.0, 10.0]
    assert differences(losses, rows, shaping="rank").tolist() == pytest.approx([-0.5, -0.5, 0.0, 1 / 3])
    zscores = differences(losses, rows, shaping="zscore")
    assert zscores[:2].tolist() == pytest.approx([-1.0 / 1.5, -3.0 / 1.5])
    one_sided = MemberRows(num_sequences=1, num_members=2, antithetic=False)
    assert differences(torch.tensor([[1.0], [3.0]]), one_sided, shaping="rank").tolist() == [-1.0, 1.0]
    assert differences(torch.full((2, 1), 3.0), one_sided, shaping="zscore").tolist() == [0.0, 0.0]
    assert differences(torch.tensor([[torch.nan], [3.0]]), one_sided, shaping="rank").isnan().all()


@pytest.mark.parametrize("num_members", [2, 8])
def test_outputs_have_the_rows_of_the_batch(num_members: int, log: pytest.LogCaptureFixture) -> None:
    model = small()
    plain = PlainMembers(model, num_members=num_members)
    batch = tiny_batch("llama")
    logits = engine_for(model, rank1_json(num_members))(**batch).logits
    assert logits.shape[:2] == batch["input_ids"].shape
    last = plain.logits(batch, member=num_members - num_members // 4 if num_members > 4 else 1)
    assert torch.allclose(logits[-1], last[-1], atol=1e-6)
    parameters = list(model.parameters())
    vectors = sum(p.ndim == 1 for p in parameters)
    assert f"{vectors} of {len(parameters)} trained parameters are vectors, which get weight decay alone" in log.text


JSONS = {
    "streamed": {"offload": True, "interval": 3},
    "some resident": {"offload": True, "interval": 3, "resident_blocks": 1},
    "resident": {"interval": 3},
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16 split", "bf16 wire"])
def test_streamed_and_resident_steps_have_the_same_bits(dtype: str) -> None:
    more = {} if dtype == "fp32" else {"bf16": {"enabled": True}, "master": dtype.split()[1]}
    found = []
    for places in JSONS.values():
        engine = engine_for(small(), rank1_json(4, **places, **more))
        losses = [one_step(engine, tiny_batch("llama", seed=step)) for step in range(4)]
        found.append((losses, parameters_of(engine)))
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert_equal(weights, found[0][1])


def test_a_resumed_and_a_replayed_run_go_on_with_the_same_bits(tmp_path: Path) -> None:
    json = with_checkpoint(rank1_json(4, **JSONS["streamed"], bf16={"enabled": True}), trajectory=True)
    batches = [tiny_batch("llama", seed=step) for step in range(6)]
    whole = engine_for(small(), json)
    expected = [one_step(whole, batch) for batch in batches]
    first = engine_for(small(), json)
    for batch in batches[:2]:
        one_step(first, batch)
    first.save_checkpoint(str(tmp_path))
    for batch in batches[2:4]:
        one_step(first, batch)
    first.backend.recorder.flush()
    resumed = engine_for(small(), json)
    resumed.load_checkpoint(str(tmp_path))
    assert resumed.global_steps == 4
    assert [one_step(resumed, batch) for batch in batches[4:]] == expected[4:]
    assert_equal(parameters_of(resumed), parameters_of(whole))


def test_an_objective_of_one_number_is_called_for_the_rows_of_each_member() -> None:
    found = []
    for objective in (None, per_sequence, lambda o, b: per_sequence(o, b).mean().item(), lambda o, b: o.loss):
        engine = engine_for(small(), rank1_json(2))
        losses = [engine.zo_step(tiny_batch("llama", seed=step), objective, minimise=True).item() for step in range(2)]
        found.append((losses, parameters_of(engine)))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-6)
        for key, value in weights.items():
            assert torch.allclose(value, found[0][1][key], atol=2e-5), key


def test_a_sequence_without_labels_has_no_say() -> None:
    engine, batch = engine_for(small(), rank1_json()), tiny_batch("llama")
    batch["labels"][0] = -100
    assert one_step(engine, batch) < 10
    assert engine.skipped_steps == 0 and engine.get_global_grad_norm() > 0


def test_an_objective_gets_the_rows_of_all_outputs() -> None:
    """Predictions are integers."""

    class Predicting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small()

        def forward(self, **batch: torch.Tensor) -> Any:
            outputs = self.model(**batch)
            return {"loss": outputs.loss, "predictions": outputs.logits.argmax(-1)}

    engine, batch, sizes = engine_for(Predicting(), rank1_json()), tiny_batch("llama"), []

    def score(outputs: Any, of: Any) -> float:
        sizes.append((len(outputs["predictions"]), len(of["labels"])))
        return (outputs["predictions"] == of["labels"]).float().mean().item()

    engine.zo_step(batch, score)
    assert set(sizes[-8:]) == {(1, 1)}
    assert len(engine(**batch)["predictions"]) == len(batch["labels"])


class Mixing(nn.Module):
    """A model in which a row of the batch depends on others: by their mean, or by a layer that takes time first."""

    def __init__(self, *, time_first: bool) -> None:
        super().__init__()
        self.time_first = time_first
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.middle(x.transpose(0, 1)).transpose(0, 1) if self.time_first else self.middle(x - x.mean(0))
        return self.last(x)


class Branches(nn.Module):
    """A model that mixes rows in a branch that the first module's output does not enter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, x = self.gate(x).sigmoid(), self.middle(x)
        return gate * self.last(x - x.mean(0))


class Switched(nn.Module):
    """A model in which all rows together decide whether a module runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.rare(x) if x.abs().max() < 100 else x


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Mixing(time_first=False), "middle"),
        (lambda: Mixing(time_first=True), "middle"),
        (Branches, "last"),
        (Switched, "rare"),
    ],
    ids=["mean", "time first", "another branch", "chosen module"],
)
def test_rows_that_mix_are_refused(make: Callable[[], nn.Module], name: str) -> None:
    engine = engine_for(make(), rank1_json(4, params={"antithetic": False}))
    with pytest.raises(ValueError, match=f"at {name} other rows have reached a row"):
        engine.zo_step({"x": torch.randn(4, 4, 4)}, lambda o, b: o.mean((1, 2)))


class Likened(nn.Module):
    """A model that takes the dtype and device of a weight for other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.last.weight
        shift = weight.new_zeros(4) + torch.zeros_like(weight)[0] + torch.ones(4).type_as(weight).to(weight)
        return self.last(self.first(x) + shift)


def test_weights_may_lend_their_dtype_and_device() -> None:
    engine = engine_for(Likened(), rank1_json(4, params={"antithetic": False}))
    engine.zo_step({"x": torch.randn(4, 4, 4)}, lambda o, b: o.mean((1, 2)))


class Padded(nn.Module):
    """A model with an embedding whose only row is that of padding, which gets no noise."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(1, 4, padding_idx=0), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x + self.embed(torch.zeros(x.shape[:2], dtype=torch.int64)))


def test_a_weight_without_noise_passes_the_check() -> None:
    engine = engine_for(Padded(), rank1_json(4, params={"antithetic": False}))
    engine.zo_step({"x": torch.randn(4, 4, 4)}, lambda o, b: o.mean((1, 2)))


def test_autocast_to_another_dtype_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one_step(engine_for(small(), rank1_json(bf16={"enabled": True})), tiny_batch("llama"))
        with pytest.raises(ValueError, match=r"got torch.bfloat16 at .*q_proj: set bf16.enabled in place"):
            engine_for(small(), rank1_json())(**tiny_batch("llama"))


def test_blocks_of_a_forward_share_one_kind_of_recording() -> None:
    """Factors get their addresses block by block, also after another matrix is trained."""
    engine = engine_for(tiny_model("llama", num_hidden_layers=4), rank1_json())
    members, found = engine.backend.store.members, set()
    for layer in engine.module.model.layers:
        layer.register_forward_pre_hook(lambda *_: found.add(members.state))
    for trains in (True, False, True):
        engine.module.model.layers[0].self_attn.q_proj.weight.requires_grad_(trains)
        moves = members.num_moves
        one_step(engine, tiny_batch("llama"))
        assert members.num_moves > moves
    assert len(found - {None}) == 1


def test_noise_outside_the_weights_is_compared_with_that_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    make = ops.factors

    def wrong(table: Any, *, noise: Any, out: torch.Tensor) -> None:
        make(table, noise=noise, out=out)
        out[:, 0] *= -1  # one number of u or v

    monkeypatch.setattr(ops, "factors", wrong)
    with pytest.raises(RuntimeError, match=r"the noise outside the weight of .* differs from that of its update"):
        engine_for(small(), rank1_json())(**tiny_batch("llama"))


def test_a_deep_model_in_bf16_passes_the_check_with_a_small_zo_eps() -> None:
    model = tiny_model("llama", num_hidden_layers=24)
    engine = engine_for(model, rank1_json(params={"zo_eps": 1e-6}, bf16={"enabled": True}))
    one_step(engine, tiny_batch("llama"))


def test_forwards_that_rank1_noise_cannot_follow_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="each rank needs two of them"):
        engine_for(small(), rank1_json(1, params={"antithetic": False}))
    with pytest.raises(ConfigError, match=r"got model.decoder.embed_positions.weight of OPTLearnedPositionalEmbedding"):
        engine_for(tiny_model("opt"), rank1_json())
    engine = engine_for(FunctionalTie().train(), rank1_json())
    with pytest.raises(ValueError, match="needs the loss of each sequence"):
        engine(**toy_batches(1, size=4)[0])
    engine = engine_for(OwnUse(), rank1_json())
    with pytest.raises(ValueError, match=r"weight head.weight was used outside of the forward of its module"):
        engine.zo_step(toy_batches(1, size=4)[0], lambda o, b: o.mean((1, 2)))
    with pytest.raises(ValueError, match="got 4 members and 3 sequences"):
        engine.zo_step(toy_batches(1, size=3)[0], lambda o, b: o.mean((1, 2)))
    with pytest.raises(ValueError, match=r"repeats the 4 rows of a batch, got a tensor of shape \(5,\) beside them"):
        engine_for(small(), rank1_json())(**tiny_batch("llama"), cu_seq_lens_q=torch.arange(5))
    model = small("gpt2")
    model.transformer.drop.p = 0.1  # type: ignore[union-attr]
    engine = engine_for(model, rank1_json())
    with pytest.raises(ValueError, match=r"got transformer.drop with p=0.1"):
        engine.zo_step(tiny_batch("gpt2"), per_sequence)
