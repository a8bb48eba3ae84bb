"""The model that is planned: a module on the meta device, made from a name, a folder or a shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ds_zo.backends.common import chunked_loss
from ds_zo.backends.common.chunked_head import ChunkedHeads, DeferredLogits, PassWeights
from ds_zo.backends.common.chunked_norm import ChunkedNorms
from ds_zo.config.json_text import parse_json
from ds_zo.planner.low_rank import low_rank_adapters
from ds_zo.planner.rates import Rates
from ds_zo.planner.shapes import RANDOM, SHAPES, config_of
from ds_zo.planner.timeline import Trace
from ds_zo.planner.trace import trace_pass
from ds_zo.streaming.blocks import find_blocks
from ds_zo.streaming.placement import base_matrix_ids, is_linear

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]
LOW_RANK = 16
"""Rank of planned adapters."""


@dataclass
class Model:
    """A module on the meta device, with the batch and the rates that it is planned for. Each kind of pass is traced
    once, on demand."""

    name: str
    module: nn.Module
    batch: int
    seq: int
    dtype: Dtype
    rates: Rates
    experts_rank: int = 0
    """Rank of planned adapters of experts. 0: they have none."""
    _traces: dict[tuple[int, str], Trace] = field(default_factory=dict)
    """By batch and kind of pass."""

    def with_batch(self, batch: int) -> Model:
        """The same module, planned for another batch."""
        return self if batch == self.batch else replace(self, batch=batch)

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
    def matrices_by_block(self) -> list[list[tuple[int, int]]]:
        """Shapes of the weights of linear layers inside blocks, to which low-rank adapters are attached."""
        return [[tuple(m.weight.shape) for m in block.modules() if is_linear(m)] for block in self.blocks]  # type: ignore

    @property
    def matrices(self) -> list[tuple[int, int]]:
        return [shape for shapes in self.matrices_by_block for shape in shapes]

    @cached_property
    def adapter_numels_by_block(self) -> list[list[int]]:
        """Elements of LoRA's matrices in each block: of rank LOW_RANK on all `matrices`, and of `experts_rank` on all
        stacks of experts."""
        found = [[LOW_RANK * size for shape in shapes for size in shape] for shapes in self.matrices_by_block]
        ids = base_matrix_ids(self.module) if self.experts_rank else ()
        for block, numels in zip(self.blocks, found, strict=True):
            stacks = (p.shape for p in block.parameters() if id(p) in ids and p.dim() == 3)
            numels += [self.experts_rank * num * size for num, *matrix in stacks for size in matrix]
        return found

    @property
    def adapters_numel(self) -> int:
        return sum(map(sum, self.adapter_numels_by_block))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a weight."""
        return self.weights_nbytes // self.numel

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq

    def forward_trace(self) -> Trace:
        """The trace of a pass without gradients and with head and loss in chunks, as ZO runs it."""
        return self._trace("forward", self._run_forward)

    def backward_trace(self, *, checkpointing: bool, loss_in_chunks: bool = False) -> Trace:
        """The trace of a forward and a backward pass. `loss_in_chunks`: the backends of this package compute head and
        loss in chunks; other methods convert all logits to float32 at once."""

        def run() -> Trace:
            with self._chunked_heads() if loss_in_chunks else nullcontext():
                return self._run_backward(checkpointing=checkpointing)

        return self._trace(f"backward {checkpointing} {loss_in_chunks}", run)

    def low_rank_trace(
        self, *, checkpointing: bool, head_in_chunks: bool = True, experts_in_groups: bool = False
    ) -> Trace:
        """The trace of a forward and a backward pass that train LoRA adapters of rank LOW_RANK on all `matrices`, with
        the loss in chunks. `head_in_chunks`: the logits too, as this package's backends compute them.
        `experts_in_groups`: the backend computes the experts, with adapters of `experts_rank`."""

        def run() -> Trace:
            chunks = self._chunked_heads() if head_in_chunks else self._chunked_losses()
            experts_rank = self.experts_rank if experts_in_groups else None
            with chunks, low_rank_adapters(self.module, self.blocks, rank=LOW_RANK, experts_rank=experts_rank):
                return self._run_backward(checkpointing=checkpointing)

        return self._trace(f"low rank {checkpointing} {head_in_chunks} {experts_in_groups}", run)

    def _trace(self, kind: str, run: Callable[[], Trace]) -> Trace:
        if (self.batch, kind) not in self._traces:
            try:
                self._traces[self.batch, kind] = run()
            except ValueError:
                raise
            except Exception as error:  # of the model's own code, which may raise anything
                raise ValueError(f"{self.name} can't be planned: {self._failure_text(error)}") from error
        return self._traces[self.batch, kind]

    def _failure_text(self, error: Exception) -> str:
        """The error of a pass in one sentence, with its remedy."""
        said = " ".join(str(error).split("\n")[0].split())
        config: Any = self.module.config
        longest = _num_positions(config)
        if longest is not None and self.seq > longest:
            return f"it has positions for {longest} tokens, got {self.seq}: lower --seq ({said})"
        if "scalar type" in said or "dtype" in said:
            other = "bf16" if self.dtype == "fp32" else "fp32"
            return f"its forward fails in {self.dtype}: try --dtype {other} ({said})"
        if isinstance(error, NotImplementedError) or "meta tensors" in said.lower():
            return f"its forward depends on values, not on shapes alone, and a plan has no values ({said})"
        return f"its forward fails on tensors of the right shapes without values ({said})"

    def _run_forward(self) -> Trace:
        with self._chunked_heads(_OnMeta()):
            return self._pass(backward=False)

    @contextmanager
    def _chunked_heads(self, pass_weights: PassWeights | None = None) -> Iterator[None]:
        heads = ChunkedHeads(chunked_loss.models_with_causal_loss(self.module), pass_weights=pass_weights)
        norms = ChunkedNorms(self.module, self.blocks).in_chunks() if pass_weights is None else nullcontext()
        with norms, heads.deferred({"labels": True}), self._chunked_losses():
            yield

    @contextmanager
    def _chunked_losses(self) -> Iterator[None]:
        with ExitStack() as stack:
            for m in self.module.modules():
                if getattr(m, "loss_type", None) == "ForCausalLM" and hasattr(type(m), "loss_function"):
                    m.loss_function = _chunked_loss_on_meta  # type: ignore[assignment]
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
        config: Any = self.module.config
        return trace_pass(
            self.module,
            example_batch(self.module, batch=self.batch, seq=self.seq),
            blocks=self.blocks,
            rates=self.rates,
            vocab_size=getattr(config, "vocab_size", None),
            backward=backward,
            whole=getattr(config, "output_router_logits", False) is True,  # each layer has logits of its own
        )


def load_model(
    name: str, *, batch: int, seq: int, dtype: Dtype = "bf16", rates: Rates | None = None, experts_rank: int = 0
) -> Model:
    """Makes a model from its config alone. `name` is a folder, a model of the Hub (or of its cache), or
    `random:SHAPE`. `experts_rank`: see `Model`."""
    config = load_config(name, seq=seq)
    config.use_cache = False  # as in training: ZO and activation checkpointing switch it off
    make = class_of(config, name)
    is_classifier = make.__name__.endswith("ForSequenceClassification")
    for key, is_needed in (("pad_token_id", is_classifier), ("decoder_start_token_id", config.is_encoder_decoder)):
        if is_needed and getattr(config, key, None) is None:
            setattr(config, key, 0)  # a training script chooses a token; its value changes no shape
    with torch.device("meta"):
        module = make._from_config(config, dtype=DTYPES[dtype])
    module.tie_weights()
    module.train()
    check_positions(module, name, seq=seq)
    found = Model(name, module, batch, seq, dtype, rates or Rates(), experts_rank)
    if experts_rank and found.adapters_numel <= replace(found, experts_rank=0).adapters_numel:
        raise ValueError(
            f"adapters of experts need a rank >= 1 and a model with stacks of experts, got {experts_rank} and {name} "
            "(--experts-rank)"
        )
    return found


def class_of(config: Any, name: str) -> Any:
    """The class that the config names in `architectures`. A config without a usable one: the causal language model of
    its model type, or else the sequence-to-sequence model."""
    import transformers as hf

    for architecture in config.architectures or ():
        named = getattr(hf, architecture, None)
        if named is not None and _takes_targets(named):
            _check_inputs(named, name)
            return named
    kinds: list[Any] = [hf.AutoModelForCausalLM, hf.AutoModelForSeq2SeqLM, hf.AutoModelForSpeechSeq2Seq]
    if getattr(config, "is_encoder_decoder", False):
        kinds.append(kinds.pop(0))
    for kind in kinds:
        if type(config) in kind._model_mapping:
            found = kind._model_mapping[type(config)]
            _check_inputs(found, name)
            return found
    if hasattr(config, "auto_map"):
        return _FromAutoMap
    raise ValueError(
        f"plans are of models that read tokens and return a loss, got {name}, a {type(config).__name__}: name such a "
        "class in architectures of its config.json (--model)"
    )


class _FromAutoMap:
    """Makes a model whose code comes with its checkpoint. transformers refuses such code unless the user trusts it."""

    @staticmethod
    def _from_config(config: Any, *, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _takes_targets(model: Any) -> bool:
    return bool({"labels", "start_positions"} & inspect.signature(model.forward).parameters.keys())


def _check_inputs(model: Any, name: str) -> None:
    main = model.main_input_name
    is_whisper = getattr(model.config_class, "model_type", None) == "whisper"
    if main != "input_ids" and not is_whisper:
        raise ValueError(
            f"plans are of models that read tokens (input_ids), got {name}, a {model.__name__}, which reads {main} "
            "(--model)"
        )


def example_batch(module: nn.Module, *, batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Inputs and targets on the meta device, in the shapes that the model's own loss takes."""
    config: Any = module.config
    ids = torch.zeros(batch, seq, dtype=torch.long, device="meta")
    rows = ids[:, 0]
    kind = type(module).__name__
    inputs = {"input_ids": ids}
    if getattr(module, "main_input_name", "input_ids") == "input_features":  # Whisper's log-mel features of 30 seconds
        shape = batch, config.num_mel_bins, 2 * config.max_source_positions
        inputs = {"input_features": torch.zeros(shape, dtype=module.dtype, device="meta")}  # type: ignore[call-overload]
    if kind.endswith("QuestionAnswering"):
        return {**inputs, "start_positions": rows, "end_positions": rows}
    if not kind.endswith(("SequenceClassification", "AudioClassification")):
        return {**inputs, "labels": ids}
    if config.problem_type == "multi_label_classification":
        rows = torch.zeros(batch, config.num_labels, device="meta")
    return {**inputs, "labels": rows.float() if config.num_labels == 1 else rows}


def _num_positions(config: Any) -> int | None:
    names = ("max_position_embeddings", "max_target_positions", "max_seq_len")
    found = (getattr(config, name, None) for name in names)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def check_positions(module: nn.Module, name: str, *, seq: int) -> None:
    """Raises if `seq` exceeds a table of learned positions. A pass on the meta device does not find that out. Rotary
    positions have no such limit."""
    config: Any = module.config
    longest = _num_positions(config)
    if longest is None or seq <= longest:
        return
    for path, table in module.named_modules():
        is_table = isinstance(table, nn.Embedding) and table.num_embeddings != config.vocab_size
        if is_table and 0 <= table.num_embeddings - longest <= 2:  # OPT's table has two more rows
            raise ValueError(f"{name} has learned positions ({path}) for {longest} tokens, got {seq} (--seq)")


def load_config(name: str, *, seq: int) -> Any:
    """The transformers config: of a shape with positions for `seq` tokens, of a folder or a Hub name unchanged."""
    from transformers import AutoConfig

    from ds_zo.tasks.hub import check_reachable

    if name.startswith(RANDOM) or name in SHAPES:
        return config_of(name, max_length=max(2048, seq))

    try:
        check_reachable(name)
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) or Path(name).is_dir():
            raise ValueError(f"{str(error).splitlines()[0]} {_remedy(name)} (--model {name})") from error
        raise ValueError(
            f"a model must be a folder with a config.json, a name that the Hub or its cache knows, or random:SHAPE "
            f"with one of {', '.join(SHAPES)}, got {name!r} ({str(error).splitlines()[0]})"
        ) from error


def _remedy(name: str) -> str:
    """What to do about a config that exists and cannot be read."""
    path = Path(name, "config.json")
    if not path.is_file():
        return "Name a folder that has a config.json."
    try:
        parse_json(path.read_text())
    except ValueError as error:
        return f"Correct it: {error}."
    return "Correct model_type in its config.json, or update transformers."


class _OnMeta:
    """Weights of passes that exist all the time."""

    def use_of(self, head: nn.Module, *, chunk_nbytes: int) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext


def _chunked_loss_on_meta(logits: torch.Tensor, labels: Any, vocab_size: int, **unused: Any) -> torch.Tensor:
    if isinstance(logits, DeferredLogits) and logits.is_deferred(vocab_size):
        return chunked_loss.chunked_causal_lm_loss(logits, labels, vocab_size)
    num_rows = max(1, chunked_loss.LOSS_CHUNK_NUMEL // vocab_size)
    loss: torch.Tensor = _ChunkedLossOnMeta.apply(logits.reshape(-1, vocab_size), num_rows)
    return loss


class _ChunkedLossOnMeta(torch.autograd.Function):
    """Allocates what the chunked loss does. Forward: one chunk of the logits in float32 and its log-softmax. Backward:
    in addition the gradient of the logits and two gradients of the chunk."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = num_rows
        return torch.empty_like(rows[:num_rows].float()).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        found = torch.empty_like(rows)
        for chunk in rows.split(ctx.num_rows):  # the last chunk is alive until these variables are assigned again
            logs = torch.empty_like(chunk.float())
            by_logs = torch.empty_like(logs)
            torch.empty_like(by_logs)
        return found, None
