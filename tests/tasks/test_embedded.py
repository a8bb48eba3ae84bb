"""The embedded model is small and really pretrained; the embedded task is balanced, disjoint and repeatable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pretrain_embedded import bits_per_byte, documents
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ds_zo.tasks import make_task
from ds_zo.tasks.embedded_model import FOLDER
from ds_zo.tasks.stdlib_text import is_held_out, modules

BITS_PER_BYTE_BOUND = 2.4
"""Above what the folder's README.md states by a margin for other Python versions' text; knowing nothing costs 8 bits,
knowing only the frequencies of bytes about 5."""


def test_folder_is_under_four_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 4_000_000


def test_model_is_pretrained() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    texts = list(documents(held_out=True))[::6]  # tokenizing all of them takes longer than the model
    assert bits_per_byte(model, tokenizer, texts, length=128, max_rows=24) < BITS_PER_BYTE_BOUND
    torch.manual_seed(0)
    untrained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32).eval()
    # On the same texts: an untrained model pays 10 bits a token, and bytes a token differ between Pythons' libraries.
    ours, theirs = (bits_per_byte(m, tokenizer, texts, length=128, max_rows=8) for m in (model, untrained))
    assert theirs > 1.5 * ours


def test_tokenizer_is_lossless() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for text in ("def f(x):\n\treturn  x  # é ü 漢\r\n", " a .b ,c 's n't"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_splits_are_balanced_and_disjoint() -> None:
    task = make_task("code_or_text")
    lines: set[str] = set()
    for split, num in (("train", 1000), ("dev", 200), ("test", 400)):
        rows = task.rows(split)  # type: ignore[arg-type]
        assert len(rows) == num
        assert sum(row["label"] == "code" for row in rows[: num // 2]) == num // 4
        lines.update(row["line"] for row in rows)
    assert len(lines) == 1600


def test_splits_do_not_depend_on_the_process(run_python: Callable[..., str]) -> None:
    script = (
        "from ds_zo.tasks import make_task; print([r['line'] for r in make_task('code_or_text').rows('test')[:50]])"
    )
    output = run_python(script)
    here = [row["line"] for row in make_task("code_or_text").rows("test")[:50]]
    assert output.strip().splitlines()[-1] == str(here)


def test_pretraining_and_held_out_modules_are_disjoint() -> None:
    held_out = {name for name, _ in modules(held_out=True)}
    assert len(held_out) > 20 and all(map(is_held_out, held_out))
    assert not held_out & {name for name, _ in modules(held_out=False)}
