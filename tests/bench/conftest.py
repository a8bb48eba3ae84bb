"""A machine to plan for."""

from __future__ import annotations

import pytest

from ds_zo.bench import measure


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host of 128 GiB with one H200, as far as a plan asks; what is changed further is undone too."""
    monkeypatch.setattr(measure, "gpu_memory_gb", lambda: 150.75)
    monkeypatch.setattr(measure, "host_total_bytes", lambda: 128 * 2**30)
    monkeypatch.setattr(measure, "may_lock_memory", lambda: True)
    return monkeypatch
