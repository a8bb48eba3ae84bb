"""Scores the outputs of a forward's passes by a function of the caller, in place of the model's loss.

[Note: scores of passes] The function is called inside the pass, so that the outputs of one pass at a time are in
memory. It is called once in each pass, and again only if a forward has to run its passes once more. A score that cannot
be used is noted, and all passes go on to their end. Then the ranks exchange the number of such scores. So either all
ranks make the step, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, Literal

import torch
from deepspeed.utils import logger

from ds_zo.backends.zo.lockstep import CannotInterleave
from ds_zo.backends.zo.member_passes import no_losses
from ds_zo.backends.zo.members import MemberRows
from ds_zo.backends.zo.outputs import loss_of, tensors_of, with_loss, with_tensors
from ds_zo.backends.zo.pass_inputs import PassInputs, has_rows
from ds_zo.backends.zo.ranks import Ranks
from ds_zo.logs import warn

Objective = Callable[[Any, Any], Any]
"""A function of a forward's outputs and its batch. Returns one number, or one number for each sequence. For members, a
method `of_rows(outputs, rows)` is called in its place, if there is one. `rows` has the sequence of each row."""


class _WrongObjective(ValueError):
    """The objective calls the engine, or returns neither one number nor one for each sequence. `on_error` does not hide
    it."""


class Scoring:
    """Turns the outputs of one forward's passes into losses; see [Note: scores of passes]."""

    def __init__(
        self, objective: Objective | None, *, minimise: bool, on_error: float | Literal["raise"], ranks: Ranks
    ) -> None:
        """`objective` None: the loss is the model's. `on_error`: as in `engine.zo_step`."""
        if objective is not None and not callable(objective):
            raise TypeError(
                f"objective must be a function of (outputs, batch), got {type(objective).__name__} (engine.zo_step)"
            )
        largest = torch.finfo(torch.float32).max
        if on_error != "raise" and not (isinstance(on_error, (int, float)) and abs(on_error) <= largest):
            raise ValueError(f'on_error must be "raise" or a finite float32, got {on_error!r} (engine.zo_step)')
        self._objective = objective
        self._minimise = minimise
        self._stand_in = None if on_error == "raise" else float(on_error)
        self._ranks = ranks
        self._errors: dict[int, Exception] = {}
        """Why there is no score, by the index of the pass."""
        self._num_nan: dict[int, torch.Tensor] = {}
        """How many scores are NaN, by the index of the pass."""
        self.num_failed = 0
        """Number of scores, on all ranks, that `on_error` has replaced."""
        self._is_calling = False
        """Whether the objective is running."""

    def check_caller(self) -> None:
        """Raises if the objective is what calls the engine."""
        if self._is_calling:
            raise _WrongObjective("an objective must not run the engine, got a call: call engine.module")

    @property
    def by_loss(self) -> bool:
        """Whether the model's loss is measured."""
        return self._objective is None

    @torch.no_grad()
    def loss(self, index: int, output: Any, inputs: PassInputs) -> torch.Tensor:
        """The loss of pass `index`: the model's, or the mean score, which is negated if it is to be maximised."""
        if self._objective is None:
            loss = loss_of(output)
            if loss is None:
                raise ValueError(
                    "engine.zo_step needs a loss or an objective, got a model that returned no loss: put labels into "
                    "the batch, or pass objective"
                )
            return loss.clone()
        scores = self._scores(index, output, inputs, lengths=inputs.lengths())
        score = scores.float().mean() if scores.ndim else scores
        return (score.clone() if self._minimise else -score).to(self._ranks.device)

    @torch.no_grad()
    def member_losses(
        self, output: Any, inputs: PassInputs, rows: MemberRows, losses: torch.Tensor | None
    ) -> torch.Tensor:
        """As `loss`, for each member and sign. An objective that returns one number is called for the rows of each.
        `losses`: of each member and sign, where the model tells them."""
        if self._objective is None:
            if losses is None:
                raise no_losses()
            return losses
        sequences = rows.repeated(torch.arange(rows.num_sequences)).tolist()
        scores = self._scores(0, output, inputs, lengths={rows.num_rows}, sequences=sequences)
        if scores.ndim:
            scores = rows.by_member(scores).float().mean(2)
        elif rows.num_rows > 1 and 0 not in self._errors:
            parts = [
                self._scores(
                    index,
                    _rows_of(output, part, None if losses is None else losses.flatten()[index], rows=rows),
                    inputs.with_rows(itemgetter(part), num_rows=rows.num_rows),
                    lengths={rows.num_each},
                    sequences=sequences[part],
                )
                for index, part in enumerate(rows.parts())
            ]
            scores = torch.stack([part.float().mean() for part in parts]).view(rows.num_members, -1)
        scores = scores.expand(rows.num_members, rows.num_signs)
        return (scores.clone() if self._minimise else -scores).to(self._ranks.device)

    def _scores(
        self,
        index: int,
        output: Any,
        inputs: PassInputs,
        *,
        lengths: Collection[int],
        sequences: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """What the objective returns, or NaN if it raises. `on_error` stands for NaN. `sequences`: of the rows of
        members."""
        assert self._objective is not None
        of_rows = None if sequences is None else getattr(self._objective, "of_rows", None)
        self._errors.pop(index, None)
        self._is_calling = True
        try:
            value = self._objective(output, inputs.batch()) if of_rows is None else of_rows(output, sequences)
            scores = _scores_of(value, lengths=lengths)
        except CannotInterleave:
            raise
        except Exception as error:
            self._errors[index] = error
            scores = torch.tensor(math.nan)
        finally:
            self._is_calling = False
        is_nan = scores.isnan()
        self._num_nan[index] = is_nan.sum()
        return scores if self._stand_in is None else scores.float().masked_fill(is_nan, self._stand_in)

    def check(self) -> None:
        """Raises on all ranks if a rank has a score that cannot be used. Every rank calls it after its last pass."""
        if self._objective is None:
            return
        is_wrong = any(isinstance(error, _WrongObjective) for error in self._errors.values())
        num_nan = int(sum(self._num_nan.values(), torch.zeros((), dtype=torch.long)))
        num_wrong, self.num_failed = self._ranks.sum([int(is_wrong), num_nan])
        if not self.num_failed:
            return
        wrong_first = sorted(self._errors.values(), key=lambda error: not isinstance(error, _WrongObjective))
        error = wrong_first[0] if wrong_first else None
        if is_wrong:
            reason = str(error)
        elif error is not None:
            reason = f"the objective raised {error!r}"
        else:
            reason = "the objective returned NaN" if num_nan else "the objective failed on another rank"
        if num_wrong or self._stand_in is None:
            self.num_failed = 0
            remedy = "" if num_wrong else ", or pass the score of such passes as on_error"
            raise RuntimeError(
                f"engine.zo_step made no step, because {reason}: correct the objective{remedy} (the weights and the "
                "step count are as before)"
            ) from error
        text = (
            f"{self.num_failed} score(s) of this step became {self._stand_in:g}, as on_error says, because {reason} "
            "(engine.failed_scores counts them)"
        )
        if error is None:
            warn(text)
        else:  # on the rank whose objective raised
            logger.warning(f"ds_zo: {text}")


def _rows_of(output: Any, part: slice, loss: torch.Tensor | None, *, rows: MemberRows) -> Any:
    """The output for some rows, with their loss."""
    has_loss = loss_of(output) is not None
    found = with_tensors(output, [t[part] if has_rows(t, rows.num_rows) else t for t in tensors_of(output)])
    return with_loss(found, loss) if has_loss else found


def _scores_of(value: Any, *, lengths: Collection[int]) -> torch.Tensor:
    """One score, or one for each sequence, as a floating-point tensor. `lengths`: of the tensors in the batch."""
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.as_tensor(value, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise _WrongObjective(
                f"the objective must return one number, or one for each sequence, got {type(value).__name__}"
            ) from error
    scores: torch.Tensor = value.detach() if value.is_floating_point() else value.detach().float()
    if scores.numel() == 1:
        return scores.reshape(())
    if scores.ndim == 1 and len(scores) in lengths:
        return scores
    batch = f"a batch of {' or '.join(map(str, sorted(lengths)))} sequences" if lengths else "a batch without tensors"
    raise _WrongObjective(
        f"the objective must return one number, or one for each sequence, got shape {tuple(scores.shape)} for {batch}"
    )
