"""Generated Markdown has no line that a reader must scroll."""

from __future__ import annotations

from benchmarks.prose import WIDTH, wrapped


def test_sentences_are_wrapped_and_everything_else_stays() -> None:
    sentence = "One word after the other. " * 20
    kept = [
        "| " + "cell | " * 40,
        "```bash",
        "python " + "--option " * 40,
        "```",
        "![a picture](" + "x" * 200 + ")",
        "",
    ]
    lines = wrapped("\n".join([sentence, *kept, "x" * 300])).splitlines()
    num_wrapped = len(lines) - len(kept) - 1
    assert num_wrapped > 1 and all(len(line) <= WIDTH for line in lines[:num_wrapped])
    assert " ".join(lines[:num_wrapped]) == sentence.strip()
    assert lines[num_wrapped:] == [*kept, "x" * 300]
