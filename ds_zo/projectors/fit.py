"""Fits projectors to a gradient, and measures what they capture."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from ds_zo.projectors.products import compress, product, relative_bias, transpose_product
from ds_zo.projectors.recording import FitGraphRecorder
from ds_zo.projectors.sparse import SparseProjector

CHECK_EVERY = 5
"""Steps of a fit between checks of its bias. Each check waits for the device."""
TEMPORARY_NUMEL = 1 << 22
"""Elements of temporary matrices that exist at a time."""
DENSE_FRACTION = 16
"""A matrix product computes an entry about this many times as fast as elementwise operations compute a dot product."""
LR = 0.3
"""Learning rate of a fit, relative to the root mean square of the projectors' values."""
BETAS, EPS = (0.9, 0.99), 1e-12
"""Of Adam on the projectors' values."""
NUM_FLATTENINGS = 6
"""Iterations of `flatten_spectrum`. Four to twelve gave equal results for toy models that memorise data. Without any, a
fit is hardly better than a random draw."""
MAX_RECORDED_NUMEL = 1 << 23
"""Elements that a kernel of the fit writes, above which it takes longer than its launch: then a CUDA graph saves no
time."""


@dataclass(frozen=True)
class FitReport:
    """The result of a fit of one matrix's projectors. Biases are relative to the norm of the fitted gradient."""

    bias_before: float
    bias_after: float
    steps: int
    seconds: float
    reason: Literal["threshold", "steps", "degenerate"]
    """Why the fit ended. `degenerate`: the gradient is zero or not finite, and no value was changed."""


@torch.no_grad()
def fit(
    G_mn: torch.Tensor,
    P: SparseProjector,
    Q: SparseProjector,
    *,
    steps: int,
    lr: float = LR,
    threshold: float = 0.0,
    recorder: FitGraphRecorder | None = None,
) -> FitReport:
    """Changes the values of P and Q (not their positions) to minimise, by Adam,

        ||P P^T G Q Q^T - G||_F / ||G||_F,

    the bias, until it is at most `threshold`. P and Q end with the best values seen, so the bias never rises. The fit
    starts at the best common scale of the given values. Drawn values are too large by (1 + m/d)(1 + n/d), which would
    cost Adam many steps. `lr` is relative to the root mean square of the values at that scale. That depends on d and on
    the non-zeros of a row by a factor of four and more. So one learning rate serves all of them. With a `recorder`, a
    GPU replays one CUDA graph for each step.
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
    projector_fit = _ProjectorFit(G_mn, P, Q, norm=norm, lr=lr, bias=before)
    if max(P.num_rows * Q.dim, Q.num_rows * P.dim) > MAX_RECORDED_NUMEL:
        recorder = None
    num_steps, reason_ended = projector_fit.run(steps, threshold=threshold, recorder=recorder)
    projector_fit.keep_best_()
    after = float(relative_bias(G_mn, P, Q))
    return FitReport(before, after, num_steps, time.perf_counter() - begin, reason_ended)


@torch.no_grad()
def flatten_spectrum(G_mn: torch.Tensor) -> torch.Tensor:
    """G with singular values that are closer to one another, in G's dtype. Projectors for Adam are fitted to it.

    Adam moves about equally far along a gradient's small and large singular directions. The Frobenius norm of a
    projection's error depends almost only on the few largest. So a subspace that is fitted to G itself has no room for
    the others. Here G is scaled to ||G||_F = 1, and NUM_FLATTENINGS times each singular value s becomes s (3 - s^2) /
    2. Small values grow by 1.5 each time, and none exceeds 1. The iterations need only square matrices of the shorter
    side: X = G B, where B <- B (3 - B G^T G B) / 2.
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
    """The share of ||G||^2 that the best multiple of P P^T G Q Q^T captures; NaN for a zero gradient.

    It does not depend on the scale of P and Q, and neither do Adam's directions."""
    S_dd = compress(G_mn, P, Q)
    KSK_dd = _gram_product(P, S_dd, Q)
    norm = torch.linalg.vector_norm(G_mn, dtype=torch.float32)
    return float(S_dd.square().sum().square() / ((KSK_dd * S_dd).sum() * norm.square()))


def choose_dims(m: int, n: int, subspace_dim: int) -> tuple[int, int] | None:
    """(d_p, d_q) for an m x n weight; None if d x d is not smaller than the weight, which then trains whole."""
    if m * n <= subspace_dim**2:
        return None
    dim = min(subspace_dim, m, n)
    return dim, dim


class _ProjectorFit:
    """Minimises the bias of P and Q by Adam on their values.

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
        bias: float,
    ) -> None:
        self.G_mn, self.G_nm = G_mn.contiguous(), G_mn.t().contiguous()
        self.projectors = P, Q
        self.norm, self.lr = norm, lr
        self.rates: list[torch.Tensor] = []
        """Learning rates of P and Q, as scalars on the device."""
        self.best_bias = torch.tensor(bias, device=P.device)
        self.best = [p.values.clone() for p in self.projectors]
        self.means = [torch.zeros_like(p.values) for p in self.projectors]
        self.squares = [torch.zeros_like(p.values) for p in self.projectors]
        self.betas = torch.tensor(BETAS, device=P.device)
        self.decays = torch.ones_like(self.betas)
        """BETAS to the power of the number of steps, for Adam's bias correction."""

    def run(
        self, steps: int, *, threshold: float, recorder: FitGraphRecorder | None = None
    ) -> tuple[int, Literal["threshold", "steps"]]:
        """Returns the number of steps taken and why the fit ended. The bias after the last step is evaluated too."""
        self._rescale_()
        self.rates = [self.lr * p.values.square().mean().sqrt() for p in self.projectors]
        take_step = self._take_step
        for step in range(steps):
            if step == 1 and recorder is not None:
                take_step = recorder.record(take_step, self.G_mn.device)
            take_step()
            if step % CHECK_EVERY == 0 and float(self.best_bias) <= threshold:
                return step, "threshold"
        self._evaluate()
        return steps, "threshold" if float(self.best_bias) <= threshold else "steps"

    def _take_step(self) -> None:
        """Takes one step. It never waits for the device and uses the same memory each time, so that it can be
        recorded."""
        self._step_(self._evaluate())

    def keep_best_(self) -> None:
        for projector, values in zip(self.projectors, self.best, strict=True):
            projector.set_values_(values)

    def _rescale_(self) -> None:
        """Scales P and Q to the best common scale. The factor c for which c P S Q^T is closest to G is
        <S, S> / <K_P S K_Q, S>. P and Q occur twice each in P P^T G Q Q^T, so each is multiplied by c^(1/4)."""
        P, Q = self.projectors
        S_dd = transpose_product(P, self._times_Q())
        KSK_dd = _gram_product(P, S_dd, Q)
        factor = (S_dd.square().sum() / (KSK_dd * S_dd).sum()).pow(0.25)
        factor = torch.where(factor.isfinite() & (factor > 0), factor, 1.0)
        for projector in self.projectors:
            projector.set_values_(projector.values * factor)

    def _times_Q(self) -> torch.Tensor:
        return _transposed(self.projectors[1], self.G_nm).div_(self.norm)

    def _times_P(self) -> torch.Tensor:
        return _transposed(self.projectors[0], self.G_mn).div_(self.norm)

    def _evaluate(self) -> list[torch.Tensor]:
        """Returns the gradients at the present values, which are kept as the best if their bias is the lowest so
        far."""
        P, Q = self.projectors
        Y_md, Z_nd = self._times_Q(), self._times_P()
        S_dd = transpose_product(P, Y_md)
        S_t_dd = S_dd.t().contiguous()
        PSK_md = product(P, _times_gram(S_dd, Q))
        E_dd = transpose_product(P, PSK_md) - S_dd
        QSK_nd = product(Q, _times_gram(S_t_dd, P))
        bias = ((E_dd * S_dd).sum() - S_dd.square().sum() + 1.0).clamp_(min=1e-12).sqrt_()
        self._keep_if_best(bias)
        return [
            _at_positions(P, (PSK_md.sub_(Y_md), S_dd), (Y_md, E_dd)).div_(bias),
            _at_positions(Q, (QSK_nd.sub_(Z_nd), S_t_dd), (Z_nd, E_dd.t())).div_(bias),
        ]

    def _keep_if_best(self, bias: torch.Tensor) -> None:
        """Keeps the present values if they are the best so far. The device compares, so that the host need not wait."""
        better = bias < self.best_bias  # False if the fit has diverged to NaN
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


def _transposed(P: SparseProjector, Y_mk: torch.Tensor) -> torch.Tensor:
    """Y^T P, with contiguous rows, which the next product gathers."""
    out_kd = torch.empty(Y_mk.shape[1], P.dim, device=Y_mk.device)
    transpose_product(P, Y_mk, out=out_kd.t())
    return out_kd


def _times_gram(S_dd: torch.Tensor, Q: SparseProjector) -> torch.Tensor:
    """S Q^T Q."""
    return _transposed(Q, product(Q, S_dd.t().contiguous()))


def _gram_product(P: SparseProjector, S_dd: torch.Tensor, Q: SparseProjector) -> torch.Tensor:
    """P^T P S Q^T Q."""
    return transpose_product(P, product(P, _times_gram(S_dd, Q)))


def _at_positions(P: SparseProjector, *pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum over pairs of (left right^T), at P's positions only.

    It computes one dot product for each position, or all entries if that is cheaper. It takes a few rows at a time, so
    that temporary matrices of an embedding's fit do not exceed its gradient.
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
