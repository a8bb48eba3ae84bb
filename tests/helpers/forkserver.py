"""The process from which ranks and other clean processes are forked. It has their imports and no threads."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = [
    *("ds_zo.backends.zo.backend", "ds_zo.backends.lomo.adalomo", "ds_zo.backends.lsp.backend", "ds_zo.bench.runner"),
    *("pytest", "transformers.models.llama.modeling_llama"),
    # What DeepSpeed imports when it makes an engine.
    *("deepspeed.module_inject.auto_ep_config", "deepspeed.module_inject.auto_ep_layer"),
    "tests.helpers.frozen_heap",
]


def forkserver_context() -> ForkServerContext:
    """One list for all users: a process has one such server, and the list of the first use counts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
