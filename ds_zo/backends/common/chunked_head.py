"""The head and the causal loss together, in chunks of tokens.

With many tokens, logits and their gradient are the largest tensors of a training step. In a training forward with
labels, the head of a model with a causal loss returns `DeferredLogits`, which have a shape and no values. The loss
computes the logits of one chunk at a time, and so does its backward pass. The plain path stays where chunks would not
save memory: a short batch, or a large trained head. ZO's passes have no graph and no backward pass; their losses are
computed in chunks too.

[Note: deferred logits] Models scale and cap logits between head and loss. These operations treat every logit alone, so
`DeferredLogits` record them, and each chunk runs them. Any other operation, the caller's included, computes the values
of all logits, as the head does without chunks, and logs one line. Their gradient runs the head once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from ds_zo.backends.common.chunked_rows import (
    Gradients,
    ReplacedForwards,
    RowFunction,
    autocast_of,
    has_class_forward,
)
from ds_zo.backends.common.plain_copies import Hook
from ds_zo.logs import show

HEAD_CHUNK_NUMEL = 2**25
"""Logits that exist at a time: 128 MB in float32. Enough rows to keep the head's product bound by arithmetic."""
_FLOAT32_COPIES = 3
"""Float32 tensors of a chunk's size in the backward pass of its loss: logits or log-softmax, and two gradients."""
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide"))
_RECORDED = _PRODUCTS | {"tanh", "float", "to", "contiguous"}
"""Names of the operations that are recorded if all their other arguments are numbers or dtypes."""
_OF_STORAGE = frozenset(("numpy", "tolist", "__array__", "data_ptr", "storage", "untyped_storage", "__dlpack__"))
_OF_COPIES = frozenset(("__repr__", "__reduce_ex__", "__deepcopy__"))
_Use = Callable[[], AbstractContextManager[None]]
"""Returns a context in which a head has the weights of one of its calls. Entering it raises if these weights do not
exist."""


class PassWeights(Protocol):
    """The weights of heads in passes without a graph, for `ChunkedHeads`."""

    def use_of(self, head: nn.Module, *, chunk_nbytes: int) -> _Use | None:
        """The weights that the head has now. None if a chunk would copy more bytes of weights than its logits have
        (`chunk_nbytes`)."""


class _Head(RowFunction):
    """One call of a head: its inputs, and the operations that follow on its logits."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        *,
        num_rows: int,
        use: _Use | None,
        on_read: Callable[[], None],
    ) -> None:
        """`num_rows`: tokens of a chunk. `use`: None where the head's parameters hold its weights. `on_read` is called
        when the values of all logits are computed."""
        super().__init__(module, forward, device=hidden.device, num_rows=num_rows)
        self._hidden = hidden.detach()
        self.has_graph = use is None
        self.parameters = self.parameters if self.has_graph else {}
        self._on_read = on_read
        self._use = _while_unchanged(list(self.function.parameters())) if use is None else use
        self.operations: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()
        self.values: torch.Tensor | None = None
        """All logits, if they were read."""

    def saves_memory(self, sample: torch.Tensor) -> bool:
        """Whether chunks take less memory than all logits and their gradient. Chunks have float32 copies, and a second
        gradient of each trained parameter, to which their gradients are added. Without a graph, whether they take at
        most half of all logits. `sample`: logits without tokens."""
        num_tokens, width = self._hidden.shape[:-1].numel(), sample.shape[-1]
        if not self.has_graph:
            return num_tokens >= 2 * self.num_rows
        whole = 2 * num_tokens * width * sample.itemsize
        chunk = self.num_rows * width * (2 * sample.itemsize + _FLOAT32_COPIES * 4)
        return whole > chunk + sum(4 * p.numel() for p in self.parameters.values())

    def followed_by(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> _Head:
        found = object.__new__(_Head)
        vars(found).update(vars(self), operations=(*self.operations, operation))
        return found

    def of(self, rows: torch.Tensor, parameters: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The logits of some tokens, after the recorded operations."""
        found = super().of(rows, parameters)
        for operation in self.operations:
            found = operation(found)
        return found

    def read(self) -> torch.Tensor:
        """The values of all logits."""
        if self.values is None:
            with self._use(), torch.no_grad():
                self._on_read()
                self.values = self.of(self._hidden)
        return self.values

    def summed_loss(self, targets: torch.Tensor, *, ignore_index: int, num_rows: int) -> torch.Tensor:
        """The sum of all tokens' losses, without a graph. `num_rows`: tokens whose losses are summed at a time."""
        total = torch.zeros((), dtype=torch.float32, device=targets.device)
        # Chunks of the head are whole chunks of the loss, so that losses are summed in the order of whole logits.
        of_head = self.num_rows - self.num_rows % num_rows if self.num_rows > num_rows else self.num_rows
        with self._use():
            hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
            for chunk, wanted in zip(hidden.split(of_head), targets.split(of_head), strict=True):
                add_losses_(total, self.of(chunk), wanted, ignore_index=ignore_index, num_rows=num_rows)
        return total


def _while_unchanged(parameters: Sequence[nn.Parameter]) -> _Use:
    """For a head whose parameters hold its weights until an update."""
    versions = [p._version for p in parameters]  # a change in place increases them

    @contextmanager
    def use() -> Iterator[None]:
        if versions != [p._version for p in parameters]:
            raise RuntimeError(
                "outputs.logits are computed when they are read, and the weights have changed after their forward: "
                "read them before engine.backward and engine.step"
            )
        yield

    return use


def add_losses_(
    total: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, *, ignore_index: int, num_rows: int
) -> None:
    """Adds the losses of all tokens to `total`, `num_rows` tokens at a time. `rows`: their logits."""
    if rows.is_meta:  # a plan needs the memory of one chunk
        rows, targets = rows[:num_rows], targets[:num_rows]
    for chunk, wanted in zip(rows.split(num_rows), targets.split(num_rows), strict=True):
        total += cross_entropy(chunk.float(), wanted, ignore_index=ignore_index, reduction="sum")


class DeferredLogits(torch.Tensor):
    """Logits without values. See [Note: deferred logits]."""

    head: _Head
    hidden: torch.Tensor
    """The head's inputs, with their graph."""
    sample: torch.Tensor
    """Logits without tokens, after the recorded operations."""

    @staticmethod
    def of(head: _Head, hidden: torch.Tensor, sample: torch.Tensor) -> DeferredLogits:
        found: DeferredLogits = _Defer.apply(head, sample, hidden, *head.parameters.values())
        return found._with(head, hidden, sample)

    @staticmethod
    def _make(head: _Head, hidden: torch.Tensor, sample: torch.Tensor) -> DeferredLogits:
        """Logits without a graph."""
        found: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], sample.shape[-1]), dtype=sample.dtype, device=sample.device
        )
        return found._with(head, hidden, sample)

    def _with(self, head: _Head, hidden: torch.Tensor, sample: torch.Tensor) -> DeferredLogits:
        self.head, self.hidden, self.sample = head, hidden, sample
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first, *rest = args or (None,)
        is_constant = all(isinstance(x, (int, float, torch.dtype)) for x in (*rest, *kwargs.values()))
        if isinstance(first, DeferredLogits) and name in _RECORDED and is_constant and first._may_be_followed:
            return first._followed_by(lambda x: func(x, *rest, **kwargs))
        if isinstance(first, DeferredLogits) and name == "detach" and not first.head.has_graph:
            return DeferredLogits._make(first.head, first.hidden, first.sample)
        is_data = name == "__get__" and getattr(func.__self__, "__name__", "") == "data"
        if is_data or name in _OF_STORAGE or name in _OF_COPIES:
            args, kwargs = _with_values(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @property
    def _may_be_followed(self) -> bool:
        """Whether operations are recorded. A graph that the head does not make is not recorded."""
        return self.head.values is None and (self.head.has_graph or not self.requires_grad)

    def _followed_by(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        return DeferredLogits.of(self.head.followed_by(operation), self.hidden, operation(self.sample))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _with_values(args, kwargs or {})
        return func(*args, **kwargs)

    def is_deferred(self, vocab_size: int) -> bool:
        """Whether nothing has read their values, and a loss over `vocab_size` tokens takes one row for each token."""
        return self.head.values is None and self.shape[-1] == vocab_size

    def summed_loss(self, targets: torch.Tensor, *, ignore_index: int, num_rows: int) -> torch.Tensor:
        """The sum of all tokens' losses, in float32. `num_rows`: tokens whose losses are summed at a time."""
        total: torch.Tensor = _SummedLoss.apply(
            self.head, targets, ignore_index, num_rows, self.hidden, *self.head.parameters.values()
        )
        return total


def _with_values(args: Any, kwargs: Any) -> Any:
    return tree_map_only(DeferredLogits, lambda x: x.head.read(), (args, kwargs))


class _Defer(torch.autograd.Function):
    """Makes `DeferredLogits`. A gradient comes where their values were read."""

    @staticmethod
    def forward(
        ctx: Any, head: _Head, sample: torch.Tensor, hidden: torch.Tensor, *parameters: torch.Tensor
    ) -> DeferredLogits:
        ctx.save_for_backward(hidden, *parameters)
        ctx.head = head
        return DeferredLogits._make(head, hidden, sample)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        hidden, *_ = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        return None, None, *ctx.head.gradients(lambda logits, _: (logits, grad), hidden, wanted, in_chunks=False)


class _SummedLoss(torch.autograd.Function):
    """`DeferredLogits.summed_loss`. The backward pass computes the logits of each chunk again."""

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        targets: torch.Tensor,
        ignore_index: int,
        num_rows: int,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, targets, *parameters)
        ctx.head, ctx.ignore_index = head, ignore_index
        return head.summed_loss(targets, ignore_index=ignore_index, num_rows=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        hidden, targets, *_ = ctx.saved_tensors
        head, wanted = ctx.head, targets.split(ctx.head.num_rows)

        def pull(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            loss = cross_entropy(logits.float(), wanted[index], ignore_index=ctx.ignore_index, reduction="sum")
            return loss, grad

        return None, None, None, None, *head.gradients(pull, hidden, ctx.needs_input_grad[4:])


class ChunkedHeads:
    """The heads of models with a causal loss."""

    def __init__(self, models: Sequence[nn.Module], *, pass_weights: PassWeights | None = None) -> None:
        """`models`: see `models_with_causal_loss`. With `pass_weights`, heads are deferred in passes without a graph,
        else in forwards that a backward may follow."""
        self._models = models
        self._pass_weights = pass_weights
        self._replaced = ReplacedForwards(self._deferring)
        self._samples: dict[Any, torch.Tensor] = {}
        """Logits without tokens, by head and dtypes."""
        self._read_logged = False

    @contextmanager
    def deferred(self, call: Mapping[str, Any]) -> Iterator[None]:
        """Context of a training forward whose logits are deferred. `call`: its keywords. Without labels the model
        computes no loss, so the caller wants the logits."""
        with ExitStack() as stack:
            for head in self._heads() if call.get("labels") is not None else ():
                stack.callback(self._replaced.replace(head))
            yield

    def _heads(self) -> list[nn.Module]:
        found = [model.get_output_embeddings() for model in self._models]  # type: ignore[operator]
        return list(
            {id(head): head for head in found if isinstance(head, nn.Module) and self._can_defer(head)}.values()
        )

    def _can_defer(self, head: nn.Module) -> bool:
        # Values of logits that a hook keeps in a pass would not be seen to depend on the weights.
        is_kept = self._pass_weights is not None and _has_forward_hooks(head)
        return not is_kept and _can_defer(head)

    def _deferring(self, head: nn.Module, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def defer(*args: Any, **kwargs: Any) -> torch.Tensor:
            is_plain = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
            if not is_plain or torch.is_grad_enabled() is (self._pass_weights is not None):
                return forward(*args, **kwargs)
            return self._deferred(head, forward, args[0])

        return defer

    def _deferred(self, head: nn.Module, forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The logits of `hidden`, deferred if that saves memory."""
        sample = self._sample(head, forward, hidden)
        num_rows = max(1, HEAD_CHUNK_NUMEL // sample.shape[-1])
        if hidden.shape[:-1].numel() <= num_rows:
            return forward(hidden)
        use = None
        if self._pass_weights is not None:
            use = self._pass_weights.use_of(head, chunk_nbytes=num_rows * sample.shape[-1] * sample.itemsize)
            if use is None:
                return forward(hidden)
            hidden = hidden.detach()  # else Activations would take it for one that the model keeps
        call = _Head(head, forward, hidden, num_rows=num_rows, use=use, on_read=self._log_read)
        return DeferredLogits.of(call, hidden, sample) if call.saves_memory(sample) else forward(hidden)

    def _sample(self, head: nn.Module, forward: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Logits without tokens."""
        device = hidden.device.type
        has_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        autocast = torch.get_autocast_dtype(device) if has_autocast else None
        key = head, hidden.device, hidden.dtype, next((p.dtype for p in head.parameters()), None), autocast
        if key not in self._samples:
            with torch.no_grad(), autocast_of(device):  # without autocast's cache, whose copies have no graph
                self._samples[key] = forward(hidden.detach().reshape(-1, hidden.shape[-1])[:1])[:0].clone()
        return self._samples[key]

    def _log_read(self) -> None:
        if not self._read_logged:
            self._read_logged = True
            show(
                "ds_zo: outputs.logits are used outside of the model's loss, so the logits of all tokens are computed; "
                "the loss alone needs one chunk at a time"
            )


def _can_defer(head: nn.Module) -> bool:
    """Whether logits of some tokens do not depend on other tokens, on random numbers or on hooks."""
    if not has_class_forward(head) or head._backward_hooks or head._backward_pre_hooks:
        return False
    for m in head.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0:
            return False
        if m is not head and (_has_forward_hooks(m) or m._backward_hooks or m._backward_pre_hooks):
            return False
        if next(m.parameters(recurse=False), None) is not None and not isinstance(m, nn.Linear):
            return False
    return True


def _has_forward_hooks(module: nn.Module) -> bool:
    """Whether the user has hooks on the module."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(not isinstance(hook, Hook) for hook in hooks)
