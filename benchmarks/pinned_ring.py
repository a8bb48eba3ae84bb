"""Speed of uploads from pageable memory on this machine's GPU, beside those from pinned memory.

`python -m benchmarks.pinned_ring` prints one JSON line a case: pinned, pageable (the driver's own staging), and the
pinned ring with several sizes of slices and numbers of threads. `--quick` measures the ring's defaults alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable

import torch

from ds_zo.records.environment import commit, versions
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.pinned_ring import (
    RING_NBYTES,
    SLICE_NBYTES,
    UploadEvent,
    attach_ring,
    close_ring,
    make_ring,
    upload_,
)

MIB = 2**20
NUM_TIMED = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--block-mib", type=int, default=512, help="bytes of one upload (default: %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=8, help="buffers that are uploaded in turn (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    device, nbytes = torch.device("cuda"), args.block_mib * MIB
    slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    sources = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8) for _ in range(args.blocks)]
    store = HostStore(device, pin=True)
    pinned = [store.take(nbytes) for _ in range(2)]
    fastest = _rate(slots, pinned)
    _show("pinned", fastest, fastest, store.pinned_nbytes == 2 * nbytes)
    store.close()
    _show("pageable", _rate(slots, sources), fastest, True)
    grid: list[tuple[int, int, int | None]] = [(RING_NBYTES, SLICE_NBYTES, None)]
    if not args.quick:
        grid += [(n * MIB, s * MIB, t) for n in (64, 256, 1024) for s in (8, 16, 32) if n > 2 * s for t in (4, 8, 12)]
    for ring_nbytes, slice_nbytes, num_copiers in grid:
        ring = make_ring(device, nbytes=ring_nbytes, slice_nbytes=slice_nbytes, num_copiers=num_copiers)
        assert ring is not None, "no memory can be pinned here"
        for source in sources:
            attach_ring(source, ring)
        name = f"ring of {ring.nbytes // MIB} MiB, slices of {slice_nbytes // MIB}, {num_copiers or 'default'} threads"
        rate = _rate(slots, sources)
        torch.cuda.synchronize()
        _show(name, rate, fastest, torch.equal(slots[0][:: 2**16].cpu(), sources[-2][:: 2**16]))
        close_ring(ring)


def _rate(slots: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    """Bytes a second of uploads of all sources in turn, into two slots."""
    events = [UploadEvent() for _ in slots]
    stream = torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            for i, source in enumerate(sources):
                upload_(slots[i % 2], source, events[i % 2])
                events[i % 2].record(stream)
        for event in events:
            event.synchronize()

    return sum(source.numel() for source in sources) / statistics.median(_seconds(run) for _ in range(NUM_TIMED))


def _seconds(run: Callable[[], None]) -> float:
    import time

    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _show(name: str, rate: float, fastest: float, is_right: bool) -> None:
    row = {"case": name, "gbps": round(rate / 1e9, 2), "of_pinned": round(rate / fastest, 3), "is_right": is_right}
    facts = {
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "commit": commit(),
    }
    print(json.dumps(row | facts), flush=True)


if __name__ == "__main__":
    main()
