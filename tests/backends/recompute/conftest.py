"""What tests of recomputed blocks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without its C++ compiler, which takes a minute. Its counters start at zero."""
    import torch
    from torch._dynamo.utils import counters

    from ds_zo.backends.recompute import compiled_blocks

    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
