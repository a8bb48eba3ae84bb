"""Traces one training pass of a model on the meta device: which memory is alive when, and how long the pass takes.

The memory of activations depends on the architecture, on checkpointing and on what autograd saves. The planner
therefore runs the model's own forward (and backward) on tensors without memory, and counts the storages that are alive,
as the device's allocator would. It needs no weights and no formula for each architecture. Two functions are replaced.
Attention: on the meta device torch takes the kernel that materialises the scores. Linear layers: a process that has
used ZeRO-3 has DeepSpeed's function in place of torch's, and its plans would differ from those of other processes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_zo.planner import repeated_blocks
from ds_zo.planner.rates import Rates
from ds_zo.planner.timeline import Cost, Gradient, LiveBytes, PassPhase, PassSection, Trace, add_up
from ds_zo.versions import autocast_on_meta


def trace_pass(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    blocks: Sequence[nn.Module],
    rates: Rates,
    vocab_size: int | None = None,
    backward: bool = False,
    whole: bool = False,
) -> Trace:
    """Traces `module(**inputs).loss` on the meta device, and its backward pass if `backward`. `whole`: every block
    runs, also those that equal another one ([Note: repeated blocks])."""
    representatives = repeated_blocks.representatives_of(module, blocks)
    replaced = set() if whole else repeated_blocks.replaceable(representatives)
    run = partial(_run, module, inputs, blocks, rates, vocab_size, backward)
    try:
        tracer = run(representatives, replaced)
        sections = (
            repeated_blocks.with_representatives(tracer.sections, representatives, replaced)
            if replaced
            else tracer.sections
        )
    except repeated_blocks.BlocksDifferError:
        tracer = run(representatives, set())
        sections = tracer.sections
    return add_up(sections, num_blocks=len(blocks), block_input_nbytes=tracer.block_input_nbytes)


def _run(
    module: nn.Module,
    inputs: Mapping[str, Any],
    blocks: Sequence[nn.Module],
    rates: Rates,
    vocab_size: int | None,
    backward: bool,
    representatives: Sequence[int],
    replaced: set[int],
) -> _Tracer:
    tracer = _Tracer(rates, vocab_size=vocab_size, known=[*module.parameters(), *module.buffers()])
    with ExitStack() as stack:
        if gc.isenabled():
            gc.disable()  # operations of finalizers, as of an engine that nobody destroyed, would count as the model's
            stack.callback(gc.enable)
        stack.enter_context(autocast_on_meta())
        calls = repeated_blocks.BlockCalls() if replaced else None
        for i, block in enumerate(blocks):
            enter, leave = partial(tracer.enter_block, i, calls), partial(tracer.leave_block, i, calls)
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
            if calls is not None and i in replaced:
                block.forward = calls.placeholder(i, representatives[i])
                stack.callback(vars(block).pop, "forward")
        if backward:
            for p in module.parameters():
                if p.requires_grad:
                    stack.callback(p.register_post_accumulate_grad_hook(tracer.complete_gradient).remove)
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(tracer)
        stack.enter_context(_traced_functions(tracer))
        loss = module(**inputs).loss
        if loss is None:
            raise ValueError(
                f"plans are of models with a loss of their own, got none from {type(module).__name__} of "
                f"{', '.join(inputs)}: name a class with such a loss in architectures of its config.json (--model)"
            )
        if backward:
            tracer.begin(PassPhase.BACKWARD, None)
            loss.backward()
        tracer.end()
    return tracer


@dataclass
class _LiveStorage:
    nbytes: int
    is_logits: bool
    reference: Any = field(repr=False, default=None)


class _Tracer(TorchDispatchMode):
    """Counts the bytes of storages from the operation that makes them to their deallocation, and estimates the seconds
    of every operation by a roofline."""

    def __init__(self, rates: Rates, *, vocab_size: int | None, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        import_module("torch._dynamo")  # hooks import it; inside a traced forward that would keep a tensor alive
        self._rates = rates
        self._vocab_size = vocab_size
        self._live: dict[int, _LiveStorage] = {t.untyped_storage()._cdata: _LiveStorage(0, False, t) for t in known}
        self._kinds: dict[Any, tuple[bool, Any]] = {}
        """For each operation met so far: whether it only makes views, and the function that counts its FLOPs or
        None."""
        self._inside: list[int] = []
        self.block_input_nbytes = 0
        self.sections: list[PassSection] = []
        self._start(PassPhase.AROUND, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Models read from a tensor whether a mask is all ones, or whether a batch is unpacked. The answer is yes.
            return torch.ones((), dtype=args[0].dtype).item()
        num_bins = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        if func is torch.ops.aten.bincount.default and args[0].is_meta and num_bins:
            # A router's loss counts tokens by expert. The result has the stated length, whatever the experts are.
            out = args[0].new_empty(num_bins)
        else:
            out = func(*args, **kwargs)
        if func is torch.ops.aten._softmax_backward_data.default:
            product = torch.empty_like(args[0])  # CUDA's kernel reads the gradient times the output
            self._count(product)
        outputs = [out] if isinstance(out, torch.Tensor) else _tensors(out)
        self._price(func, args, kwargs, out, outputs)
        for t in outputs:
            self._count(t)
        return out

    # Stretches

    def _start(self, phase: PassPhase, block: int | None) -> None:
        self._phase, self._block = phase, block
        self._flops = self._kernel_s = self._launch_s = 0.0
        self._now = self._logits_now = self._kept_gradients = 0
        self._peak: LiveBytes | None = None
        self._peak_keeping: LiveBytes | None = None
        self._gradients: list[Gradient] = []

    def end(self) -> None:
        cost = Cost(self._flops, self._kernel_s, self._launch_s)
        peaks = self._peak, self._peak_keeping
        self.sections.append(PassSection(self._phase, self._block, cost, self._alive(), *peaks, tuple(self._gradients)))

    def begin(self, phase: PassPhase, block: int | None) -> None:
        self.end()
        self._start(phase, block)

    def _alive(self) -> LiveBytes:
        return LiveBytes(self._now + self._kept_gradients, self._logits_now, self._kept_gradients)

    def enter_block(
        self, block: int, calls: repeated_blocks.BlockCalls | None, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        if self._phase is PassPhase.BACKWARD:  # recomputed
            return
        first = repeated_blocks.first_tensor((args, kwargs))
        self.block_input_nbytes = max(self.block_input_nbytes, first.numel() * first.element_size())
        if calls is not None:
            calls.enter(block, args, kwargs)
        self._inside.append(block)
        self.begin(PassPhase.FORWARD, block)

    def leave_block(
        self, block: int, calls: repeated_blocks.BlockCalls | None, module: nn.Module, args: Any, output: Any
    ) -> None:
        if self._phase is PassPhase.BACKWARD:
            return
        if calls is not None:
            calls.leave(block, output)
        for t in tree_leaves(output):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                t.register_hook(partial(self._begin_backward, block))
                break
        self._inside.pop()
        self.begin(*((PassPhase.FORWARD, self._inside[-1]) if self._inside else (PassPhase.AROUND, block)))

    def _begin_backward(self, block: int, grad: torch.Tensor) -> None:
        self.begin(PassPhase.BACKWARD, block)

    # Memory

    def _count(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        is_logits = self._vocab_size is not None and t.ndim > 1 and t.shape[-1] == self._vocab_size
        seen = _LiveStorage(storage.nbytes(), is_logits)
        seen.reference = weakref.ref(storage, partial(self._uncount, key))
        self._live[key] = seen
        self._now += seen.nbytes
        self._logits_now += seen.nbytes * is_logits
        now = self._alive()
        if self._peak is None or now.total - now.gradients > self._peak.total - self._peak.gradients:
            self._peak = now
        if self._peak_keeping is None or now.total > self._peak_keeping.total:
            self._peak_keeping = now

    def _uncount(self, key: int, _: Any) -> None:
        seen = self._live.pop(key)
        self._now -= seen.nbytes
        self._logits_now -= seen.nbytes * seen.is_logits

    def complete_gradient(self, p: torch.Tensor) -> None:
        """The hook of a parameter. It drops the gradient, and counts its bytes for the peak that keeps gradients. The
        first gradient begins a new section, because buckets of gradients exist from then on only."""
        if self._block is None and not self._gradients:
            self.begin(PassPhase.BACKWARD, None)
        self._gradients.append(Gradient(p.numel(), self._now))
        p.grad = None
        self._kept_gradients += p.numel() * p.element_size()

    # Time

    def _price(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, outputs: Sequence[torch.Tensor]
    ) -> None:
        backward = self._phase is PassPhase.BACKWARD
        launch_s = (self._rates.backward_launch_us if backward else self._rates.launch_us) * 1e-6
        if func not in self._kinds:
            from torch.utils.flop_counter import flop_registry  # here, because it imports Triton

            is_view = not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)
            self._kinds[func] = is_view, flop_registry.get(func._overloadpacket)
        is_view, count = self._kinds[func]
        if is_view:
            self._launch_s += launch_s
            return
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        nbytes = sum(t.numel() * t.element_size() for t in (*_tensors(args), *outputs))
        self.add(flops=flops, nbytes=nbytes, launch_s=launch_s)

    def add(self, *, flops: float, nbytes: int, launch_s: float = 0.0) -> None:
        self._flops += flops
        self._launch_s += launch_s
        self._kernel_s += max(
            self._rates.kernel_us * 1e-6,
            flops / (self._rates.matmul_tflops * 1e12),
            nbytes / (self._rates.device_memory_gbps * 1e9),
        )


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results, which nest one level at most."""
    found: list[torch.Tensor] = []
    for value in values if isinstance(values, (tuple, list)) else ():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [t for t in value if isinstance(t, torch.Tensor)]
    return found


@contextmanager
def _traced_functions(tracer: _Tracer) -> Iterator[None]:
    """Inside, attention takes the memory of the device's fused kernels: output and log-sum-exp are kept, and scores are
    never materialised. The function is replaced, because autograd recomputes with dispatch modes switched off. Linear
    layers call torch's own function, even if DeepSpeed's ZeRO-3 has replaced it for the rest of the process."""
    attention, linear = functional.scaled_dot_product_attention, functional.linear

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = _Attention.apply(query, key, value, tracer, is_causal)
        return out

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    functional.linear = torch._C._nn.linear
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.linear = attention, linear


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tracer: _Tracer, causal: bool
    ) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        # The kernels write tokens before heads, so that the transpose that follows in every model is a view.
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tracer = tracer
        ctx.flops = 2.0 * batch * heads * length * k.shape[-2] * (q.shape[-1] + v.shape[-1]) / (2 if causal else 1)
        tracer.add(flops=ctx.flops, nbytes=sum(t.numel() * t.element_size() for t in (q, k, v, out)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        q_sum = torch.empty_like(q, dtype=torch.float32)  # the kernel accumulates it in float32
        found = tuple(torch.empty_like(t) for t in (q, k, v))
        ctx.tracer.add(flops=2.5 * ctx.flops, nbytes=0)
        del q_sum
        return (*found, None, None)
