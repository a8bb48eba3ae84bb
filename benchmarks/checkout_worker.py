"""Trains cases of `benchmarks.side_by_side` with the package of one checkout.

`side_by_side` starts `main` in an interpreter that has imported `ds_zo` of that checkout. Each line that this process
reads is answered by one line. The fields of a `TrainedCase` make a child process that loads the model. A line such as
`{"warmup": 1, "steps": 10}` makes the child take these steps, of which `steps` are timed. An empty line ends it. The
parent imports libraries once and has no CUDA context.

Names of ds_zo that this file uses have to exist in both checkouts.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import torch

from ds_zo.bench.measure import measure_steps, start_device, synchronize
from ds_zo.bench.runner import import_warm, is_out_of_memory, single_process
from ds_zo.bench.shapes import materialise, random_model
from ds_zo.planner.shapes import config_of
from ds_zo.records.environment import environment


@dataclass(frozen=True)
class TrainedCase:
    """A model of random weights, its JSON, and its input."""

    name: str
    shape: str
    """A name of `ds_zo.planner.shapes`."""
    config: dict[str, Any]
    """The JSON, without the keys that follow from `batch` and the dtype."""
    batch: int
    length: int
    """Tokens of a sequence."""
    warmup: int
    """Steps before the first timed step."""
    steps: int
    """Timed steps of one round."""
    load_s: float = 0.0
    """Seconds until the model is loaded, expected of an H200 that loads both checkouts' models at once."""
    step_s: float = 0.0
    """Seconds of a step, expected of an H200."""
    layers: int | None = None
    """Layers of the model; None: as many as the shape has."""
    checkpointing: bool = False
    """Whether transformers checkpoints each block."""
    cap_gb: float | None = None
    """Device memory in GB (10**9 bytes) that the case may allocate; None: the whole card."""
    lora_rank: int | None = None
    """Rank of adapters over the model, which is frozen; None: the model itself is trained. All blocks of a frozen model
    have the weights of the first one, which are drawn and quantised to NF4 once."""
    device: str = "cuda"


def main() -> None:
    orders = os.fdopen(0, "rb", buffering=0)  # a buffer would read lines ahead that another process has to read
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    import_warm()
    _answer(answers, environment())
    while line := orders.readline():
        pid = os.fork()
        if pid == 0:
            gc.freeze()
            _child(TrainedCase(**json.loads(line)), orders, answers)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            _answer(answers, {"status": "crash", "error": f"ended with status {status}"})


def _answer(answers: IO[str], row: dict[str, Any]) -> None:
    answers.write(json.dumps(row) + "\n")
    answers.flush()


def _child(case: TrainedCase, orders: IO[bytes], answers: IO[str]) -> NoReturn:
    """Ends without interpreter shutdown, in which some libraries hang. A case that fails ends with its answer."""
    try:
        os.environ.update(single_process())
        step, load_s = _loaded(case)
        _answer(answers, {"status": "ok", "load_s": load_s})
        while line := orders.readline().strip():
            measured = measure_steps(step, device=case.device, **json.loads(line))
            _answer(answers, {"status": "ok", "load_s": load_s, **measured})
    except BaseException as error:
        traceback.print_exc()
        status = "oom" if is_out_of_memory(error) else "crash"
        _answer(answers, {"status": status, "error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _loaded(case: TrainedCase) -> tuple[Callable[[], torch.Tensor], float]:
    """A training step of the case, and the seconds until the engine was ready."""
    import deepspeed

    where = start_device(case.device, cap_gb=case.cap_gb)
    torch.manual_seed(0)  # of adapters
    begin = time.perf_counter()
    kept: dict[str, Any] = {}
    config = config_of(case.shape, num_layers=case.layers, max_length=max(case.length, 2048))
    model: Any = random_model(config, dtype=torch.bfloat16, device=where)
    if case.lora_rank is not None:
        from benchmarks.lora_models import repeat_first_block, with_lora  # it uses names that older checkouts lack

        kept = repeat_first_block(model)
        model = with_lora(model, rank=case.lora_rank, dtype=torch.bfloat16, device=torch.device("cpu"))
    if "offload_param" not in case.config.get("zero_optimization", {}):
        model = materialise(model, where)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ds_config = {
        "train_micro_batch_size_per_gpu": case.batch,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "timers": {"throughput": {"enabled": False}},  # this timer waits for the device twice a step
        **case.config,
    }
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0]
    engine.train()
    kept.clear()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    tokens = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.length), generator=tokens).to(where)
    synchronize(where)

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step, time.perf_counter() - begin
