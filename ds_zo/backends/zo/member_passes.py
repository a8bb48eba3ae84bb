"""The pass that evaluates all members of a rank, and the passes of the check in the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_zo.backends.common.chunked_loss import RowLosses
from ds_zo.backends.zo.member_check import WEIGHTS_SCALE
from ds_zo.backends.zo.members import MemberRows, losses_of_members
from ds_zo.backends.zo.outputs import floats_of, tensors_of, with_tensors
from ds_zo.backends.zo.pass_inputs import PassInputs, has_rows
from ds_zo.backends.zo.store import ZOStore
from ds_zo.config import ZOParams
from ds_zo.logs import show
from ds_zo.streaming.placement import Placement


class MemberPasses:
    """Evaluates the members of a rank in the rows of one pass."""

    def __init__(self, module: nn.Module, store: ZOStore, settings: ZOParams, *, num_members: int) -> None:
        """`num_members`: of this rank."""
        assert store.members is not None
        self._module = module
        self._forwards = store.members
        self._forwards.attach()
        self._store = store
        self._settings = settings
        self._num_members = num_members
        self.rows = MemberRows(1, 1, antithetic=False)
        """The rows of the newest forward."""
        self.row_losses = RowLosses()
        """The losses of these rows."""

    def begin(self, inputs: PassInputs) -> PassInputs:
        """The inputs of the pass, with the rows of all members."""
        num_sequences = inputs.num_sequences
        inputs.check_rows(num_sequences)
        self.rows = MemberRows(num_sequences, self._num_members, self._settings.antithetic)
        return inputs.with_rows(self.rows.repeated, num_rows=num_sequences)

    @contextmanager
    def adding_noise(self) -> Iterator[None]:
        """Context of the module's forward in the pass."""
        self.row_losses.loss = None
        with self._forwards.adding_noise(self.rows, scale=self._settings.zo_eps):
            yield

    def losses(self, output: Any) -> torch.Tensor | None:
        """The losses [member, sign] of the pass that returned `output`; None if the model does not tell them."""
        return losses_of_members(self.row_losses, output, self.rows)

    def measured(self, output: Any, *, needs_loss: bool) -> list[torch.Tensor]:
        """The losses of the pass that returned `output`. Without `needs_loss`, the output's tensors if it has none."""
        losses = self.losses(output)
        if losses is not None:
            return [losses]
        if needs_loss:
            raise no_losses()
        return [t.detach().clone() for t in floats_of(output)]

    def of_sequences(self, output: Any) -> Any:
        """The output of the pass with one row for each sequence of the batch, whose noise is that of its first row."""
        num_rows = self.rows.num_rows
        return with_tensors(
            output, [self.rows.of_sequences(t) if has_rows(t, num_rows) else t for t in tensors_of(output)]
        )

    def check(self, inputs: PassInputs, run: Callable[[PassInputs], None], rewind: Callable[[], None]) -> None:
        """See [Note: check of members]. `inputs`: of the pass. `run` runs a pass."""
        self._refuse_dropout()
        first = inputs.with_rows(lambda x: x[: self.rows.num_each], num_rows=self.rows.num_rows)
        materialiser = self._store.materialiser
        with self._forwards.checked(self.rows) as check:
            rewind()
            with check.detector, self.adding_noise():
                run(inputs)
            if self.row_losses.loss is not None:
                check.saw_losses(self.row_losses.sums)
            check.raise_for_uses()
            rewind()
            check.in_weights = True
            try:
                materialiser.noise_scale = WEIGHTS_SCALE
                run(first)
            finally:
                materialiser.noise_scale = 0.0
            check.raise_for_noise()

    def _refuse_dropout(self) -> None:
        for name, m in self._module.named_modules():
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0:
                raise ValueError(
                    'noise "rank1" compares rows of one pass, in which dropout differs from row to row, got '
                    f'{name} with p={m.p:g}: set the dropout of the model to 0, or use noise "mezo"'
                )


def log_limits(placement: Placement) -> None:
    """Logs what rank-1 noise leaves out."""
    trained = [p for unit in placement.units for p in unit.placed if p.trainable]
    vectors = sum(len(p.shape) < 2 for p in trained)
    left_out = f"{vectors} of {len(trained)} trained parameters are vectors, which get weight decay alone"
    show(f'ds_zo: noise "rank1" is for matrices: {left_out}')


def no_losses() -> ValueError:
    return ValueError(
        'noise "rank1" needs the loss of each sequence, which the engine knows of the causal loss of transformers, got '
        "a model with another loss or none: pass an objective to engine.zo_step that returns one number for each "
        'sequence, or use noise "mezo" (optimizer.params.noise)'
    )
