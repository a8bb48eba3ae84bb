"""Would another zeroth-order estimator learn more in the same time? Prototypes beside plain MeZO, in memory.

    python -m benchmarks.zo_variants run --out rows.jsonl
    python -m benchmarks.zo_variants run --model FOLDER --task sst2 --data-dir DIR --rate 1e-5 --out rows.jsonl
    python -m benchmarks.zo_variants table rows.jsonl

Each run spends the same number of forward passes over a batch. The table compares what runs have learnt when they have
spent the same passes, which is the time of an engine bound by arithmetic, and when they have made the same steps, which
is the time of a streamed one as long as the link is what it waits for. Rates are chosen by the loss on dev at each of
these points with the first seed.

Variants are told apart here, on weights that lie flat in memory, not in the engine: only what pays belongs there.
Batches are padded on the right, where a causal model needs no mask for it as no label stands there; on a GPU all to one
length, so that one graph holds the whole forward.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.sweep import read_rows, rows_of
from ds_zo.records.environment import commit, versions
from ds_zo.records.rows import Row, append_row, table_lines

Noise = Literal["normal", "rademacher", "low-rank", "sparse"]
SEEDS = (0, 1, 2)
ZO_EPS = 1e-3
RANK, REFRESH_STEPS = 2, 50
"""Of low-rank noise: z = U V^T / sqrt(rank), V kept for so many steps."""
SPARSE_SHARE = 0.25
"""Of each tensor's entries, the smallest, get noise."""
CLIP_STEPS = 24
"""g is clipped at the median |g| of so many first steps."""
_MOST_KEPT = 16


@dataclass(frozen=True)
class Variant:
    """How a step is made of losses; the default is MeZO's."""

    directions: int = 1
    batches: int = 1
    """A loss is a mean over so many batches."""
    noise: Noise = "normal"
    one_sided: bool = False
    """Against the loss without noise, which all directions share."""
    normalised: bool = False
    """Differences are divided by the standard deviation of the step's losses: the rate is then a length."""
    momentum: float = 0.0
    clip: bool = False
    rate: float = 1.0
    """Where its best learning rate is looked for, as a multiple of MeZO's."""

    @property
    def passes(self) -> int:
        """Forward passes over a batch in a step."""
        return self.batches * (self.directions + 1 if self.one_sided else 2 * self.directions)


TYPICAL_G = 16.0
"""|g| of the models this is run with, which turns MeZO's rate into a length."""
VARIANTS: dict[str, Variant] = {
    "mezo": Variant(),
    "directions-4": Variant(directions=4, rate=2.0),
    "batch-4": Variant(batches=4),
    "fzoo-7": Variant(directions=7, noise="rademacher", one_sided=True, normalised=True, rate=2.0 * TYPICAL_G),
    "momentum": Variant(momentum=0.9),
    "low-rank": Variant(noise="low-rank"),
    "sparse": Variant(noise="sparse", rate=2.0),
    "clip": Variant(clip=True, rate=2.0),
}
MOST_PASSES = max(variant.passes for variant in VARIANTS.values())
RATES = (0.4, 1.0, 2.5)


class Landscape:
    """A model's loss as a function of its weights, which lie in one vector."""

    def __init__(self, model: nn.Module, batches: Callable[[int], dict[str, torch.Tensor]]) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.clean = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.theta = self.clean.clone()
        offset = 0
        for p in self.parameters:
            p.data = self.theta[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.batches = batches
        self._inputs: dict[str, torch.Tensor] = {}
        self._graph: Any = None
        self._loss = torch.zeros(())

    @torch.no_grad()
    def at(self, scale: float, z: torch.Tensor | None, *, first: int, count: int) -> torch.Tensor:
        """The mean loss of batches `first` to `first + count` at the weights plus `scale` times z."""
        if z is None:
            self.theta.copy_(self.clean)
        else:
            torch.add(self.clean, z, alpha=scale, out=self.theta)
        return torch.stack([self._forward(self.batches(first + i)) for i in range(count)]).mean()

    def _forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.theta.device.type != "cuda":
            found: torch.Tensor = self.model(**batch, use_cache=False).loss
            return found
        if self._graph is None:
            self._record(batch)
        for name, tensor in batch.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _record(self, batch: dict[str, torch.Tensor]) -> None:
        self._inputs = {name: tensor.to(self.theta.device) for name, tensor in batch.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.model(**self._inputs, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self.model(**self._inputs, use_cache=False).loss

    def move(self, update: torch.Tensor) -> None:
        self.clean.add_(update)

    def settle(self) -> None:
        """The model itself is at the clean weights."""
        self.theta.copy_(self.clean)


class Noises:
    """z of a step's directions."""

    def __init__(self, landscape: Landscape, kind: Noise, *, seed: int) -> None:
        self.kind = kind
        self.like = landscape.clean
        self.shapes = [p.shape for p in landscape.parameters]
        self.generator = torch.Generator(self.like.device).manual_seed(seed)
        self.mask = torch.cat([_smallest(p) for p in landscape.parameters]) if kind == "sparse" else None
        self.kept: list[torch.Tensor] = []

    def draw(self, step: int, direction: int) -> torch.Tensor:
        if self.kind == "low-rank":
            return self._low_rank(fresh=step % REFRESH_STEPS == 0 and direction == 0)
        z = self._normal(self.like.numel())
        if self.kind == "rademacher":
            return z.sign_()
        return z if self.mask is None else z.mul_(self.mask)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.like.device)

    def _low_rank(self, *, fresh: bool) -> torch.Tensor:
        matrices = [shape for shape in self.shapes if len(shape) == 2]
        if fresh:
            self.kept = [self._normal(shape[1], RANK) for shape in matrices]
        right = iter(self.kept)
        parts = [
            self._normal(shape[0], RANK) @ next(right).T / math.sqrt(RANK)
            if len(shape) == 2
            else self._normal(shape.numel())
            for shape in self.shapes
        ]
        return torch.cat([part.reshape(-1) for part in parts])


def _smallest(p: torch.Tensor) -> torch.Tensor:
    sizes = p.detach().abs().reshape(-1)
    return (sizes <= sizes.kthvalue(max(1, int(SPARSE_SHARE * sizes.numel()))).values).float()


class Estimator:
    """Makes a variant's steps."""

    def __init__(self, landscape: Landscape, variant: Variant, *, lr: float, seed: int) -> None:
        self.landscape, self.variant, self.lr = landscape, variant, lr
        self.noises = Noises(landscape, variant.noise, seed=seed)
        self.velocity = torch.zeros_like(landscape.clean) if variant.momentum else None
        self.sizes: list[float] = []
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        variant = self.variant
        zs = [self.noises.draw(self.num_steps, i) for i in range(variant.directions)]
        span = {"first": self.num_steps * variant.batches, "count": variant.batches}
        plus = torch.stack([self.landscape.at(ZO_EPS, z, **span) for z in zs])
        if variant.one_sided:
            differences = (plus - self.landscape.at(0.0, None, **span)) / ZO_EPS
            losses = plus
        else:
            minus = torch.stack([self.landscape.at(-ZO_EPS, z, **span) for z in zs])
            differences = (plus - minus) / (2 * ZO_EPS)
            losses = torch.cat([plus, minus])
        g = differences * ZO_EPS / losses.std() if variant.normalised else differences
        g = self._clipped(g) if variant.clip else g
        update = torch.zeros_like(self.landscape.clean)
        for coefficient, z in zip(g, zs, strict=True):
            update.add_(z * coefficient, alpha=-self.lr / variant.directions)
        if self.velocity is not None:
            update = self.velocity.mul_(variant.momentum).add_(update, alpha=1 - variant.momentum)
        self.landscape.move(update)
        self.num_steps += 1

    def _clipped(self, g: torch.Tensor) -> torch.Tensor:
        if len(self.sizes) < CLIP_STEPS:
            self.sizes.append(float(g.abs().mean()))
        limit = statistics.median(self.sizes)
        return g.clamp(-limit, limit)


# Runs


@dataclass(frozen=True)
class Plan:
    """What all runs of a file share."""

    model: str
    task: str
    data_dir: str | None
    batch_size: int
    length: int
    passes: int
    base_rate: float
    num_dev: int
    num_test: int


@dataclass(frozen=True)
class Trial:
    """One run."""

    variant: str
    lr: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.variant}_lr{self.lr:.3g}_seed{self.seed}"


class Bench:
    """Loads once what every run begins with."""

    def __init__(self, plan: Plan) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from ds_zo.tasks import DataSource, make_task, pad_token_id
        from ds_zo.tasks.embedded_model import folder_of

        self.plan = plan
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.backends.cuda.matmul.allow_tf32 = True
        path = folder_of(plan.model)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.pad = pad_token_id(self.tokenizer)
        self.task = make_task(plan.task, DataSource(folder=Path(plan.data_dir)) if plan.data_dir else DataSource())
        self.sequences = self.task.sequences("train", self.tokenizer, max_length=plan.length)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(self.device).eval()
        self.landscape = Landscape(self.model, lambda index: self._batches(index))
        self.start = self.landscape.clean.clone()
        self._order: Any = None
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._causal = causal_mask(plan.batch_size, plan.length) if self.device.type == "cuda" else None

    def _batches(self, index: int) -> dict[str, torch.Tensor]:
        """The passes of a step ask for the same ones again."""
        if index not in self._kept:
            if len(self._kept) > _MOST_KEPT:
                self._kept.clear()
            self._kept[index] = {name: tensor.to(self.device) for name, tensor in self._collated(index).items()}
        return self._kept[index]

    def _collated(self, index: int) -> dict[str, torch.Tensor]:
        size = self.plan.batch_size
        batch = self.task.collate(
            [self.sequences[i] for i in self._order.batch(index * size, size)],
            pad_token_id=self.pad,
            multiple=1 if self._causal is None else self.plan.length,
        )
        del batch["attention_mask"]
        return batch if self._causal is None else {**batch, "attention_mask": self._causal}

    def run(self, trial: Trial) -> Row:
        from ds_zo.tasks import SeededOrder

        plan, variant = self.plan, VARIANTS[trial.variant]
        self._order = SeededOrder(len(self.sequences), seed=trial.seed)
        self._kept.clear()
        self.landscape.clean.copy_(self.start)
        estimator = Estimator(self.landscape, variant, lr=trial.lr, seed=trial.seed)
        num_steps = plan.passes // variant.passes
        when = {num_steps, plan.passes // MOST_PASSES}  # scoring costs as much as many steps: where runs are compared
        curve = []
        for step in range(1, num_steps + 1):
            estimator.step()
            if step in when:
                self.landscape.settle()
                curve.append({"step": step, "passes": step * variant.passes, **self._score()})
                if not math.isfinite(curve[-1]["dev_loss"]):
                    break
        return {
            "key": trial.key,
            "status": "ok",
            **asdict(trial),
            **{f"of_{name}": value for name, value in asdict(variant).items() if name != "rate"},
            **asdict(plan),
            "model": Path(plan.model).name,
            "data_dir": None,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "curve": curve,
            "versions": versions(),
            "commit": commit(),
        }

    @torch.no_grad()
    def _score(self) -> dict[str, float]:
        """Mean loss of the right options on dev, and the score on test."""
        from ds_zo.tasks import Evaluator

        evaluator = Evaluator(self.model, device=self.device, pad_token_id=self.pad, batch_size=128)
        right = self.task.sequences("dev", self.tokenizer, max_length=self.plan.length)[: self.plan.num_dev]
        nats = [-total / count for total, count in evaluator.log_likelihoods(right)]
        test = self.task.evaluate(
            evaluator, "test", self.tokenizer, max_length=self.plan.length, num_examples=self.plan.num_test
        )
        return {"dev_loss": round(statistics.mean(nats), 5), "test": round(test.value, 5)}


def causal_mask(batch_size: int, length: int) -> torch.Tensor:
    """Complete, so that no model makes one of its own: how it does may wait for the device, which a graph can't."""
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    return mask.expand(batch_size, 1, length, length).contiguous()


def trials(
    names: Iterable[str],
    rows: Sequence[Row],
    *,
    base_rate: float,
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
) -> list[Trial]:
    """All rates with the first seed; then, where those are known, the rates that were best at some budget with the
    others."""
    first = [Trial(name, base_rate * VARIANTS[name].rate * rate, seeds[0]) for name in names for rate in rates]
    done = {row["key"] for row in rows}
    rest = []
    for name in names:
        mine = [trial for trial in first if trial.variant == name]
        if all(trial.key in done for trial in mine):
            wanted = {best_rate(rows, name, budget) for budget in budgets(rows)}
            rest += [Trial(name, lr, seed) for lr in sorted(lr for lr in wanted if lr) for seed in seeds[1:]]
    return [trial for trial in [*first, *rest] if trial.key not in done]


# What rows say


@dataclass(frozen=True)
class Budget:
    """What two runs have alike when they are compared: passes, or steps and a limit on passes in each."""

    passes: int | None = None
    steps: int | None = None

    def point(self, row: Row) -> Row | None:
        """The last point within it; None where there is none near its end."""
        x, limit = ("passes", self.passes) if self.passes is not None else ("step", self.steps)
        assert limit is not None
        within = [point for point in row["curve"] if point[x] <= limit]
        return within[-1] if within and within[-1][x] >= 0.85 * limit else None


def budgets(rows: Sequence[Row]) -> list[Budget]:
    """All passes; and as many steps as the variant with the most passes a step makes with them."""
    passes = rows[0]["passes"]
    return [Budget(passes=passes), Budget(steps=passes // MOST_PASSES)]


def best_rate(rows: Sequence[Row], name: str, budget: Budget) -> float | None:
    found = {}
    for row in rows:
        point = budget.point(row) if (row["variant"], row["seed"]) == (name, SEEDS[0]) else None
        if point is not None and math.isfinite(point["dev_loss"]):
            found[row["lr"]] = point["dev_loss"]
    return min(found, key=lambda lr: found[lr]) if found else None


def table(rows: Sequence[Row]) -> str:
    """Markdown: at each budget, a variant's rate, loss on dev and accuracy on test, means and spreads over seeds."""
    lines = []
    for budget in budgets(rows):
        what = f"{budget.passes} passes" if budget.passes is not None else f"{budget.steps} steps"
        cells = []
        for name in dict.fromkeys(row["variant"] for row in rows):
            lr = best_rate(rows, name, budget)
            mine = [row for row in rows if row["variant"] == name and row["lr"] == lr]
            points = [point for row in mine if (point := budget.point(row)) is not None]
            if points:
                loss, accuracy = (_spread([point[key] for point in points]) for key in ("dev_loss", "test"))
                cells.append([name, str(VARIANTS[name].passes), f"{lr:.3g}", loss, accuracy, str(len(points))])
        heads = ["variant", "passes a step", "rate", "loss on dev", "test accuracy", "seeds"]
        lines += [f"After {what}:", "", *table_lines(heads, cells), ""]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="runs what has no row yet")
    run.add_argument("--out", type=Path, required=True, metavar="FILE")
    run.add_argument("--model", default="embedded", metavar="FOLDER")
    run.add_argument("--task", default="code_or_text")
    run.add_argument("--data-dir", metavar="DIR")
    run.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        metavar="A,B",
        help="several processes may share a file, each with its own",
    )
    run.add_argument("--passes", type=int, default=480, help="forward passes a run (default: %(default)s)")
    run.add_argument("--batch-size", type=int, default=8)
    run.add_argument("--length", type=int, default=64, help="tokens a sequence (default: %(default)s)")
    run.add_argument("--rate", type=float, default=5e-4, help="MeZO's, around which is tried (default: %(default)s)")
    run.add_argument("--rates", default=",".join(map(str, RATES)), metavar="A,B", help="multiples of it to try")
    run.add_argument("--num-dev", type=int, default=100)
    run.add_argument("--num-test", type=int, default=200)
    shown = commands.add_parser("table", help="Markdown of rows")
    shown.add_argument("rows", type=Path, nargs="+")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    if args.command == "table":
        try:
            print(table(rows_of(args.rows)))
        except ValueError as error:
            sys.exit(f"error: {error}")
        return
    names = args.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        sys.exit(f"error: the variants are {', '.join(VARIANTS)}; got {', '.join(unknown)} (--variants)")
    plan = Plan(
        model=args.model,
        task=args.task,
        data_dir=args.data_dir,
        batch_size=args.batch_size,
        length=args.length,
        passes=args.passes,
        base_rate=args.rate,
        num_dev=args.num_dev,
        num_test=args.num_test,
    )
    bench = Bench(plan)
    rates = [float(rate) for rate in args.rates.split(",")]
    while left := trials(names, read_rows(args.out), base_rate=args.rate, rates=rates):
        for trial in tqdm(left, unit="run"):
            append_row(args.out, bench.run(trial))


if __name__ == "__main__":
    main()
