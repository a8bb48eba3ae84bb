"""Speed of the projectors' products on this machine's GPU: `python -m ds_zo.bench.projector_kernels` prints JSON lines.

A row a shape of LLaMA-1.3B and operation, each timed with a cold L2; rows `model` for all of its matrices, layer by
layer as a step runs them and one by one (`host_ms` is what launching them took: where it exceeds `median_ms`, launches
are the limit). `--tune` tries other tilings instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_zo.bench.kernels import median_ms
from ds_zo.projectors import (
    Application,
    Compression,
    SparseProjector,
    apply_,
    apply_all_,
    choose_dims,
    compress,
    compress_all,
    relative_bias,
)

NUM_LAYERS = 24
SHAPES = {(2048, 2048): 4 * NUM_LAYERS, (5504, 2048): 2 * NUM_LAYERS, (2048, 5504): NUM_LAYERS, (32000, 2048): 2}
"""Weights of LLaMA-1.3B (24 layers; embedding and head) and how many there are of each."""
DIMS, NONZEROS = (256, 512, 1024, 2048), (4, 16)
MODEL_REPEATS = 5

TILINGS: dict[str, dict[str, tuple[int, ...]]] = {
    "compress": {
        "MAX_GATHER_ROWS": (8, 16, 32),
        "GATHER_COLUMNS": (64, 128, 256),
        "GATHER_ELEMENTS_PER_WARP": (256, 512),
    },
    "apply": {
        "SLAB_COLUMNS": (32, 64, 128, 256),
        "SLAB_ROWS": (16, 32, 64),
        "PROGRAMS_PER_MULTIPROCESSOR": (1, 2, 4),
    },
}
"""Constants of `ops.triton_projectors` that decide speed alone, and what `--tune` sets them to."""

Pair = tuple[SparseProjector, SparseProjector]


def draw(shape: tuple[int, int], dim: int, nonzeros: int) -> Pair | None:
    """Projectors of a weight, None where it would be updated densely."""
    dims = choose_dims(*shape, dim)
    if dims is None:
        return None
    P, Q = (
        SparseProjector.draw(rows, d, nonzeros, seed=0, stream=i, device="cuda")
        for i, (rows, d) in enumerate(zip(shape, dims, strict=True))
    )
    return P, Q


def operations(shape: tuple[int, int], projectors: Pair) -> Iterator[tuple[str, Callable[[], object], int]]:
    """(name, call, bytes that it must move)."""
    P, Q = projectors
    W = torch.full(shape, 0.02, dtype=torch.bfloat16, device="cuda")
    G = torch.randn(shape, device="cuda").bfloat16()
    S = torch.empty(P.dim, Q.dim, device="cuda")
    D = torch.randn(P.dim, Q.dim, device="cuda")
    G_bytes, S_bytes = G.numel() * 2, S.numel() * 4
    yield "compress", lambda: compress(G, P, Q, out=S), G_bytes + S_bytes
    yield "apply", lambda: apply_(W, D, P, Q, lr=1e-4, seed=0, step=1, offset=1024), 2 * G_bytes + S_bytes
    dense_P, dense_Q = (x.dense().bfloat16() for x in projectors)
    yield "compress by dense projectors", lambda: dense_P.t() @ (G @ dense_Q), G_bytes + S_bytes
    yield "copy", lambda: W.copy_(G), 2 * G_bytes


def shape_rows(dim: int, nonzeros: int) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        projectors = draw(shape, dim, nonzeros)
        if projectors is None:
            continue
        bias = float(relative_bias(torch.randn(shape, device="cuda"), *projectors))
        for name, call, num_bytes in operations(shape, projectors):
            median, fastest, slowest = median_ms(call)
            yield {
                "case": name,
                "shape": shape,
                "dim": projectors[0].dim,
                "nonzeros": nonzeros,
                "median_ms": round(median, 4),
                "fastest_ms": round(fastest, 4),
                "slowest_ms": round(slowest, 4),
                "gbytes_per_s": round(num_bytes / median / 1e6, 1),
                "bias_as_drawn": round(bias, 2),
            }


def model_rows(dim: int, nonzeros: int, weights: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    drawn = {shape: draw(shape, dim, nonzeros) for shape in SHAPES}
    projected = [(W, pair) for W in weights if (pair := drawn[W.shape[0], W.shape[1]]) is not None]
    subspace = {shape: torch.zeros(pair[0].dim, pair[1].dim, device="cuda") for shape, pair in drawn.items() if pair}

    by_layer = [projected[first::NUM_LAYERS] for first in range(NUM_LAYERS)]

    def compress_each() -> None:
        for W, (P, Q) in projected:
            compress(W, P, Q, out=subspace[W.shape[0], W.shape[1]].t())

    def apply_each() -> None:
        for i, (W, (P, Q)) in enumerate(projected):
            apply_(W, subspace[W.shape[0], W.shape[1]].t(), P, Q, lr=1e-4, seed=0, step=1, offset=i << 30)

    def compress_layers() -> None:
        for layer in by_layer:
            compress_all([Compression(W, P, Q, subspace[W.shape[0], W.shape[1]].t()) for W, (P, Q) in layer])

    def apply_layers() -> None:
        for layer in by_layer:
            apply_all_([Application(W, subspace[W.shape[0], W.shape[1]].t(), P, Q, 1e-4) for W, (P, Q) in layer])

    numel = sum(W.numel() for W, _ in projected)
    for name, call, num_bytes in (
        ("compress one by one", compress_each, 2 * numel),
        ("compress", compress_layers, 2 * numel),
        ("apply one by one", apply_each, 4 * numel),
        ("apply", apply_layers, 4 * numel),
    ):
        call()
        torch.cuda.synchronize()
        times, host_times = [], []
        for _ in range(MODEL_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            start = time.perf_counter()
            call()
            host_times.append((time.perf_counter() - start) * 1e3)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        median = sorted(times)[MODEL_REPEATS // 2]
        yield {
            "case": f"model {name}",
            "dim": dim,
            "nonzeros": nonzeros,
            "num_matrices": len(projected),
            "median_ms": round(median, 3),
            "host_ms": round(sorted(host_times)[MODEL_REPEATS // 2], 3),
            "gbytes_per_s": round(num_bytes / median / 1e6, 1),
        }


def tuning_rows(dim: int, nonzeros: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of each tiling for the layers' three shapes together, weighted by how many there are of each."""
    from ds_zo.ops import triton_projectors

    shapes = [shape for shape, count in SHAPES.items() if count > 2]
    pairs = {shape: pair for shape in shapes if (pair := draw(shape, dim, nonzeros)) is not None}
    for case, choices in TILINGS.items():
        defaults = {name: getattr(triton_projectors, name) for name in choices}
        for values in itertools.product(*choices.values()):
            tiling = dict(zip(choices, values, strict=True))
            if case == "apply" and not 512 <= tiling["SLAB_ROWS"] * tiling["SLAB_COLUMNS"] <= 8192:
                continue
            for name, value in tiling.items():
                setattr(triton_projectors, name, value)
            total = 0.0
            for shape, pair in pairs.items():
                call = next(call for name, call, _ in operations(shape, pair) if name == case)
                total += median_ms(call)[0] * SHAPES[shape]
            yield {"case": f"tune {case}", "dim": dim, "nonzeros": nonzeros, **tiling, "model_ms": round(total, 3)}
        for name, value in defaults.items():
            setattr(triton_projectors, name, value)


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    weights: list[torch.Tensor] = []
    if not arguments.tune:
        for shape, count in SHAPES.items():
            weights += [torch.full(shape, 0.02, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    for dim, nonzeros in itertools.product(arguments.dims, arguments.nonzeros):
        if arguments.tune:
            yield from tuning_rows(dim, nonzeros)
        else:
            yield from shape_rows(dim, nonzeros)
            yield from model_rows(dim, nonzeros, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS, help="subspace dimensions")
    parser.add_argument("--nonzeros", type=int, nargs="+", default=NONZEROS, help="non-zeros of a projector's row")
    parser.add_argument("--tune", action="store_true", help="time other tilings, for these dimensions")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("ds_zo.bench.projector_kernels times CUDA kernels and found no CUDA device: use a GPU machine")
    for row in rows(arguments):
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **row}), flush=True)


if __name__ == "__main__":
    main()
