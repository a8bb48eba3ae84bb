"""Scores of padded batches equal scores one by one, on one rank or several."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds_zo.tasks import ChoiceTask, Evaluator, make_task
from ds_zo.tasks.base import Choice
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.encoding import Side, collate, encode_answer, num_label_positions

CHOICES = [
    Choice("The cup fell so", (" it broke.", " a man who was walking by picked all of it up."), 1),
    Choice("import", (" os", " the"), 0),
    Choice("Return the number of items in the", (" list", " banana republic", " dictionary"), 0),
    Choice("for i in", (" range(10):", " of"), 0),
    Choice("x", (" = 1", " which is a rather long continuation for such a short prompt"), 1),
]


class FixedChoices(ChoiceTask):
    name = "fixed"
    fields = ()

    def choice(self, row: dict) -> Choice:
        return CHOICES[row["index"]]

    def rows(self, split: str) -> list[dict]:
        return [{"index": i} for i in range(len(CHOICES))]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def evaluator(model: PreTrainedModel, **options: object) -> Evaluator:
    return Evaluator(model, device=torch.device("cpu"), pad_token_id=0, **options)  # type: ignore[arg-type]


SMALL = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 32,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
}
"""Rotary positions, learned ones counted from the first column, learned ones counted from the mask, none."""


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", list(SMALL))
def test_padding_on_either_side_equals_no_padding(
    architecture: str, side: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, vocab_size=len(tokenizer), **SMALL[architecture])
    random = AutoModelForCausalLM.from_config(config).eval()
    pairs = [(choice.prompt, option) for choice in CHOICES for option in choice.options]
    sequences = [encode_answer(tokenizer, prompt, option, max_length=64) for prompt, option in pairs]
    alone = evaluator(random, batch_size=1).log_likelihoods(sequences)
    padded = evaluator(random, batch_size=64, padding_side=side).log_likelihoods(sequences)
    assert [total for total, _ in padded] == pytest.approx([total for total, _ in alone], abs=1e-4)
    assert [count for _, count in padded] == [count for _, count in alone]


@torch.no_grad()
def one_by_one(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, option: str) -> float:
    """The mean log-probability of the option's tokens, token after token, without padding or batching."""
    ids = tokenizer(prompt + option)["input_ids"]
    num_option = len(tokenizer(option)["input_ids"])
    terms = []
    for position in range(len(ids) - num_option, len(ids)):
        logits = model(input_ids=torch.tensor([ids[:position]])).logits[0, -1]
        terms.append(torch.log_softmax(logits, -1)[ids[position]].item())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_batched_scores_equal_one_by_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> None:
    pairs = [(choice.prompt, option) for choice in CHOICES for option in choice.options]
    sequences = [encode_answer(tokenizer, prompt, option, max_length=64) for prompt, option in pairs]
    batched = evaluator(model, batch_size=batch_size).log_likelihoods(sequences)
    expected = [one_by_one(model, tokenizer, prompt, option) for prompt, option in pairs]
    assert [total / count for total, count in batched] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_one_forward_scores_all_one_word_answers_of_a_prompt(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, side: str
) -> None:
    pairs = [("import", " os"), ("import", " re"), ("for i in", " range(10):"), ("import", " the"), ("from", " os")]
    sequences = [encode_answer(tokenizer, prompt, option, max_length=64) for prompt, option in pairs]
    alone = evaluator(model, world_size=2)
    assert evaluator(model).alike(sequences) == [[0, 1, 3], [2], [4]]
    assert alone.alike(sequences) == [[i] for i in range(len(pairs))], "ranks must make equally many forwards"
    together = evaluator(model, padding_side=side).log_likelihoods(sequences)
    for (total, count), (expected, number) in zip(together, alone.log_likelihoods(sequences), strict=True):
        assert (total, count) == (pytest.approx(expected, abs=1e-4), number)


def test_accuracy_is_that_of_one_by_one_ranking(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    num_right = 0
    for choice in CHOICES:
        scores = [one_by_one(model, tokenizer, choice.prompt, option) for option in choice.options]
        num_right += scores.index(max(scores)) == choice.answer
    score = FixedChoices().evaluate(evaluator(model), "test", tokenizer, max_length=64)
    assert score.value == num_right / len(CHOICES)
    assert 0 < num_right < len(CHOICES)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_sum_to_the_whole(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, world_size: int) -> None:
    whole = FixedChoices().evaluate(evaluator(model), "test", tokenizer, max_length=64)
    ranks = [evaluator(model, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [FixedChoices().evaluate(rank, "test", tokenizer, max_length=64) for rank in ranks]
    sums = [sum(each) for each in zip(*(part.sums for part in parts), strict=True)]
    assert parts[0].with_sums(sums).values == whole.values
    assert any(part.sums != whole.sums for part in parts)
    assert len({len(rank.share(len(CHOICES))) for rank in ranks}) == 1


def test_perplexity_is_that_of_the_models_own_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Return the number of items. " * 20
    task = make_task("text")
    task.rows = lambda split: [{"text": text}]  # type: ignore[method-assign]
    (sequence,) = task.sequences("test", tokenizer, max_length=512)
    ids = torch.tensor([sequence.input_ids])
    loss = model(input_ids=ids, labels=ids).loss.item()
    score = task.evaluate(evaluator(model), "test", tokenizer, max_length=512)
    assert score.value == pytest.approx(math.exp(loss), rel=1e-4)
    assert score.sums[1] == ids.numel() - 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_where_answers_are_make_the_same_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, side: Side
) -> None:
    sequences = [encode_answer(tokenizer, c.prompt, c.options[0], max_length=64) for c in CHOICES[0:3:2]]
    batch = collate(sequences, pad_token_id=0, side=side)
    kept = num_label_positions(batch["labels"])
    first = [next(i for i, label in enumerate(row) if label >= 0) for row in batch["labels"].tolist()]
    assert kept == batch["labels"].shape[1] - min(first) + 1 < batch["labels"].shape[1]
    with torch.no_grad():
        whole = model(**batch).loss
        batch["labels"] = batch["labels"][:, -kept:]
        torch.testing.assert_close(model(**batch, logits_to_keep=kept).loss, whole)
