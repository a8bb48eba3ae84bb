"""torch.compile of single blocks: one compiled graph for all blocks of a class. Modules outside of blocks run eagerly.

In an eager block the operations between matrix products (norms, rotary positions, gates, residual sums) run as many
memory-bound kernels; torch.compile fuses them into a few. Results are equal up to rounding, not bit for bit. A compiled
block's backward returns the gradients of all its parameters together. So the gradients of one block are alive at a
time, where an eager backward has those of one parameter.

[Note: run backward twice] By default the backward of compiled code may overwrite tensors that its forward has saved,
and then cannot run twice. torch's setting `donated_buffer` permits this. Code that was compiled with the setting and
without it must be kept apart in three places. In a process, dynamo finds compiled code by its backend function, so
there are two backend functions. On disk (torch 2.13) the cache key does not include the setting, so a tag is added to
the key. When the backward runs, the setting is read again, and a patched value is not visible in autograd's threads for
GPUs. So such a backward runs in the thread that called it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
    """Compiles blocks when the first one runs in training. If the compiler fails, blocks run eagerly."""

    def __init__(self, *, backward_twice: bool = False) -> None:
        """`backward_twice`: the same graph may be run backward twice. See [Note: run backward twice]."""
        self._backend = _compile_to_run_backward_twice if backward_twice else _compile
        self._functions: dict[Any, Callable[..., Any]] = {}
        self.failure: str | None = None
        """The compiler's error, after which blocks run eagerly. None: it has not failed."""
        self._installed: list[tuple[nn.Module, _CallWithHooks]] = []

    def install(self, blocks: Iterable[nn.Module]) -> None:
        """Sets `_compiled_call_impl` of each block, which `nn.Module.__call__` uses, and which copies and pickles of a
        module leave out. A block that the user has compiled is left alone."""
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
        """Calls a bound method by its compiled function. Blocks of one class share the function, so that it is compiled
        once."""
        if self.failure is not None:
            return method(*args, **kwargs)
        function, is_first = getattr(method, "__func__", method), not self._functions
        if function not in self._functions:
            self._functions[function] = torch.compile(function, backend=self._backend)
        bound = (method.__self__,) if hasattr(method, "__self__") else ()
        try:
            with _first_compilation() if is_first else nullcontext(), unwatched():
                return self._functions[function](*bound, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            why = str(error).split("\n\n")[0]
            self.failure = f"{type(error).__name__}: {' '.join(why.split())}"
            logger.warning(
                f"ds_zo: blocks could not be compiled and run without torch.compile ({self.failure}); remove "
                "ds_zo.compile_blocks to avoid the attempt"
            )
        return method(*args, **kwargs)


class CompiledForward:
    """A replacement of a block's `forward`, compiled in training. Calls in evaluation run eagerly. So do calls that
    fill a key-value cache: they depend on the block's index, and would be compiled once for every block."""

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
    """A replacement of a block's `__call__`. Only `forward` is compiled; the block's hooks run eagerly."""

    def __init__(self, compiler: BlockCompiler, block: nn.Module) -> None:
        self._compiler = compiler
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        if torch.compiler.is_compiling():  # the user compiles the whole model
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


@contextmanager
def _first_compilation() -> Iterator[None]:
    """Context of the first compiled call. Logs its start and its duration."""
    show("ds_zo: compiling blocks: the first step may take a minute longer (ds_zo.compile_blocks)")
    start = time.perf_counter()
    yield
    show(f"ds_zo: the first block was compiled and run in {time.perf_counter() - start:.1f} s")


def _compile(graph: Any, inputs: list[torch.Tensor], **options: Any) -> Any:
    """The torch.compile backend. It compiles the backward together with the forward: if the compiler fails, it must
    fail in the forward, where a block can still run eagerly."""
    at_once = {name: True for name in ("force_non_lazy_backward_lowering",) if hasattr(functorch_config, name)}
    with functorch_config.patch(at_once):
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs, **options)


def _compile_to_run_backward_twice(graph: Any, inputs: list[torch.Tensor], **options: Any) -> Any:
    """The torch.compile backend for code whose backward runs twice. See [Note: run backward twice]."""
    with _nothing_donated():
        return _compile(graph, inputs, **options)


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """Context in which a compiled backward does not overwrite saved tensors."""
    tag = f"{compiler_config.cache_key_tag} nothing donated"
    with functorch_config.patch(donated_buffer=False), compiler_config.patch(cache_key_tag=tag):
        yield


@contextmanager
def run_backward_twice() -> Iterator[None]:
    """Context of forwards and backwards of code that may be compiled. See [Note: run backward twice]."""
    with _nothing_donated(), torch.autograd.set_multithreading_enabled(False):
        yield


def is_compiled(module: nn.Module) -> bool:
    """Whether any submodule is compiled, by `BlockCompiler` or by the user."""
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in module.modules())


def is_compiled_by_user(module: nn.Module) -> bool:
    """Whether the user has compiled the module or a submodule."""
    calls = (m._compiled_call_impl for m in module.modules() if not isinstance(m._compiled_call_impl, _CallWithHooks))
    return any(call is not None for call in calls) or any("_orig_mod" in m._modules for m in module.modules())
