"""LOMO on several ranks: gradients are averaged a layer at a time, while the backward pass goes on with the next.

[Note: one order of buckets] A layer's gradients are reduced in one buffer, its bucket. Ranks must reduce the same
buckets in the same order, whatever their batches reach: a bucket goes out when this rank has nothing more to add to it
and all before it have gone, and at the end of the pass at the latest, with zeros where this rank has no gradient. The
order is that in which the first pass completed them on the first rank (during that pass: the reverse of the model's);
while ranks complete them so, one bucket is filled and one is on its way, and no other exists. A rank that lacks a
gradient which the others have keeps those that come after it to the end of the pass.

[Note: marks] A parameter that no rank has a gradient for is left alone, weight decay included, as on one rank. So each
bucket ends with a mark a parameter, the number of ranks that had its gradient; only ranks that had none look at it.
To these marks each rank adds its loss times zero, so that a loss that is not finite on one rank turns marks to NaN on
all of them, which skips updates ([Note: skipped updates]).

[Note: gradients in pieces] Where devices keep weights in pieces ([Note: device shards]), a rank needs the sum of its
own piece's gradients alone. Its bucket is laid out by ranks, so that one reduce-scatter brings each what it updates,
and the block's weights may be gone by then: the next block's backward pass runs meanwhile. The marks tell a rank
whether a gradient is finite outside its piece: each rank adds the largest magnitude of its own gradient, times zero.
Rules that look at a parameter as a whole (AdaLOMO, a layer's norm, adapters) take whole sums, which every rank applies
to the gathered weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn

from ds_zo.backends.lomo.gradients import ParameterState
from ds_zo.backends.recompute.blocks import RecomputedBlock, shared_parameters
from ds_zo.optim import gradient_guard
from ds_zo.streaming.device_shards import DeviceShards, ParameterShard
from ds_zo.streaming.node import one_may_be_gone, waiting_time

_ALIGN = 16
"""Bytes: where a gradient begins in its bucket, which kernels like."""
_PIECES_NBYTES = 128 * 2**20

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Gradients = list[tuple[ParameterState, torch.Tensor]]
Pieces = list[tuple[ParameterState, ParameterShard, torch.Tensor]]


class BucketStage(Enum):
    OPEN = "gradients of this rank may still come; there are buffers once one has"
    CLOSED = "all have come, and wait for their turn in buffers"
    REDUCING = "the buffers are on their way"
    DONE = "gradients are consumed, buffers are gone"


class Bucket:
    """Parameters whose gradients are reduced together, in one buffer a dtype."""

    in_pieces = False
    """Each rank gets the sums of its own pieces; see [Note: gradients in pieces]."""

    def __init__(self, states: Sequence[ParameterState], block: RecomputedBlock | None = None) -> None:
        self.states = list(states)
        self.block = block
        """Where blocks stream: the one whose weights have to be here when this is consumed."""
        self.trained: list[ParameterState] = []
        self.stage = BucketStage.DONE
        self.arrived: set[int] = set()
        self.works: list[Any] = []
        self.pieces: list[torch.Tensor] = []
        """This rank's pieces of the sums, where each rank needs but one."""
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._offset_of: dict[int, tuple[torch.dtype, int]] = {}
        """Dtype and offset of each parameter's gradient, by the state's id."""
        self._marks_begin: dict[torch.dtype, int] = {}
        self._num_elements: dict[torch.dtype, int] = {}

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self._buffers.values())

    def lay_out(self, trained: Sequence[ParameterState], *, num_ranks: int) -> None:
        """Lays out the parameters that take part."""
        self.trained = list(trained)
        self._offset_of, self._marks_begin, self._num_elements = {}, {}, {}
        for dtype, states in _by_dtype(trained).items():
            step, end = _ALIGN // dtype.itemsize, 0
            for state in states:
                self._offset_of[id(state)] = (dtype, end)
                end += -(-state.parameter.numel() // step) * step
            self._marks_begin[dtype] = end
            whole = step * num_ranks
            self._num_elements[dtype] = -(-(end + len(states)) // whole) * whole

    def begin(self) -> None:
        self.drop()
        self.stage = BucketStage.OPEN if self.trained else BucketStage.DONE

    def fill(self, device: torch.device) -> None:
        """Makes the buffers, of zeros: what no gradient is written to counts as none."""
        if not self._buffers:
            self._buffers = {d: torch.zeros(n, dtype=d, device=device) for d, n in self._num_elements.items()}

    def gradient(self, state: ParameterState) -> torch.Tensor:
        dtype, begin = self._offset_of[id(state)]
        return self._buffers[dtype][begin : begin + state.parameter.numel()].view(state.parameter.shape)

    def put(self, state: ParameterState, grad: torch.Tensor) -> None:
        self.gradient(state).copy_(grad)
        self.arrived.add(id(state))

    def write_marks(self, loss_guard: torch.Tensor | None) -> None:
        """See [Note: marks]."""
        for dtype, begin in self._marks_begin.items():
            here = [state for state in self.trained if self._offset_of[id(state)][0] is dtype]
            marks = self._buffers[dtype][begin : begin + len(here)].fill_(1)
            for i, state in enumerate(here):
                if id(state) not in self.arrived:
                    marks[i].zero_()
            if loss_guard is not None:
                marks.add_(loss_guard)

    def loss_guard(self) -> torch.Tensor:
        """Finite where the losses of all ranks are."""
        dtype, begin = next(iter(self._marks_begin.items()))
        return self._buffers[dtype][begin].to(torch.float32, copy=True)

    def with_gradients(self) -> list[ParameterState]:
        """Those that some rank had a gradient for."""
        if len(self.arrived) == len(self.trained):
            return self.trained
        marks = {d: iter(self._buffers[d][begin:].tolist()) for d, begin in self._marks_begin.items()}
        return [state for state in self.trained if next(marks[self._offset_of[id(state)][0]]) != 0]

    def drop(self) -> None:
        self.stage = BucketStage.DONE
        self.arrived, self.works, self.pieces, self._buffers = set(), [], [], {}


class PiecesBucket(Bucket):
    """See [Note: gradients in pieces]. A buffer is a row a rank: its segments of gradients, then the marks."""

    in_pieces = True

    def __init__(
        self,
        states: Sequence[ParameterState],
        block: RecomputedBlock | None,
        segments: Mapping[int, Sequence[ParameterShard]],
    ) -> None:
        """`segments` by the parameter's id."""
        super().__init__(states, block)
        self._segments = segments
        self._places: dict[int, list[tuple[ParameterShard, int]]] = {}
        """Where in its rank's row each of a parameter's segments begins, by the state's id."""
        self._own_guards: dict[int, torch.Tensor] = {}
        """Of this rank's gradients, by the state's id."""
        self._num_ranks = 1

    def lay_out(self, trained: Sequence[ParameterState], *, num_ranks: int) -> None:
        self.trained = list(trained)
        self._num_ranks = num_ranks
        self._offset_of, self._marks_begin, self._num_elements, self._places = {}, {}, {}, {}
        for dtype, states in _by_dtype(trained).items():
            step, ends = _ALIGN // dtype.itemsize, [0] * num_ranks
            for state in states:
                self._offset_of[id(state)] = (dtype, 0)
                self._places[id(state)] = []
                for segment in self._segments[id(state.parameter)]:
                    self._places[id(state)].append((segment, ends[segment.rank]))
                    ends[segment.rank] += -(-segment.numel // step) * step
            self._marks_begin[dtype] = max(ends)
            self._num_elements[dtype] = num_ranks * (-(-(max(ends) + len(states)) // step) * step)

    def put(self, state: ParameterState, grad: torch.Tensor) -> None:
        flat, rows = grad.reshape(-1), self._rows(state.parameter.dtype)
        for segment, at in self._places[id(state)]:
            rows[segment.rank, at : at + segment.numel].copy_(flat[segment.begin : segment.begin + segment.numel])
        self.arrived.add(id(state))

    def add_guard(self, state: ParameterState, grad: torch.Tensor) -> None:
        """See [Note: gradients in pieces]. A gradient whose sum over ranks may overflow counts as not finite."""
        self._own_guards[id(state)] = gradient_guard(grad).to(grad.dtype) * self._num_ranks

    def write_marks(self, loss_guard: torch.Tensor | None) -> None:
        for dtype, begin in self._marks_begin.items():
            here = [state for state in self.trained if state.parameter.dtype is dtype]
            marks = self._rows(dtype)[:, begin : begin + len(here)].fill_(1)
            for i, state in enumerate(here):
                if id(state) not in self.arrived:
                    marks[:, i].zero_()
            if loss_guard is not None:
                none = torch.zeros_like(loss_guard, dtype=dtype)
                own = torch.stack([self._own_guards.get(id(state), none) for state in here])
                marks.add_(own * 0 + loss_guard)

    def with_gradients(self) -> list[ParameterState]:
        if len(self.arrived) == len(self.trained):
            return self.trained
        marks = {
            d: iter(row[self._marks_begin[d] :].tolist()) for d, row in zip(self._buffers, self.pieces, strict=True)
        }
        return [state for state in self.trained if next(marks[state.parameter.dtype]) != 0]

    def guards(self, present: Sequence[ParameterState]) -> Gradients:
        """Each parameter's, for the gradients and losses of all ranks."""
        rows = zip(self._buffers, self.pieces, strict=True)
        marks = {dtype: iter(row[self._marks_begin[dtype] :].to(torch.float32, copy=True)) for dtype, row in rows}
        guards = {id(state): next(marks[state.parameter.dtype]) for state in self.trained}
        return [(state, guards[id(state)]) for state in present]

    def drop(self) -> None:
        super().drop()
        self._own_guards = {}

    def sums(self, state: ParameterState, *, rank: int) -> list[tuple[ParameterShard, torch.Tensor]]:
        """What of a parameter's summed gradient came to this rank."""
        row = dict(zip(self._buffers, self.pieces, strict=True))[state.parameter.dtype]
        return [(s, row[at : at + s.numel]) for s, at in self._places[id(state)] if s.rank == rank]

    def _rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self._buffers[dtype].view(self._num_ranks, -1)


def _by_dtype(states: Sequence[ParameterState]) -> dict[torch.dtype, list[ParameterState]]:
    found: dict[torch.dtype, list[ParameterState]] = {}
    for state in states:
        found.setdefault(state.parameter.dtype, []).append(state)
    return found


class Consumer(Protocol):
    """Who takes averaged gradients."""

    def materialised_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        """Context in which a bucket is reduced and consumed: its weights are here before any rank changes them. None:
        not now, for another block is being visited."""

    def consume(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        """`loss_guard`: finite where the losses of all ranks are."""

    def consume_pieces(self, block: RecomputedBlock, pieces: Pieces, *, guards: Gradients) -> None:
        """This rank's pieces of a block's averaged gradients; at least one rank has some. `guards` has a scalar for
        each parameter, also for those of which this rank has no piece: finite where gradients and losses of all ranks
        are."""


class GradientReducer:
    """Takes gradients as they come and hands them back averaged, a bucket at a time. See [Note: one order of buckets].

    A pass is `begin`, then `add` for each gradient, then `finish`; `close` says that no more will come for a bucket
    before all of them have.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        process_group: Any,
        device: torch.device,
        consumer: Consumer,
        blocks_first: bool = False,
    ) -> None:
        """`blocks_first`: what stands around blocks waits for the end of the pass, so that no rank can wait for another
        there that waits for it at the gathering of a block ([Note: sharded blocks])."""
        self._group = process_group
        self._device = device
        self._num_ranks = dist.get_world_size(process_group)
        self._consumer = weakref.ref(consumer)
        self._blocks_first = blocks_first
        self._buckets = list(buckets)
        self._bucket_of = {id(state): bucket for bucket in self._buckets for state in bucket.states}
        self._trained: list[int] | None = None
        self._order = self._buckets
        """In which buckets go out."""
        self._has_learned_order = False
        self._completed: list[Bucket] = []
        """In this pass, in the order that they were."""
        self._next = 0
        """Place in the order of the next bucket to go out."""
        self._in_flight: list[Bucket] = []
        self._measures = False
        self._norms: list[torch.Tensor] = []
        self._loss_guard: torch.Tensor | None = None
        self._has_warned = False
        self.active = False
        """Between `begin` and `finish`."""
        self.bytes_reduced = 0
        """Given to reductions so far: an update takes one gradient, and so does a pass that measures, which needs but a
        piece of the sum on each rank (half of the traffic)."""
        self.max_live_buckets = 0
        """Buckets that had buffers at once, in the last pass."""
        on_gpu_by_gloo = device.type == "cuda" and "gloo" in str(dist.get_backend(process_group))
        self._scatters = not on_gpu_by_gloo
        """Gloo reduces on a GPU, but does not scatter there."""

    # A pass

    def begin(
        self, trains: Callable[[ParameterState], bool], *, measures: bool, loss_guard: torch.Tensor | None
    ) -> None:
        """`measures`: only the norm is wanted, and nothing is consumed. `loss_guard`: a scalar that is finite where
        this rank's loss is; None where losses and gradients have been found to be."""
        trained = [id(state) for bucket in self._buckets for state in bucket.states if trains(state)]
        if trained != self._trained:  # at first, and when parameters were frozen or thawed
            chosen = set(trained)
            for bucket in self._buckets:
                bucket.lay_out([state for state in bucket.states if id(state) in chosen], num_ranks=self._num_ranks)
            self._trained = trained
            self._set_order(self._buckets[::-1])
            self._has_learned_order = False
        self.drop()
        for bucket in self._buckets:
            bucket.begin()
        self._measures = measures
        self._loss_guard = loss_guard
        self.max_live_buckets = 0
        self.active = True

    def add(self, state: ParameterState, grad: torch.Tensor) -> None:
        bucket = self._bucket_of[id(state)]
        assert bucket.stage is BucketStage.OPEN, f"the bucket of {state.name} has gone"
        bucket.fill(self._device)
        bucket.put(state, grad)
        if isinstance(bucket, PiecesBucket) and self._loss_guard is not None and not self._measures:
            bucket.add_guard(state, grad)
        self.max_live_buckets = max(self.max_live_buckets, sum(b.has_buffers for b in self._buckets))
        if len(bucket.arrived) == len(bucket.trained) and (bucket.block is None or bucket.in_pieces):
            self.close(bucket)

    def close(self, bucket: Bucket) -> None:
        """No more of this rank's gradients come for a bucket."""
        if bucket.stage is BucketStage.OPEN:
            self._completed.append(bucket)
            bucket.stage = BucketStage.CLOSED
            self.send()

    def finish(self) -> None:
        open_buckets = [bucket for bucket in self._order if bucket.stage is BucketStage.OPEN]
        if any(bucket.stage is BucketStage.CLOSED for bucket in self._order) and self._has_learned_order:
            self._warn(open_buckets)
        for bucket in open_buckets:
            self.close(bucket)
        self.send()
        self._retire(leaving=0)
        if not self._has_learned_order:
            self._learn_order()
        self.active = False

    def drop(self) -> None:
        """Forgets a pass that broke off."""
        for bucket in self._buckets:
            bucket.drop()
        self._in_flight, self._completed, self._norms = [], [], []
        self._next = 0
        self.active = False

    def open_blocks(self) -> list[Bucket]:
        """Buckets of streamed blocks that may still get gradients, in the order of a backward pass."""
        return [bucket for bucket in reversed(self._buckets) if bucket.block and bucket.stage is BucketStage.OPEN]

    def close_block(self, block: RecomputedBlock) -> None:
        for bucket in self.open_blocks():
            if bucket.block is block:
                self.close(bucket)

    def norm(self) -> float:
        """Of the averaged gradients of a pass that measured: one number is reduced, so that ranks can't disagree."""
        norms, self._norms = self._norms, []
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        if norms:
            squares += torch.stack(norms).double().square().sum()
        if self._loss_guard is not None:
            squares += self._loss_guard
        with one_may_be_gone(self._device):
            dist.all_reduce(squares, group=self._group)
            return float(squares.sqrt().item()) / self._num_ranks

    def describe(self) -> str:
        nbytes = sum(s.parameter.numel() * s.parameter.element_size() for b in self._buckets for s in b.states)
        return (
            f"ds_zo: {self._num_ranks} ranks average gradients in {len(self._buckets)} buckets, {nbytes / 2**30:.2f} "
            f"GiB a backward pass; a rank waits {waiting_time(self._device).total_seconds():.0f} s at most for another"
        )

    # Buckets on their way

    def send(self) -> None:
        """What is due. Some of it may have waited for a visit to end."""
        consumer = self._consumer()
        assert consumer is not None
        while self._next < len(self._order) and self._order[self._next].stage is not BucketStage.OPEN:
            bucket = self._order[self._next]
            if bucket.stage is BucketStage.CLOSED:
                weights = consumer.materialised_weights(bucket)
                if weights is None:
                    return
                with weights:
                    self._launch(bucket)
                    # A streamed block's weights are here now; others can wait until the next bucket is full.
                    now = bucket.block is not None and not bucket.in_pieces and not self._measures
                    self._retire(leaving=0 if now else 1)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.fill(self._device)
        if not self._measures:
            bucket.write_marks(self._loss_guard)
        bucket.stage = BucketStage.REDUCING
        with one_may_be_gone(self._device):
            for buffer in bucket.buffers:
                self.bytes_reduced += buffer.numel() * buffer.element_size()
                if (self._measures or bucket.in_pieces) and self._scatters:
                    piece = buffer.new_empty(buffer.numel() // self._num_ranks)
                    bucket.pieces.append(piece)
                    work = _reduce_scatter(piece, buffer, group=self._group, async_op=True)
                else:
                    work = dist.all_reduce(buffer, group=self._group, async_op=True)
                bucket.works.append(work)
        self._in_flight.append(bucket)

    def _retire(self, *, leaving: int) -> None:
        """Consumes what has been sent, but for the last so many."""
        while len(self._in_flight) > leaving:
            bucket = self._in_flight.pop(0)
            with one_may_be_gone(self._device):
                for work in bucket.works:
                    work.wait()
            rank = dist.get_rank(self._group)
            if not bucket.pieces:
                bucket.pieces = [buffer.chunk(self._num_ranks)[rank] for buffer in bucket.buffers]
            if self._measures:
                self._norms += [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in bucket.pieces]
            elif isinstance(bucket, PiecesBucket):
                self._consume_pieces(bucket, rank)
            else:
                present = bucket.with_gradients()
                for buffer in bucket.buffers:
                    buffer.div_(self._num_ranks)
                consumer = self._consumer()
                assert consumer is not None
                gradients = [(state, bucket.gradient(state)) for state in present]
                consumer.consume(gradients, loss_guard=bucket.loss_guard())
            bucket.drop()

    def _consume_pieces(self, bucket: PiecesBucket, rank: int) -> None:
        present = bucket.with_gradients()
        for piece in bucket.pieces:
            piece.div_(self._num_ranks)
        consumer = self._consumer()
        assert consumer is not None and bucket.block is not None
        if present:
            found = [(state, segment, grad) for state in present for segment, grad in bucket.sums(state, rank=rank)]
            consumer.consume_pieces(bucket.block, found, guards=bucket.guards(present))

    def _learn_order(self) -> None:
        number = {id(bucket): i for i, bucket in enumerate(self._buckets)}
        seen = [number[id(bucket)] for bucket in self._completed]
        rest = [i for i in reversed(range(len(self._buckets))) if i not in set(seen)]
        order = torch.tensor(seen + rest, dtype=torch.int64, device=self._device)
        with one_may_be_gone(self._device):
            dist.broadcast(order, group=self._group, group_src=0)
        self._set_order([self._buckets[i] for i in order.tolist()])
        self._has_learned_order = True

    def _set_order(self, order: Sequence[Bucket]) -> None:
        """Blocks that stream come in the order that they are planned to be brought in, a block's buckets as given."""
        place = {id(bucket): i for i, bucket in enumerate(order)}
        turn = {id(bucket.block): i for i, bucket in enumerate(self._buckets)}
        blocks = [bucket for bucket in self._buckets if bucket.block is not None]
        blocks.sort(key=lambda bucket: (-turn[id(bucket.block)], place[id(bucket)]))
        if self._blocks_first:
            self._order = blocks + [bucket for bucket in order if bucket.block is None]
        else:
            following = iter(blocks)
            self._order = [bucket if bucket.block is None else next(following) for bucket in order]

    def _warn(self, open_buckets: Sequence[Bucket]) -> None:
        if self._has_warned or not open_buckets:
            return
        self._has_warned = True
        missing = next(state.name for state in open_buckets[0].trained if id(state) not in open_buckets[0].arrived)
        logger.warning(
            f"ds_zo: rank {dist.get_rank()} got no gradient for {missing}, so those that follow it waited for the end "
            "of the backward pass, which takes memory: freeze parameters that no loss reaches"
        )


def buckets_of(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    states: Sequence[ParameterState],
    *,
    shards: DeviceShards | None = None,
) -> list[Bucket]:
    """A bucket for what stands in one block alone, and one for each module around blocks, in the model's order.
    `shards`: those of blocks that are sharded are reduced in pieces."""
    block_of: dict[int, int] = {}
    for i, (block, shared) in enumerate(zip(blocks, shared_parameters(module, blocks), strict=True)):
        elsewhere = {id(getattr(owner, name)) for owner, name in shared}
        block_of |= {id(p): i for p in block.parameters() if id(p) not in elsewhere}
    found: dict[int | str, list[ParameterState]] = {}
    for state in states:
        found.setdefault(block_of.get(id(state.parameter), state.name.rpartition(".")[0]), []).append(state)
    return [bucket for members in found.values() for bucket in _buckets_for(members, shards)]


def _buckets_for(members: Sequence[ParameterState], shards: DeviceShards | None) -> list[Bucket]:
    """One, or where ranks need pieces alone, several of no more than `_PIECES_NBYTES`, if parameters allow: each goes
    as soon as it is full, and two are alive at once. Vectors, such as the norm that a block begins with, would keep
    matrices waiting."""
    block = members[0].block
    if shards is None or block is None or not block.unit.is_cut:
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
            room = _PIECES_NBYTES
        groups[-1].append(state)
        room -= nbytes
    return [PiecesBucket(group, block, segments) for group in groups]
