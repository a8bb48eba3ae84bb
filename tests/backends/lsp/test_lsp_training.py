"""What trains how, calibration, accumulation, and a run that goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from ds_zo.backends.lsp import backend as lsp
from ds_zo.backends.lsp import calibration as lsp_calibration
from ds_zo.backends.lsp import matrices as lsp_matrices
from ds_zo.checkpoint.errors import CheckpointError
from ds_zo.config import ConfigError, LSPParams
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors import SparseProjector, captured_share, flatten_spectrum
from tests.helpers.lomo_runs import batches, start, train
from tests.helpers.lsp_runs import CPU, Strided, adopt_always, lsp_json, small
from tests.helpers.tiny_models import tiny_batch
from tests.helpers.weights import assert_close, assert_equal, parameters_of

pytestmark = pytest.mark.usefixtures("single_process")


def kinds(engine: Any) -> dict[str, bool]:
    """Parameter: whether it is projected."""
    return {matrix.name: matrix.subspace is not None for matrix in engine.backend._matrices}


def test_what_trains_how() -> None:
    llama = kinds(start(lsp_json(), small()))
    assert all(llama[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkvo")
    assert llama["model.embed_tokens.weight"] and llama["lm_head.weight"]
    assert not llama["model.norm.weight"] and not llama["model.layers.1.input_layernorm.weight"]
    gpt2 = kinds(start(lsp_json(), small("gpt2")))
    assert gpt2["transformer.h.0.attn.c_attn.weight"] and not gpt2["transformer.h.0.attn.c_attn.bias"]
    assert "lm_head.weight" not in gpt2 and gpt2["transformer.wte.weight"]  # tied: one parameter
    assert LSPParams().edge == "dense"
    dense = kinds(start(lsp_json(params={"edge": "dense"}), small()))
    assert not dense["model.embed_tokens.weight"] and not dense["lm_head.weight"]
    assert dense["model.layers.0.mlp.up_proj.weight"]
    bert = {
        "vocab_size": 67,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    classifier = BertForSequenceClassification(BertConfig(**bert, num_labels=2))  # as many as it has kinds of token
    trained = kinds(start(lsp_json(params={"edge": "freeze"}), classifier))
    assert "classifier.weight" in trained and not any("embeddings" in n for n in trained if n.endswith("s.weight"))
    frozen = start(lsp_json(params={"edge": "freeze"}), small())
    assert kinds(frozen).keys() == llama.keys() - {"model.embed_tokens.weight", "lm_head.weight"}
    before = parameters_of(frozen)
    train(frozen, batches("llama", 2))
    moved = {name for name, value in parameters_of(frozen).items() if not torch.equal(value, before[name])}
    assert moved == kinds(frozen).keys()
    # 16 x 16 and 8 x 16 are no larger than d x d; 24 x 16 and 67 x 16 are. d is at most the smaller side.
    large = start(lsp_json(params={"subspace_dim": 18}), small())
    assert not kinds(large)["model.layers.0.self_attn.q_proj.weight"]
    shapes = {matrix.name: matrix.shape for matrix in large.backend._matrices}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (16, 16)
    assert (
        "7 subspaces of at most 16 x 16" not in large.backend.describe()
        and "subspaces of at most 16 x 16" in large.backend.describe()
    )


def test_frozen_parameters_stay_and_cost_nothing() -> None:
    model = small()
    model.model.layers[0].requires_grad_(False)
    engine = start(lsp_json(), model)
    assert not any(name.startswith("model.layers.0.") for name in kinds(engine))
    before = parameters_of(engine)
    train(engine, batches("llama", 2))
    after = parameters_of(engine)
    assert all(torch.equal(before[name], after[name]) == name.startswith("model.layers.0.") for name in before)
    model.model.layers[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"model\.layers\.0.*before deepspeed\.initialize"):
        train(engine, batches("llama", 1))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("projector", ["random", "none", "learned"])
def test_parameters_of_any_strides_train_as_contiguous_ones(projector: str, offload: bool) -> None:
    weights = []
    for strided in (True, False):
        model = Strided()
        for p in model.parameters():
            p.data = p.data if strided else p.data.contiguous()
        engine = start(lsp_json(offload=offload, params={"projector": projector, "calibration_batches": 1}), model)
        for seed in range(3):
            engine.backward(engine(torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))))
            engine.step()
        weights.append(parameters_of(engine))
    assert_close(*weights, atol=1e-5)


@pytest.mark.parametrize("extra", [{}, {"params": {"projector": "none"}}, {"offload": False}])
def test_accumulation_is_the_large_batch(extra: dict[str, Any]) -> None:
    """In the subspace too: the sum of projections is the projection of the sum."""
    large = start({**lsp_json(lr=1e-3, **extra), "train_micro_batch_size_per_gpu": 4}, small())
    whole = [tiny_batch("llama", seed=seed, batch_size=4, length=8) for seed in range(3)]
    train(large, whole)
    engine = start(lsp_json(lr=1e-3, gradient_accumulation_steps=2, **extra), small())
    halves = [{k: v[i : i + 2] for k, v in batch.items()} for batch in whole for i in (0, 2)]
    train(engine, halves)
    assert engine.global_steps == 3
    assert_close(parameters_of(engine), parameters_of(large), atol=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_a_bare_backward_is_the_engines(offload: bool, tmp_path: Path) -> None:
    """What it leaves is in a checkpoint too."""
    data = list(batches("llama", 3))
    through, bare, resumed = (start(lsp_json(offload=offload), small()) for _ in range(3))
    train(through, data)
    for batch in data:
        bare(**batch).loss.backward()
        if batch is data[-1]:
            bare.save_checkpoint(str(tmp_path))
            resumed.load_checkpoint(str(tmp_path))
            resumed.step()
        bare.step()
    for engine in (bare, resumed):
        assert_close(parameters_of(engine), parameters_of(through))


def learned(**params: Any) -> dict[str, Any]:
    return lsp_json(params={"projector": "learned", "fit_steps": 5, "calibration_batches": 1, **params})


def draws(engine: Any) -> dict[str, int]:
    return {
        matrix.name: matrix.subspace.num_draws for matrix in engine.backend._matrices if matrix.subspace is not None
    }


def test_fitted_projectors_serve_from_the_batch_after_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted to the sum of two batches, tested with the third; until then those that were drawn serve."""
    adopt_always(monkeypatch)
    engine, drawn = start(learned(calibration_batches=2), small()), start(lsp_json(), small())
    data = list(batches("llama", 3))
    grads: dict[str, list[torch.Tensor]] = {}
    for batch in data:
        for matrix, found in zip(engine.backend._matrices, drawn.backend._matrices, strict=True):
            if matrix.subspace is not None:
                assert torch.equal(matrix.subspace.P.values, found.subspace.P.values)
        model = small()
        model.load_state_dict(engine.module.state_dict())
        model(**batch).loss.backward()
        for name, p in model.named_parameters():
            grads.setdefault(name, []).append(p.grad)
        train(engine, [batch])
        assert (engine.backend.biases == {}) == (batch is not data[-1])
    for matrix, found in zip(engine.backend._matrices, drawn.backend._matrices, strict=True):
        if matrix.subspace is not None:
            total = flatten_spectrum(grads[matrix.name][0]) + flatten_spectrum(grads[matrix.name][1])
            pairs = [(subspace.P, subspace.Q) for subspace in (matrix.subspace, found.subspace)]
            assert captured_share(total, *pairs[0]) > 1.1 * captured_share(total, *pairs[1]), matrix.name
            last = captured_share(flatten_spectrum(grads[matrix.name][2]), *pairs[0])
            assert engine.backend.biases[matrix.name] == pytest.approx((1 - last) ** 0.5, abs=1e-3)


def test_projectors_that_capture_no_more_do_not_serve() -> None:
    """A fit of no steps leaves a draw as it is, which is no better than itself."""
    engine, random = start(learned(check_interval=2, fit_steps=0), small()), start(lsp_json(), small())
    for one in (engine, random):
        train(one, [*batches("llama", 1)] * 2)
    assert engine.backend.biases.keys() == draws(engine).keys() and set(draws(engine).values()) == {1}
    assert_equal(*map(parameters_of, (engine, random)))


@pytest.mark.parametrize("seed", range(20))
def test_a_candidate_serves_where_it_captures_clearly_more(seed: int) -> None:
    """Of an identity, projectors that keep some of its 64 entries capture the share that they keep."""
    random = torch.Generator().manual_seed(seed)
    size, dim = 64, 32
    present, kept = torch.randint(1, dim + 1, (2,), generator=random).tolist()
    if seed % 2:
        kept = min(dim, present + int(torch.randint(0, 8, (1,), generator=random)))  # about as good

    def keeps(num: int) -> lsp_matrices.Subspace:
        indices = (torch.arange(size) % dim)[:, None].to(torch.int32)
        values = (torch.arange(size) < num).float()[:, None]
        return lsp_matrices.Subspace(*(SparseProjector(indices, values, dim) for _ in range(2)))

    candidate = lsp_matrices.Candidate(keeps(kept), num_batches=1, total=torch.eye(dim))
    weight = torch.nn.Parameter(torch.zeros(size, size))
    matrix = lsp_matrices.MatrixState("matrix", weight, 0, 0, subspace=keeps(present), candidate=candidate)
    calibration = lsp_calibration.Calibration(LSPParams(calibration_batches=1), ranks=None)
    calibration.fit_or_test(matrix, torch.eye(size))
    serves = matrix.candidate is not None and matrix.candidate.gain is not None
    assert serves == (kept - present > 0.05 * size or kept >= 3 * present), (present, kept)
    assert matrix.is_fitted != serves
    share = (kept if serves else present) / size
    assert calibration.biases["matrix"] == pytest.approx((1 - share) ** 0.5, abs=1e-3)


def test_a_check_refits_what_fails_alone_and_later_steps_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check leaves its own step's update as it was, and that of the test."""
    adopt_always(monkeypatch)
    monkeypatch.setattr(lsp_calibration, "relative_bias", lambda G, *projectors: float(G.shape[0] == 24))
    engines = [start(learned(check_interval=interval, fit_steps=1), small()) for interval in (2, 1000)]
    for engine in engines:
        train(engine, batches("llama", 4))
    assert_equal(*map(parameters_of, engines))
    for matrix in engines[0].backend._matrices:
        if matrix.subspace is not None:
            assert matrix.subspace.num_draws == (2 if matrix.parameter.shape[0] == 24 else 1)
    for engine in engines:
        train(engine, batches("llama", 1, first=4))
    refitted, kept = map(parameters_of, engines)
    changed = {name for name, value in kept.items() if not torch.equal(refitted[name], value)}
    assert changed == {f"model.layers.{i}.mlp.{part}_proj.weight" for i in (0, 1) for part in ("gate", "up")}


@pytest.mark.parametrize("is_fitted", [False, True])
def test_moments_of_a_new_subspace(is_fitted: bool) -> None:
    """M begins at zero; V's mean is as much larger as the same gradient is, and it is shaped as the calibration's."""
    (m, n), dim = (24, 36), 12
    old, new = (lsp_matrices.Subspace(orthonormal(m, dim, seed=i), orthonormal(n, dim, seed=i + 2)) for i in (0, 1))
    total = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0))
    candidate = lsp_matrices.Candidate(new, num_batches=1, total=total, gain=3.0)
    matrix = lsp_matrices.MatrixState(
        "matrix", torch.nn.Parameter(torch.zeros(m, n)), 0, 0, subspace=old, candidate=candidate
    )
    matrix.is_fitted = is_fitted
    moments = Moments.zeros(matrix.shape, "cpu")
    moments.mean.fill_(1.0)
    moments.mean_square.fill_(2.0)
    moments.num_steps.fill_(7.0)
    lsp_calibration.adopt(matrix, moments)
    assert matrix.subspace is new and matrix.candidate is None and matrix.is_fitted
    assert not moments.mean.any()
    if not is_fitted:
        assert not moments.mean_square.any() and not moments.num_steps
        return
    assert moments.num_steps == 7
    assert float(moments.mean_square.mean()) == pytest.approx(6.0, rel=1e-4)
    expected = 3.0 + 3.0 * total.t().square() / total.square().mean()
    torch.testing.assert_close(moments.mean_square, expected)


def orthonormal(num_rows: int, dim: int, *, seed: int) -> SparseProjector:
    random = torch.Generator().manual_seed(seed)
    indices = (torch.randperm(num_rows, generator=random) % dim)[:, None].to(torch.int32)
    signs = torch.randint(0, 2, (num_rows, 1), generator=random) * 2.0 - 1.0
    return SparseProjector(indices, signs * (dim / num_rows) ** 0.5, dim)


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_projectors_are_fitted_to_the_first_gradient_that_says_anything(factor: float) -> None:
    """The next check may be a thousand steps away."""
    engine, reference = (start(learned(fit_steps=1, lr=0.0), small()) for _ in range(2))
    data = list(batches("llama", 3))
    engine.backward(engine(**data[0]).loss * factor)
    engine.step()
    for one in (engine, reference):
        assert one.backend.biases == {}
        train(one, data[1:])
    assert engine.backend.biases == reference.backend.biases != {}


def test_projectors_are_fitted_to_gradients_whose_squares_float32_cannot_hold() -> None:
    """All but one of the gradient's rows are zero, so that the mean of squares is smaller still."""
    table = torch.nn.Embedding(400, 64, _weight=torch.linspace(-1.0, 1.0, 400 * 64).view(400, 64))
    engine = start(learned(subspace_dim=64, nonzeros_per_row=4), table)
    drawn = engine.backend._matrices[0].subspace
    for _ in range(2):
        engine.backward(engine(torch.tensor([3])).square().mean() * 2e-21)
        engine.step()
    assert engine.backend._matrices[0].subspace is not drawn


@pytest.mark.parametrize("offload", [False, True])
def test_updates_are_as_large_as_adamws(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, whose directions are signs, and one with refitted projectors, whose moments are forgotten so that
    they are signs again."""
    adopt_always(monkeypatch)

    def rms_of_updates(engine: Any, batch: Any) -> list[float]:
        before = parameters_of(engine)
        train(engine, [batch])
        moved = {name: (value - before[name]) / 1e-2 for name, value in parameters_of(engine).items()}
        return [float(moved[name].square().mean().sqrt()) for name, projected in kinds(engine).items() if projected]

    data = list(batches("llama", 5))
    json = learned(check_interval=2, bias_threshold=0.1, fit_steps=5)
    engine = start({**json, "zero_optimization": CPU if offload else {"stage": 0}}, small())
    sizes = rms_of_updates(engine, data[0])
    train(engine, data[1:4])
    assert set(draws(engine).values()) == {2}
    for _, moments in engine.backend.groups.matrices_and_moments():
        moments.reset()
    sizes += rms_of_updates(engine, data[4])
    assert min(sizes) > 0.7 and max(sizes) < 1.3, sizes


def test_several_calibration_batches_go_on_with_one_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt_always(monkeypatch)
    json = learned(check_interval=4, bias_threshold=0.01, calibration_batches=3, fit_steps=3)
    engine = start(json, small())
    found = []
    for batch in batches("llama", 9):
        train(engine, [batch])
        found.append((len(engine.backend.biases) > 0, set(draws(engine).values())))
    assert found[:4] == [(False, {1})] * 3 + [(True, {1})]  # fits at steps 0, 1 and 2, and a test
    assert found[4:] == [(True, {1})] * 3 + [(True, {2})] * 2  # the same from step 4 on


def test_rounding_errors_of_narrow_copies_are_dropped_with_a_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1.0 saved them with `payload_dtype` bf16 or int8."""
    engine = start(lsp_json(), small())
    train(engine, batches("llama", 2))
    state_dict = engine.backend.state_dict

    def with_errors() -> dict[str, Any]:
        state: dict[str, Any] = state_dict()
        for saved in state["matrices"].values():
            saved["errors"] = {"down": torch.ones_like(saved["moments"]["mean"])}
        return state

    monkeypatch.setattr(engine.backend, "state_dict", with_errors)
    engine.config["optimizer"]["params"]["payload_dtype"] = "int8"
    engine.save_checkpoint(str(tmp_path))
    resumed = start(lsp_json(), small(seed=1))
    resumed.load_checkpoint(str(tmp_path))
    assert log.text.count("payload_dtype") == 1
    assert_equal(parameters_of(resumed), parameters_of(engine))


def test_a_checkpoint_of_another_subspace_is_refused(tmp_path: Path) -> None:
    engine = start(lsp_json(), small())
    train(engine, batches("llama", 1))
    engine.save_checkpoint(str(tmp_path))
    for params, remedy in (({"subspace_dim": 5}, "subspace_dim"), ({"edge": "dense"}, 'head.*"edge": "lsp"')):
        other = start(lsp_json(params=params), small())
        with pytest.raises(CheckpointError, match=remedy):
            other.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_counted(offload: bool) -> None:
    """Adam on the device gets a single inf, which clipping by the norm of all gradients would turn into zeros of all
    others."""
    json = lsp_json(offload=offload, clipping=0.1, params={} if offload else {"clip_scope": "global"})
    engine, reference = (start(json, small()) for _ in range(2))
    data = list(batches("llama", 3))
    for one in (engine, reference):
        train(one, data[:1])
    factor = 1.0 if not offload else float("nan")
    weight, one_inf = engine.module.model.layers[0].mlp.up_proj.weight, torch.zeros(24, 16)
    one_inf[5, 5] = float("inf")
    handle = weight.register_hook(lambda grad: grad + one_inf) if not offload else None
    engine.backward(engine(**data[1]).loss * factor)
    engine.step()
    if handle is not None:
        handle.remove()
    assert engine.skipped_steps == 1 and not engine.was_step_applied()
    for one in (engine, reference):
        train(one, data[2:])
    assert_equal(parameters_of(engine), parameters_of(reference))
    assert engine.skipped_steps == 1


def test_weights_in_bf16_do_not_lose_small_updates() -> None:
    """A hundred steps of 1e-5 move a weight of size 1, which rounds to 2^-8, by about 1e-3 on average."""
    moved = {}
    for rounding in ("stochastic", "nearest"):
        json = lsp_json(lr=2e-5, bf16={"enabled": True}, ds_zo={"rounding": rounding})
        engine = start(json, small())
        before = parameters_of(engine)
        train(engine, [*batches("llama", 1)] * 8)
        after = parameters_of(engine)
        moved[rounding] = sum(int((after[name] != before[name]).sum()) for name in after if "proj" in name)
    assert moved["stochastic"] > 2 * moved["nearest"]


def test_what_it_cannot_do_is_refused_with_the_remedy() -> None:
    streamed = {"stage": 0, "offload_param": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=r"add \"offload_optimizer\".*offload_optimizer\.device"):
        start({**lsp_json(), "zero_optimization": streamed}, small())


def test_groups_and_schedules_are_read_at_the_step() -> None:
    model = small()
    named = dict(model.named_parameters())
    head = [named.pop("lm_head.weight")]
    groups = [{"params": list(named.values())}, {"params": head, "lr": 0.0, "weight_decay": 0.0}]
    engine = start(lsp_json(), model, model_parameters=groups)
    before = parameters_of(engine)
    train(engine, batches("llama", 1))
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # which makes groups anew
    engine.optimizer.param_groups[0]["lr"] = 0.0
    after = parameters_of(engine)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    train(engine, batches("llama", 1))
    assert_equal(parameters_of(engine), after)
    first, second = engine.optimizer.param_groups  # lists as long as before: weights that change places
    embedding = named["model.embed_tokens.weight"]
    first["params"] = [head[0] if p is embedding else p for p in first["params"]]
    second |= {"params": [embedding], "lr": 1e-3}
    train(engine, batches("llama", 1))
    found = parameters_of(engine)
    assert [name for name in found if not torch.equal(found[name], after[name])] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("schedule", ["layerwise", "sync"])
@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_that_leaves_its_group_inside_a_window_stops_no_other(offload: bool, schedule: str) -> None:
    json = lsp_json(offload=offload, gradient_accumulation_steps=2, params={"schedule": schedule})
    name, weights = "model.layers.0.input_layernorm.weight", []
    for leaves_after in (0, 1):
        engine = start(json, small())
        for number, batch in enumerate(batches("llama", 2)):
            if number == leaves_after:
                [group], leaving = engine.optimizer.param_groups, engine.module.get_parameter(name)
                group["params"] = [p for p in group["params"] if p is not leaving]
            train(engine, [batch])
        weights.append(parameters_of(engine))
    assert_equal(*weights)
    moved = [
        key for key, value in parameters_of(start(json, small())).items() if not torch.equal(value, weights[0][key])
    ]
    assert set(moved) == weights[0].keys() - {name}


@pytest.mark.parametrize("offload", [False, True])
def test_one_gradient_that_a_script_drops_is_dropped_alone(offload: bool, tmp_path: Path) -> None:
    """As recipes do that leave a layer as it is for some steps. A checkpoint of that moment has the other gradients."""
    name, weights = "model.norm.weight", []
    for drops in (True, False):
        engine = start(lsp_json(offload=offload), small())
        before = parameters_of(engine)
        [batch] = batches("llama", 1)
        engine.backward(engine(**batch).loss)
        if drops:
            engine.module.get_parameter(name).grad = None
            engine.save_checkpoint(str(tmp_path))
            resumed = start(lsp_json(offload=offload), small())
            resumed.load_checkpoint(str(tmp_path))
            resumed.step()
            weights.append(parameters_of(resumed))
        engine.step()
        weights.append(parameters_of(engine))
    expected = {**weights[2], name: before[name]}
    assert_close(weights[0], expected)
    assert_close(weights[1], expected)


def test_what_is_not_read_of_an_optimizer_object_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(lsp, "warn", said.append)
    json, model = lsp_json(), small()
    del json["optimizer"]
    json["ds_zo"] = {"backend": "lsp"}
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["betas"] = [0.9, 0.95]  # a list, as a JSON and some versions of PyTorch have it
    start(json, model, optimizer=optimizer)
    [told] = [text for text in said if "LSP's Adam" in text]
    assert "betas (0.9, 0.999) and ignores the optimizer's (0.9, 0.95): set ds_zo.params.betas" in told


def test_fits_are_logged(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[int] = []

    class Bar(lsp_calibration.tqdm):  # type: ignore[misc, name-defined]
        def close(self) -> None:
            if not self.disable:
                bars.append(self.n)
            super().close()

    monkeypatch.setattr(lsp_calibration, "tqdm", Bar)
    engine = start(learned(fit_steps=1), small())
    train(engine, batches("llama", 2))
    said, *_ = [text for record in log.records if "fitted projectors of" in (text := record.getMessage())]
    assert f"in {engine.backend.fit_s:.1f} s; on the next batch" in said and engine.backend.fit_s > 0
    assert bars == [16, 16]  # in the pass of the fit and in that of the test
