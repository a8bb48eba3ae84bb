"""Blocks compiled by torch, each by itself: one graph for all blocks of a kind, whatever stands around them as it was.

What runs between matrix products in a block (norms, rotary positions, gates, residual sums) are many kernels that only
read and write memory; compiled, they are a few. Results are equal to rounding, not in bits. A block's backward becomes
one piece of code, which hands over the gradients of all its parameters together: those of one block are alive at a
time, in place of one parameter's.

[Note: run backward twice] Compiled code may let its backward overwrite what its forward saved, and is not to be
retained then. torch's `donated_buffer` says whether it may. Three things have to keep apart what was compiled with it
and without: in a process, code is found again by the backend it was compiled with, so there are two; on disk (torch
2.13) it is found by a key that knows nothing of this setting, so the key gets a tag; and the setting is read once more
when the backward runs, where a patched value does not reach the threads that autograd has for GPUs, so the thread that
asks for such a backward runs it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.utils import logger
from torch import nn
from torch._functorch import config as functorch_config

from ds_zo.backends.common.stray_weights import unwatched
from ds_zo.logs import show

BACKEND = "inductor"
compiler_config: Any = importlib.import_module("torch.compiler.config")


class BlockCompiler:
    """Compiles when the first block runs in training. Where the compiler fails, blocks run as they are."""

    def __init__(self, *, backward_twice: bool = False) -> None:
        """`backward_twice`: [Note: run backward twice]."""
        self._backend = _compile_to_run_backward_twice if backward_twice else _compile
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._started = False
        self.failure: str | None = None
        """Why blocks run as they are."""
        self._installed: list[tuple[nn.Module, _CallWithHooks]] = []

    def install(self, blocks: Iterable[nn.Module]) -> None:
        """Where torch looks for a module's compiled form, and copies and pickles do not. A user's own stays."""
        for block in blocks:
            if block._compiled_call_impl is None or isinstance(block._compiled_call_impl, _CallWithHooks):
                block._compiled_call_impl = call = _CallWithHooks(self, block)
                self._installed.append((block, call))

    def close(self) -> None:
        for block, call in self._installed:
            if block._compiled_call_impl is call:
                block._compiled_call_impl = None
        self._installed = []

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same method of many blocks is one function, compiled once."""
        if self.failure is not None:
            return method(*args, **kwargs)
        function = getattr(method, "__func__", method)
        if function not in self._functions:
            self._functions[function] = torch.compile(function, backend=self._backend)
        bound = (method.__self__,) if hasattr(method, "__self__") else ()
        try:
            with self._announced(), unwatched():
                return self._functions[function](*bound, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = str(error).split("\n\n")[0]
            self.failure = f"{type(error).__name__}: {' '.join(why.split())}"
            logger.warning(
                f"ds_zo: blocks could not be compiled and run as they are ({self.failure}); leave out "
                "ds_zo.compile_blocks to spare the attempt"
            )
        return method(*args, **kwargs)

    @contextmanager
    def _announced(self) -> Iterator[None]:
        if self._started:
            yield
            return
        self._started = True
        show("ds_zo: compiling blocks: the first step may take a minute longer (ds_zo.compile_blocks)")
        start = time.perf_counter()
        yield
        show(f"ds_zo: the first block was compiled and run in {time.perf_counter() - start:.1f} s")


class CompiledForward:
    """Stands for a block's `forward`, and leaves alone what is not a training pass or would be compiled anew for every
    block: calls that fill a cache go by the block's number."""

    def __init__(self, compiler: BlockCompiler, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._compiler = compiler
        self._block = block
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fills_cache = any(hasattr(v, "get_seq_length") for v in (*args, *kwargs.values()))
        if not self._block.training or fills_cache:
            return self._forward(*args, **kwargs)
        return self._compiler.run(self._forward, *args, **kwargs)


class _CallWithHooks:
    """A call of a block: its hooks run as they are, only `forward` between them is compiled."""

    def __init__(self, compiler: BlockCompiler, block: nn.Module) -> None:
        self._compiler = compiler
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        if torch.compiler.is_compiling():  # by a user, and everything at once
            return block._call_impl(*args, **kwargs)
        own = block.__dict__.get("forward")
        object.__setattr__(block, "forward", CompiledForward(self._compiler, block, block.forward))
        try:
            return block._call_impl(*args, **kwargs)
        finally:
            if own is None:
                object.__delattr__(block, "forward")
            else:
                object.__setattr__(block, "forward", own)


def _compile(graph: Any, inputs: list[torch.Tensor], **options: Any) -> Any:
    """The backward at once too: a compiler that fails has to do so in the forward, where blocks can still run as they
    are."""
    at_once = {name: True for name in ("force_non_lazy_backward_lowering",) if hasattr(functorch_config, name)}
    with functorch_config.patch(at_once):
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs, **options)


def _compile_to_run_backward_twice(graph: Any, inputs: list[torch.Tensor], **options: Any) -> Any:
    with _nothing_donated():
        return _compile(graph, inputs, **options)


@contextmanager
def _nothing_donated() -> Iterator[None]:
    tag = f"{compiler_config.cache_key_tag} nothing donated"
    with functorch_config.patch(donated_buffer=False), compiler_config.patch(cache_key_tag=tag):
        yield


@contextmanager
def run_backward_twice() -> Iterator[None]:
    """Around forwards and backwards of code that may be compiled; see [Note: run backward twice]."""
    with _nothing_donated(), torch.autograd.set_multithreading_enabled(False):
        yield


def is_compiled(module: nn.Module) -> bool:
    """Any part of it, by us or by a user."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in module.modules())


def is_compiled_by_user(module: nn.Module) -> bool:
    calls = (m._compiled_call_impl for m in module.modules() if not isinstance(m._compiled_call_impl, _CallWithHooks))
    return any(call is not None for call in calls) or any("_orig_mod" in m._modules for m in module.modules())
