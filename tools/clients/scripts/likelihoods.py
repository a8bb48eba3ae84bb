"""Log-likelihoods of the chosen and rejected answers of data/dpo, by `from_pretrained` and plain PyTorch.

Runs in the environment of a client: python likelihoods.py FOLDER... prints a JSON list of pairs for each folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def pairs_of(folder: str, rows: list[dict[str, str]]) -> list[list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()

    def likelihood(prompt: str, answer: str) -> float:
        num_prompt = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + answer)["input_ids"]])
        logs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        return float(logs[num_prompt - 1 :].sum())

    return [[likelihood(row["prompt"], row[kind]) for kind in ("chosen", "rejected")] for row in rows]


def main() -> None:
    lines = Path("data/dpo/train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    print(json.dumps([pairs_of(folder, rows) for folder in sys.argv[1:]]))


if __name__ == "__main__":
    main()
