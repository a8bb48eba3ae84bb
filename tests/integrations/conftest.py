"""Accelerate and transformers keep process-wide state; each test starts without it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def fresh_libraries(single_process: None) -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def forget() -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()
        unset_hf_deepspeed_config()

    before = dict(os.environ)
    forget()
    yield
    forget()
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
