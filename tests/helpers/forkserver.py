"""The process from which ranks and other clean processes are forked. It has their imports and no threads."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

from tests.helpers.warm_interpreter import ADDRESS

PRELOAD = [
    *("ds_zo.backends.zo.backend", "ds_zo.backends.lomo.adalomo", "ds_zo.backends.lsp.backend", "ds_zo.bench.runner"),
    *("pytest", "transformers.models.llama.modeling_llama"),
]
IMPORTED_BY_ENGINES = ["deepspeed.module_inject.auto_ep_config", "deepspeed.module_inject.auto_ep_layer"]
"""DeepSpeed imports them when it makes an engine. They look for a GPU, which a process that is forked from may not."""


def forkserver_context() -> ForkServerContext:
    """One list for all users: a process has one such server, and the list of the first use counts."""
    context = multiprocessing.get_context("forkserver")
    more = [] if torch.cuda.is_available() else IMPORTED_BY_ENGINES
    context.set_forkserver_preload([*PRELOAD, *more, "tests.helpers.frozen_heap"])
    if ADDRESS in os.environ:  # the server is then a fork itself, and imports the rest
        context.set_executable(str(Path(os.environ[ADDRESS]).with_name("python")))
    return context
