"""Which tokens carry a label, what truncation keeps, how batches are padded."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ds_zo.tasks import DataSource, Encoded, TaskError, collate, make_task
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.encoding import IGNORED, encode_answer, encode_chat, pack, position_ids


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


def labelled(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> str:
    return tokenizer.decode([token for token in encoded.labels if token != IGNORED])


def test_only_the_answer_carries_labels(tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = encode_answer(tokenizer, "return self\nis_code =", " True", max_length=64)
    assert tokenizer.decode(encoded.input_ids) == "return self\nis_code = True"
    assert labelled(tokenizer, encoded) == " True"
    num_answer = len(tokenizer(" True")["input_ids"])
    assert encoded.labels == [IGNORED] * (len(encoded.input_ids) - num_answer) + encoded.input_ids[-num_answer:]


def test_a_token_across_the_border_belongs_to_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    merged = tokenizer("self")["input_ids"]
    assert len(merged) == 1
    assert encode_answer(tokenizer, "se", "lf", max_length=8) == Encoded(merged, merged)


def test_truncation_drops_the_prompts_beginning_first(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = encode_answer(tokenizer, "one two three four five", " six", max_length=64)
    short = encode_answer(tokenizer, "one two three four five", " six", max_length=len(whole.input_ids) - 3)
    assert short.input_ids == whole.input_ids[3:]
    assert labelled(tokenizer, short) == " six"


def test_truncation_keeps_a_beginning_token(tokenizer: PreTrainedTokenizerBase) -> None:
    begin = tokenizer.eos_token
    whole = encode_answer(tokenizer, f"{begin}one two three four five", " six", max_length=64)
    short = encode_answer(tokenizer, f"{begin}one two three four five", " six", max_length=len(whole.input_ids) - 2)
    assert short.input_ids == [tokenizer.eos_token_id, *whole.input_ids[3:]]


def test_an_overlong_answer_loses_its_end_and_keeps_some_context(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = " word" * 50
    encoded = encode_answer(tokenizer, "some prompt here", answer, max_length=10)
    assert len(encoded.input_ids) == len(encoded.labels) == 10
    assert encoded.labels[0] == IGNORED and encoded.labels[1:] == encoded.input_ids[1:]


@pytest.mark.parametrize("begin", ["", "<eos>"])
def test_a_length_without_room_for_an_answer_is_refused(tokenizer: PreTrainedTokenizerBase, begin: str) -> None:
    """A sequence without a label has no score, and its loss is not a number."""
    least = 1 + len(begin[:1])
    with pytest.raises(TaskError, match=rf"room for {least} tokens .* got {least}: .*\(--max-length\)"):
        encode_answer(tokenizer, f"{begin}one two", " six", max_length=least)
    assert encode_answer(tokenizer, f"{begin}one two", " six", max_length=least + 1).labels[-1] != IGNORED
    with pytest.raises(TaskError, match=r"two tokens or more, got .* \(--data, --max-length\)"):
        pack(tokenizer, ["one two three"], max_length=1)


CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat_trains_on_the_turns_of_the_assistant(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Seeded conversations: the labels spell the answers with their ends, and nothing else."""
    tokenizer = copy.deepcopy(tokenizer)
    rng = random.Random(0)
    for _ in range(20):
        roles = ["system"] * rng.randrange(2) + ["user", "assistant"] * rng.randrange(1, 4)
        messages = [{"role": role, "content": f"{rng.choice('abc')} = {rng.randrange(99)}"} for role in roles]
        tokenizer.chat_template = CHAT
        found = encode_chat(tokenizer, messages, max_length=10_000)
        said = tokenizer.decode([label for label in found.labels if label != IGNORED])
        assert said.count("=") == roles.count("assistant") and "<user>" not in said
        for message in messages:
            assert (f"{message['content']}</s>" in said) or message["role"] != "assistant"
    with pytest.raises(TaskError, match="--max-length"):
        encode_chat(tokenizer, messages, max_length=2)
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 20)
    with pytest.raises(TaskError, match="trains on turns of the role assistant"):
        make_task("chat", DataSource(file=tmp_path / "rows.jsonl")).check()


def test_alpaca_trains_on_the_answer_and_its_end(tokenizer: PreTrainedTokenizerBase) -> None:
    task = make_task("alpaca")
    rows = [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "Yo"}]
    task.rows = lambda split: rows  # type: ignore[method-assign]
    first, second = task.sequences("train", tokenizer, max_length=128)
    assert labelled(tokenizer, first) == "3<eos>"
    assert "### Input:\n1 2" in tokenizer.decode(first.input_ids)
    assert "### Input" not in tokenizer.decode(second.input_ids)


def test_packing_loses_and_repeats_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["def f():\n    return 1\n", "a sentence.", "x" * 40]
    packed = pack(tokenizer, texts, max_length=7)
    joined = [token for row in packed for token in row.input_ids]
    assert tokenizer.decode(joined) == "".join(text + "<eos>" for text in texts)
    assert all(row.labels == row.input_ids for row in packed)
    assert {len(row.input_ids) for row in packed[:-1]} == {7}


def test_collate_pads_on_the_right_without_labels() -> None:
    batch = collate([Encoded([5, 6, 7], [IGNORED, 6, 7]), Encoded([8], [8])], pad_token_id=3)
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 6, 7], [8, 3, 3]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([[IGNORED, 6, 7], [8, IGNORED, IGNORED]]))
    longer = collate([Encoded([5, 6, 7], [5, 6, 7])], pad_token_id=3, multiple=4)
    assert longer["input_ids"].tolist() == [[5, 6, 7, 3]] and longer["labels"].tolist() == [[5, 6, 7, IGNORED]]


def test_collate_pads_on_the_left_and_positions_start_at_the_first_token() -> None:
    batch = collate([Encoded([5, 6, 7], [IGNORED, 6, 7]), Encoded([8], [8])], pad_token_id=3, side="left")
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 6, 7], [3, 3, 8]]))
    assert torch.equal(batch["labels"], torch.tensor([[IGNORED, 6, 7], [IGNORED, IGNORED, 8]]))
    assert torch.equal(position_ids(batch["attention_mask"]), torch.tensor([[0, 1, 2], [0, 0, 0]]))
