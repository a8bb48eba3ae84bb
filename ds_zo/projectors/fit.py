"""Fitting projectors to a gradient, measuring what they capture, carrying matrices from one subspace to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from ds_zo.projectors.products import compress, product, relative_bias, transpose_product
from ds_zo.projectors.recording import GradientRecorder
from ds_zo.projectors.sparse import SparseProjector

CHECK_EVERY = 5
"""Steps of a fit between looks at its bias and the clock, each of which waits for the device."""
SLAB_COLUMNS = 256
"""Columns of a projector that its overlap with another makes dense at a time."""
TEMPORARY_NUMEL = 1 << 22
DENSE_FRACTION = 16
"""A matrix product makes an entry about this many times as fast as a dot product by elementwise operations."""
BETAS, EPS = (0.9, 0.99), 1e-12
NUM_FLATTENINGS = 6
"""Four to twelve were alike on memorising toys; with none, a fit hardly beats a random draw."""
MAX_RECORDED_NUMEL = 1 << 23
"""Of what a kernel of the fit writes, above which it takes longer than its launch."""


@dataclass(frozen=True)
class FitReport:
    """What a fit did to one matrix's projectors. Biases are relative to the gradient it was fitted on."""

    bias_before: float
    bias_after: float
    steps: int
    seconds: float
    reason: Literal["threshold", "steps", "timeout", "degenerate"]
    """Why it ended; `degenerate`: the gradient is zero or not finite, and nothing was changed."""


@torch.no_grad()
def fit(
    G_mn: torch.Tensor,
    P: SparseProjector,
    Q: SparseProjector,
    *,
    steps: int,
    lr: float,
    beta: float = 0.0,
    threshold: float = 0.0,
    timeout_s: float = float("inf"),
    recorder: GradientRecorder | None = None,
) -> FitReport:
    """Change the values of P and Q (not their positions) to minimise, by Adam,

        ||P P^T G Q Q^T - G||_F / ||G||_F  +  beta (||P||_F + ||Q||_F)

    until the first term is at most `threshold`. The best values seen are kept, so the bias never rises. Dividing by
    ||G|| makes beta mean the same for every matrix. The descent starts at the best common scale of the given values:
    as drawn they overshoot by (1 + m/d)(1 + n/d), which Adam would need many steps to unlearn. `lr` is a part of the
    values' size there, which d and r change by a factor of four and more: one rate does for all of them. A
    `recorder` spares a GPU the launches.
    """
    begin = time.perf_counter()
    norm = torch.linalg.vector_norm(G_mn, dtype=torch.float32)
    if not 0.0 < float(norm) < float("inf"):
        bias = 0.0 if float(norm) == 0.0 else float("nan")
        return FitReport(bias, bias, 0, time.perf_counter() - begin, "degenerate")
    before = float(relative_bias(G_mn, P, Q))
    if before <= threshold or steps == 0:
        reason: Literal["threshold", "steps"] = "threshold" if before <= threshold else "steps"
        return FitReport(before, before, 0, time.perf_counter() - begin, reason)
    projector_fit = _ProjectorFit(G_mn, P, Q, norm=norm, lr=lr, beta=beta, bias=before)
    if max(P.num_rows * Q.dim, Q.num_rows * P.dim) > MAX_RECORDED_NUMEL:
        recorder = None
    num_steps, reason_ended = projector_fit.run(
        steps, threshold=threshold, deadline=begin + timeout_s, recorder=recorder
    )
    projector_fit.keep_best_()
    after = float(relative_bias(G_mn, P, Q))
    return FitReport(before, after, num_steps, time.perf_counter() - begin, reason_ended)


@torch.no_grad()
def flatten_spectrum(G_mn: torch.Tensor) -> torch.Tensor:
    """G with singular values that are nearer to one another, in G's dtype: what projectors for Adam are fitted to.

    Adam moves about equally far along a gradient's small and large directions. The norm of what a projection loses
    counts the few largest alone, and a subspace that was fitted to G as it is has no room for the others. So singular
    values s, at first of ||G||_F = 1, become s (3 - s^2) / 2, FLATTENINGS times: small ones grow by 1.5 each time, and
    none beyond 1. In products of the shorter side alone: X = G B, and B <- B (3 - B G^T G B) / 2.
    """
    m, n = G_mn.shape
    side = min(m, n)
    norm = torch.linalg.vector_norm(G_mn, dtype=torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
    gram, B = torch.zeros(side, side, device=G_mn.device), torch.eye(side, device=G_mn.device)
    for part in (G_mn if side == n else G_mn.t()).split(max(1, TEMPORARY_NUMEL // side)):
        rows = part.to(torch.float32) / norm
        gram.addmm_(rows.t(), rows)
    for _ in range(NUM_FLATTENINGS):
        B = 1.5 * B - 0.5 * (B @ (B @ gram @ B))
    B = B.to(G_mn.dtype)
    return (G_mn @ B if side == n else B @ G_mn).div_(norm)


@torch.no_grad()
def captured_share(G_mn: torch.Tensor, P: SparseProjector, Q: SparseProjector) -> float:
    """The share of ||G||^2 that the best multiple of P P^T G Q Q^T has: it does not depend on the scale of P and Q,
    which Adam does not see either. NaN for a zero gradient."""
    S = compress(G_mn, P, Q)
    KSK = _gram_product(P, S, Q)
    norm = torch.linalg.vector_norm(G_mn, dtype=torch.float32)
    return float(S.square().sum().square() / ((KSK * S).sum() * norm.square()))


def reproject(
    X_dd: torch.Tensor, P0: SparseProjector, Q0: SparseProjector, P: SparseProjector, Q: SparseProjector
) -> torch.Tensor:
    """A matrix of the subspace (P0, Q0) as one of (P, Q): (P^T P0) X (Q0^T Q), computed where the projectors are and
    returned where X was."""
    left, right = overlap(P, P0), overlap(Q0, Q)
    return (left @ X_dd.to(left.device, torch.float32) @ right).to(X_dd)


def overlap(P: SparseProjector, P0: SparseProjector) -> torch.Tensor:
    """P^T P0 (dim x dim of P0), made a slab of P0's columns at a time."""
    result = torch.empty(P.dim, P0.dim, device=P.device)
    for first in range(0, P0.dim, SLAB_COLUMNS):
        width = min(SLAB_COLUMNS, P0.dim - first)
        unit = torch.zeros(P0.dim, width, device=P.device)
        unit[first : first + width].fill_diagonal_(1.0)
        result[:, first : first + width] = transpose_product(P, product(P0, unit))
    return result


def choose_dims(m: int, n: int, subspace_dim: int) -> tuple[int, int] | None:
    """(d_p, d_q) for an m x n weight, or None where d x d is no smaller than the weight: then dense Adam is."""
    if m * n <= subspace_dim**2:
        return None
    dim = min(subspace_dim, m, n)
    return dim, dim


class _ProjectorFit:
    """Adam on the values of P and Q.

    With Y = G Q, Z = G^T P, S = P^T Y, K_P = P^T P, K_Q = Q^T Q and E = K_P S K_Q - S, all of ||G|| = 1:
        bias^2              = <E, S> - <S, S> + 1
        d(bias^2 / 2) / dP  = (P S K_Q - Y) S^T + Y E^T      at P's positions only
        d(bias^2 / 2) / dQ  = (Q S^T K_P - Z) S + Z E        at Q's
    K_P and K_Q are never formed: K_Q X = Q^T (Q X) is two gathers.
    """

    def __init__(
        self,
        G_mn: torch.Tensor,
        P: SparseProjector,
        Q: SparseProjector,
        *,
        norm: torch.Tensor,
        lr: float,
        beta: float,
        bias: float,
    ) -> None:
        self.G_mn, self.G_nm = G_mn.contiguous(), G_mn.t().contiguous()
        self.projectors = P, Q
        self.norm, self.lr, self.beta = norm, lr, beta
        self.rates: list[torch.Tensor] = []
        """Of P and Q, on the device."""
        self.best_bias = torch.tensor(bias, device=P.device)
        self.best = [p.values.clone() for p in self.projectors]
        self.means = [torch.zeros_like(p.values) for p in self.projectors]
        self.squares = [torch.zeros_like(p.values) for p in self.projectors]
        self.betas = torch.tensor(BETAS, device=P.device)
        self.decays = torch.ones_like(self.betas)
        """What is left of the moments' first values."""

    def run(
        self, steps: int, *, threshold: float, deadline: float, recorder: GradientRecorder | None = None
    ) -> tuple[int, Literal["threshold", "steps", "timeout"]]:
        """(steps taken, why no more). One bias more than steps is evaluated: the last step's result counts too."""
        self._rescale_()
        self.rates = [self.lr * p.values.square().mean().sqrt() for p in self.projectors]
        take_step = self._take_step
        for step in range(steps):
            if step == 1 and recorder is not None:
                take_step = recorder.record(take_step, self.G_mn.device)
            take_step()
            if step % CHECK_EVERY == 0:
                if float(self.best_bias) <= threshold:
                    return step, "threshold"
                if time.perf_counter() > deadline:
                    return step, "timeout"
        self._evaluate()
        return steps, "threshold" if float(self.best_bias) <= threshold else "steps"

    def _take_step(self) -> None:
        """Waits for nothing, and finds everything where it was the last time."""
        self._step_(self._evaluate())

    def keep_best_(self) -> None:
        for projector, values in zip(self.projectors, self.best, strict=True):
            projector.set_values_(values)

    def _rescale_(self) -> None:
        """The factor c of c P S Q^T nearest to G is <S, S> / <K_P S K_Q, S>; each of the four projectors takes its
        fourth root."""
        P, Q = self.projectors
        S = transpose_product(P, self._times_Q())
        KSK = _gram_product(P, S, Q)
        factor = (S.square().sum() / (KSK * S).sum()).pow(0.25)
        factor = torch.where(factor.isfinite() & (factor > 0), factor, 1.0)
        for projector in self.projectors:
            projector.set_values_(projector.values * factor)

    def _times_Q(self) -> torch.Tensor:
        return _transposed(self.projectors[1], self.G_nm).div_(self.norm)

    def _times_P(self) -> torch.Tensor:
        return _transposed(self.projectors[0], self.G_mn).div_(self.norm)

    def _evaluate(self) -> list[torch.Tensor]:
        """Gradients at the present values, which become the best ones where their bias is the lowest so far."""
        P, Q = self.projectors
        Y, Z = self._times_Q(), self._times_P()
        S = transpose_product(P, Y)
        S_t = S.t().contiguous()
        PSK = product(P, _times_gram(S, Q))
        E = transpose_product(P, PSK) - S
        QSK = product(Q, _times_gram(S_t, P))
        bias = ((E * S).sum() - S.square().sum() + 1.0).clamp_(min=1e-12).sqrt_()
        self._keep_if_best(bias)
        return [
            _at_positions(P, (PSK.sub_(Y), S), (Y, E)).div_(bias) + self.beta * P.values / _norm(P.values),
            _at_positions(Q, (QSK.sub_(Z), S_t), (Z, E.t())).div_(bias) + self.beta * Q.values / _norm(Q.values),
        ]

    def _keep_if_best(self, bias: torch.Tensor) -> None:
        """On the device: nobody waits to learn whether these values are the best."""
        better = bias < self.best_bias  # False where the descent diverged to NaN
        self.best_bias.copy_(torch.where(better, bias, self.best_bias))
        for best, projector in zip(self.best, self.projectors, strict=True):
            best.copy_(torch.where(better, projector.values, best))

    def _step_(self, gradients: list[torch.Tensor]) -> None:
        of_mean, of_square = (1.0 - self.decays.mul_(self.betas)).unbind()
        states = zip(self.projectors, gradients, self.rates, self.means, self.squares, strict=True)
        for projector, g, rate, mean, square in states:
            mean.lerp_(g, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(g, g, value=1 - BETAS[1])
            denominator = (square / of_square).sqrt_().add_(EPS)
            projector.set_values_(projector.values - rate / of_mean * mean / denominator)


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values).clamp(min=1e-30)


def _transposed(P: SparseProjector, Y_mk: torch.Tensor) -> torch.Tensor:
    """Y^T P, contiguous: what P's next product gathers rows of."""
    out_kd = torch.empty(Y_mk.shape[1], P.dim, device=Y_mk.device)
    transpose_product(P, Y_mk, out=out_kd.t())
    return out_kd


def _times_gram(S: torch.Tensor, Q: SparseProjector) -> torch.Tensor:
    """S Q^T Q."""
    return _transposed(Q, product(Q, S.t().contiguous()))


def _gram_product(P: SparseProjector, S: torch.Tensor, Q: SparseProjector) -> torch.Tensor:
    """P^T P S Q^T Q."""
    return transpose_product(P, product(P, _times_gram(S, Q)))


def _at_positions(P: SparseProjector, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Sum over pairs of (left right^T) at P's positions: one dot product each, or all entries where that is cheaper.

    A few rows at a time: the temporaries of an embedding's fit must not outgrow its gradient.
    """
    right = torch.cat([pair[1] for pair in pairs], dim=1)
    num_rows = max(1, TEMPORARY_NUMEL // right.shape[1])
    parts = []
    for first in range(0, P.num_rows, num_rows):
        part = slice(first, first + num_rows)
        left, indices = torch.cat([pair[0][part] for pair in pairs], dim=1), P.indices[part]
        if DENSE_FRACTION * P.nonzeros >= P.dim:
            parts.append((left @ right.t()).gather(1, indices.long()))
        else:
            dots = [(left * right[columns.int()]).sum(dim=1) for columns in indices.t()]
            parts.append(torch.stack(dots, dim=1))
    return torch.cat(parts)
