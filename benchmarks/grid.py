"""A grid of training runs: methods, each a JSON with the values to try, on tasks with seeds.

A user's own grid is a JSON file with the same names:

    {"tasks": ["sst2"], "seeds": [0, 1],
     "methods": {"my-zo": {"config": {"optimizer": {"type": "ZO", "params": {"zo_eps": 1e-3}}},
                           "lrs": [1e-6, 1e-7], "steps": 2000, "eval_every": 500}}}
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_zo.bench.runner import NOT_RUN
from ds_zo.records.rows import Row, read_objects

Config = dict[str, Any]


class GridError(ValueError):
    """A mistake in a grid. The message names what was expected, what was found, and the remedy."""


@dataclass(frozen=True)
class Method:
    """One way to train. `config` is a DeepSpeed JSON without the keys that the grid varies: rate, seed, batch size,
    schedule."""

    config: Config
    lrs: tuple[float, ...] = ()
    """Learning rates to try; none: the method has no rate."""
    steps: int = 1000
    batch_size: int = 16
    eval_every: int = 250
    warmups: tuple[float, ...] = ()
    """Warm-up as a share of the steps, then linear decay to zero; none: a constant rate."""
    lora_ranks: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    """Further arguments of launch/train.py."""
    lr_of: str | None = None
    """The method whose chosen rate this one uses, so that both are compared at one rate; None: its own."""
    seeds: tuple[int, ...] | None = None
    """Seeds in place of the grid's; None: the grid's. A method without randomness needs one."""
    device_gb: float | None = None
    """Device memory of one run, by which a sweep decides how many runs fit the device at once; None: an equal share."""


@dataclass(frozen=True)
class GridCase:
    """One training run."""

    method: str
    task: str
    lr: float | None
    seed: int
    steps: int
    eval_every: int
    batch_size: int
    warmup: float | None = None
    lora_rank: int | None = None
    arguments: tuple[str, ...] = ()
    device_gb: float | None = None
    config: Config = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Names the run in rows and folders."""
        parts = [self.method, self.task]
        parts += [f"lr{self.lr:g}"] if self.lr is not None else []
        parts += [f"warmup{self.warmup:g}"] if self.warmup is not None else []
        parts += [f"rank{self.lora_rank}"] if self.lora_rank is not None else []
        return "_".join([*parts, f"steps{self.steps}", f"seed{self.seed}"])


@dataclass(frozen=True)
class Grid:
    """Every method on every task with every seed."""

    methods: dict[str, Method]
    tasks: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    arguments: tuple[str, ...] = ()
    """Arguments of launch/train.py in every case."""

    def cases(self, *, lrs: dict[str, float] | None = None, steps: int | None = None) -> Iterator[GridCase]:
        """Yields the cases. `lrs` fixes a method's rate instead of trying all; `steps` overrides the steps of all
        methods. Cases that are compared are adjacent, so that an unfinished sweep gives a smaller table without
        gaps."""
        for seed, task in itertools.product(self.seeds, self.tasks):
            for name, method in self.methods.items():
                if seed not in (self.seeds if method.seeds is None else method.seeds):
                    continue
                fixed = (lrs or {}).get(method.lr_of or name)
                rates: Sequence[float | None] = method.lrs or (None,)
                for lr in rates if fixed is None or not method.lrs else (fixed,):
                    for warmup in method.warmups or (None,):
                        for rank in method.lora_ranks or (None,):
                            case = _case(name, method, task, lr, seed, warmup, rank, steps)
                            yield dataclasses.replace(case, arguments=(*self.arguments, *case.arguments))


def _case(
    name: str,
    method: Method,
    task: str,
    lr: float | None,
    seed: int,
    warmup: float | None,
    rank: int | None,
    steps: int | None,
) -> GridCase:
    num_steps = method.steps if steps is None or not method.steps else steps
    config = copy.deepcopy(method.config)
    config["train_micro_batch_size_per_gpu"] = method.batch_size
    params = config["optimizer"].setdefault("params", {})
    if lr is not None:
        params["lr"] = lr
    if config["optimizer"]["type"].lower() in ("zo", "mezo", "lsp"):
        params["seed"] = seed
    if warmup is not None:
        num_warmup = max(2, round(warmup * num_steps))  # DeepSpeed takes the logarithm of it
        schedule = {"total_num_steps": max(num_steps, num_warmup + 1), "warmup_num_steps": num_warmup}
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {**schedule, "warmup_max_lr": lr, "warmup_min_lr": 0.0, "warmup_type": "linear"},
        }
    return GridCase(
        method=name,
        task=task,
        lr=lr,
        seed=seed,
        steps=num_steps,
        eval_every=min(method.eval_every, num_steps),
        batch_size=method.batch_size,
        warmup=warmup,
        lora_rank=rank,
        arguments=method.arguments,
        device_gb=method.device_gb,
        config=config,
    )


def grid_of_file(path: Path) -> Grid:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        methods = {key: _from_json(Method, value) for key, value in found.pop("methods").items()}
        grid: Grid = _from_json(Grid, {**found, "methods": methods})
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise GridError(f"{path} is no grid: {type(error).__name__} {error} (benchmarks/grid.py shows one)") from None
    for name, method in methods.items():
        optimizer = method.config.get("optimizer") if isinstance(method.config, dict) else None
        if not isinstance(optimizer, dict) or not isinstance(optimizer.get("type"), str):
            raise GridError(
                f"the config of a method must have an optimizer with a type, got {method.config} of {name}: write one "
                f"as in a DeepSpeed JSON ({path})"
            )
    return grid


def _from_json(kind: type[Any], values: dict[str, Any]) -> Any:
    known = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise GridError(f"a {kind.__name__.lower()} has {', '.join(known)}; got {', '.join(unknown)}")
    for name, value in values.items():
        is_list, of_numbers = known[name].startswith("tuple"), known[name].startswith(("tuple[int", "tuple[float"))
        right = isinstance(value, list) == is_list or (value is None and "None" in known[name])
        if not right or (of_numbers and not all(isinstance(item, (int, float)) for item in value or ())):
            form = "a list of numbers" if of_numbers else "a list" if is_list else "one value"
            raise GridError(f"{name} of a {kind.__name__.lower()} must be {form}, got {value!r}: correct it")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


# Rows


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of a file that may not exist yet, without cases that a call had no time for."""
    rows = read_objects(path) if path.is_file() else []
    return [row for row in rows if "key" in row and row.get("status") != NOT_RUN]


def rows_of(paths: Iterable[Path]) -> list[Row]:
    """Reads the rows of files that must exist: those that a table is made of."""
    found = []
    for path in paths:
        if not path.is_file():
            raise ValueError(f"looked for rows at {path}: not found")
        found += read_rows(path)
    return found


def remaining(cases: Iterable[GridCase], rows: Sequence[Row]) -> list[GridCase]:
    """Returns the cases that have no row, each once."""
    settled = {row["key"] for row in rows}
    found: dict[str, GridCase] = {}
    for case in cases:
        if case.key not in settled:
            found.setdefault(case.key, case)
    return list(found.values())
