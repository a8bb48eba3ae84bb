#!/usr/bin/env python
"""Pretrain the small decoder that ships in ds_zo/tasks/embedded, from the text every Python carries.

    python tools/pretrain_embedded.py --output ds_zo/tasks/embedded

Everything is seeded; the result depends on the Python version only through the text of its standard library. Takes
about ten minutes on two CPU cores. The last lines are the figures of the folder's README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ds_zo.tasks.stdlib_text import docstrings, modules, parse

PAD, EOS = "<pad>", "<eos>"


def train_tokenizer(texts: list[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE: every string has an encoding, so that no unknown token exists."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="right", model_max_length=512
    )


def name_fast_class(config: Path) -> None:
    """Names the tokenizer's class as transformers 4 and 5 both know it. transformers 5 writes a name of its own."""
    found = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.write_text(json.dumps(found, indent=2) + "\n")


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str], *, length: int) -> torch.Tensor:
    """Joins documents by the end-of-sequence token and cuts them into rows of `length`."""
    ids: list[int] = []
    for text in texts:
        ids.extend(tokenizer(text)["input_ids"])
        ids.append(tokenizer.eos_token_id)
    num_rows = len(ids) // length
    return torch.tensor(ids[: num_rows * length], dtype=torch.long).view(num_rows, length)


def batches(rows: torch.Tensor, *, batch_size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches for ever, each epoch in its own seeded order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield rows[order[start : start + batch_size]]


def learning_rate(step: int, *, peak: float, warmup: int, total: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def documents(*, held_out: bool) -> Iterator[str]:
    """Each module twice, as source and as its docstrings alone. For pretraining, pydoc's topics too."""
    for _, source in modules(held_out=held_out):
        yield source
        tree = parse(source)
        prose = "\n\n".join(docstrings(tree)) if tree is not None else ""
        if prose:
            yield prose
    if not held_out:
        from pydoc_data.topics import topics

        yield from (text for _, text in sorted(topics.items()))


@torch.no_grad()
def bits_per_byte(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    *,
    length: int = 256,
    max_rows: int | None = None,
    batch_size: int = 16,
) -> float:
    """Cross-entropy over separate windows of `length` tokens, in bits per byte of UTF-8, comparable between tokenizers.

    With `max_rows`, at most so many windows are used, evenly spaced over the text. The first token of a window is only
    context: its bytes are not counted.
    """
    rows: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
    if not rows:
        raise ValueError(
            f"bits_per_byte needs a text of at least length={length} tokens, got {len(texts)} shorter texts"
        )
    if max_rows is not None and len(rows) > max_rows:
        rows = [rows[i * len(rows) // max_rows] for i in range(max_rows)]
    nats, num_bytes = 0.0, 0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        ids = torch.tensor(batch, device=model.device)
        nats += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * (ids.numel() - len(batch))
        num_bytes += sum(
            len(tokenizer.decode(row[1:], clean_up_tokenization_spaces=False).encode("utf-8")) for row in batch
        )
    return nats / math.log(2) / num_bytes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and tokenizer")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate of AdamW")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    texts = list(documents(held_out=False))
    random.Random(args.seed).shuffle(texts)
    tokenizer = train_tokenizer(texts, vocab_size=args.vocab_size)
    rows = pack(tokenizer, texts, length=args.length)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
    )

    smoothed = math.nan
    stream = batches(rows, batch_size=args.batch_size, seed=args.seed)
    for step in (bar := tqdm(range(args.steps), mininterval=10)):
        lr = learning_rate(step, peak=args.lr, warmup=50, total=args.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = next(stream)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        smoothed = value if math.isnan(smoothed) else 0.98 * smoothed + 0.02 * value
        bar.set_postfix(loss=f"{smoothed:.3f}", refresh=False)

    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    name_fast_class(args.output / "tokenizer_config.json")
    held_out = bits_per_byte(model.float(), tokenizer, list(documents(held_out=True)), max_rows=400)
    tokens = args.steps * args.batch_size * args.length
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"tokens seen: {tokens:,} ({tokens / rows.numel():.2f} epochs of {rows.numel():,})")
    print(f"final training loss: {smoothed:.3f} nats a token; held-out modules: {held_out:.3f} bits per byte")


if __name__ == "__main__":
    main()
