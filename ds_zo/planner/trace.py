"""One training pass of a model on the meta device, watched: what is alive when, and how long it takes on paper.

[Note: activations by running them] How much memory activations take depends on the architecture, the checkpointing and
what autograd saves. So the planner runs the model's own forward (and backward) on tensors without memory and counts
the storages that are alive, as the device's allocator would. Only the attention kernel is replaced: on the meta device
it would be the naive one, which materialises the scores. No weights are needed, and no formula per model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_zo.planner.rates import Rates


@dataclass(frozen=True)
class Peak:
    """What was alive, besides the parameters, when most was."""

    total: int = 0
    logits: int = 0
    """Tensors as wide as the vocabulary."""
    gradients: int = 0
    """Of parameters, complete ones that are kept."""

    @property
    def activations(self) -> int:
        return self.total - self.logits - self.gradients


@dataclass(frozen=True)
class Cost:
    """Work that ran one after the other."""

    flops: float = 0.0
    kernel_s: float = 0.0
    launch_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The device works off what the host launches; the slower of them decides."""
        return max(self.kernel_s, self.launch_s)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.flops - other.flops, max(0.0, self.kernel_s - other.kernel_s), max(0.0, self.launch_s - other.launch_s)
        )

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.kernel_s + other.kernel_s, self.launch_s + other.launch_s)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.flops * factor, self.kernel_s * factor, self.launch_s * factor)


@dataclass(frozen=True)
class Trace:
    """What a pass came to."""

    peak: Peak
    """With each parameter's gradient gone as soon as it is complete, as LOMO and LSP have it."""
    peak_keeping: Peak
    """With gradients kept to the end of the backward pass."""
    paused: int
    """Most that a pass keeps alive while it waits at a block: what each further pass in lockstep adds."""
    block: tuple[Cost, ...]
    """Forward of each block."""
    edge: Cost
    """Forward of everything else, loss included."""
    backward: Cost
    """Recomputation included; nothing for a pass without gradients."""
    boundary: int
    """Bytes of one block's input: what is kept of a block that is recomputed."""

    @property
    def forward(self) -> Cost:
        return sum(self.block, self.edge)


def trace_pass(
    module: nn.Module,
    inputs: Mapping[str, Any],
    *,
    blocks: Sequence[nn.Module],
    rates: Rates,
    vocab_size: int | None = None,
    backward: bool = False,
) -> Trace:
    """Runs `module(**inputs).loss` on the meta device, and its backward if asked to."""
    watcher = _Watcher(rates, vocab_size=vocab_size, known=[*module.parameters(), *module.buffers()])
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(watcher.enter_block, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(watcher.leave_block).remove)
        if backward:
            for p in module.parameters():
                if p.requires_grad:
                    stack.callback(p.register_post_accumulate_grad_hook(watcher.complete_gradient).remove)
        stack.enter_context(torch.set_grad_enabled(backward))
        stack.enter_context(watcher)
        stack.enter_context(_fused_attention(watcher))
        loss = module(**inputs).loss
        forward = watcher.total
        if backward:
            watcher.in_backward = True
            loss.backward()
    in_blocks = sum(watcher.block_costs, Cost())
    return Trace(
        peak=watcher.peak,
        peak_keeping=watcher.peak_keeping,
        paused=watcher.paused,
        block=tuple(watcher.block_costs),
        edge=forward - in_blocks,
        backward=watcher.total - forward,
        boundary=watcher.boundary,
    )


@dataclass
class _Live:
    nbytes: int
    is_logits: bool
    reference: Any = field(repr=False, default=None)


class _Watcher(TorchDispatchMode):
    """Counts storages from their first sight to their end, and prices every operation by a roofline."""

    def __init__(self, rates: Rates, *, vocab_size: int | None, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._rates = rates
        self._vocab_size = vocab_size
        self._live: dict[int, _Live] = {t.untyped_storage()._cdata: _Live(0, False, t) for t in known}
        self._now = 0
        self._logits_now = 0
        self._kept_gradients = 0
        self.peak = Peak()
        self.peak_keeping = Peak()
        self._kinds: dict[Any, tuple[bool, Any]] = {}
        """Of operations met so far: whether they only make views, and what counts their FLOPs."""
        self.total = Cost()
        self.in_backward = False
        self.block_costs: list[Cost] = []
        self._entered: list[Cost] = []
        self.paused = 0
        self.boundary = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Models ask tensors whether a mask is all ones or a batch unpacked: it is.
            return torch.ones((), dtype=args[0].dtype).item()
        out = func(*args, **kwargs)
        outputs = [out] if isinstance(out, torch.Tensor) else _tensors(out)
        self._price(func, args, kwargs, out, outputs)
        for t in outputs:
            self._see(t)
        return out

    # Memory

    def _see(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        is_logits = self._vocab_size is not None and t.ndim > 1 and t.shape[-1] == self._vocab_size
        seen = _Live(storage.nbytes(), is_logits)
        seen.reference = weakref.ref(storage, partial(self._gone, key))
        self._live[key] = seen
        self._now += seen.nbytes
        self._logits_now += seen.nbytes * is_logits
        if self._now > self.peak.total:
            self.peak = Peak(self._now, self._logits_now)
        if self._now + self._kept_gradients > self.peak_keeping.total:
            self.peak_keeping = Peak(self._now + self._kept_gradients, self._logits_now, self._kept_gradients)

    def _gone(self, key: int, _: Any) -> None:
        seen = self._live.pop(key)
        self._now -= seen.nbytes
        self._logits_now -= seen.nbytes * seen.is_logits

    def complete_gradient(self, p: torch.Tensor) -> None:
        """A parameter's hook: dropped, and counted as if it were kept."""
        p.grad = None
        self._kept_gradients += p.numel() * p.element_size()

    # Time

    def _price(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, outputs: Sequence[torch.Tensor]
    ) -> None:
        launch_s = (self._rates.backward_launch_us if self.in_backward else self._rates.launch_us) * 1e-6
        if func not in self._kinds:
            from torch.utils.flop_counter import flop_registry  # imports Triton, which `import ds_zo` does without

            is_view = not func._schema.is_mutable and any(r.alias_info is not None for r in func._schema.returns)
            self._kinds[func] = is_view, flop_registry.get(func._overloadpacket)
        is_view, count = self._kinds[func]
        if is_view:
            self.total = self.total + Cost(launch_s=launch_s)
            return
        flops = 0 if count is None else count(*args, **kwargs, out_val=out)
        nbytes = sum(t.numel() * t.element_size() for t in (*_tensors(args), *outputs))
        self.add(flops=flops, nbytes=nbytes, launch_s=launch_s)

    def add(self, *, flops: float, nbytes: int, launch_s: float = 0.0) -> None:
        kernel_s = max(
            self._rates.kernel_us * 1e-6,
            flops / (self._rates.matmul_tflops * 1e12),
            nbytes / (self._rates.device_memory_gbps * 1e9),
        )
        self.total = self.total + Cost(flops, kernel_s, launch_s)

    # Blocks

    def enter_block(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.in_backward:
            return
        self.paused = max(self.paused, self._now)
        first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        self.boundary = max(self.boundary, first.numel() * first.element_size())
        self._entered.append(self.total)

    def leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.in_backward:
            self.block_costs.append(self.total - self._entered.pop())


def _tensors(values: Any) -> list[torch.Tensor]:
    """Those of an operation's arguments or results, which nest one level at most."""
    found: list[torch.Tensor] = []
    for value in values if isinstance(values, (tuple, list)) else ():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += [t for t in value if isinstance(t, torch.Tensor)]
    return found


@contextmanager
def _fused_attention(watcher: _Watcher) -> Iterator[None]:
    """Attention as the device's fused kernels do it: output and log-sum-exp are kept, scores never exist. A mode would
    be the cleaner way in, but autograd recomputes with modes off."""
    original = functional.scaled_dot_product_attention

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = _Attention.apply(query, key, value, watcher, is_causal)
        return out

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, watcher: _Watcher, causal: bool
    ) -> torch.Tensor:
        batch, heads, length, _ = q.shape
        # The kernels write tokens before heads, so the transpose that follows in every model costs nothing.
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.watcher = watcher
        ctx.flops = 2.0 * batch * heads * length * k.shape[-2] * (q.shape[-1] + v.shape[-1]) / (2 if causal else 1)
        watcher.add(flops=ctx.flops, nbytes=sum(t.numel() * t.element_size() for t in (q, k, v, out)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        q_sum = torch.empty_like(q, dtype=torch.float32)  # the kernel sums it up in float32
        found = tuple(torch.empty_like(t) for t in (q, k, v))
        ctx.watcher.add(flops=2.5 * ctx.flops, nbytes=0)
        del q_sum
        return (*found, None, None)
