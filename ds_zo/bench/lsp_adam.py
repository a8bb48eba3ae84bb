"""Adam on the CPU for a block of whole bf16 matrices: over whole tensors, and in chunks of several sizes.

python -m ds_zo.bench.lsp_adam --threads 1 2 8 14

See [Note: once through memory] in `optim/subspace_adam`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from ds_zo.optim.subspace_adam import Moments, clip_, directions_, host_directions_

_BETAS, _EPS = (0.9, 0.999), 1e-8


class Block:
    """A LLaMA-1.3B block's four square and three wide matrices, and one more: 64 M parameters."""

    def __init__(self) -> None:
        self.shapes = [(2048, 2048)] * 4 + [(2048, 5632)] * 3 + [(2048, 6400)]
        self.numel = sum(m * n for m, n in self.shapes)
        self._grads = [torch.randn(shape).mul_(1e-5).bfloat16() for shape in self.shapes]
        self._out = [torch.zeros_like(grad) for grad in self._grads]
        self._moments = [Moments.zeros(shape, "cpu") for shape in self.shapes]
        self._wide = [[torch.zeros(shape) for shape in self.shapes] for _ in range(2)]

    def whole(self) -> None:
        wide, directions = self._wide
        for target, grad in zip(wide, self._grads, strict=True):
            target.copy_(grad)
        directions_(directions, wide, self._moments, norms=clip_(wide, 1.0), betas=_BETAS, eps=_EPS)
        for target, direction in zip(self._out, directions, strict=True):
            target.copy_(direction)

    def chunked(self, chunk_numel: int) -> Callable[[], object]:
        scratch = torch.empty(2, chunk_numel)
        return lambda: host_directions_(
            self._out,
            self._grads,
            self._moments,
            max_norm=1.0,
            betas=_BETAS,
            eps=_EPS,
            scratch=lambda: scratch,
        )


def measure(threads: int, *, repeats: int) -> str:
    torch.set_num_threads(threads)
    block = Block()
    ways: dict[str, Callable[[], object]] = {"whole": block.whole}
    for power in (16, 17, 18, 19):
        ways[f"2^{power} a thread"] = block.chunked(threads << power)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, work in ways.items():
            begin = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - begin)
    found = ", ".join(f"{name} {1e3 * s:.1f} ms ({block.numel / s / 1e9:.2f} G/s)" for name, s in best.items())
    return f"{threads} threads, the best of {repeats}: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    for threads in options.threads:
        print(measure(threads, repeats=options.repeats))


if __name__ == "__main__":
    main()
