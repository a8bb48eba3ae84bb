"""What is planned: a model without memory, from a name, a folder or a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from ds_zo.planner import choices
from ds_zo.planner.rates import Rates
from ds_zo.planner.shapes import RANDOM, SHAPES, config_of
from ds_zo.planner.timeline import Trace
from ds_zo.planner.trace import trace_pass
from ds_zo.streaming.blocks import find_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass
class Model:
    """A module on the meta device and the batch it is planned for. Its passes are traced once each, on demand."""

    name: str
    module: nn.Module
    batch: int
    seq: int
    dtype: Dtype
    rates: Rates
    _traces: dict[str, Trace] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        return list(find_blocks(self.module).values())

    @cached_property
    def numel(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @cached_property
    def weights_nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.module.parameters())

    @cached_property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of the blocks' weight matrices: what LSP projects and low-rank adapters are put on."""
        return [tuple(p.shape) for block in self.blocks for p in block.parameters() if p.ndim == 2]  # type: ignore[misc]

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    def forward_trace(self) -> Trace:
        """Without gradients, loss in chunks: a ZO pass."""
        return self._trace("forward", self._run_forward)

    def backward_trace(self, *, checkpointing: bool, loss_in_chunks: bool = False) -> Trace:
        """`loss_in_chunks`: as LOMO has it; others upcast all logits at once."""

        def run() -> Trace:
            with self._losses_on_paper() if loss_in_chunks else nullcontext():
                return self._run_backward(checkpointing=checkpointing)

        return self._trace(f"backward {checkpointing} {loss_in_chunks}", run)

    def _trace(self, kind: str, run: Callable[[], Trace]) -> Trace:
        if kind not in self._traces:
            try:
                self._traces[kind] = run()
            except (NotImplementedError, RuntimeError) as error:
                raise ValueError(
                    f"{self.name} can't be planned: its forward depends on values, not on shapes alone, and a plan has "
                    f"no values ({error})"
                ) from error
        return self._traces[kind]

    def _run_forward(self) -> Trace:
        with self._losses_on_paper():
            return self._pass(backward=False)

    @contextmanager
    def _losses_on_paper(self) -> Iterator[None]:
        with ExitStack() as stack:
            for m in self.module.modules():
                if getattr(m, "loss_type", None) == "ForCausalLM" and hasattr(type(m), "loss_function"):
                    m.loss_function = _loss_on_paper  # type: ignore[assignment]
                    stack.callback(m.__dict__.pop, "_loss_function", None)
            yield

    def _run_backward(self, *, checkpointing: bool) -> Trace:
        switch: Any = self.module
        if checkpointing:
            if not getattr(self.module, "supports_gradient_checkpointing", False):
                raise ValueError(f"{self.name} has no gradient checkpointing: plan it without (--no-checkpointing)")
            switch.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            return self._pass(backward=True)
        finally:
            if checkpointing:
                switch.gradient_checkpointing_disable()

    def _pass(self, *, backward: bool) -> Trace:
        ids = torch.zeros(self.batch, self.seq, dtype=torch.long, device="meta")
        config: Any = self.module.config
        return trace_pass(
            self.module,
            {"input_ids": ids, "labels": ids},
            blocks=self.blocks,
            rates=self.rates,
            vocab_size=getattr(config, "vocab_size", None),
            backward=backward,
        )


def load_model(name: str, *, batch: int, seq: int, dtype: Dtype = "bf16", rates: Rates | None = None) -> Model:
    """From its config alone. `name` is a folder, a model of the Hub (or its cache), or `random:SHAPE`."""
    from transformers import AutoModelForCausalLM

    config = load_config(name, seq=seq)
    config.use_cache = False  # ZO switches it off for its passes, checkpointing for its own
    if type(config) not in AutoModelForCausalLM._model_mapping and not hasattr(config, "auto_map"):
        raise ValueError(f"plans are of causal language models, got {name}, a {type(config).__name__} (--model)")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    module.tie_weights()
    module.train()
    check_positions(module, name, seq=seq)
    return Model(name, module, batch, seq, dtype, rates or Rates())


def check_positions(module: nn.Module, name: str, *, seq: int) -> None:
    """Rotary positions go on; a table of learned ones ends, which tensors without values do not notice."""
    config: Any = module.config
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None or seq <= longest:
        return
    for path, table in module.named_modules():
        is_table = isinstance(table, nn.Embedding) and table.num_embeddings != config.vocab_size
        if is_table and 0 <= table.num_embeddings - longest <= 2:  # OPT's begins at 2
            raise ValueError(f"{name} has learned positions ({path}) for {longest} tokens, got {seq} (--seq)")


def load_config(name: str, *, seq: int) -> Any:
    """Of a shape, long enough for `seq` tokens; of a folder or a Hub name, as it stands there."""
    from transformers import AutoConfig

    from ds_zo.tasks.hub import check_reachable

    if name.startswith(RANDOM) or name in SHAPES:
        return config_of(name, max_length=max(2048, seq))

    try:
        check_reachable(name)
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a model must be a folder with a config.json, a name that the Hub or its cache knows, or random:SHAPE "
            f"with one of {', '.join(SHAPES)}, got {name!r} ({str(error).splitlines()[0]})"
        ) from error


def _loss_on_paper(logits: torch.Tensor, labels: Any, vocab_size: int, **unused: Any) -> torch.Tensor:
    num_rows = max(1, choices.LOSS_CHUNK_NUMEL // vocab_size)
    loss: torch.Tensor = _LossOnPaper.apply(logits.reshape(-1, vocab_size), num_rows)
    return loss


class _LossOnPaper(torch.autograd.Function):
    """What the chunked loss holds: the logits, one chunk of them in float32 and its log-softmax; in the backward pass
    also the logits' gradient and two gradients of the chunk."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = num_rows
        return torch.empty_like(rows[:num_rows].float()).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        found = torch.empty_like(rows)
        for chunk in rows.split(ctx.num_rows):  # which meets what is left of the one before
            logs = torch.empty_like(chunk.float())
            by_logs = torch.empty_like(logs)
            torch.empty_like(by_logs)
        return found, None
