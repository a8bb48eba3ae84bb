"""How much of real gradients LSP's projectors keep, beside GaLore's at equal memory, as rows.

    python -m benchmarks.lsp_studies --model DIR --data-dir DIR --out rows.jsonl
    python -m benchmarks.lsp_studies --model random:llama-1.3b --train-steps 300 --data-dir DIR --layers 8 \\
        --dims 256,512,1024,2048 --nonzeros 4,16,64,256 --gradients FILE --out rows.jsonl --device cuda
    python -m benchmarks.lsp_plots bias rows.jsonl --out bias.svg

Projectors are fitted on the gradient of one batch and tested on that of another, different examples both. Bias is what
is lost, relative to the gradient. `--train-steps` first trains the model on the other examples: gradients of random
weights are no model's. Called again it goes on where it was, small fits first; where rows are left it trains again with
the same seed, unless `--gradients` kept what came of it.

[Note: equal memory]
LSP keeps its projectors on the device and Adam's d x d states on the host; GaLore keeps a projector and states of rank
times the longer side, all on the device. So each row has two peers: `total` takes what LSP takes in both places
together, `device` what it takes on the device alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from ds_zo.bench.shapes import config_of_model, materialise, random_model
from ds_zo.config import LSPParams
from ds_zo.planner.shapes import RANDOM, config_of
from ds_zo.projectors import SparseProjector, apply_, choose_dims, compress, fit, relative_bias
from ds_zo.projectors.fit import LR
from ds_zo.records.environment import commit, versions
from ds_zo.records.rows import Row, append_row, read_objects
from ds_zo.reference.galore import biases_by_rank, rank_within
from ds_zo.tasks import DataSource, SeededOrder, make_task, pad_token_id
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.tasks.encoding import IGNORED, Encoded, collate

DIMS = (64, 128, 256, 512)
NONZEROS = (4, 16, 64)
MATRICES = ("q_proj", "v_proj", "gate_proj", "down_proj")
MICRO_BATCH = 8
WARMUP_FRACTION, MAX_GRADIENT_NORM, BETAS = 0.1, 1.0, (0.9, 0.95)
"""Of the training."""
NUM_LAST = 10
"""Steps at the end of the training whose losses are averaged: one batch's is noise."""
_MOMENT_BYTES = 8
"""Adam's two moments of one entry, in float32."""


# Training


class TimeIsUpError(Exception):
    """The training would end after the deadline."""


def train_(
    model: nn.Module,
    examples: Sequence[Encoded],
    *,
    steps: int,
    lr: float,
    batch_size: int,
    pad: int,
    deadline: float = float("inf"),
    seed: int = 0,
) -> list[float]:
    """AdamW on float32 weights, with products in bfloat16 on CUDA; returns every step's loss. The model stays in
    evaluation mode: nothing is dropped out."""
    device = next(model.parameters()).device
    params = [p for p in model.parameters() if p.requires_grad]
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=0.0, fused=on_cuda)
    warmup = max(1, round(WARMUP_FRACTION * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    order = SeededOrder(len(examples), seed=seed)
    losses: list[torch.Tensor] = []
    for step in (bar := tqdm(range(steps), desc="training", unit="step")):
        some = [examples[i] for i in order.batch(step * batch_size, batch_size)]
        batch = {key: value.to(device) for key, value in collate(some, pad_token_id=pad).items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % NUM_LAST == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")  # waits for the device, so that the clock is right
            if time.monotonic() > deadline:
                raise TimeIsUpError(f"time was up after {step + 1} of {steps} steps of the training (--max-seconds)")
    return torch.stack(losses).tolist()


def pieces(examples: Sequence[Encoded], length: int) -> list[Encoded]:
    """All of the examples, cut every `length` tokens; a stump of one token is dropped."""
    cut = [
        Encoded(one.input_ids[first : first + length], one.labels[first : first + length])
        for one in examples
        for first in range(0, len(one.input_ids), length)
    ]
    return [one for one in cut if len(one.input_ids) > 1]


# Gradients


def gradients_of(
    model: nn.Module, examples: Sequence[Encoded], names: Sequence[str], *, pad: int
) -> tuple[dict[str, torch.Tensor], float]:
    """The mean loss's gradient by the named weights, in float32 on the device, and that loss; every answer token counts
    the same."""
    device = next(model.parameters()).device
    wanted = {name: p for name, p in model.named_parameters() if name in set(names)}
    for name, p in model.named_parameters():
        p.requires_grad_(name in wanted)
        p.grad = None
    num_targets = sum(_num_targets(one) for one in examples)
    ordered = sorted(examples, key=lambda one: len(one.input_ids))  # less padding
    sums = {name: torch.zeros(p.shape, device=device) for name, p in wanted.items()}
    mean = torch.zeros((), device=device)
    for first in range(0, len(ordered), MICRO_BATCH):
        some = ordered[first : first + MICRO_BATCH]
        batch = {key: value.to(device) for key, value in collate(some, pad_token_id=pad).items()}
        loss = model(**batch, use_cache=False).loss * (sum(_num_targets(one) for one in some) / num_targets)
        loss.backward()
        mean += loss.detach()
        for name, p in wanted.items():
            assert p.grad is not None
            sums[name] += p.grad.float()
            p.grad = None
    return sums, float(mean)


def _num_targets(example: Encoded) -> int:
    """The first token is nobody's target."""
    return sum(label != IGNORED for label in example.labels[1:])


def load(
    name: str, data_dir: Path | None, *, task: str, max_length: int, device: str, tokenizer: str | None = None
) -> tuple[nn.Module, list[Encoded], int]:
    """(model in evaluation mode and float32, all training examples, padding token). Random weights read whole texts as
    bytes, which need no tokenizer, unless one is named."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, is_random = torch.device(device), name.startswith(RANDOM)
    made = make_task(task, DataSource(folder=data_dir))
    words = None if is_random and tokenizer is None else AutoTokenizer.from_pretrained(folder_of(tokenizer or name))
    if is_random:
        config = config_of(name.removeprefix(RANDOM), max_length=max(2048, max_length))
        config.vocab_size = max(config.vocab_size, 0 if words is None else len(words))
        model = materialise(random_model(config, dtype=torch.float32, device=where), where)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).to(where)
    if words is not None:
        return model.eval(), made.sequences("train", words, max_length=max_length), pad_token_id(words)
    texts = [list(" ".join(str(value) for value in row.values()).encode()) for row in made.rows("train")]
    return model.eval(), [Encoded(text, text) for text in texts], 0


def two_batches(examples: Sequence[Encoded], size: int) -> tuple[list[Encoded], list[Encoded]]:
    """Without an example in common."""
    if len(examples) < 2 * size:
        raise ValueError(
            f"two batches of {size} need {2 * size} examples, the data has {len(examples)}: lower --samples"
        )
    order = SeededOrder(len(examples), seed=0).batch(0, 2 * size)
    return [examples[i] for i in order[:size]], [examples[i] for i in order[size:]]


def others(examples: Sequence[Encoded], batches: Sequence[Sequence[Encoded]]) -> list[Encoded]:
    """What is in none of the batches, nor equal to something there."""
    taken = {tuple(one.input_ids) for batch in batches for one in batch}
    return [one for one in examples if tuple(one.input_ids) not in taken]


def matrices_of(model: nn.Module, layers: Sequence[int], kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Shapes of the weights of `kinds` in the blocks of these numbers, by name."""
    linear = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [name for name in linear if name.split(".")[-2] in kinds and any(f".{layer}." in name for layer in layers)]
    if not found:
        raise ValueError(f"no linear layer named {', '.join(kinds)} in blocks {list(layers)} (--matrices, --layers)")
    return {name: (linear[name].out_features, linear[name].in_features) for name in sorted(found)}


# Biases


class Pair:
    """One weight's two gradients, how alike they are, and what GaLore loses of them at every rank."""

    def __init__(self, G_fit: torch.Tensor, G_test: torch.Tensor) -> None:
        self.G_fit, self.G_test = G_fit, G_test
        self.cosine = float(torch.nn.functional.cosine_similarity(G_fit.flatten(), G_test.flatten(), dim=0))
        self.lost_fit, self.lost_test = (lost.tolist() for lost in biases_by_rank(G_fit, G_test))

    def row(self, dim: int, nonzeros: int, *, fit_steps: int, fit_lr: float = LR, seed: int = 0) -> Row:
        """LSP's biases at d and r, and GaLore's at equal memory: [Note: equal memory]."""
        shape = self.G_fit.shape
        P, Q = (
            SparseProjector.draw(size, dim, nonzeros, seed=seed, stream=side, device=self.G_fit.device)
            for side, size in enumerate(shape)
        )
        report = fit(self.G_fit, P, Q, steps=fit_steps, lr=fit_lr)
        on_device, on_host = P.num_bytes + Q.num_bytes, _MOMENT_BYTES * dim * dim
        row: Row = {
            "d": dim,
            "r": nonzeros,
            "bias_fit": report.bias_after,
            "bias_test": float(relative_bias(self.G_test, P, Q)),
            "update_rms": update_rms(self.G_fit, P, Q),
            "fit_steps": report.steps,
            "fit_ended": report.reason,
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


def left_to_do(
    shapes: Mapping[str, tuple[int, int]],
    dims: Sequence[int],
    nonzeros: Sequence[int],
    done: Collection[tuple[str, int, int]],
) -> list[tuple[str, int, int]]:
    """(matrix, d, r), cheap fits first."""

    def gathered(setting: tuple[str, int, int]) -> int:
        """By a step's products, up to a factor: r rows for each one, of G or of what has d columns."""
        name, dim, r = setting
        m, n = shapes[name]
        return r * (m * n + 2 * dim * (m + n))

    settings = [(name, *at) for name, shape in shapes.items() for at in settings_for(*shape, dims, nonzeros)]
    return sorted((setting for setting in settings if setting not in done), key=gathered)


# Command


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="embedded, a folder, a Hub name, or random:SHAPE")
    parser.add_argument("--tokenizer", metavar="DIR", help="for random:SHAPE, which reads bytes without one")
    parser.add_argument("--task", default="alpaca")
    parser.add_argument("--data-dir", type=Path, help="holds the task's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="rows are appended here as they come")
    parser.add_argument("--samples", type=int, default=128, help="of each of the two batches (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--train-steps", type=int, default=0, metavar="N", help="before gradients are taken")
    parser.add_argument("--train-lr", type=float, default=3e-4, help="(default: %(default)s)")
    parser.add_argument("--train-batch", type=int, default=16, help="sequences of --max-length (default: %(default)s)")
    parser.add_argument("--layers", type=_numbers, default=(3, 15, 27), help="numbers of blocks, with commas")
    parser.add_argument("--matrices", type=lambda text: tuple(text.split(",")), default=MATRICES)
    parser.add_argument("--dims", type=_numbers, default=DIMS)
    parser.add_argument("--nonzeros", type=_numbers, default=NONZEROS)
    parser.add_argument("--fit-steps", type=int, default=LSPParams().fit_steps)
    parser.add_argument("--fit-lr", type=float, default=LR)
    parser.add_argument(
        "--max-seconds", type=float, default=float("inf"), metavar="S", help="begin no fit after so long"
    )
    parser.add_argument("--gradients", type=Path, metavar="FILE", help="kept here, and read from here where it exists")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


class Gradients(NamedTuple):
    about: Row
    """The rows' facts of the model and its training."""
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """(to fit on, to test on) by weight."""


def gradients_for(args: argparse.Namespace, source: Row, names: Sequence[str], *, deadline: float) -> Gradients:
    """`source` is what a kept file must be of."""
    kept: Path | None = args.gradients
    if kept is not None and kept.is_file():
        found = Gradients(*torch.load(kept, map_location=args.device, weights_only=True))
        other = [key for key, value in source.items() if found.about.get(key) != value]
        if other or not set(names) <= set(found.pairs):
            what = ", ".join(f"{key} {found.about.get(key)}" for key in other) or "other matrices"
            raise ValueError(f"gradients must be of the model and batches that are asked for, {kept} is of {what}")
        return found
    where = {"max_length": args.max_length, "device": args.device, "tokenizer": args.tokenizer}
    model, examples, pad = load(args.model, args.data_dir, task=args.task, **where)
    batches = two_batches(examples, args.samples)
    about = dict(source)
    if args.train_steps > 0:
        begin = time.monotonic()
        options = {"steps": args.train_steps, "lr": args.train_lr, "batch_size": args.train_batch, "pad": pad}
        losses = train_(model, pieces(others(examples, batches), args.max_length), **options, deadline=deadline)
        about |= {"trained_s": round(time.monotonic() - begin, 1), "trained_loss_first": losses[0]}
        about["trained_loss_last"] = statistics.fmean(losses[-NUM_LAST:])
    taken = [gradients_of(model, [_cut(one, args.max_length) for one in batch], names, pad=pad) for batch in batches]
    (G_fit, about["loss_fit"]), (G_test, about["loss_test"]) = taken
    found = Gradients(about, {name: (G_fit[name], G_test[name]) for name in names})
    if kept is not None:
        torch.save(tuple(found), kept)
    return found


def _cut(example: Encoded, length: int) -> Encoded:
    return Encoded(example.input_ids[:length], example.labels[:length])


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    deadline = time.monotonic() + args.max_seconds
    source: Row = {"model": Path(args.model).name, "task": args.task}
    source |= {"samples": args.samples, "max_length": args.max_length, "trained_steps": args.train_steps}
    if args.tokenizer is not None:
        source["tokenizer"] = Path(args.tokenizer).name
    if args.train_steps > 0:
        source |= {"trained_lr": args.train_lr, "trained_batch": args.train_batch}
    fitting = {"fit_steps_wanted": args.fit_steps, "fit_lr": args.fit_lr}
    skeleton = random_model(config_of_model(folder_of(args.model)), dtype=torch.float32, device=torch.device("cpu"))
    shapes = matrices_of(skeleton, args.layers, args.matrices)
    left = left_to_do(shapes, args.dims, args.nonzeros, _done(args.out, source | fitting))
    if not left:
        print(f"nothing is left to do: {args.out} has all of these rows")
        return
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    run = {"device": where, "versions": versions(), "commit": commit()}
    run["started"] = time.strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        about, gradients = gradients_for(args, source, list(shapes), deadline=deadline)
    except TimeIsUpError as error:
        sys.exit(str(error))
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    pairs: dict[str, Pair] = {}
    for name, dim, r in left:
        if time.monotonic() > deadline:
            print(f"time is up; the same command goes on with {args.out}")
            return
        if name not in pairs:
            pairs[name] = Pair(*gradients[name])
        pair = pairs[name]
        found = pair.row(dim, r, fit_steps=args.fit_steps, fit_lr=args.fit_lr)
        matrix = {"matrix": name, "shape": list(shapes[name]), "cosine_of_gradients": round(pair.cosine, 4)}
        append_row(args.out, {"study": "bias", **about, **fitting, **matrix, **found, **run})
        print(
            f"{name} {shapes[name]} d={dim} r={r}: test bias {found['bias_test']:.3f}; GaLore "
            f"{found['galore_total_bias_test']:.3f} at rank {found['galore_total_rank']} (total), "
            f"{found['galore_device_bias_test']:.3f} at rank {found['galore_device_rank']} (device); "
            f"{found['fit_steps']} steps in {found['fit_s']:.1f} s",
            flush=True,
        )


def _done(out: Path, facts: Mapping[str, Any]) -> set[tuple[str, int, int]]:
    """(matrix, d, r) of rows with these facts, and no others: a trained model's are not those of an untrained one."""
    if not out.is_file():
        return set()
    rows = [{"trained_steps": 0, **row} for row in read_objects(out)]
    same = [row for row in rows if all(row.get(key) == facts.get(key) for key in (*facts, "tokenizer"))]
    return {(row["matrix"], row["d"], row["r"]) for row in same}


if __name__ == "__main__":
    main()
