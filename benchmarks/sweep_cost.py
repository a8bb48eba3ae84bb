"""How long a sweep's run will take: from rows of runs like it, else from the model's size and the texts' lengths.

A small model keeps the host busy longer than the device, so several runs at once gain until their work together fills
the GPU: a step then takes the longer of its own host time and everybody's device time. Kernels too short to fill the
device are counted as if those of several runs lay side by side, which needs CUDA's multi-process service.

The figures are of SmolLM2-135M on an H200 with four runs at once: together 26 steps of 16 x 256 tokens a second with
backward passes in TF32, 88 steps of 16 x 45 of ZO and MeZO in float32; 35 ms a step of MeZO and 72 of AdamW with nobody
waiting for the device; 2 to 5 s a run beside steps and scores; LSP's first fit takes half of what is counted. Good to a
factor of one and a half; rows of like runs replace the estimate as they come in. Loading is timed of a model of 1.5
billion parameters.
"""

from __future__ import annotations

import json
import math
import statistics
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.grid import GridCase
from ds_zo.config import backend_of
from ds_zo.planner.rates import Rates
from ds_zo.records.rows import Row, table_lines
from ds_zo.tasks.data import read_jsonl
from ds_zo.tasks.embedded_model import folder_of
from ds_zo.tasks.errors import TaskError

RATES = Rates()
FLOPS = {"fp32": 35e12, "tf32": 75e12, "bf16": 120e12, "fp16": 120e12}
"""Of forward passes over a few thousand tokens on an H200: products, and what is done element by element between."""
OPS_PER_LAYER = 45
OP_US = 12.5
"""Host time of one in a forward pass; of a backward pass the planner's rates tell."""
UPDATE_S = 0.02
"""Host time a step of clipping, an optimizer over a few hundred tensors and DeepSpeed's own."""
BLOCK_GRAPH_US = 500.0
"""Host time of a block's pass where ZO replays a graph of it."""
BACKWARD_OPS = 1.6
"""Operations of a backward pass for each of the forward pass."""
CHARS_PER_TOKEN = 4.3
GROUPED = 1.2
"""Tokens of a batch of like lengths, for each that is not padding."""
START_S, LSP_FIT_S, LSP_FIT_STEPS = 5.0, 8.0, 100
"""Until the first step: the device's context, weights, tokens; what LSP's first fit adds, at its usual steps."""
LOAD_S_PER_BILLION = 3.0
"""Further seconds until the first step for each billion of weights."""
LSP_UPDATE_S, OFFLOAD_UPDATE_S = 0.02, 0.12
"""Of the CPU's Adam a step: LSP's beyond what is hidden, and ZeRO-Offload's with its copies."""
COMPLETIONS_S = {"humaneval": 40.0, "humaneval-chat": 40.0}
"""Of tasks whose test split is completed token by token and run: seconds of one score on test."""
SAFETY = 1.15
"""On a time that was measured: neighbours change."""
_EVAL_BATCH = 128


@dataclass(frozen=True)
class Cost:
    """Seconds of a run that has the machine to itself."""

    device_s: float
    host_s: float
    start_s: float = START_S

    def wall_s(self, *, jobs: int) -> float:
        """With `jobs` runs like it at once."""
        return self.start_s + max(self.host_s, jobs * self.device_s)


@dataclass(frozen=True)
class Size:
    """Of a model."""

    numel: int
    num_layers: int


def model_size(name: str) -> Size | None:
    """From a folder's files; None where there is none (a Hub name)."""
    folder = Path(folder_of(name))
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layers = next((config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config), 1)
    return Size(sum(map(_numel, files)), int(layers))


def _numel(path: Path) -> int:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


@cache
def num_tokens(path: Path) -> tuple[int, ...]:
    """Of each row of a file, by the length of its texts; none where it can't be read."""
    try:
        rows = read_jsonl(path)
    except TaskError:
        return ()
    texts = [sum(len(value) for value in row.values() if isinstance(value, str)) for row in rows]
    return tuple(max(4, round(length / CHARS_PER_TOKEN)) for length in texts)


def cost(case: GridCase, size: Size, folder: Path, *, arguments: Sequence[str] = ()) -> Cost | None:
    """From first principles; None without data."""
    options = [*case.arguments, *arguments]
    most = int(options[options.index("--max-length") + 1]) if "--max-length" in options else 512
    lengths = [min(length, most) for length in num_tokens(folder / "train.jsonl")]
    if not lengths:
        return None
    if "--group-by-length" in options:
        length = min(max(lengths), GROUPED * sum(lengths) / len(lengths))
    else:  # a batch is as long as its longest
        length = sorted(lengths)[int(len(lengths) * (1 - 1 / case.batch_size)) - 1]
    step = _passes(case, size, tokens=round(case.batch_size * length), flops=FLOPS[_dtype(case, options)])
    scored = {split: [min(n, most) for n in num_tokens(folder / f"{split}.jsonl")] for split in ("dev", "test")}
    num_evals = -(-case.steps // max(1, case.eval_every)) if case.steps else 1
    evals = [
        _forward(size, tokens=sum(found), batches=len(found) / _EVAL_BATCH, flops=FLOPS[_dtype(case, options)])
        for found in (scored["dev"], scored["test"])  # a state that is the best so far is also tested: every other one
    ]
    eval_device_s, eval_host_s = (evals[0][i] + evals[1][i] / 2 for i in range(2))
    if case.task in COMPLETIONS_S:
        eval_host_s += COMPLETIONS_S[case.task]
    lsp = backend_of(case.config) == "lsp"
    offloads = not lsp and "offload_optimizer" in (case.config.get("zero_optimization") or {})
    update_s = LSP_UPDATE_S * lsp + OFFLOAD_UPDATE_S * offloads
    return Cost(
        device_s=case.steps * step[0] + num_evals * eval_device_s,
        host_s=case.steps * (step[1] + update_s) + num_evals * eval_host_s,
        start_s=START_S
        + LOAD_S_PER_BILLION * size.numel / 1e9
        + LSP_FIT_S * lsp * _params(case).get("fit_steps", LSP_FIT_STEPS) / LSP_FIT_STEPS,
    )


def _params(case: GridCase) -> dict[str, Any]:
    found: dict[str, Any] = case.config["optimizer"].get("params") or {}
    return found


def _dtype(case: GridCase, options: Sequence[str]) -> str:
    half = next((name for name in ("bf16", "fp16") if (case.config.get(name) or {}).get("enabled")), None)
    return half or ("tf32" if "--tf32" in options else "fp32")


def _forward(size: Size, *, tokens: int, batches: float, flops: float) -> tuple[float, float]:
    """(device, host) seconds."""
    return 2 * size.numel * tokens / flops, batches * OPS_PER_LAYER * size.num_layers * OP_US * 1e-6


def _passes(case: GridCase, size: Size, *, tokens: int, flops: float) -> tuple[float, float]:
    kind = str(case.config["optimizer"]["type"]).lower()
    num_forward = 2 if kind in ("zo", "mezo") else 1
    two_pass = kind in ("lomo", "adalomo") and case.config.get("gradient_clipping")
    num_backward = 0 if num_forward == 2 else 2 if two_pass else 1
    device_s, host_s = _forward(size, tokens=tokens, batches=1, flops=flops)
    if kind == "zo":
        host_s = size.num_layers * BLOCK_GRAPH_US * 1e-6
    sweeps = 32 * size.numel / (RATES.device_memory_gbps * 1e9)  # of the weights and what an update reads and writes
    backward_host_s = host_s * BACKWARD_OPS * RATES.backward_launch_us / OP_US
    update_s = UPDATE_S if num_backward else 0.0
    host_s = num_forward * host_s + num_backward * backward_host_s + update_s
    return (num_forward + 2 * num_backward) * device_s + sweeps, host_s


def plan_table(
    cases: Sequence[GridCase],
    *,
    model: str,
    data_root: Path,
    jobs: int,
    arguments: Sequence[str] = (),
    shared_gb: float = math.inf,
) -> str:
    """Markdown: seconds by method, and what `jobs` runs at once need for all; a ValueError where nothing is known.
    Fewer run at once if those that state their memory exceed `shared_gb` together."""
    size = model_size(model)
    if size is None:
        raise ValueError(f"a plan needs the model's size: looked for a folder with config.json and weights at {model}")
    costs: dict[str, list[Cost]] = {}
    gb_seconds = 0.0
    for case in cases:
        found = cost(case, size, data_root / case.task, arguments=arguments)
        if found is None:
            raise ValueError(f"a plan needs the texts' lengths: looked for {data_root / case.task / 'train.jsonl'}")
        costs.setdefault(case.method, []).append(found)
        gb_seconds += (case.device_gb or 0.0) * (found.start_s + found.host_s)
    whole = [found for mine in costs.values() for found in mine]
    cells = []
    for name, mine in [*costs.items(), ("all", whole)]:
        sums = [sum(getattr(found, part) for found in mine) for part in ("start_s", "host_s", "device_s")]
        cells.append([name, str(len(mine)), *(f"{value:.0f}" for value in sums)])
    alone_s = sum(found.start_s + found.host_s for found in whole)
    at_once = min(jobs, shared_gb * alone_s / gb_seconds) if gb_seconds else jobs
    host_s = alone_s / at_once
    device_s = sum(found.device_s for found in whole)
    bound = "device" if device_s > host_s else "host"
    longest_s = max((found.start_s + found.host_s for found in whole), default=0.0)
    about = f"about {max(host_s, device_s):.0f} s, bound by the {bound}; the longest {longest_s:.0f} s"
    total = f"{at_once:.0f} at once: {about}"
    return "\n".join([*table_lines(["method", "runs", "start, s", "host, s", "device, s"], cells), "", total])


def expectation(
    *, model: str, data_root: Path | None, jobs: int, arguments: Sequence[str] = ()
) -> Callable[[GridCase, Sequence[Row]], float | None]:
    """Tells the seconds a case will take beside `jobs` - 1 others; None where nothing is known."""
    size = model_size(model)

    def seconds(case: GridCase, rows: Sequence[Row]) -> float | None:
        alike = [row["wall_s"] for row in rows if row["status"] == "ok" and _alike(row, case, jobs=jobs)]
        if alike:
            return SAFETY * statistics.median(alike)
        if size is None or data_root is None:
            return None
        found = cost(case, size, data_root / case.task, arguments=arguments)
        return None if found is None else found.wall_s(jobs=jobs)

    return seconds


def _alike(row: Row, case: GridCase, *, jobs: int) -> bool:
    found = [row.get(name) for name in ("method", "task", "steps", "jobs")]
    return found == [case.method, case.task, case.steps, jobs] and not row.get("resumed")
