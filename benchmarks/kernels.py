"""Speed of the fused operation on this machine's GPU: `python -m benchmarks.kernels` prints one JSON line a case."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ds_zo import ops
from ds_zo.bench.measure import link_gbps, start_device

NUM_WARMUPS, NUM_TIMED = 5, 30
MATRIX_COLUMNS = 4096
FLUSH_BYTES = 256 << 20
"""Written between timings, so that no case finds its tensors in the L2 cache."""


def cases(numel: int) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, call, bytes that it must move) for flats of one segment."""
    device = "cuda"
    table = ops.build_table([ops.Segment(start=0, numel=numel, offset=0)], device)
    odd_table = ops.build_table([ops.Segment(start=0, numel=numel, offset=1)], device)
    log = torch.ones(8, 3, device=device)
    log[:, 2] = 1e-6
    gaussian = ops.Noise(seed=1, step=3)
    signs = ops.Noise(seed=1, step=3, distribution="rademacher")
    one, eight = (ops.Pending(log, first_entry=0, num_entries=num_entries) for num_entries in (1, 8))

    def call(
        source: ops.Planes,
        pending: ops.Pending | None = None,
        *,
        to: ops.Planes | None = None,
        fold: bool = False,
        out: torch.Tensor | None = None,
        noise: ops.Noise = gaussian,
        table: ops.SegmentTable = table,
    ) -> Callable[[], object]:
        store = None if to is None else ops.Store(to, fold=fold)
        copies = None if out is None else ops.Copies(out, scale=1e-3)
        return partial(
            ops.replay_perturb, source, table=table, noise=noise, pending=pending, store=store, copies=copies
        )

    values = torch.full((numel,), 0.02, dtype=torch.bfloat16, device=device)
    theta, slot, out = ops.Planes(values), ops.Planes(torch.empty_like(values)), torch.empty_like(values)
    yield "bf16 replay 1 + perturb 1", call(theta, one, to=slot, out=out), 6 * numel
    yield "bf16 replay 8 + perturb 1", call(theta, eight, to=slot, out=out), 6 * numel
    yield "bf16 perturb", call(theta, out=out), 4 * numel
    yield "bf16 fold 1", call(theta, one, to=theta, fold=True), 4 * numel
    yield "bf16 fold 1 + perturb 1", call(theta, one, to=theta, fold=True, out=out), 6 * numel
    yield "bf16 replay 1 + perturb 1, odd offset", call(theta, one, to=slot, out=out, table=odd_table), 6 * numel
    yield "bf16 replay 1 + perturb 1, rademacher", call(theta, one, to=slot, out=out, noise=signs), 6 * numel
    yield "bf16 perturb, rademacher", call(theta, out=out, noise=signs), 4 * numel
    matrix = ops.Matrix(0, numel // MATRIX_COLUMNS, MATRIX_COLUMNS)
    segment = ops.Segment(start=0, numel=matrix.num_rows * matrix.num_columns, offset=0, matrix=matrix)
    of_matrix = ops.build_table([segment], device, factor_dtype=torch.bfloat16)
    rank1 = ops.Noise(seed=1, step=3, distribution="rank1")
    for members in (32, 1024):
        pending = ops.Pending(torch.full((1, 2 + members), 1e-6, device=device), 0, 1, members)
        update = call(theta, pending, to=theta, fold=True, noise=rank1, table=of_matrix)
        yield f"bf16 fold 1, rank1, {members} members", update, 4 * numel
    yield "torch.randn_like bf16 and add_", lambda: values.add_(torch.randn_like(values), alpha=1e-6), 10 * numel
    split = ops.Planes(values, low=torch.zeros(numel, dtype=torch.int16, device=device))
    yield "bf16 split fold 1", call(split, one, to=split, fold=True), 8 * numel
    yield "bf16 copy", partial(slot.storage.copy_, values), 4 * numel

    scales = torch.zeros(-(-numel // 256), dtype=torch.int8, device=device)
    theta = ops.Planes(values.to(torch.float8_e4m3fn), scales)
    slot = _like(theta)
    yield "fp8 replay 1 + perturb 1", call(theta, one, to=slot, out=out), 4 * numel
    yield "fp8 perturb", call(theta, out=out), 3 * numel

    codes, words = _bf12(values[:256], numel)
    theta = ops.Planes(codes, words)
    slot = _like(theta)
    packed = codes.numel() + 4 * words.numel()
    yield "bf12 replay 1 + perturb 1", call(theta, one, to=slot, out=out), 2 * packed + 2 * numel
    yield "bf12 replay 8 + perturb 1", call(theta, eight, to=slot, out=out), 2 * packed + 2 * numel
    yield "bf12 perturb", call(theta, out=out), packed + 2 * numel
    yield "bf12 fold 1 + perturb 1", call(theta, one, to=theta, fold=True, out=out), 2 * packed + 2 * numel

    four_bits = torch.randint(0, 256, (numel // 2,), dtype=torch.uint8, device=device)
    absmax = torch.ones(numel // 64, device=device)
    yield "nf4 dequantise", partial(ops.dequantise_nf4_, out, four_bits, absmax), 2 * numel + numel // 2 + numel // 16
    rows = torch.zeros(ops.NF4_NESTED.num_scales(numel), dtype=torch.uint8, device=device)
    yield (
        "nf4_nested dequantise",
        partial(ops.dequantise_nf4_, out, four_bits, rows),
        2 * numel + numel // 2 + len(rows),
    )
    powers = torch.full((numel // 32,), 120, dtype=torch.uint8, device=device)
    experts = out[: numel // 2**20 * 2**20].view(-1, 1024, 1024)
    planes = four_bits[: experts.numel() // 2], powers[: experts.numel() // 32]
    yield (
        "mxfp4 dequantise",
        partial(ops.dequantise_mxfp4_, experts, *planes),
        2 * experts.numel() + planes[0].numel() + planes[1].numel(),
    )

    master, copy = ops.Planes(values.float()), torch.empty(numel, device=device)
    yield "fp32 fold 1 + perturb 1", call(master, one, to=master, fold=True, out=copy), 12 * numel
    yield "torch.normal_ fp32", copy.normal_, 4 * numel


def _like(planes: ops.Planes) -> ops.Planes:
    scales = None if planes.scales is None else torch.empty_like(planes.scales)
    return ops.Planes(torch.empty_like(planes.storage), scales)


def _bf12(group: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a flat that repeats one group of 256 values."""
    fmt = ops.storage_format(torch.uint8)
    codes = torch.empty(256, dtype=fmt.dtype, device=group.device)
    scales = torch.empty(fmt.scale_numel, dtype=fmt.scale_dtype, device=group.device)
    ops.encode_(codes, group.float(), scales=scales)
    num_groups = -(-numel // 256)
    return codes.repeat(num_groups)[:numel], scales.repeat(num_groups)


def median_ms(call: Callable[[], object]) -> tuple[float, float, float]:
    """(median, fastest, slowest) of NUM_TIMED runs by CUDA events."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(NUM_WARMUPS):
        call()
    times = []
    for _ in range(NUM_TIMED):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def measured(numel: int) -> Iterator[dict[str, Any]]:
    """A row a case."""
    for name, call, num_bytes in cases(numel):
        median, fastest, slowest = median_ms(call)
        yield {
            "case": name,
            "numel": numel,
            "median_ms": round(median, 4),
            "fastest_ms": round(fastest, 4),
            "slowest_ms": round(slowest, 4),
            "gparameters_per_s": round(numel / median / 1e6, 1),
            "gbytes_per_s": round(num_bytes / median / 1e6, 1),
        }


def machine(*, numel: int = 200_000_000, device: str = "cuda") -> dict[str, Any]:
    """What the speed rows of the same run rest on: the link both ways, and the fused kernels' rates."""
    where = start_device(device)
    found = list(measured(numel))
    return {
        "method": "machine",
        "link_gbps": link_gbps(where),
        "kernel_gparameters_per_s": {row["case"]: row["gparameters_per_s"] for row in found},
        "kernels": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=200_000_000, help="elements of the flat tensor")
    numel = parser.parse_args().numel
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels times CUDA kernels and found no CUDA device: run it on a GPU machine")
    for row in measured(numel):
        print(json.dumps(row | {"gpu": torch.cuda.get_device_name()}), flush=True)


if __name__ == "__main__":
    main()
