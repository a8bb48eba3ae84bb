"""When projectors are fitted and tested, and when fitted ones replace the present ones.

[Note: calibration gradients] A backward pass makes each matrix's gradient anyway, one at a time. Fits and tests use it
there: they need no pass of their own and no second gradient in memory, and leave nothing to restore. A gradient is
first compressed with the present projectors. Then a candidate, a second pair of projectors, is fitted to it. Each of
`calibration_batches` micro-batches does its part of `fit_steps`. They are the first micro-batches of a matrix, and the
micro-batches from a check on that the present projectors fail. A fit to one batch alone would not generalise to other
batches. So the target of each fit is the sum T of all gradients so far. T is not stored: its part in the candidate's
subspace, P (P^T T Q) Q^T, replaces it. Fits and tests see gradients after `flatten_spectrum`, because Adam equalises
the directions of a gradient too.

[Note: testing a candidate] The micro-batch after the fits tests the candidate. The candidate replaces the present
projectors if it captures clearly more of that gradient's squared norm (MIN_GAIN, MIN_RATIO). So projectors are never
judged by a gradient that they were fitted to, and fitted projectors are never much worse than drawn ones. Steps within
one subspace correct one another, and a change of the subspace ends that. So an equally good candidate is rejected.

On several ranks, fits and tests use the average of the ranks' gradients, layer by layer. See
[Note: one order of collectives] in `ranks`.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import logger
from tqdm import tqdm

from ds_zo.backends.lsp.matrices import Candidate, MatrixState, draw
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.config import LSPParams
from ds_zo.logs import show
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors import (
    FitGraphRecorder,
    apply_,
    captured_share,
    compress,
    fit,
    flatten_spectrum,
    relative_bias,
)

MIN_GAIN = 0.05
"""Share of a gradient's squared norm that a candidate must capture in addition to the present projectors' share."""
MIN_RATIO = 2.0
"""An addition of this many times the present projectors' share is enough too, if their share is small."""


class Calibration:
    """Fits and tests projectors during backward passes. See [Note: calibration gradients]."""

    def __init__(self, settings: LSPParams, *, ranks: CollectiveThread | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._checked_step = 0
        """The step at which the present projectors were last checked."""
        self._is_checking = False
        """The present backward pass checks the projectors of every matrix."""
        self.biases: dict[str, float] = {}
        """By matrix name: the relative bias of its projectors on the last gradient that they were tested with."""
        self.fit_s = 0.0
        """Seconds spent on fits."""
        self._test_results: dict[str, bool] = {}
        """By matrix name: whether the candidate that was tested in this step replaces the present projectors."""
        self._reported_fit_s = 0.0
        """The value of `fit_s` at the last report."""
        self._bar: tqdm[Any] | None = None
        """Shown while a backward pass fits projectors, which makes it many times as long; otherwise None."""
        self._recorder = FitGraphRecorder()

    # Called by the backend

    def begin_backward(self, step: int, trained: Sequence[MatrixState]) -> None:
        settings = self._settings
        self._is_checking = step > 0 and step % settings.check_interval == 0 and step != self._checked_step
        if self._is_checking:
            self._checked_step = step
        self._end_bar()
        num_wanted = sum(map(self.wants_gradient, trained))
        if num_wanted and settings.fit_steps > 0:
            silent = logger.getEffectiveLevel() > logging.WARNING or (self._ranks is not None and self._ranks.index > 0)
            self._bar = tqdm(total=num_wanted, desc="fitting projectors", unit="matrix", delay=3.0, disable=silent)

    def wants_gradient(self, matrix: MatrixState) -> bool:
        """Whether this backward pass uses a gradient of the matrix to fit or test projectors."""
        if matrix.subspace is None or self._settings.projector != "learned":
            return False
        if matrix.candidate is not None:
            return matrix.candidate.gain is None
        return self._is_checking or not matrix.is_fitted

    @torch.no_grad()
    def fit_or_test(self, matrix: MatrixState, grad: torch.Tensor) -> None:
        """Fits a candidate to a gradient, or tests the candidate with it. The gradient has been compressed before."""
        flattened_grad = flatten_spectrum(grad)
        if matrix.candidate is None:
            matrix.candidate = self._new_candidate(matrix, flattened_grad)
        if matrix.candidate is not None:
            if matrix.candidate.num_batches < self._settings.calibration_batches:
                self._fit(matrix, matrix.candidate, flattened_grad)
            else:
                self._test(matrix, matrix.candidate, grad, flattened_grad)
        if self._bar is not None:
            self._bar.update()
            if self._bar.n == self._bar.total:
                self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def report(self) -> None:
        """Logs the candidates that were tested since the last report, and releases the fit's device memory."""
        self._end_bar()
        self._recorder.release()
        results, self._test_results = self._test_results, {}
        if not results:
            return
        fit_s, self._reported_fit_s = self.fit_s - self._reported_fit_s, self.fit_s
        biases = [self.biases[name] for name in results]
        show(
            f"ds_zo: fitted projectors of {len(results)} matrices in {fit_s:.1f} s; on the next batch "
            f"{sum(results.values())} of them capture more than the present projectors and replace them; relative bias "
            f"on that batch {statistics.median(biases):.3f} (median), {max(biases):.3f} (largest)"
        )

    # Fitting

    def _new_candidate(self, matrix: MatrixState, flattened_grad: torch.Tensor) -> Candidate | None:
        """A newly drawn candidate; None: the present projectors are good enough, or the gradient is zero or not
        finite."""
        assert matrix.subspace is not None
        bias = float(relative_bias(flattened_grad, matrix.subspace.P, matrix.subspace.Q))
        if not math.isfinite(bias):
            return None
        if matrix.is_fitted:
            self.biases[matrix.name] = bias
            if bias <= self._settings.bias_threshold:
                return None
        num_draws = matrix.subspace.num_draws + matrix.is_fitted
        return Candidate(
            draw(matrix.parameter, matrix.index, self._settings, num_draws=num_draws, device=flattened_grad.device)
        )

    def _fit(self, matrix: MatrixState, candidate: Candidate, target: torch.Tensor) -> None:
        """Fits the candidate to the sum of all its gradients. `target`: the newest gradient, which this overwrites with
        the sum."""
        settings, P, Q = self._settings, candidate.subspace.P, candidate.subspace.Q
        if candidate.total is not None:
            apply_(target, candidate.total.to(target.device), P, Q, lr=-1.0, rounding="nearest")
        report = fit(
            target,
            P,
            Q,
            steps=-(-settings.fit_steps // settings.calibration_batches),
            threshold=settings.bias_threshold,
            recorder=self._recorder,
        )
        self.fit_s += report.seconds
        logger.debug(f"ds_zo: {matrix.name} {report}")
        if report.reason == "degenerate":
            return
        if self._ranks is not None:  # GPUs of two kinds may fit with different bits
            for projector in (P, Q):
                values = projector.values.clone()
                self._ranks.broadcast_from_first_(values)
                projector.set_values_(values)
        candidate.subspace.refresh_()
        candidate.total = compress(target, P, Q).cpu()
        candidate.num_batches += 1

    def _test(
        self, matrix: MatrixState, candidate: Candidate, grad: torch.Tensor, flattened_grad: torch.Tensor
    ) -> None:
        """Compares the candidate with the present projectors. See [Note: testing a candidate]."""
        assert matrix.subspace is not None
        pairs = [(subspace.P, subspace.Q) for subspace in (matrix.subspace, candidate.subspace)]
        present, share = (captured_share(flattened_grad, *pair) for pair in pairs)
        if not math.isfinite(present + share):
            return
        replaces = share - present >= min(MIN_GAIN, MIN_RATIO * present)
        if replaces:
            # In float64: squares of gradients below 1e-20 would be zero.
            square, candidate_square = (float(compress(grad, *pair).double().square().mean()) for pair in pairs)
            candidate.gain = candidate_square / square
        else:
            matrix.candidate = None
            matrix.is_fitted = True
        self._test_results[matrix.name] = replaces
        self.biases[matrix.name] = math.sqrt(max(0.0, 1.0 - (share if replaces else present)))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {"checked_step": self._checked_step}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._checked_step = 0 if state is None else int(state["checked_step"])
        self._test_results = {}


@torch.no_grad()
def adopt(matrix: MatrixState, moments: Moments | None) -> None:
    """Replaces a matrix's present projectors by its candidate. `moments`: None if another rank keeps them.

    [Note: moments of a new subspace] The old moments contain only the part of the gradients that the old subspace
    captured. Projected to the new subspace, the second moment V would be far too small, and steps too large until V had
    grown. So the first moment M starts at zero, and steps grow to their full size within 1 / (1 - beta1) steps. The
    mean of V is the old mean, scaled by the candidate's `gain`. Half of it is distributed in proportion to the squared
    entries of the calibration's sum. At the first calibration V has no value either, so Adam starts anew. Its count of
    steps does too: after many calibration batches, Adam would hardly correct V for its start at zero, and steps would
    be too large.
    """
    candidate = matrix.candidate
    assert candidate is not None and candidate.gain is not None
    if moments is not None and not matrix.is_fitted:
        moments.reset()
    elif moments is not None:
        assert candidate.total is not None
        moments.mean.zero_()
        square = candidate.total.t().square().to(moments.mean_square)  # transposed, as `MatrixState.shape` says
        mean = moments.mean_square.mean() * (0.5 * candidate.gain)
        moments.mean_square.copy_(mean + mean / square.mean().clamp(min=torch.finfo(torch.float32).tiny) * square)
    matrix.subspace, matrix.candidate, matrix.is_fitted = candidate.subspace, None, True
