"""How much of real gradients LSP's projectors keep, beside GaLore's at equal memory, as rows.

    python -m ds_zo.bench.lsp_studies --model DIR --data-dir DIR --out rows.jsonl
    python -m ds_zo.bench.lsp_studies --model random:llama-1.3b --data-dir DIR --dims 256,512,1024,2048 \\
        --layers 8 --out rows.jsonl --device cuda
    python -m ds_zo.bench.lsp_plots bias rows.jsonl --out bias.svg

Projectors are fitted on the gradient of one batch and tested on that of another, different examples both. Bias is what
is lost, relative to the gradient. Called again it goes on where it was.

[Note: equal memory]
LSP keeps its projectors on the device and Adam's d x d states on the host; GaLore keeps a projector and states of rank
times the longer side, all on the device. So each row has two peers: `total` takes what LSP takes in both places
together, `device` what it takes on the device alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_zo.bench.galore import biases_by_rank, rank_within
from ds_zo.bench.measure import commit
from ds_zo.bench.run_summary import append_row, versions
from ds_zo.bench.shapes import RANDOM, config_of, materialise, random_model
from ds_zo.config import LSPParams
from ds_zo.projectors import SparseProjector, apply_, choose_dims, compress, fit, relative_bias
from ds_zo.tasks import DataSource, SeededOrder, make_task, pad_token_id
from ds_zo.tasks.embedded_model import FOLDER as EMBEDDED_MODEL
from ds_zo.tasks.encoding import IGNORED, Encoded, collate

Row = dict[str, Any]
DIMS = (64, 128, 256, 512)
NONZEROS = (4, 16, 64)
MATRICES = ("q_proj", "v_proj", "gate_proj", "down_proj")
MICRO_BATCH = 8
_MOMENT_BYTES = 8
"""Adam's two moments of one entry, in float32."""


# Gradients


def gradients_of(
    model: nn.Module, examples: Sequence[Encoded], names: Sequence[str], *, pad: int
) -> dict[str, torch.Tensor]:
    """The mean loss's gradient by the named weights, in float32 on the device; every answer token counts the same."""
    device = next(model.parameters()).device
    wanted = {name: p for name, p in model.named_parameters() if name in set(names)}
    for name, p in model.named_parameters():
        p.requires_grad_(name in wanted)
        p.grad = None
    num_targets = sum(_num_targets(one) for one in examples)
    ordered = sorted(examples, key=lambda one: len(one.input_ids))  # less padding
    sums = {name: torch.zeros(p.shape, device=device) for name, p in wanted.items()}
    for first in range(0, len(ordered), MICRO_BATCH):
        some = ordered[first : first + MICRO_BATCH]
        batch = {key: value.to(device) for key, value in collate(some, pad_token_id=pad).items()}
        loss = model(**batch, use_cache=False).loss
        (loss * (sum(_num_targets(one) for one in some) / num_targets)).backward()
        for name, p in wanted.items():
            assert p.grad is not None
            sums[name] += p.grad.float()
            p.grad = None
    return sums


def _num_targets(example: Encoded) -> int:
    """The first token is nobody's target."""
    return sum(label != IGNORED for label in example.labels[1:])


def load(
    name: str, data_dir: Path | None, *, task: str, max_length: int, device: str
) -> tuple[nn.Module, list[Encoded], int]:
    """(model in evaluation mode, all training examples, padding token). Random weights read bytes, which need no
    tokenizer; elsewhere float32, as far as the fit sees it."""
    where = torch.device(device)
    made = make_task(task, DataSource(folder=data_dir))
    if name.startswith(RANDOM):
        config = config_of(name.removeprefix(RANDOM), max_length=max(2048, max_length))
        dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
        model = materialise(random_model(config, dtype=dtype, device=where), where)
        texts = [" ".join(str(value) for value in row.values()).encode() for row in made.rows("train")]
        return model.eval(), [Encoded(list(t[:max_length]), list(t[:max_length])) for t in texts], 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = EMBEDDED_MODEL if name == "embedded" else name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(where)
    return model.eval(), made.sequences("train", tokenizer, max_length=max_length), pad_token_id(tokenizer)


def two_batches(examples: Sequence[Encoded], size: int, *, seed: int = 0) -> tuple[list[Encoded], list[Encoded]]:
    """Without an example in common."""
    if len(examples) < 2 * size:
        raise ValueError(
            f"two batches of {size} need {2 * size} examples, the data has {len(examples)}: lower --samples"
        )
    order = SeededOrder(len(examples), seed=seed).batch(0, 2 * size)
    return [examples[i] for i in order[:size]], [examples[i] for i in order[size:]]


def matrices_of(model: nn.Module, layers: Sequence[int], kinds: Sequence[str]) -> list[str]:
    """Weights of `kinds` in the blocks of these numbers, by name."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [name for name in linear if name.split(".")[-2] in kinds and any(f".{layer}." in name for layer in layers)]
    if not found:
        raise ValueError(f"no linear layer named {', '.join(kinds)} in blocks {list(layers)} (--matrices, --layers)")
    return sorted(found)


# Biases


class Pair:
    """One weight's two gradients, and what GaLore loses of them at every rank."""

    def __init__(self, G_fit: torch.Tensor, G_test: torch.Tensor) -> None:
        self.G_fit, self.G_test = G_fit, G_test
        self.lost_fit, self.lost_test = (lost.tolist() for lost in biases_by_rank(G_fit, G_test))

    def row(
        self, dim: int, nonzeros: int, *, fit_steps: int, fit_lr: float, timeout_s: float = float("inf"), seed: int = 0
    ) -> Row:
        """LSP's biases at d and r, and GaLore's at equal memory: [Note: equal memory]."""
        shape = self.G_fit.shape
        P, Q = (
            SparseProjector.draw(size, dim, nonzeros, seed=seed, stream=side, device=self.G_fit.device)
            for side, size in enumerate(shape)
        )
        report = fit(self.G_fit, P, Q, steps=fit_steps, lr=fit_lr, timeout_s=timeout_s)
        on_device, on_host = P.num_bytes + Q.num_bytes, _MOMENT_BYTES * dim * dim
        row: Row = {
            "d": dim,
            "r": nonzeros,
            "bias_fit": report.bias_after,
            "bias_test": float(relative_bias(self.G_test, P, Q)),
            "update_rms": update_rms(self.G_fit, P, Q),
            "fit_steps": report.steps,
            "fit_s": round(report.seconds, 3),
            "device_bytes": on_device,
            "host_bytes": on_host,
        }
        for peer, budget in (("total", on_device + on_host), ("device", on_device)):
            rank = rank_within(budget, shape[0], shape[1])
            row |= {f"galore_{peer}_rank": rank, f"galore_{peer}_bias_fit": self.lost_fit[rank]}
            row[f"galore_{peer}_bias_test"] = self.lost_test[rank]
        return row


@torch.no_grad()
def update_rms(G: torch.Tensor, P: SparseProjector, Q: SparseProjector) -> float:
    """Size of LSP's first update at lr 1, where AdamW's is 1: Adam's first direction is the gradient's sign."""
    W = torch.zeros(G.shape, device=G.device)
    apply_(W, compress(G, P, Q).sign_(), P, Q, lr=1.0, rounding="nearest")
    return float(W.square().mean().sqrt())


def settings_for(
    num_rows: int, num_cols: int, dims: Sequence[int], nonzeros: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """d as the engine clamps it; nothing where it would train the matrix whole; r at most d."""
    seen = set()
    for wanted in dims:
        found = choose_dims(num_rows, num_cols, wanted)
        for r in nonzeros:
            if found is not None and r <= found[0] and (found[0], r) not in seen:
                seen.add((found[0], r))
                yield found[0], r


# Command


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="embedded, a folder, a Hub name, or random:SHAPE")
    parser.add_argument("--task", default="alpaca")
    parser.add_argument("--data-dir", type=Path, help="holds the task's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="rows are appended here as they come")
    parser.add_argument("--samples", type=int, default=128, help="of each of the two batches (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--layers", type=_numbers, default=(3, 15, 27), help="numbers of blocks, with commas")
    parser.add_argument("--matrices", type=lambda text: tuple(text.split(",")), default=MATRICES)
    parser.add_argument("--dims", type=_numbers, default=DIMS)
    parser.add_argument("--nonzeros", type=_numbers, default=NONZEROS)
    parser.add_argument("--fit-steps", type=int, default=LSPParams().fit_steps)
    parser.add_argument("--fit-lr", type=float, default=LSPParams().fit_lr)
    parser.add_argument("--fit-timeout", type=float, default=float("inf"), metavar="S", help="of one fit")
    parser.add_argument(
        "--max-seconds", type=float, default=float("inf"), metavar="S", help="begin no fit after so long"
    )
    parser.add_argument("--gradients", type=Path, metavar="FILE", help="kept here, and read from here where it exists")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def gradients_for(args: argparse.Namespace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(to fit on, to test on) by weight."""
    kept: Path | None = args.gradients
    if kept is not None and kept.is_file():
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = torch.load(
            kept, map_location=args.device, weights_only=True
        )
        return found
    model, examples, pad = load(
        args.model, args.data_dir, task=args.task, max_length=args.max_length, device=args.device
    )
    names = matrices_of(model, args.layers, args.matrices)
    both = [gradients_of(model, batch, names, pad=pad) for batch in two_batches(examples, args.samples)]
    pairs = {name: (both[0][name], both[1][name]) for name in names}
    if kept is not None:
        torch.save(pairs, kept)
    return pairs


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    deadline = time.monotonic() + args.max_seconds
    facts = {"model": Path(args.model).name, "task": args.task, "samples": args.samples, "max_length": args.max_length}
    facts |= {"fit_steps_wanted": args.fit_steps, "fit_lr": args.fit_lr}
    done = _done(args.out, facts)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    about = {
        "device": where,
        "versions": versions(),
        "commit": commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    for name, (G_fit, G_test) in gradients_for(args).items():
        settings = settings_for(G_fit.shape[0], G_fit.shape[1], args.dims, args.nonzeros)
        left = [at for at in settings if (name, *at) not in done]
        if not left:
            continue
        pair = Pair(G_fit, G_test)
        cosine = float(torch.nn.functional.cosine_similarity(G_fit.flatten(), G_test.flatten(), dim=0))
        shape = {"matrix": name, "shape": list(G_fit.shape), "cosine_of_gradients": round(cosine, 4)}
        for dim, r in left:
            if time.monotonic() > deadline:
                print(f"time is up; the same command goes on with {args.out}")
                return
            found = pair.row(dim, r, fit_steps=args.fit_steps, fit_lr=args.fit_lr, timeout_s=args.fit_timeout)
            append_row(args.out, {"study": "bias", **facts, **shape, **found, **about})
            print(
                f"{name} {tuple(G_fit.shape)} d={dim} r={r}: test bias {found['bias_test']:.3f}; GaLore "
                f"{found['galore_total_bias_test']:.3f} at rank {found['galore_total_rank']} (total), "
                f"{found['galore_device_bias_test']:.3f} at rank {found['galore_device_rank']} (device)",
                flush=True,
            )


def _done(out: Path, facts: Mapping[str, Any]) -> set[tuple[str, int, int]]:
    if not out.is_file():
        return set()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    same = [row for row in rows if all(row.get(key) == value for key, value in facts.items())]
    return {(row["matrix"], row["d"], row["r"]) for row in same}


if __name__ == "__main__":
    main()
