"""Registered memory, as CUDA sees it."""

from __future__ import annotations

import gc

import deepspeed
import pytest
import torch

from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.slot import Slot
from ds_zo.streaming.streams import CudaStreams
from tests.helpers.tiny_models import tiny_batch, tiny_model

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


def test_uploads_through_the_ring_have_the_right_bytes_while_kernels_read_the_slots() -> None:
    """Blocks larger than the ring, of which each kernel sees the bytes of its own upload."""
    store = HostStore(CUDA, pin=True)
    first = store.take(NBYTES)
    assert not store._register(first)  # it is already, so later memory stays pageable
    sources = [store.take(10 * NBYTES) for _ in range(4)]
    assert store.pinned_nbytes == NBYTES and store._ring is not None
    for i, source in enumerate(sources):
        source.fill_(i + 1)
    streams = CudaStreams(CUDA)
    slots = [Slot(10 * NBYTES, streams) for _ in range(2)]
    sums = []
    for i in range(12):
        slot = slots[i % 2]
        streams.upload.wait(slot.drained)
        with streams.upload.issuing():
            store.upload(slot.buffer, sources[i % 4], slot.filled, stream=streams.upload)
        streams.compute.wait(slot.filled)
        sums.append(slot.buffer.sum())
        streams.compute.record(slot.drained)
    assert [int(s) for s in sums] == [10 * NBYTES * (i % 4 + 1) for i in range(12)]
    store.close()


@pytest.mark.usefixtures("single_process")
def test_training_from_pageable_memory_equals_training_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "ZO", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
        "ds_zo": {"stream": {"resident_blocks": 0, "writeback_interval": 2}},
    }
    runs = []
    for pins in (True, False):
        if not pins:
            monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *arguments: 2)
        engine = deepspeed.initialize(model=tiny_model("llama").train(), config=config)[0]
        store = engine.backend.store.blocks.store
        assert (store.pinned_nbytes == store.nbytes, store._ring is None) == (pins, pins)
        losses = []
        for seed in range(4):
            batch = {k: v.cuda() for k, v in tiny_batch("llama", seed=seed, batch_size=2, length=8).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
        engine.destroy()
    assert runs[0] == runs[1]
