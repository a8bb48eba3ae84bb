"""Tasks for models with a classification head: what they are given, and the suites' metrics on what they answer."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from ds_zo.tasks import Evaluator, HeadTask, TaskError, make_task
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.encoding import encode_texts
from ds_zo.tasks.glue import STSB
from ds_zo.tasks.scoring import num_reserved_positions

PAIRS = [
    {"sentence1": "It fell.", "sentence2": "It dropped to the floor and broke.", "label": 4.5},
    {"sentence1": "A man who walks along the road sings.", "sentence2": "No.", "label": 0.5},
    {"sentence1": "One two.", "sentence2": "Two one.", "label": 3.0},
    {"sentence1": "return self", "sentence2": "return", "label": 2.0},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def head_task(name: str, rows: list[dict]) -> HeadTask:
    task = make_task(name, head="classifier")
    assert isinstance(task, HeadTask)
    task.task.rows = lambda split: rows  # type: ignore[method-assign]
    return task


def model(num_labels: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(FOLDER, num_labels=num_labels, pad_token_id=0)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("name", "num_labels"), [("stsb", 1), ("mrpc", 2)])
def test_score_of_a_padded_batch_is_that_of_single_rows(
    name: str, num_labels: int, side: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = PAIRS if num_labels == 1 else [{**row, "label": i % 2} for i, row in enumerate(PAIRS)]
    task, head = head_task(name, rows), model(num_labels)
    evaluator = Evaluator(head, torch.device("cpu"), pad_token_id=0, padding_side=side)  # type: ignore[arg-type]
    score = task.evaluate(evaluator, "test", tokenizer, max_length=64)
    expected = []
    for row in rows:
        ids = torch.tensor([tokenizer(f"{row['sentence1']}\n{row['sentence2']}")["input_ids"]])
        with torch.no_grad():
            logits = head(input_ids=ids).logits[0]
        expected.append(logits[0].item() if num_labels == 1 else float(logits.argmax()))
    assert list(score.sums) == pytest.approx(expected, abs=1e-5)
    assert set(score.values) == ({"pearson", "spearman"} if num_labels == 1 else {"accuracy", "f1"})


def test_positions_after_reserved_ones_are_the_models_own_to_count() -> None:
    config = RobertaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    torch.manual_seed(0)
    head = RobertaForSequenceClassification(config).eval()
    assert num_reserved_positions(head) == 2 and not num_reserved_positions(model(2))
    found = []
    for side, ids in (("right", [[5, 6, 7, 8], [5, 6, 1, 1]]), ("left", [[5, 6, 7, 8], [1, 1, 5, 6]])):
        evaluator = Evaluator(head, torch.device("cpu"), pad_token_id=1, padding_side=side)  # type: ignore[arg-type]
        input_ids = torch.tensor(ids)
        found.append(evaluator.logits({"input_ids": input_ids, "attention_mask": (input_ids != 1).long()})[:1])
    assert torch.equal(*found)


def test_regression_labels_are_numbers_and_the_loss_is_squared_error(tokenizer: PreTrainedTokenizerBase) -> None:
    task, head = head_task("stsb", PAIRS), model(1)
    batch = task.collate(task.sequences("train", tokenizer, max_length=64), pad_token_id=0)
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [4.5, 0.5, 3.0, 2.0]
    out = head(**batch)
    assert out.loss.item() == pytest.approx(((out.logits[:, 0] - batch["labels"]) ** 2).mean().item(), rel=1e-5)


def test_a_long_text_does_not_push_the_other_out(tokenizer: PreTrainedTokenizerBase) -> None:
    """A decoder gets a pair as one text: cut at its end, a long premise would be left without its hypothesis."""
    short, long = "It rained.", "The sun rose over the hills and the fields. " * 8
    for pair, kept in (((long, short), f"\n{short}"), ((short, long), f"{short}\nThe sun")):
        row = {"sentence1": pair[0], "sentence2": pair[1], "label": 1}
        task = head_task("mrpc", [row])
        whole, cut = (task.encode(tokenizer, row, max_length=length).input_ids for length in (512, 40))
        assert whole == tokenizer("\n".join(pair))["input_ids"] and len(cut) == 40
        assert tokenizer.decode(cut).startswith(pair[0][:10]) and kept in tokenizer.decode(cut)
    halves = encode_texts(tokenizer, (long, f"{long}<eos>"), max_length=41)
    assert halves[-1] == tokenizer.eos_token_id and tokenizer.decode(halves).count("The sun") >= 2
    assert encode_texts(tokenizer, ("One. <eos>",), max_length=64) == tokenizer("One. <eos>")["input_ids"]


def test_multirc_is_scored_by_question() -> None:
    rows = [
        {"paragraph": "p", "question": q, "answer": str(i), "label": y}
        for i, (q, y) in enumerate([("a", 1), ("a", 0), ("b", 1), ("b", 0)])
    ]
    task = make_task("multirc")
    values = task.measure([1, 0, 1, 1], rows)  # type: ignore[attr-defined]
    assert values == pytest.approx({"f1": 0.8, "f1_by_question": (1 + 2 / 3) / 2, "exact_match": 0.5, "accuracy": 0.75})


def test_what_has_no_head_and_what_has_no_prompt() -> None:
    with pytest.raises(TaskError, match=r"stsb asks for a number.*--head classifier"):
        make_task("stsb")
    with pytest.raises(TaskError, match=r"alpaca has no labels.*--head lm"):
        make_task("alpaca", head="classifier")
    copa = {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 0}
    with pytest.raises(TaskError, match=r"copa has no form for a classification head"):
        head_task("copa", [copa]).check()
    for label in ("high", -1.0, float("nan"), None):
        with pytest.raises(TaskError, match=rf"label must be a number from 0 to 5, got {label!r}"):
            STSB().label({"label": label})
