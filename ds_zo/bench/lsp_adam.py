"""Adam on the CPU, ours beside DeepSpeed's kernel: for a block of whole bf16 matrices, over whole tensors and in chunks
of several sizes; and for a layer's d x d matrices in float32.

python -m ds_zo.bench.lsp_adam --threads 1 2 8 14

DeepSpeed's kernel is given zeros and a rate of -1, as ours is, and neither norms nor clipping, which ours has besides.
See [Note: Adam in chunks] and [Note: few torch calls] in `optim/subspace_adam`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from ds_zo.optim.subspace_adam import FlatMoments, Moments, clip_, directions_, flat_directions_, host_directions_

_BETAS, _EPS = (0.9, 0.999), 1e-8


class DeepSpeedAdam:
    """The kernel of `DeepSpeedCPUAdam`, a call for each tensor. Built where it is first asked for."""

    def __init__(self) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        self._optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])

    def __call__(self, out: list[torch.Tensor], grads: list[torch.Tensor], moments: list[Moments]) -> None:
        optimizer = self._optimizer
        for direction, grad, m in zip(out, grads, moments, strict=True):
            direction.zero_()
            settings = (optimizer.opt_id, 1, -1.0, *_BETAS, _EPS, 0.0, True)
            optimizer.ds_opt_adam.adam_update(*settings, direction, grad, m.mean, m.mean_square)


class Layer:
    """Seven 512 x 512 matrices, one behind the other: 1.8 M parameters."""

    def __init__(self) -> None:
        side, num = 512, 7
        self.numel = num * side * side

        def view(i: int, flat: torch.Tensor) -> torch.Tensor:
            return flat[i * side * side : (i + 1) * side * side].view(side, side)

        self._grad, self._out = torch.randn(self.numel).mul_(1e-5), torch.zeros(self.numel)
        self._moments = FlatMoments.zeros(self.numel, num, view)
        self._outs, self._grads = ([view(i, flat) for i in range(num)] for flat in (self._out, self._grad))

    def flat(self) -> None:
        parts = self._outs, self._grads
        flat_directions_(self._out, self._grad, self._moments, parts=parts, max_norm=1.0, betas=_BETAS, eps=_EPS)

    def by(self, adam: DeepSpeedAdam) -> None:
        adam(self._outs, self._grads, self._moments.parts)


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

    def by(self, adam: DeepSpeedAdam) -> None:
        adam(self._out, self._grads, self._moments)

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
    block, layer = Block(), Layer()
    ways: dict[str, Callable[[], object]] = {"whole": block.whole}
    for power in (16, 17, 18, 19):
        ways[f"2^{power} a thread"] = block.chunked(threads << power)
    flat: dict[str, Callable[[], object]] = {"flat": layer.flat}
    try:
        adam = DeepSpeedAdam()
    except Exception as error:  # no compiler: its absence is a line of the report
        print(f"DeepSpeed's kernel was not built: {error}")
    else:
        ways["DeepSpeed's"], flat["DeepSpeed's"] = partial(block.by, adam), partial(layer.by, adam)
    whole, small = _best(ways, block.numel, repeats=repeats), _best(flat, layer.numel, repeats=repeats)
    return f"{threads} threads, the best of {repeats}: {whole}; seven 512 x 512: {small}"


def _best(ways: dict[str, Callable[[], object]], numel: int, *, repeats: int) -> str:
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, work in ways.items():
            begin = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - begin)
    return ", ".join(f"{name} {1e3 * s:.1f} ms ({numel / s / 1e9:.2f} G/s)" for name, s in best.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    for threads in options.threads:
        print(measure(threads, repeats=options.repeats))


if __name__ == "__main__":
    main()
