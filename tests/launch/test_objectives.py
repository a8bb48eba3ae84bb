"""`ds-zo train --objective`: scores of the task's labels, and functions of one's own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ds_zo.tasks import Choice, ChoiceTask, Evaluator, LabelledTask, make_task
from ds_zo.tasks.base import Task
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.metrics import macro_f1
from ds_zo.training.arguments import parse_args
from ds_zo.training.data import TrainingBatches
from ds_zo.training.errors import UserError
from ds_zo.training.job import run
from ds_zo.training.objectives import objective_of

CHOICES = [
    Choice("The cup fell so", (" it broke.", " a man who was walking by picked all of it up."), 1),
    Choice("import", (" os", " the"), 0),
    Choice("Return the number of items in the", (" list", " banana republic", " dictionary"), 2),
    Choice("for i in", (" range(10):", " of"), 0),
]


class Mixed(ChoiceTask):
    """Options of one token and of several, and different numbers of options."""

    name = "mixed"
    fields = ()
    num_labels = 3

    def choice(self, row: dict) -> Choice:
        return CHOICES[row["index"]]

    def rows(self, split: str) -> list[dict]:
        return [{"index": i} for i in range(len(CHOICES))]


def tasks() -> dict[str, Task]:
    lines = make_task("code_or_text"), make_task("code_or_text", head="classifier")
    return {"words": lines[0], "mixed": Mixed(), "head": lines[1]}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["words", "mixed", "head"])
def test_the_score_of_a_batch_is_the_one_of_the_tasks_evaluation(name: str, side: str) -> None:
    task, tokenizer = tasks()[name], AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(task, LabelledTask)
    words = ["--padding-side", side, *(["--head", "classifier"] if name == "head" else [])]
    kind = AutoModelForSequenceClassification if name == "head" else AutoModelForCausalLM
    torch.manual_seed(1)
    model: Any = kind.from_pretrained(FOLDER, dtype=torch.float32).eval()
    model.config.pad_token_id = 0
    objectives = {}
    for metric in ("accuracy", "f1"):
        args = parse_args(["--objective", metric, *words])
        objective = objective_of(args, task)
        assert objective is not None
        objective.prepare(tokenizer, max_length=64)
        objectives[metric] = objective
    batches = TrainingBatches(
        task.sequences("train", tokenizer, max_length=64), task=task, args=args, pad_token_id=0, batch_size=4
    )
    evaluator = Evaluator(model, device=torch.device("cpu"), pad_token_id=0, padding_side=side)  # type: ignore[arg-type]
    totals = dict.fromkeys(objectives, 0.0)
    for position in (0, 4, 8):
        scored = {metric: objective.batch_at(batches, position) for metric, objective in objectives.items()}
        batch = scored["f1"]
        options = {} if batch.num_positions is None else {"logits_to_keep": batch.num_positions}
        inputs = dict(batch.inputs)
        if side == "left":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            outputs = model(**inputs, **options)
        rows = [task.rows("train")[i] for i in batches.indices(position)]
        predicted = task.predict(evaluator, rows, tokenizer, max_length=64)
        labels = [task.label(row) for row in rows]
        scores = {metric: one.score(outputs, inputs) for metric, one in scored.items()}
        assert scores["accuracy"] == sum(p == y for p, y in zip(predicted, labels, strict=True)) / len(rows)
        if name == "mixed":
            assert scores["f1"] == macro_f1(predicted, labels)
        else:
            hits = sum(p == y == 1 for p, y in zip(predicted, labels, strict=True))
            assert scores["f1"] == pytest.approx(2 * hits / max(1, predicted.count(1) + labels.count(1)))
        for metric, score in scores.items():
            totals[metric] += score
    assert all(0 < total < 3 for total in totals.values()), "else constants would pass"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a short run of ZO. The job leaves environment and process group as they are."""
    monkeypatch.setattr("ds_zo.training.job.dist.destroy_process_group", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-4, "zo_eps": 1e-2}},
    }
    (tmp_path / "zo.json").write_text(json.dumps(config))
    words = ["--deepspeed", str(tmp_path / "zo.json"), "--output-dir", str(tmp_path / "out"), "--steps", "2"]
    return [*words, "--num-eval", "4", "--skip-zero-shot", "--no-save"]


@pytest.mark.usefixtures("single_process")
def test_a_run_shows_its_score(job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(parse_args([*job, "--objective", "accuracy"]))
    assert summary is not None and summary.objective == "accuracy"
    scores = [point.score for point in summary.curve]
    assert [summary.score_first, summary.score_last] == scores
    assert all(score is not None and 0 <= score <= 1 for score in scores)
    assert summary.loss_first is None
    out, err = capsys.readouterr()
    assert "\nscore " in out and "\nloss " not in out
    assert f"score {scores[-1]:.3f}, " in err


@pytest.mark.parametrize("name", ["words", "mixed"])
def test_rows_of_members_have_the_score_of_their_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task, tokenizer = tasks()[name], AutoTokenizer.from_pretrained(FOLDER)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    args = parse_args([])
    batches = TrainingBatches(
        task.sequences("train", tokenizer, max_length=64), task=task, args=args, pad_token_id=0, batch_size=4
    )

    def scored(metric: str, *examples: int) -> tuple[Any, Any]:
        objective = objective_of(parse_args(["--objective", metric]), task)
        assert objective is not None
        objective.prepare(tokenizer, max_length=64)
        monkeypatch.setattr(batches, "indices", lambda position: examples)
        batch = objective.batch_at(batches, 0)
        return batch.score, model(**batch.inputs)

    for metric in ("accuracy", "f1"):
        whole, outputs = scored(metric, 0, 1, 2, 3)
        first = 0
        for examples in ((0, 1), (2, 3)):
            part, its = scored(metric, *examples)
            rows = 2 * list(range(first, first + len(its.logits)))  # + and -
            score = whole.of_rows(SimpleNamespace(logits=outputs.logits[rows]), rows)
            assert torch.as_tensor(score).mean().item() == pytest.approx(part(its, None))
            first += len(its.logits)
        if name == "mixed":
            with pytest.raises(ValueError, match="must have all options of their examples"):
                whole.of_rows(SimpleNamespace(logits=outputs.logits[[0, 0, 1]]), [0, 0, 1])


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("metric", ["accuracy", "f1"])
def test_members_train_on_a_score_of_labels(job: list[str], tmp_path: Path, metric: str) -> None:
    file = tmp_path / "zo.json"
    config = json.loads(file.read_text())
    config["optimizer"]["params"] |= {"noise": "rank1", "num_members": 2}
    file.write_text(json.dumps(config))
    summary = run(parse_args([*job, "--objective", metric]))
    assert summary is not None and all(0 <= point.score <= 1 for point in summary.curve)


@pytest.mark.usefixtures("single_process")
def test_minus_the_loss_of_a_file_trains_as_the_loss_does(job: list[str], tmp_path: Path) -> None:
    file = tmp_path / "scores.py"
    (tmp_path / "signs.py").write_text("SIGN = -1\n")
    file.write_text("from signs import SIGN\n\ndef gain(outputs, batch):\n    return SIGN * outputs.loss\n")
    by_loss, by_score = (run(parse_args([*job, *more])) for more in ([], ["--objective", f"{file}:gain"]))
    assert by_loss is not None and by_score is not None
    assert [-point.score for point in by_score.curve] == pytest.approx([p.loss for p in by_loss.curve], rel=1e-5)


@pytest.mark.usefixtures("single_process")
def test_a_run_resumes_with_its_objective(job: list[str], tmp_path: Path) -> None:
    words = [*(word for word in job if word != "--no-save"), "--save-every", "2"]
    run(parse_args([*words, "--objective", "accuracy"]))
    with pytest.raises(
        UserError, match="resumes with the objective it began with: the checkpoint has 'accuracy', got None"
    ):
        run(parse_args([*words, "--resume", "latest"]))
    resumed = run(parse_args([*words, "--objective", "accuracy", "--resume", "latest", "--steps", "3"]))
    assert resumed is not None and resumed.objective == "accuracy"
    assert [point.step for point in resumed.curve] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "acc"], r"must be accuracy, f1 or FILE.py:function, got 'acc' \(--objective\)"),
        (["--objective", "{}.py:gain"], r"Python file at .*\.py: not found \(--objective\)"),
        (["--objective", "{}/broken.py:gain"], r"broken.py raised NameError.* when it was imported \(--objective\)"),
        (["--objective", "{}/scores.py:loss"], r"a function 'loss' in .*scores.py, which has gain, margin \(--obj"),
        (
            ["--objective", "f1", "--task", "text", "--data", "{}/notes.txt"],
            "needs a task with a set of labels, got text",
        ),
        (["--objective", "f1", "--method", "lomo"], "an objective needs ZO, .* got LOMO in .*: take --method zo"),
    ],
)
@pytest.mark.usefixtures("single_process", "job")
def test_a_wrong_objective_is_told_before_a_model_is_loaded(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("def gain(o, b): ...\ndef margin(o, b): ...\ndef _own(): ...\n")
    (tmp_path / "broken.py").write_text("gain = nothing\n")
    (tmp_path / "notes.txt").write_text("".join(f"Paragraph {i} of a text.\n\n" for i in range(40)))
    words = [word.format(tmp_path) for word in words]
    with pytest.raises(ValueError, match=said):
        run(parse_args([*words, "--model", "no/such", "--output-dir", str(tmp_path / "out")]))
