"""When projectors are looked at, and what becomes of those that lose too much.

[Note: calibration gradients] A backward pass forms each matrix's gradient anyway, one at a time, so tests and fits look
at it right there: no pass of their own, no second gradient alive, nothing to restore. At a check the step's gradient is
first compressed with the projectors of before; those fitted on it serve from the next step on, so no gradient is
compressed by projectors that were fitted on it. The very first gradient is the exception: there is none before it.
With `calibration_batches` > 1 a fit goes on over the gradients of that many micro-batches, one after the other.
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

from ds_zo.config import LSPParams
from ds_zo.engines.lsp_matrices import Slot, Subspace, draw
from ds_zo.engines.lsp_payload import Carry
from ds_zo.engines.lsp_ranks import RankLine
from ds_zo.logs import show
from ds_zo.optim.subspace_adam import Moments
from ds_zo.projectors import Recorder, carry_moments, fit, relative_bias


class Calibration:
    def __init__(self, settings: LSPParams, *, ranks: RankLine | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._checked_step = 0
        """The step at which the last check began."""
        self._batch: int | None = None
        """How many micro-batches the present check has seen before this one; None: no check is on."""
        self.biases: dict[str, float] = {}
        """What each matrix's projectors last lost of a gradient, relative to it."""
        self.fit_s = 0.0
        """Spent on fits so far."""
        self._news: list[str] = []
        self._told_fit_s = 0.0
        self._bar: tqdm[Any] | None = None
        """A backward pass that fits takes many times as long as others."""
        self._recorder = Recorder()

    # What the engine asks

    def begin_backward(self, step: int, trained: Sequence[Slot]) -> None:
        self._begin_check(step)
        self._end_bar()
        num_wanted = sum(map(self.wants, trained))
        if num_wanted and self._settings.fit_steps > 0:
            silent = logger.getEffectiveLevel() > logging.WARNING or (self._ranks is not None and self._ranks.index > 0)
            self._bar = tqdm(total=num_wanted, desc="fitting projectors", unit="matrix", delay=3.0, disable=silent)

    def _begin_check(self, step: int) -> None:
        settings = self._settings
        if settings.projector != "learned":
            return
        if self._batch is not None:
            self._batch += 1
        elif step > 0 and step % settings.check_interval == 0 and step != self._checked_step:
            self._checked_step, self._batch = step, 0

    @property
    def _looks(self) -> bool:
        return self._batch is not None and self._batch < self._settings.calibration_batches

    def wants(self, slot: Slot) -> bool:
        """Whether it looks at a gradient of that matrix in this backward pass."""
        return slot.subspace is not None and (self._looks or not slot.is_fitted)

    @property
    def is_over(self) -> bool:
        """What was fitted may take its place."""
        return self._batch is not None and self._batch + 1 >= self._settings.calibration_batches

    def before_compress(self, slot: Slot, grad: torch.Tensor) -> None:
        """Fits a matrix's first projectors, on the first gradient that it gets."""
        if slot.is_fitted or slot.subspace is None:
            return
        # Not before: a fit may find no memory, or zeros or NaN, and is made with the next gradient then.
        slot.is_fitted = self._fit(slot, slot.subspace, grad, num_steps=self._settings.fit_steps)

    def after_compress(self, slot: Slot, grad: torch.Tensor) -> None:
        """At a check: tests the matrix's projectors, and fits others where they fail."""
        self._test(slot, grad)
        if self._bar is not None:
            self._bar.update()
            if self._bar.n == self._bar.total:
                self._end_bar()

    def _test(self, slot: Slot, grad: torch.Tensor) -> None:
        if not self._looks or slot.subspace is None:
            return
        refitted, slot.refitted = slot.refitted, None  # until it is fitted: see `before_compress`
        if self._batch == 0:
            bias = float(relative_bias(grad, slot.subspace.P, slot.subspace.Q))
            refitted = None
            if math.isfinite(bias):
                self.biases[slot.name] = bias
            if bias > self._settings.bias_threshold:
                num_draws = slot.subspace.num_draws + 1
                refitted = draw(slot.parameter, slot.index, self._settings, num_draws=num_draws, device=grad.device)
        if refitted is not None:
            num_steps = -(-self._settings.fit_steps // self._settings.calibration_batches)
            self._fit(slot, refitted, grad, num_steps=num_steps)
            slot.refitted = refitted

    def end_check(self) -> None:
        self._batch = None

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def report(self) -> None:
        """Says what has been fitted since it was last asked."""
        self._end_bar()
        self._recorder.release()
        news, self._news = self._news, []
        fit_s, self._told_fit_s = self.fit_s - self._told_fit_s, self.fit_s
        if news:
            settings = self._settings
            biases = [self.biases[name] for name in news]
            failing = sum(bias > settings.bias_threshold for bias in biases)
            show(
                f"ds_zo: projectors of {len(news)} matrices fitted in {fit_s:.1f} s: relative bias "
                f"{statistics.median(biases):.3f} (median), {max(biases):.3f} (largest), {failing} above "
                f"bias_threshold {settings.bias_threshold:g}"
            )

    # Fitting

    def _fit(self, slot: Slot, subspace: Subspace, grad: torch.Tensor, *, num_steps: int) -> bool:
        """False: the gradient has nothing to fit to."""
        settings = self._settings
        report = fit(
            grad,
            subspace.P,
            subspace.Q,
            steps=num_steps,
            lr=settings.fit_lr,
            beta=settings.fit_beta,
            threshold=settings.bias_threshold,
            timeout_s=settings.fit_timeout_s,
            recorder=self._recorder,
        )
        if self._ranks is not None:  # they see the same gradient, but not the same clock
            for projector in (subspace.P, subspace.Q):
                values = projector.values.clone()
                self._ranks.take_from_first_(values)
                projector.set_values_(values)
        subspace.refresh_()
        self.fit_s += report.seconds
        logger.debug(f"ds_zo: {slot.name} {report}")
        if report.reason == "degenerate":
            return False
        self.biases[slot.name] = report.bias_after
        if slot.name not in self._news:
            self._news.append(slot.name)
        return True

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {"checked_step": self._checked_step, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        self._checked_step = 0 if state is None else int(state["checked_step"])
        self._batch = None if state is None else state["batch"]
        self._news = []


@torch.no_grad()
def adopt(slot: Slot, moments: Moments | None, carries: list[tuple[Carry, int]]) -> None:
    """The refitted projectors take the place of the present ones; what lives in the subspace moves to the new one.
    `moments`: None where another rank has them. Errors of directions need no factor of `update_rms`: it is the same
    before and after as far as columns have length 1, as the formula for gradients assumes too."""
    old, new = slot.subspace, slot.refitted
    assert old is not None and new is not None
    if moments is not None:
        held = moments.mean.t(), moments.mean_square.t()  # kept transposed, as a slot's shape says
        for moment, carried in zip(held, carry_moments(*held, old.P, old.Q, new.P, new.Q), strict=True):
            moment.copy_(carried)
    for carry, i in carries:
        if (held_error := carry.error_of(i)) is not None:
            error = held_error.t()
            carried, _ = carry_moments(error, error.square(), old.P, old.Q, new.P, new.Q)
            error.copy_(carried)
    slot.subspace, slot.refitted = new, None
