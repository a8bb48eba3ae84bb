"""Language modelling: plain text, answers to instructions, and conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_zo.tasks.base import LanguageTask
from ds_zo.tasks.data import Row, Split, cut, draw_ready
from ds_zo.tasks.encoding import Encoded, encode_answer, encode_chat, pack
from ds_zo.tasks.errors import TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Text(LanguageTask):
    """Packed sequences from a text file (paragraphs) or from JSONL rows with a "text" field."""

    name = "text"
    fields = ("text",)

    def rows(self, split: Split) -> list[Row]:
        file = self.source.file
        if file is None or file.suffix in (".jsonl", ".json"):
            return list(super().rows(split))
        if not file.is_file():
            raise TaskError(f"looked for the text file {file}: not found")
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TaskError(f"a text file must be UTF-8, got {file}: {error}; convert it (--data)") from None
        paragraphs = [p for p in text.split("\n\n") if p.strip()]
        rows = cut([{"text": paragraph} for paragraph in paragraphs], split, place=f"{file} (rows are paragraphs)")
        return draw_ready(rows, split, draw=self.source.draw)

    def check_row(self, row: Row) -> None:
        "".join([row["text"]])

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        return pack(tokenizer, [row["text"] for row in self.rows(split)], max_length=max_length)


class Alpaca(LanguageTask):
    """Instructions with an optional input. The loss is on the answer and its end-of-sequence token."""

    name = "alpaca"
    fields = ("instruction", "output")

    def check_row(self, row: Row) -> None:
        "".join([self.prompt(row), row["output"]])

    def prompt(self, row: Row) -> str:
        given = row.get("input") or ""
        middle = f"\n\n### Input:\n{given}" if given.strip() else ""
        return f"### Instruction:\n{row['instruction']}{middle}\n\n### Response:\n"

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        return [
            encode_answer(tokenizer, self.prompt(row), row["output"], max_length=max_length, end=True)
            for row in self.rows(split)
        ]


class Chat(LanguageTask):
    """Conversations, written by the tokenizer's chat template. The loss is on the turns of the assistant."""

    name = "chat"
    fields = ("messages",)

    def check_row(self, row: Row) -> None:
        messages = row["messages"]
        is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        if not is_list or not all(isinstance(message.get("role"), str) for message in messages):
            raise TaskError(
                f'task chat needs messages like [{{"role": "user", "content": "..."}}], got {messages!r:.200}'
            )
        if all(message["role"] != "assistant" for message in messages):
            raise TaskError(f"task chat trains on turns of the role assistant, got none in {messages!s:.200}")

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        if not tokenizer.chat_template:
            raise TaskError(
                "task chat needs a tokenizer with a chat template, got one without: take an instruct model, or task "
                "alpaca (--model, --task)"
            )
        return [encode_chat(tokenizer, row["messages"], max_length=max_length) for row in self.rows(split)]
