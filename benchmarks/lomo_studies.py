"""LOMO's memory by part beside other first-order methods, and what sequential accumulation changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from benchmarks.methods import Method, method_of
from benchmarks.training_case import TrainingCase, random_batch, with_compiled_blocks
from benchmarks.training_speed import ROOM
from ds_zo.bench.measure import memory_peaks, start_device
from ds_zo.bench.shapes import materialise
from ds_zo.bench.trainer import Batch, set_checkpointing
from ds_zo.records.rows import Row
from ds_zo.streaming.blocks import find_blocks


def memory(**settings: Any) -> Row:
    """Device memory of one case by part, in two steps, as the LOMO paper's table lists it.

    A case that does not fit has the sum of its parts: activations are measured with the weights alone, the other parts
    are counted. A compiled block returns the gradients of its parameters together.
    """
    case = TrainingCase(**settings)
    method = method_of(case)
    where = start_device(case.device)
    _warm_libraries(where)
    model = materialise(case.lazy_model(where), where)
    model.train()
    set_checkpointing(model, case.checkpointing)
    numel = sum(p.numel() for p in model.parameters())
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    ids = random_batch(model, case.batch, case.length, where)
    before = _allocated(where)
    loss = model(**ids, use_cache=False).loss
    activations = _allocated(where) - before
    del loss
    parts = {
        "parameters_gb": sum(sizes) / 1e9,
        "gradients_gb": (sum(sizes) if method.keeps_gradients else max(sizes)) / 1e9,
        "states_gb": method.state_bytes * numel / 1e9,
        "activations_gb": activations / 1e9,
    }
    computed_gb = sum(parts.values())
    row = {
        "method": case.method,
        "shape": case.shape,
        "tokens_a_step": case.batch * case.length,
        "parameters": numel,
        "checkpointing": case.checkpointing,
        "attention": case.attention,
        "compiled": case.compiled,
        **parts,
        "computed_total_gb": computed_gb,
    }
    room = torch.cuda.get_device_properties(where).total_memory if where.type == "cuda" else float("inf")
    if computed_gb * 1e9 > ROOM * room:
        return {**row, "fits": False, "total_gb": computed_gb}
    try:
        measured = _measured_parts(case, method, model, ids, where)
    except torch.OutOfMemoryError:
        return {**row, "fits": False, "total_gb": computed_gb}
    return {**row, "fits": True, **measured, "total_gb": measured["peak_gb"] or computed_gb}


def _measured_parts(case: TrainingCase, method: Method, model: nn.Module, ids: Batch, where: torch.device) -> Row:
    before = _allocated(where)
    trainer = method.make(case, model, where)
    if case.compiled:
        trainer = with_compiled_blocks(trainer, model)
    of_a_block = [sum(p.numel() * p.element_size() for p in b.parameters()) for b in find_blocks(model, None).values()]
    with _live_gradients(model) as live:
        trainer.step(ids)
    states = _allocated(where) - before
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
    loss = trainer.step(ids)
    return {
        "settings": trainer.settings,
        "gradients_gb": max(live["most"], max(of_a_block) if case.compiled else 0) / 1e9,
        "states_gb": states / 1e9,
        "loss": float(loss),
        **memory_peaks(where),
    }


@contextmanager
def _live_gradients(model: nn.Module) -> Iterator[dict[str, int]]:
    """Bytes of gradients alive at once, at their most: the one that arrives and those that parameters hold."""
    live = {"most": 0}
    parameters = [p for p in model.parameters() if p.requires_grad]

    def arrives(grad: torch.Tensor) -> None:
        held = sum(p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None)
        live["most"] = max(live["most"], held + grad.numel() * grad.element_size())

    handles = [p.register_hook(arrives) for p in parameters]
    try:
        yield live
    finally:
        for handle in handles:
            handle.remove()


def accumulation(
    *, micro_batches: int = 4, batch: int = 8, length: int = 64, steps: int = 40, lr: float = 0.05, device: str = "cpu"
) -> Row:
    """`accumulation: sequential` beside the true batch: the embedded model reads held-out Python, the same rows in the
    same order, once a whole batch a step and once a micro-batch an update. A third run has the true batch's exact
    gradient from torch's SGD with accumulation, which LOMO cannot have."""
    where = start_device(device)
    rows = _text_rows(batch * steps, length).to(where)
    true = _curve(rows, where, micro=batch, micro_batches=1, lr=lr)
    sequential = _curve(rows, where, micro=batch // micro_batches, micro_batches=micro_batches, lr=lr)
    accumulated = _sgd_curve(rows, where, micro=batch // micro_batches, micro_batches=micro_batches, lr=lr)
    tail = max(1, steps // 6)
    last = {name: sum(curve[-tail:]) / tail for name, curve in (("true", true), ("sequential", sequential))}
    return {
        "micro_batches": micro_batches,
        "batch": batch,
        "length": length,
        "num_steps": steps,
        "lr": lr,
        "losses_true": true,
        "losses_sequential": sequential,
        "losses_sgd_accumulated": accumulated,
        "first_loss": true[0],
        "last_loss_true": last["true"],
        "last_loss_sequential": last["sequential"],
        "last_loss_difference": last["sequential"] - last["true"],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(true, sequential, strict=True)),
        "largest_sgd_difference": max(abs(a - b) for a, b in zip(true, accumulated, strict=True)),
    }


def _curve(rows: torch.Tensor, where: torch.device, *, micro: int, micro_batches: int, lr: float) -> list[float]:
    import deepspeed

    import ds_zo  # noqa: F401

    config: Row = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "LOMO", "params": {"lr": lr, "accumulation": "sequential"}},
        "zero_optimization": {"stage": 0},
    }
    model = _embedded().to(where)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.train()
    losses = []
    for window in rows.split(micro * micro_batches):
        total = 0.0
        for ids in window.split(micro):
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / micro_batches
        losses.append(total)
    return losses


def _sgd_curve(rows: torch.Tensor, where: torch.device, *, micro: int, micro_batches: int, lr: float) -> list[float]:
    model = _embedded().to(where).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for window in rows.split(micro * micro_batches):
        total = 0.0
        for ids in window.split(micro):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def _embedded() -> Any:
    from transformers import AutoModelForCausalLM

    from ds_zo.tasks.embedded_model import FOLDER

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def _text_rows(num_rows: int, length: int) -> torch.Tensor:
    from transformers import AutoTokenizer

    from ds_zo.tasks.embedded_model import FOLDER
    from ds_zo.tasks.stdlib_text import modules

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids: list[int] = []
    for _, source in modules(held_out=True):
        ids += tokenizer(source, add_special_tokens=False)["input_ids"]
        if len(ids) >= num_rows * length:
            break
    found = torch.tensor(ids)[: num_rows * length]
    if found.numel() < num_rows * length:
        raise ValueError(f"the standard library has {found.numel()} tokens for {num_rows * length}: take fewer steps")
    return found.view(num_rows, length)


def _allocated(where: torch.device) -> int:
    return torch.cuda.memory_allocated(where) if where.type == "cuda" else 0


def _warm_libraries(where: torch.device) -> None:
    """So that cuBLAS's workspaces, one a thread, are not taken for anything that the model needs."""
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=where, requires_grad=True)
    (x @ x).sum().backward()
