"""Times training steps of a peer's own code, and prints them as one JSON line.

`benchmarks.peers` starts this file in the peer's interpreter. It imports torch, transformers and the peer, and nothing
of ds_zo: a peer may need versions of transformers that ds_zo does not support. Its input is one JSON object on standard
input, `Job` has its keys. The last line that it prints is `ROW {...}`, or `FAILED {...}` with the error.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

Row = dict[str, Any]
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Job:
    peer: str
    checkout: str
    architecture: str
    """Name of a transformers class for causal language models, such as `OPTForCausalLM`."""
    model: dict[str, Any]
    """Fields of the model's configuration."""
    batch: int
    length: int
    steps: int
    warmup: int
    dtype: str
    device: str
    max_s: float | None
    cap_gb: float | None
    checkpointing: bool
    options: dict[str, Any]

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.dtype]


def main() -> int:
    job = Job(**json.load(sys.stdin))
    try:
        print("ROW " + json.dumps(run(job)), flush=True)
    except Exception as error:
        import traceback

        traceback.print_exc()
        kind = "import" if isinstance(error, ImportError) else "run"
        print("FAILED " + json.dumps({"kind": kind, "error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def run(job: Job) -> Row:
    sys.path.insert(0, job.checkout)
    if job.device == "cuda" and job.cap_gb is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job.cap_gb * 1e9 / total, 0)
    torch.manual_seed(0)
    began = time.perf_counter()
    step, num_parameters = PEERS[job.peer](job)
    load_s = time.perf_counter() - began
    return {"load_s": load_s, "parameters": num_parameters, **measure(step, job)}


def measure(step: Step, job: Job) -> Row:
    """Times the steps by events on the current stream, as `ds_zo.bench.measure` does."""
    on_gpu = job.device == "cuda"
    warmup_seconds, losses = [], []
    for _ in range(max(1, job.warmup)):
        start = time.perf_counter()
        losses.append(step())
        _wait(job)
        warmup_seconds.append(time.perf_counter() - start)
    num_steps = job.steps
    if job.max_s is not None:
        num_steps = min(num_steps, max(2, int(job.max_s / statistics.median_low(warmup_seconds))))
    reserved_before = torch.cuda.max_memory_reserved() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    marks = [_mark(job)]
    start = time.perf_counter()
    for _ in range(num_steps):
        losses.append(step())
        marks.append(_mark(job))
    _wait(job)
    wall_s = time.perf_counter() - start
    seconds = [_between(before, after) for before, after in pairwise(marks)]
    return {
        "step_s": statistics.median(seconds),
        "step_s_min": min(seconds),
        "step_s_max": max(seconds),
        "step_wall_s": wall_s / num_steps,
        "seconds": [round(s, 6) for s in seconds],
        "warmup_seconds": [round(s, 6) for s in warmup_seconds],
        "losses": [round(float(loss), 5) for loss in losses],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0,
        "reserved_before_gb": reserved_before / 1e9,
        "host_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def _wait(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


def _mark(job: Job) -> Any:
    if job.device != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(before: Any, after: Any) -> float:
    return float(after - before) if isinstance(before, float) else before.elapsed_time(after) / 1e3


def _made(job: Job, architecture: Any) -> Any:
    """A model of the class `architecture` in host memory. Its random weights are drawn on the device, which is
    faster."""
    import transformers

    config = architecture.config_class(**job.model)
    skipping: Any = getattr(transformers.modeling_utils, "no_init_weights", nullcontext)
    default = torch.get_default_dtype()
    torch.set_default_dtype(job.torch_dtype)
    try:
        with skipping():
            model = architecture(config)
    finally:
        torch.set_default_dtype(default)
    for name, p in model.named_parameters():
        value = torch.empty(p.shape, dtype=p.dtype, device=job.device)
        if p.dim() > 1:
            value.normal_(0.0, 0.02)
        else:
            value.fill_(1.0 if name.endswith("weight") else 0.0)  # a norm's scale, or a bias
        p.data.copy_(value)
    return model


def _ids(job: Job) -> torch.Tensor:
    vocabulary = job.model["vocab_size"]
    return torch.randint(0, vocabulary, (job.batch, job.length), device=job.device)


def zo2(job: Job) -> tuple[Step, int]:
    """ZO2's training loop: a call of the model is a step."""
    package = importlib.import_module("zo2")
    config = package.ZOConfig(
        method="mezo-sgd", zo2=True, offloading_device="cpu", working_device=job.device, **job.options
    )
    model = _made(job, package.get_opt_for_causalLM(config))
    model.zo_init(config)
    num_parameters = sum(p.numel() for p in model.parameters())
    ids = _ids(job)

    def step() -> torch.Tensor:
        model.zo_train()
        loss: torch.Tensor = model(input_ids=ids, labels=ids)
        return loss.detach()

    return step, num_parameters


def lsp_offload(job: Job) -> tuple[Step, int]:
    """LSP-Offload's own throughput script: linear layers update themselves in the backward pass, on the CPU. Its
    projectors are random before the first fit, which costs the same a step."""
    state = importlib.import_module("state").State
    layers = importlib.import_module("para_offload_modules")
    compressors = importlib.import_module("gradient_compressor")
    transformers = importlib.import_module("transformers")
    options = dict(job.options)
    model = _made(job, getattr(transformers, job.architecture)).to(job.device)
    num_parameters = sum(p.numel() for p in model.parameters())
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    modules = layers.replace_linear_layer_with_parallel_linear(
        model,
        modules=None,
        use_lora=False,
        lora_rank=None,
        offload="cpu",
        use_grad_ckpt=job.checkpointing,
        global_state={"state": state.RUNNING},
        lr=options.pop("lr"),
        optim_dtype=torch.float32,
    )
    model.train()
    compressor = compressors.LearnedCountSketchCompressor(
        sketch_size=options.pop("dim"), n_unempty=options.pop("nonzeros")
    )
    compressor.fit(modules)
    for module in modules:
        module.gradient_compressor = compressor
    layers.Scheduler(modules, **options)
    ids = _ids(job)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    return step, num_parameters


PEERS: dict[str, Callable[[Job], tuple[Step, int]]] = {"zo2": zo2, "lsp-offload": lsp_offload}

if __name__ == "__main__":
    sys.exit(main())
