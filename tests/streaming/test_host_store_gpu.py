"""Registered memory, as CUDA sees it."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_zo.streaming.host_store import HostStore

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NBYTES = 64 * 2**20


def test_a_store_that_nobody_closed_leaves_no_memory_registered() -> None:
    """Whoever gets that memory next can register it, and copy across what was registered."""
    for _ in range(4):
        store = HostStore(CUDA, pin=True)
        buffers = [store.take(NBYTES + i) for i in range(4)]
        assert store.pinned_nbytes == store.nbytes
        there = [buffer.to(CUDA, non_blocking=True) for buffer in buffers]
        del store, buffers
        gc.collect()
        plain = torch.ones(5 * NBYTES, dtype=torch.uint8)
        assert int(plain.to(CUDA).sum()) == plain.numel() and len(there) == 4
        del plain


def test_memory_that_cannot_be_registered_stays_pageable_and_no_kernel_is_blamed() -> None:
    store = HostStore(CUDA, pin=True)
    buffer = store.take(NBYTES)
    assert not store._register(buffer)  # it is already
    assert int(torch.ones(8, device=CUDA).sum()) == 8
    later = store.take(NBYTES)
    assert store.pinned_nbytes == NBYTES
    assert int(later.fill_(1).to(CUDA).sum()) == NBYTES
    store.close()
