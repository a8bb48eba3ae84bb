"""LSP's studies: gradients, biases beside GaLore's, tables and pictures of rows."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import lsp_plots, lsp_studies
from benchmarks.grids import lsp_glue
from ds_zo.projectors import SparseProjector, fit, relative_bias
from ds_zo.reference.galore import bytes_per_rank, galore_engine
from ds_zo.tasks.encoding import Encoded, collate


def _matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def loaded() -> tuple[torch.nn.Module, list[Any], int]:
    return lsp_studies.load("embedded", None, task="code_or_text", max_length=32, device="cpu")


@pytest.mark.usefixtures("single_process")
def test_galore_trains_through_deepspeed(loaded: tuple[torch.nn.Module, list[Any], int]) -> None:
    model, examples, pad = copy.deepcopy(loaded[0]).requires_grad_(True), loaded[1], loaded[2]
    params = {"rank": 4, "lr": 5e-3, "refresh_interval": 3}
    config = {**lsp_glue(576).methods["galore"].config, "train_micro_batch_size_per_gpu": 4}
    engine = galore_engine(model, {**config, "optimizer": {"type": "GaLore", "params": params}})
    batch = collate(examples[:4], pad_token_id=pad)
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


# Gradients and biases


def test_gradients_are_of_the_mean_over_all_tokens(loaded: tuple[torch.nn.Module, list[Any], int]) -> None:
    model, examples, pad = loaded
    name = "model.layers.1.mlp.down_proj.weight"
    some = examples[: lsp_studies.MICRO_BATCH + 3]  # two micro-batches of different size
    found, loss = lsp_studies.gradients_of(model, some, [name], pad=pad)
    assert list(found) == [name]
    losses, num_targets = [], 0
    for one in some:
        ids = torch.tensor([one.input_ids])
        logits, labels = model(ids).logits[0, :-1], torch.tensor(one.labels[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        num_targets += int((labels != -100).sum())
    p = model.get_parameter(name)
    assert loss == pytest.approx(torch.stack(losses).sum().item() / num_targets, rel=1e-5)
    (expected,) = torch.autograd.grad(torch.stack(losses).sum() / num_targets, p)
    assert torch.allclose(found[name], expected, atol=1e-6, rtol=1e-4)


def test_two_batches_share_no_example(loaded: tuple[torch.nn.Module, list[Any], int]) -> None:
    fitted, tested = lsp_studies.two_batches(loaded[1], 16)
    assert len(fitted) == len(tested) == 16
    assert not {id(one) for one in fitted} & {id(one) for one in tested}
    with pytest.raises(ValueError, match="lower --samples"):
        lsp_studies.two_batches(loaded[1], len(loaded[1]))


def test_settings_are_clamped_as_the_engine_does() -> None:
    found = list(lsp_studies.settings_for(24, 96, (8, 16, 32, 64), (4, 16)))
    assert found == [(8, 4), (16, 4), (16, 16), (24, 4), (24, 16)]  # 64 x 64 is larger than the matrix


def test_an_update_is_as_large_as_the_rule_for_the_rate_says() -> None:
    G = _matrix(96, 3) @ _matrix(3, 64, seed=1)
    for dim in (16, 32):
        P, Q = (SparseProjector.draw(size, dim, 4, seed=0, stream=side) for side, size in enumerate(G.shape))
        assert lsp_studies.update_rms(G, P, Q) == pytest.approx(1.0, rel=0.2)  # as drawn: AdamW's size
        fit(G, P, Q, steps=30, lr=0.1)
        assert lsp_studies.update_rms(G, P, Q) == pytest.approx(dim / math.sqrt(96 * 64), rel=0.25)


def test_bias_study_resumes_and_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--task", "code_or_text", "--out", str(out), "--samples", "8", "--max-length", "32", "--layers", "1"]
    command += ["--matrices", "q_proj,gate_proj", "--nonzeros", "2,4", "--fit-steps", "10"]
    command += ["--gradients", str(tmp_path / "gradients.pt")]
    lsp_studies.main([*command, "--dims", "16"])
    assert len(out.read_text().splitlines()) == 4
    lsp_studies.main([*command, "--dims", "16,48"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len({(row["matrix"], row["d"], row["r"]) for row in rows}) == 8
    for row in rows:
        assert row["bias_fit"] < 1.0
        total = row["device_bytes"] + row["host_bytes"]
        assert 0 <= total - row["galore_total_rank"] * bytes_per_rank(*row["shape"]) < bytes_per_rank(*row["shape"])
        assert row["galore_device_bias_test"] >= row["galore_total_bias_test"] - 1e-6
    about, gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert about.items() <= rows[-1].items()
    with pytest.raises(ValueError, match="samples 8"):
        lsp_studies.main([*command, "--dims", "16", "--samples", "9"])
    G_fit, G_test = gradients["model.layers.1.self_attn.q_proj.weight"]
    row = lsp_studies.Pair(G_fit, G_test).row(16, 4, fit_steps=10, fit_lr=0.1)
    P, Q = (SparseProjector.draw(128, 16, 4, seed=0, stream=side) for side in (0, 1))
    fit(G_fit, P, Q, steps=10, lr=0.1)
    assert row["bias_test"] == pytest.approx(float(relative_bias(G_test, P, Q)))
    capsys.readouterr()
    lsp_plots.main(["bias", str(out), "--out", str(tmp_path / "bias.svg")])
    assert capsys.readouterr().out.count("\n| ") == 8 + 1
    assert (tmp_path / "bias.svg").stat().st_size > 1000
    trained = [{**row, "trained_steps": 9, "r": 256, "bias_test": 1.4} for row in rows]
    assert {r for _, _, r in lsp_plots.bias_by_setting(rows + trained)} == {256}  # the last row's study, not a mixture
    panels = lsp_plots.draw_bias(rows + trained).axes
    assert [axes.get_title() for axes in panels] == ["weights 128 x 128, r = 256", "weights 384 x 128, r = 256"]
    assert all(axes.get_ylim()[1] > 1.4 for axes in panels)
    assert len(lsp_plots.draw_bias(rows, nonzeros=[4]).axes) == 2, "of r = 2 and 4 the second alone"
    with pytest.raises(SystemExit, match=r"run `python -m benchmarks.lsp_studies` with --nonzeros 8,16 first"):
        lsp_plots.main(["bias", str(out), "--nonzeros", "8,16", "--out", str(tmp_path / "none.svg")])


def test_training_leaves_the_study_batches_out(loaded: tuple[torch.nn.Module, list[Any], int]) -> None:
    examples = loaded[1] + [copy.copy(one) for one in loaded[1][:40]]  # equal ones count as the same
    batches = lsp_studies.two_batches(examples, 16)
    rest = lsp_studies.others(examples, batches)
    studied = [one for batch in batches for one in batch]
    assert len(rest) + sum(one in studied for one in examples) == len(examples)
    assert not any(one in studied for one in rest)
    cut = lsp_studies.pieces([Encoded(list(range(9)), list(range(10, 19)))], 4)  # one token is left: nobody's target
    assert cut == [Encoded([0, 1, 2, 3], [10, 11, 12, 13]), Encoded([4, 5, 6, 7], [14, 15, 16, 17])]


def test_small_fits_come_first() -> None:
    shapes = {"wide": (64, 256), "square": (64, 64)}
    left = lsp_studies.left_to_do(shapes, (16, 64), (4, 16), {("wide", 16, 4)})
    squares = [("square", 16, 4), ("square", 16, 16)]  # d = 64 would train it whole
    assert left == [*squares, ("wide", 64, 4), ("wide", 16, 16), ("wide", 64, 16)]


def test_a_random_model_is_trained_once_before_its_gradients_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--model", "random:llama-tiny", "--task", "code_or_text", "--out", str(out), "--samples", "16"]
    command += ["--max-length", "24", "--layers", "1", "--matrices", "q_proj,gate_proj", "--nonzeros", "2,16"]
    command += ["--fit-steps", "5", "--train-lr", "1e-2", "--gradients", str(tmp_path / "gradients.pt")]
    trained = [*command, "--train-steps", "20"]
    with pytest.raises(SystemExit, match="after 1 of 20 steps"):
        lsp_studies.main([*trained, "--dims", "16", "--max-seconds", "0"])
    lsp_studies.main([*trained, "--dims", "16"])
    monkeypatch.setattr(lsp_studies, "load", lambda *_, **__: pytest.fail("the gradients are kept"))
    lsp_studies.main([*trained, "--dims", "16,48"])
    (tmp_path / "gradients.pt").unlink()
    lsp_studies.main([*trained, "--dims", "16,48"])
    assert "nothing is left to do" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["shape"], row["d"], row["r"]) for row in rows[:4]] == [
        ([64, 64], 16, 2),
        ([176, 64], 16, 2),
        ([64, 64], 16, 16),
        ([176, 64], 16, 16),
    ]
    assert len(rows) == 8
    for row in rows:
        assert (row["model"], row["trained_steps"], row["trained_lr"]) == ("random:llama-tiny", 20, 1e-2)
        assert row["trained_loss_first"] == pytest.approx(math.log(512), rel=0.05)
        assert row["trained_loss_last"] < 0.8 * row["trained_loss_first"]
        assert row["loss_test"] < 0.8 * row["trained_loss_first"]  # never trained on
    monkeypatch.undo()
    lsp_studies.main([*command, "--dims", "16"])
    untrained = json.loads(out.read_text().splitlines()[-1])
    assert untrained["trained_steps"] == 0
    assert untrained["loss_test"] == pytest.approx(math.log(512), rel=0.05)


def test_a_random_model_reads_a_tokenizers_tokens() -> None:
    from ds_zo.tasks.embedded_model import FOLDER

    options: dict[str, Any] = {"task": "code_or_text", "max_length": 24, "device": "cpu"}
    model, examples, _ = lsp_studies.load("random:llama-tiny", None, tokenizer=str(FOLDER), **options)
    assert examples == lsp_studies.load("embedded", None, **options)[1]
    assert model.get_parameter("model.embed_tokens.weight").shape == (1024, 64)  # there is room for them


# Rows of `lsp_speed`


def test_breakdown_adds_up_to_the_step(tmp_path: Path) -> None:
    facts = {"run_id": "a", "status": "ok", "forward_s": 0.06}
    rows: list[dict[str, Any]] = [
        {**facts, "case": "breakdown/1.3b/4/ceiling", "step_s": 0.19},
        {**facts, "case": "breakdown/1.3b/4/lsp-512", "step_s": 0.21, "exposed_cpu_s": 0.01, "exposed_copy_s": -0.001},
        {**facts, "case": "breakdown/1.3b/4/zero2-offload", "step_s": 0.9, "exposed_cpu_s": 0.5, "rest_s": 0.4},
    ]
    parts = lsp_plots.breakdown_parts(rows)
    assert list(parts) == ["forward and backward only", "LSP, d = 512", "ZeRO-Offload"]
    for row, found in zip(rows, parts.values(), strict=True):
        assert sum(found.values()) == pytest.approx(row["step_s"])
    assert parts["LSP, d = 512"]["copy"] == 0.0
    assert lsp_plots.negative_waits(rows) == ["copies of LSP, d = 512 (-1.0 ms)"]
    assert parts["ZeRO-Offload"] == pytest.approx({"forward": 0.06, "backward": 0.13, "copy": 0.21, "cpu": 0.5})
    with pytest.raises(lsp_plots.NoRowsError, match="--preset breakdown"):
        lsp_plots.breakdown_parts(rows[1:])
    with pytest.raises(lsp_plots.NoRowsError):
        lsp_plots.breakdown_parts([])
    path, out = tmp_path / "rows.jsonl", tmp_path / "breakdown.svg"
    later = [{**row, "run_id": "b"} for row in rows[:2]]
    path.write_text("\n".join(map(json.dumps, rows + later)))
    lsp_plots.main(["breakdown", str(path), "--out", str(out)])
    assert "LSP, d = 512" in out.read_text() and "ZeRO-Offload" not in out.read_text(), "the last run has none"
    lsp_plots.main(["breakdown", str(path), "--run-id", "a", "--out", str(out)])
    assert "ZeRO-Offload" in out.read_text()
    with pytest.raises(SystemExit, match="--preset breakdown"):
        lsp_plots.main(["breakdown", str(path), "--run-id", "c", "--out", str(out)])
