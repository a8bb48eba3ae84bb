"""When projectors are fitted and tested, and which of them serve.

[Note: calibration gradients] A backward pass forms each matrix's gradient anyway, one at a time, so fits and tests look
at it right there: no pass of their own, no second gradient alive, nothing to restore. A gradient is first compressed
with the present projectors. Then a candidate beside them is fitted to it, a part of `fit_steps` for each of
`calibration_batches` micro-batches: the first ones that a matrix gets, and those from a check that the present
projectors fail. A fit to one batch alone does not carry over to others, so each fit's target is the sum of all
gradients so far. Nobody keeps that sum: its part in the candidate's subspace, P (P^T T Q) Q^T, stands for it. Fits and
tests see gradients `flattened`, as Adam does.

[Note: who serves] The micro-batch after these tests the candidate: it takes the place of the present projectors if it
captures clearly more of that gradient's square norm (MIN_GAIN, MIN_RATIO). So no projectors are judged by a gradient
that they were fitted to, and fitted ones are never much worse than drawn ones. Steps within one subspace correct one
another, which a new subspace ends; a candidate that is as good is therefore not worth it.

Several ranks look at the average of their gradients, a layer at a time, in [Note: one order] of `lsp_ranks`.
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
from ds_zo.backends.lsp.payload import Carry
from ds_zo.backends.lsp.ranks import CollectiveThread
from ds_zo.config import LSPParams
from ds_zo.logs import show
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors import (
    GradientRecorder,
    apply_,
    captured_share,
    carry_over,
    compress,
    fit,
    flattened,
    relative_bias,
)

MIN_GAIN = 0.05
"""Of a gradient's square norm: what a candidate has to capture more than the present projectors."""
MIN_RATIO = 2.0
"""Enough too where they capture little, as multiples of that."""


class Calibration:
    def __init__(self, settings: LSPParams, *, ranks: CollectiveThread | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._checked_step = 0
        """The step of the last check."""
        self._is_check = False
        """This backward pass tests every matrix's projectors."""
        self.biases: dict[str, float] = {}
        """What each matrix's projectors last lost of a gradient that they were not fitted to, relative to it."""
        self.fit_s = 0.0
        """Spent on fits so far."""
        self._verdicts: dict[str, bool] = {}
        """Candidates tested in this step: whether they take the place of the present projectors."""
        self._told_fit_s = 0.0
        self._bar: tqdm[Any] | None = None
        """A backward pass that fits takes many times as long as others."""
        self._recorder = GradientRecorder()

    # What the engine asks

    def begin_backward(self, step: int, trained: Sequence[MatrixState]) -> None:
        settings = self._settings
        self._is_check = step > 0 and step % settings.check_interval == 0 and step != self._checked_step
        if self._is_check:
            self._checked_step = step
        self._end_bar()
        num_wanted = sum(map(self.wants, trained))
        if num_wanted and settings.fit_steps > 0:
            silent = logger.getEffectiveLevel() > logging.WARNING or (self._ranks is not None and self._ranks.index > 0)
            self._bar = tqdm(total=num_wanted, desc="fitting projectors", unit="matrix", delay=3.0, disable=silent)

    def wants(self, slot: MatrixState) -> bool:
        """Whether it looks at a gradient of that matrix in this backward pass."""
        if slot.subspace is None or self._settings.projector != "learned":
            return False
        if slot.candidate is not None:
            return slot.candidate.gain is None
        return self._is_check or not slot.is_fitted

    @torch.no_grad()
    def look(self, slot: MatrixState, grad: torch.Tensor) -> None:
        """After a gradient has been compressed: fits a candidate to it, or tests one with it."""
        flat = flattened(grad)
        if slot.candidate is None:
            slot.candidate = self._new_candidate(slot, flat)
        if slot.candidate is not None:
            if slot.candidate.num_batches < self._settings.calibration_batches:
                self._fit(slot, slot.candidate, flat)
            else:
                self._test(slot, slot.candidate, grad, flat)
        if self._bar is not None:
            self._bar.update()
            if self._bar.n == self._bar.total:
                self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def report(self) -> None:
        """Says which candidates have been tested since it was last asked."""
        self._end_bar()
        self._recorder.release()
        verdicts, self._verdicts = self._verdicts, {}
        if not verdicts:
            return
        fit_s, self._told_fit_s = self.fit_s - self._told_fit_s, self.fit_s
        biases = [self.biases[name] for name in verdicts]
        show(
            f"ds_zo: projectors of {len(verdicts)} matrices fitted in {fit_s:.1f} s; on the next batch "
            f"{sum(verdicts.values())} of them capture more than the present ones and take their place; relative bias "
            f"there {statistics.median(biases):.3f} (median), {max(biases):.3f} (largest)"
        )

    # Fitting

    def _new_candidate(self, slot: MatrixState, flat: torch.Tensor) -> Candidate | None:
        """None: the present projectors are good enough, or the gradient says nothing."""
        assert slot.subspace is not None
        bias = float(relative_bias(flat, slot.subspace.P, slot.subspace.Q))
        if not math.isfinite(bias):
            return None
        if slot.is_fitted:
            self.biases[slot.name] = bias
            if bias <= self._settings.bias_threshold:
                return None
        num_draws = slot.subspace.num_draws + slot.is_fitted
        return Candidate(draw(slot.parameter, slot.index, self._settings, num_draws=num_draws, device=flat.device))

    def _fit(self, slot: MatrixState, candidate: Candidate, target: torch.Tensor) -> None:
        """Adds what the candidate has kept of earlier gradients to `target`."""
        settings, P, Q = self._settings, candidate.subspace.P, candidate.subspace.Q
        if candidate.total is not None:
            apply_(target, candidate.total.to(target.device), P, Q, lr=-1.0, rounding="nearest")
        report = fit(
            target,
            P,
            Q,
            steps=-(-settings.fit_steps // settings.calibration_batches),
            lr=settings.fit_lr,
            beta=settings.fit_beta,
            threshold=settings.bias_threshold,
            timeout_s=settings.fit_timeout_s,
            recorder=self._recorder,
        )
        self.fit_s += report.seconds
        logger.debug(f"ds_zo: {slot.name} {report}")
        if report.reason == "degenerate":
            return
        if self._ranks is not None:  # they see the same gradient, but not the same clock
            for projector in (P, Q):
                values = projector.values.clone()
                self._ranks.take_from_first_(values)
                projector.set_values_(values)
        candidate.subspace.refresh_()
        candidate.total = compress(target, P, Q).cpu()
        candidate.num_batches += 1

    def _test(self, slot: MatrixState, candidate: Candidate, grad: torch.Tensor, flat: torch.Tensor) -> None:
        """See [Note: who serves]."""
        assert slot.subspace is not None
        pairs = [(subspace.P, subspace.Q) for subspace in (slot.subspace, candidate.subspace)]
        present, share = (captured_share(flat, *pair) for pair in pairs)
        if not math.isfinite(present + share):
            return
        takes_place = share - present >= min(MIN_GAIN, MIN_RATIO * present)
        if takes_place:
            square, candidate_square = (float(compress(grad, *pair).square().mean()) for pair in pairs)
            candidate.gain = candidate_square / square
        else:
            slot.candidate = None
            slot.is_fitted = True
        self._verdicts[slot.name] = takes_place
        self.biases[slot.name] = math.sqrt(max(0.0, 1.0 - (share if takes_place else present)))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {"checked_step": self._checked_step}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._checked_step = 0 if state is None else int(state["checked_step"])
        self._verdicts = {}


@torch.no_grad()
def adopt(slot: MatrixState, moments: Moments | None, carries: list[tuple[Carry, int]]) -> None:
    """The candidate takes the place of the present projectors. `moments`: None where another rank has them.

    [Note: moments of a new subspace] The old moments know only the part of a gradient that the old subspace had.
    Projected to the new one, V is too small by far, and steps are too large until it has grown. So M begins at zero,
    and steps grow to their size within 1 / (1 - beta1) steps. V's mean is the old one, scaled by what the new
    projectors make of the same gradient; entries that were large in the calibration have more of it. After the first
    calibration V is worth nothing either, and Adam begins again. What a payload lost of an update is projected.
    """
    old, candidate = slot.subspace, slot.candidate
    assert old is not None and candidate is not None and candidate.gain is not None
    new = candidate.subspace
    if moments is not None:
        moments.mean.zero_()
        if slot.is_fitted:
            assert candidate.total is not None
            square = candidate.total.t().square().to(moments.mean_square)  # kept transposed, as a slot's shape says
            mean = moments.mean_square.mean() * (0.5 * candidate.gain)
            moments.mean_square.copy_(mean + mean / square.mean().clamp(min=torch.finfo(torch.float32).tiny) * square)
        else:
            moments.mean_square.zero_()
    for carry, i in carries:
        if (error := carry.error_of(i)) is not None:
            error.t().copy_(carry_over(error.t(), old.P, old.Q, new.P, new.Q))
    slot.subspace, slot.candidate, slot.is_fitted = new, None, True
