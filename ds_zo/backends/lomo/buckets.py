"""Buckets: the parameters of one layer, whose gradients are reduced over ranks together.

[Note: presence marks] A parameter for which no rank has a gradient is not changed, not even by weight decay, as on one
rank. So each bucket ends with one mark per parameter: the number of ranks that had a gradient for it. Only ranks
without a gradient read the mark. Each rank adds its loss times zero to its marks. If the loss of one rank is not
finite, the marks are NaN on all ranks, which skips the updates ([Note: skipped updates]).

[Note: gradients in shards] Where weights are sharded over devices ([Note: device shards]), a rank updates its own
shard, and needs only the gradient of that shard. The buffers of such a bucket have one row per rank, so that one
reduce-scatter gives each rank its row. The update does not need the gathered weights. So these may be freed, and the
backward of the next block runs meanwhile. A rank sees only its shard of a gradient. It learns from the marks whether
the rest is finite: to its marks each rank adds the largest magnitude of its own gradient, times zero. Rules that need a
whole parameter (AdaLOMO, a layer's norm, adapters) get whole gradients, and every rank updates the gathered weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn

from ds_zo.backends.lomo.parameters import ParameterState, block_numbers
from ds_zo.backends.recompute.blocks import RecomputedBlock
from ds_zo.optim import gradient_guard
from ds_zo.streaming.device_shards import DeviceShards, ParameterShard

_ALIGN = 16
"""Bytes. Each gradient begins at a multiple of it in its bucket, as fast kernels require."""
_SHARDS_NBYTES = 128 * 2**20
"""Largest size of a `ShardsBucket` with more than one parameter."""

Gradients = list[tuple[ParameterState, torch.Tensor]]
"""Parameters, each with its gradient, or with a scalar that guards its update."""
Shards = list[tuple[ParameterState, ParameterShard, torch.Tensor]]
"""Parts of parameters, each with the gradient of that part."""


class GradientConsumer(Protocol):
    """Updates weights by gradients that are averaged over ranks."""

    def consume(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Updates by one gradient, on one rank."""

    def consume_bucket(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        """Updates by the averaged gradients of a bucket. `loss_guard`: a scalar that is finite if the losses of all
        ranks are."""

    def consume_shards(self, block: RecomputedBlock, shards: Shards, *, guards: Gradients) -> None:
        """Updates this rank's shards of a block by `shards`, its shards of the averaged gradients. Some rank has a
        gradient for each of them. `guards`: a scalar for each parameter that has a gradient, also if this rank has no
        shard of it. The scalar is finite if the parameter's gradients and the losses of all ranks are."""

    def materialised_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        """Context in which a bucket is reduced and consumed. Inside, the bucket's weights are on the device: this rank
        has read them before any rank changes them. None: not possible now, because another block is materialised; the
        reducer asks again."""


class BucketStage(Enum):
    OPEN = "more gradients of this rank may come; buffers exist after the first gradient"
    CLOSED = "no more gradients of this rank come; the buckets before this one are reduced first"
    REDUCING = "collectives read and write the buffers"
    DONE = "gradients are consumed and buffers are freed"


class Bucket:
    """Parameters whose gradients are reduced together, in one buffer per dtype.

    A buffer has one row, or one per rank if `in_shards`. A row holds gradients one after the other, then the presence
    marks of all parameters, then padding. The length of a buffer is a multiple of the number of ranks.
    """

    in_shards = False
    """Each rank gets the reduced gradients of its own shards only. See [Note: gradients in shards]."""

    def __init__(self, states: Sequence[ParameterState], block: RecomputedBlock | None = None) -> None:
        self.states = list(states)
        self.block = block
        """The streamed block whose weights must be on the device when the bucket is consumed. None: these weights are
        always on the device."""
        self.trained: list[ParameterState] = []
        """The parameters that are trained now."""
        self.stage = BucketStage.DONE
        self.arrived: set[int] = set()
        """Ids of the parameter states whose gradients this rank has put in."""
        self.works: list[Any] = []
        """The running collectives, one per buffer."""
        self.buffers: dict[torch.dtype, torch.Tensor] = {}
        self.shards: dict[torch.dtype, torch.Tensor] = {}
        """This rank's shard of each reduced buffer."""
        self._num_ranks = self._num_rows = 1
        self._places: dict[int, list[tuple[ParameterShard, int]]] = {}
        """Segments of each parameter, whose `rank` is their row, with their offsets there in elements, by the state's
        id."""
        self._marks_begin: dict[torch.dtype, int] = {}
        """Offset in elements of the marks in each row."""
        self._num_elements: dict[torch.dtype, int] = {}

    def lay_out(self, trained: Sequence[ParameterState], *, num_ranks: int) -> None:
        """Computes the layout of the buffers. `trained`: the parameters that take part."""
        self.trained, self._num_ranks = list(trained), num_ranks
        self._num_rows = num_ranks if self.in_shards else 1
        self._places, self._marks_begin, self._num_elements = {}, {}, {}
        for dtype, states in self._by_dtype().items():
            step, ends = _ALIGN // dtype.itemsize, [0] * self._num_rows
            for state in states:
                places = self._places[id(state)] = []
                for segment in self._segments(state):
                    places.append((segment, ends[segment.rank]))
                    ends[segment.rank] += _up(segment.numel, step)
            self._marks_begin[dtype] = max(ends)
            row = _up(max(ends) + len(states), step * num_ranks // self._num_rows)
            self._num_elements[dtype] = self._num_rows * row

    def _segments(self, state: ParameterState) -> Sequence[ParameterShard]:
        return [ParameterShard(rank=0, begin=0, numel=state.parameter.numel(), at=0)]

    def _by_dtype(self) -> dict[torch.dtype, list[ParameterState]]:
        found: dict[torch.dtype, list[ParameterState]] = {}
        for state in self.trained:
            found.setdefault(state.parameter.dtype, []).append(state)
        return found

    def begin(self) -> None:
        self.drop()
        self.stage = BucketStage.OPEN if self.trained else BucketStage.DONE

    def drop(self) -> None:
        """Frees the buffers."""
        self.stage = BucketStage.DONE
        self.arrived, self.works, self.shards, self.buffers = set(), [], {}, {}

    def fill(self, device: torch.device) -> None:
        """Allocates the buffers if there are none. They are zeros: a gradient that is not put in adds nothing."""
        if not self.buffers:
            self.buffers = {d: torch.zeros(n, dtype=d, device=device) for d, n in self._num_elements.items()}

    def put(self, state: ParameterState, grad: torch.Tensor, *, guarded: bool) -> None:
        """Copies this rank's gradient to its place. `guarded`: the marks must say whether it is finite."""
        flat, rows = grad.reshape(-1), self._rows(state.parameter.dtype)
        for segment, at in self._places[id(state)]:
            rows[segment.rank, at : at + segment.numel].copy_(flat[segment.begin : segment.begin + segment.numel])
        self.arrived.add(id(state))

    def write_marks(self, loss_guard: torch.Tensor | None) -> None:
        """Writes this rank's marks. `loss_guard`: see `Reducer.begin`. See [Note: presence marks]."""
        for dtype, states in self._by_dtype().items():
            begin = self._marks_begin[dtype]
            marks = self._rows(dtype)[:, begin : begin + len(states)].fill_(1)
            for i, state in enumerate(states):
                if id(state) not in self.arrived:
                    marks[:, i].zero_()
            if loss_guard is not None:
                marks.add_(self._guards(states, loss_guard))

    def _rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self.buffers[dtype].view(self._num_rows, -1)

    def _guards(self, states: Sequence[ParameterState], loss_guard: torch.Tensor) -> torch.Tensor:
        """One scalar for the marks of `states`, or one per mark."""
        return loss_guard

    def _reduced_marks(self, dtype: torch.dtype) -> torch.Tensor:
        """After the reduction: the marks of the parameters of `dtype`, then padding."""
        return self.buffers[dtype][self._marks_begin[dtype] :]

    def _with_gradients(self) -> list[ParameterState]:
        """After the reduction: the parameters for which some rank had a gradient. The host waits for the marks only if
        this rank lacks a gradient."""
        if len(self.arrived) == len(self.trained):
            return self.trained
        marks = {dtype: iter(self._reduced_marks(dtype).tolist()) for dtype in self.buffers}
        return [state for state in self.trained if next(marks[state.parameter.dtype]) != 0]

    def consume(self, consumer: GradientConsumer, *, rank: int) -> None:
        """After the reduction: passes the averaged gradients to the consumer."""
        present = self._with_gradients()
        for buffer in self.buffers.values():
            buffer.div_(self._num_ranks)
        gradients = []
        for state in present:
            [(segment, at)] = self._places[id(state)]
            grad = self.buffers[state.parameter.dtype][at : at + segment.numel].view(state.parameter.shape)
            gradients.append((state, grad))
        guard = self._reduced_marks(next(iter(self.buffers)))[0].to(torch.float32, copy=True)
        consumer.consume_bucket(gradients, loss_guard=guard)


class ShardsBucket(Bucket):
    """A bucket whose reduction gives each rank its row: the segments of gradients that this rank updates, and the
    marks. See [Note: gradients in shards]."""

    in_shards = True

    def __init__(
        self,
        states: Sequence[ParameterState],
        block: RecomputedBlock,
        segments: Mapping[int, Sequence[ParameterShard]],
    ) -> None:
        """`segments`: the parts of each parameter that ranks have, by the parameter's id."""
        super().__init__(states, block)
        self._segments_of = segments
        self._own_guards: dict[int, torch.Tensor] = {}
        """Guards of this rank's whole gradients, by the state's id."""

    def _segments(self, state: ParameterState) -> Sequence[ParameterShard]:
        return self._segments_of[id(state.parameter)]

    def drop(self) -> None:
        super().drop()
        self._own_guards = {}

    def put(self, state: ParameterState, grad: torch.Tensor, *, guarded: bool) -> None:
        super().put(state, grad, guarded=guarded)
        if guarded:  # not finite either if the sum over ranks may overflow
            self._own_guards[id(state)] = gradient_guard(grad).to(grad.dtype) * self._num_ranks

    def _guards(self, states: Sequence[ParameterState], loss_guard: torch.Tensor) -> torch.Tensor:
        none = torch.zeros_like(loss_guard, dtype=states[0].parameter.dtype)
        return torch.stack([self._own_guards.get(id(state), none) for state in states]) * 0 + loss_guard

    def _reduced_marks(self, dtype: torch.dtype) -> torch.Tensor:
        return self.shards[dtype][self._marks_begin[dtype] :]

    def consume(self, consumer: GradientConsumer, *, rank: int) -> None:
        present = self._with_gradients()
        if not present:
            return
        assert self.block is not None
        for shard in self.shards.values():
            shard.div_(self._num_ranks)
        found = [
            (state, segment, self.shards[state.parameter.dtype][at : at + segment.numel])
            for state in present
            for segment, at in self._places[id(state)]
            if segment.rank == rank
        ]
        marks = {dtype: iter(self._reduced_marks(dtype).to(torch.float32, copy=True)) for dtype in self.buffers}
        guards = {id(state): next(marks[state.parameter.dtype]) for state in self.trained}
        consumer.consume_shards(self.block, found, guards=[(state, guards[id(state)]) for state in present])


def _up(number: int, step: int) -> int:
    """`number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


def buckets_of(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    states: Sequence[ParameterState],
    *,
    shards: DeviceShards | None = None,
) -> list[Bucket]:
    """The buckets of a model, in the model's order. Each block has one, for the parameters that are used in no other
    module; each module outside of blocks has one. `shards`: sharded blocks get buckets that are reduced in shards."""
    block_of = block_numbers(module, blocks)
    found: dict[int | str, list[ParameterState]] = {}
    for state in states:
        found.setdefault(block_of.get(id(state.parameter), state.name.rpartition(".")[0]), []).append(state)
    return [bucket for members in found.values() for bucket in _buckets_for(members, shards)]


def _buckets_for(members: Sequence[ParameterState], shards: DeviceShards | None) -> list[Bucket]:
    """The buckets of one block or module. There is one, except where it is reduced in shards: then there are several of
    at most `_SHARDS_NBYTES`, or of one larger parameter. Each of them is reduced as soon as it is full, and two have
    buffers at the same time. Vectors get separate buckets, so that matrices do not wait for them: the norm at the start
    of a block gets its gradient last."""
    block = members[0].block
    if shards is None or block is None or not block.unit.is_sharded:
        return [Bucket(members, block)]
    segments = shards.segments(block.unit)
    if any(id(state.parameter) not in segments or state.is_adapter for state in members):
        return [Bucket(members, block)]
    groups: list[list[ParameterState]] = []
    room = 0
    for state in sorted(members, key=lambda state: state.parameter.dim() >= 2):
        nbytes = state.parameter.numel() * state.parameter.element_size()
        begins = bool(groups) and state.parameter.dim() >= 2 > groups[-1][-1].parameter.dim()
        if not groups or begins or nbytes > room:
            groups.append([])
            room = _SHARDS_NBYTES
        groups[-1].append(state)
        room -= nbytes
    return [ShardsBucket(group, block, segments) for group in groups]
