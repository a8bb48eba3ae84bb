"""LOMO on several ranks: the gradients of one layer are averaged while the backward of the next layer runs.

[Note: one order of buckets] The gradients of a layer are reduced together, in the buffers of a bucket. All ranks must
reduce the same buckets in the same order, also if their batches reach different parameters. A bucket is reduced when
this rank has nothing more to add to it and all buckets before it have been reduced. At the end of a pass the remaining
buckets are reduced, with zeros for gradients that this rank does not have. The first pass reduces buckets in the
reverse order of the model. Later passes use the order in which the first pass completed the buckets on rank 0. While
every rank completes buckets in this order, two buckets have buffers: one is filled and one is being reduced. A rank
without a gradient for some bucket holds all later buckets until the end of the pass.

[Note: presence marks] A parameter for which no rank has a gradient is not changed, not even by weight decay, as on one
rank. So each bucket ends with one mark per parameter: the number of ranks that had a gradient for it. Only ranks
without a gradient read the mark. Each rank adds its loss times zero to its marks. If the loss of one rank is not
finite, the marks are NaN on all ranks, which skips the updates ([Note: skipped updates]).

[Note: gradients in pieces] Where weights are sharded over devices ([Note: device shards]), a rank updates its own
piece, and needs only the gradient of that piece. The buffers of such a bucket have one row per rank, so that one
reduce-scatter gives each rank its row. The update does not need the gathered weights. So these may be freed, and the
backward of the next block runs meanwhile. A rank sees only its piece of a gradient. It learns from the marks whether
the rest is finite: to its marks each rank adds the largest magnitude of its own gradient, times zero. Rules that need a
whole parameter (AdaLOMO, a layer's norm, adapters) get whole gradients, and every rank updates the gathered weights.
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
from ds_zo.streaming.node import explain_lost_rank, world_timeout

_ALIGN = 16
"""Bytes. Each gradient begins at a multiple of it in its bucket, as fast kernels require."""
_PIECES_NBYTES = 128 * 2**20
"""Largest size of a `PiecesBucket` with more than one parameter."""

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Gradients = list[tuple[ParameterState, torch.Tensor]]
"""Parameters, each with its gradient, or with a scalar that guards its update."""
Pieces = list[tuple[ParameterState, ParameterShard, torch.Tensor]]
"""Parts of parameters, each with the gradient of that part."""


class BucketStage(Enum):
    OPEN = "more gradients of this rank may come; buffers exist after the first gradient"
    CLOSED = "no more gradients of this rank come; the buckets before this one are reduced first"
    REDUCING = "collectives read and write the buffers"
    DONE = "gradients are consumed and buffers are freed"


class Bucket:
    """Parameters whose gradients are reduced together, in one buffer per dtype.

    A buffer holds the gradients one after the other, then the presence marks, then padding up to a multiple of the
    number of ranks.
    """

    in_pieces = False
    """Each rank gets the reduced gradients of its own pieces only. See [Note: gradients in pieces]."""

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
        self.pieces: list[torch.Tensor] = []
        """This rank's piece of each reduced buffer."""
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        self._offset_of: dict[int, tuple[torch.dtype, int]] = {}
        """Dtype and offset in elements of each parameter's gradient, by the state's id."""
        self._marks_begin: dict[torch.dtype, int] = {}
        """Offset in elements of the marks in each buffer."""
        self._num_elements: dict[torch.dtype, int] = {}

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffers)

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self._buffers.values())

    def lay_out(self, trained: Sequence[ParameterState], *, num_ranks: int) -> None:
        """Computes the layout of the buffers. `trained`: the parameters that take part."""
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
        """Allocates the buffers if there are none. They are zeros: a gradient that is not put in adds nothing."""
        if not self._buffers:
            self._buffers = {d: torch.zeros(n, dtype=d, device=device) for d, n in self._num_elements.items()}

    def gradient(self, state: ParameterState) -> torch.Tensor:
        """The part of the buffer for a parameter's gradient, in the parameter's shape."""
        dtype, begin = self._offset_of[id(state)]
        return self._buffers[dtype][begin : begin + state.parameter.numel()].view(state.parameter.shape)

    def put(self, state: ParameterState, grad: torch.Tensor) -> None:
        self.gradient(state).copy_(grad)
        self.arrived.add(id(state))

    def write_marks(self, loss_guard: torch.Tensor | None) -> None:
        """Writes this rank's marks. `loss_guard`: see `GradientReducer.begin`. See [Note: presence marks]."""
        for dtype, begin in self._marks_begin.items():
            here = [state for state in self.trained if self._offset_of[id(state)][0] is dtype]
            marks = self._buffers[dtype][begin : begin + len(here)].fill_(1)
            for i, state in enumerate(here):
                if id(state) not in self.arrived:
                    marks[i].zero_()
            if loss_guard is not None:
                marks.add_(loss_guard)

    def loss_guard(self) -> torch.Tensor:
        """After the reduction: a scalar that is finite if the losses of all ranks are."""
        dtype, begin = next(iter(self._marks_begin.items()))
        return self._buffers[dtype][begin].to(torch.float32, copy=True)

    def with_gradients(self) -> list[ParameterState]:
        """After the reduction: the parameters for which some rank had a gradient. The host waits for the marks only if
        this rank lacks a gradient."""
        if len(self.arrived) == len(self.trained):
            return self.trained
        marks = {d: iter(self._buffers[d][begin:].tolist()) for d, begin in self._marks_begin.items()}
        return [state for state in self.trained if next(marks[self._offset_of[id(state)][0]]) != 0]

    def drop(self) -> None:
        """Frees the buffers."""
        self.stage = BucketStage.DONE
        self.arrived, self.works, self.pieces, self._buffers = set(), [], [], {}


class PiecesBucket(Bucket):
    """A bucket whose reduction gives each rank its own pieces ([Note: gradients in pieces]). A buffer has one row per
    rank: the segments of gradients that this rank updates, then the marks of all parameters."""

    in_pieces = True

    def __init__(
        self,
        states: Sequence[ParameterState],
        block: RecomputedBlock | None,
        segments: Mapping[int, Sequence[ParameterShard]],
    ) -> None:
        """`segments`: the parts of each parameter that ranks have, by the parameter's id."""
        super().__init__(states, block)
        self._segments = segments
        self._places: dict[int, list[tuple[ParameterShard, int]]] = {}
        """Segments of each parameter with their offsets in the rank's row, in elements, by the state's id."""
        self._own_guards: dict[int, torch.Tensor] = {}
        """Guards of this rank's whole gradients, by the state's id."""
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
        """Computes the guard of this rank's gradient. It is not finite either if the sum over ranks may overflow. See
        [Note: gradients in pieces]."""
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
        """After the reduction: a scalar per parameter, finite if the parameter's gradients and the losses of all ranks
        are."""
        rows = zip(self._buffers, self.pieces, strict=True)
        marks = {dtype: iter(row[self._marks_begin[dtype] :].to(torch.float32, copy=True)) for dtype, row in rows}
        guards = {id(state): next(marks[state.parameter.dtype]) for state in self.trained}
        return [(state, guards[id(state)]) for state in present]

    def drop(self) -> None:
        super().drop()
        self._own_guards = {}

    def sums(self, state: ParameterState, *, rank: int) -> list[tuple[ParameterShard, torch.Tensor]]:
        """After the reduction: this rank's segments of a parameter, each with its summed gradient."""
        row = dict(zip(self._buffers, self.pieces, strict=True))[state.parameter.dtype]
        return [(s, row[at : at + s.numel]) for s, at in self._places[id(state)] if s.rank == rank]

    def _rows(self, dtype: torch.dtype) -> torch.Tensor:
        return self._buffers[dtype].view(self._num_ranks, -1)


def _by_dtype(states: Sequence[ParameterState]) -> dict[torch.dtype, list[ParameterState]]:
    found: dict[torch.dtype, list[ParameterState]] = {}
    for state in states:
        found.setdefault(state.parameter.dtype, []).append(state)
    return found


class BucketConsumer(Protocol):
    """The backend, which updates weights by averaged gradients."""

    def materialised_weights(self, bucket: Bucket) -> AbstractContextManager[None] | None:
        """Context in which a bucket is reduced and consumed. Inside, the bucket's weights are on the device: this rank
        has read them before any rank changes them. None: not possible now, because another block is materialised; the
        reducer asks again."""

    def consume(self, gradients: Gradients, *, loss_guard: torch.Tensor) -> None:
        """Updates by the averaged gradients of a bucket. `loss_guard`: a scalar that is finite if the losses of all
        ranks are."""

    def consume_pieces(self, block: RecomputedBlock, pieces: Pieces, *, guards: Gradients) -> None:
        """Updates this rank's pieces of a block by `pieces`, its pieces of the averaged gradients. Some rank has a
        gradient for each of them. `guards`: a scalar for each parameter that has a gradient, also if this rank has no
        piece of it. The scalar is finite if the parameter's gradients and the losses of all ranks are."""


class GradientReducer:
    """Averages gradients over ranks, one bucket at a time, and passes them to its consumer. See
    [Note: one order of buckets].

    A pass is one call of `begin`, one of `add` for each gradient, and one of `finish`. `close` declares that a bucket
    gets no more gradients, before all its parameters have got one.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        process_group: Any,
        device: torch.device,
        consumer: BucketConsumer,
        blocks_first: bool = False,
    ) -> None:
        """`blocks_first`: buckets of modules outside of blocks are reduced at the end of the pass. Otherwise one rank
        could wait in such a reduction while another waits in the gather of a block ([Note: sharded blocks])."""
        self._group = process_group
        self._device = device
        self._num_ranks = dist.get_world_size(process_group)
        self._consumer = weakref.ref(consumer)
        self._blocks_first = blocks_first
        self._buckets = list(buckets)
        self._bucket_of = {id(state): bucket for bucket in self._buckets for state in bucket.states}
        self._trained: list[int] | None = None
        """Ids of the trained parameter states for which buckets are laid out. None before the first pass."""
        self._order = self._buckets
        """The buckets in the order in which they are reduced."""
        self._has_learned_order = False
        self._completed: list[Bucket] = []
        """The buckets closed in this pass, in the order in which they were closed."""
        self._next = 0
        """Index in `_order` of the next bucket to reduce."""
        self._in_flight: list[Bucket] = []
        """Buckets in stage REDUCING, oldest first."""
        self._measures = False
        self._norms: list[torch.Tensor] = []
        """In a pass that measures: norms of this rank's pieces of the summed gradients."""
        self._loss_guard: torch.Tensor | None = None
        self._has_warned = False
        self.active = False
        """Between `begin` and `finish`."""
        self.bytes_reduced = 0
        """Bytes of all buffers reduced so far. Each pass reduces every gradient once. A pass that measures uses
        reduce-scatter, which has half the traffic of the all-reduce of an update."""
        self.max_live_buckets = 0
        """The largest number of buckets that had buffers at the same time in the last pass."""
        on_gpu_by_gloo = device.type == "cuda" and "gloo" in str(dist.get_backend(process_group))
        self._scatters = not on_gpu_by_gloo
        """Reduce-scatter is available. Gloo has all-reduce for CUDA tensors, but not reduce-scatter."""

    # A pass

    def begin(
        self, trains: Callable[[ParameterState], bool], *, measures: bool, loss_guard: torch.Tensor | None
    ) -> None:
        """Begins a pass. `trains`: whether a parameter is trained now. `measures`: the pass only computes the norm, and
        nothing is consumed. `loss_guard`: a scalar that is finite if this rank's loss is. None in a second pass, after
        the first has found losses and gradients finite."""
        trained = [id(state) for bucket in self._buckets for state in bucket.states if trains(state)]
        if trained != self._trained:  # in the first pass, and after parameters were frozen or unfrozen
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
        """Copies this rank's gradient of a parameter to its bucket, which may start reductions."""
        bucket = self._bucket_of[id(state)]
        assert bucket.stage is BucketStage.OPEN, f"the bucket of {state.name} is closed"
        bucket.fill(self._device)
        bucket.put(state, grad)
        if isinstance(bucket, PiecesBucket) and self._loss_guard is not None and not self._measures:
            bucket.add_guard(state, grad)
        self.max_live_buckets = max(self.max_live_buckets, sum(b.has_buffers for b in self._buckets))
        if len(bucket.arrived) == len(bucket.trained) and (bucket.block is None or bucket.in_pieces):
            self.close(bucket)

    def close(self, bucket: Bucket) -> None:
        """Declares that this rank adds no more gradients to a bucket."""
        if bucket.stage is BucketStage.OPEN:
            self._completed.append(bucket)
            bucket.stage = BucketStage.CLOSED
            self.send()

    def finish(self) -> None:
        """Ends a pass: reduces and consumes all remaining buckets."""
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
        """Drops all buckets of a pass that raised."""
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
        """Norm of all averaged gradients, after a pass that measured. The sum of squares is reduced over ranks, so that
        all ranks get the same number. It is not finite if a loss is not."""
        norms, self._norms = self._norms, []
        squares = torch.zeros(1, dtype=torch.float64, device=self._device)
        if norms:
            squares += torch.stack(norms).double().square().sum()
        if self._loss_guard is not None:
            squares += self._loss_guard
        with explain_lost_rank(self._device):
            dist.all_reduce(squares, group=self._group)
            return float(squares.sqrt().item()) / self._num_ranks

    def startup_text(self) -> str:
        """How ranks share the work, for the start-up table."""
        return f"{self._num_ranks}, gradients averaged in {len(self._buckets)} buckets"

    def describe(self) -> str:
        nbytes = sum(s.parameter.numel() * s.parameter.element_size() for b in self._buckets for s in b.states)
        return (
            f"ds_zo: {self._num_ranks} ranks average gradients in {len(self._buckets)} buckets, {nbytes / 2**30:.2f} "
            "GiB per backward pass; a rank waits at most "
            f"{world_timeout(self._device).total_seconds():.0f} s for another"
        )

    # Reductions

    def send(self) -> None:
        """Starts the reductions of closed buckets, in order, up to the first open bucket. It stops at a bucket whose
        weights cannot be materialised now, and must be called again later."""
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
                    # A streamed block must be updated while it is materialised; other updates overlap the next bucket.
                    now = bucket.block is not None and not bucket.in_pieces and not self._measures
                    self._retire(leaving=0 if now else 1)
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        bucket.fill(self._device)
        if not self._measures:
            bucket.write_marks(self._loss_guard)
        bucket.stage = BucketStage.REDUCING
        with explain_lost_rank(self._device):
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
        """Waits for running reductions and consumes their buckets, oldest first, until `leaving` of them remain."""
        while len(self._in_flight) > leaving:
            bucket = self._in_flight.pop(0)
            with explain_lost_rank(self._device):
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
        """Sets the order of later passes to that in which rank 0 has completed the buckets of this pass."""
        number = {id(bucket): i for i, bucket in enumerate(self._buckets)}
        seen = [number[id(bucket)] for bucket in self._completed]
        rest = [i for i in reversed(range(len(self._buckets))) if i not in set(seen)]
        order = torch.tensor(seen + rest, dtype=torch.int64, device=self._device)
        with explain_lost_rank(self._device):
            dist.broadcast(order, group=self._group, group_src=0)
        self._set_order([self._buckets[i] for i in order.tolist()])
        self._has_learned_order = True

    def _set_order(self, order: Sequence[Bucket]) -> None:
        """Sets the order of reductions. Buckets of streamed blocks are sorted by the planned order of uploads of a
        backward pass, and those of one block as in `order`."""
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
        """Warns once of a parameter without a gradient on this rank, behind which complete buckets had to wait."""
        if self._has_warned or not open_buckets:
            return
        self._has_warned = True
        missing = next(state.name for state in open_buckets[0].trained if id(state) not in open_buckets[0].arrived)
        logger.warning(
            f"ds_zo: rank {dist.get_rank()} got no gradient for {missing}, so later gradients were held until the end "
            "of the backward pass, which takes memory: freeze parameters that no loss reaches"
        )


def buckets_of(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    states: Sequence[ParameterState],
    *,
    shards: DeviceShards | None = None,
) -> list[Bucket]:
    """The buckets of a model, in the model's order. Each block has one, for the parameters that are used in no other
    module; each module outside of blocks has one. `shards`: sharded blocks get buckets that are reduced in pieces."""
    block_of: dict[int, int] = {}
    for i, (block, shared) in enumerate(zip(blocks, shared_parameters(module, blocks), strict=True)):
        elsewhere = {id(getattr(owner, name)) for owner, name in shared}
        block_of |= {id(p): i for p in block.parameters() if id(p) not in elsewhere}
    found: dict[int | str, list[ParameterState]] = {}
    for state in states:
        found.setdefault(block_of.get(id(state.parameter), state.name.rpartition(".")[0]), []).append(state)
    return [bucket for members in found.values() for bucket in _buckets_for(members, shards)]


def _buckets_for(members: Sequence[ParameterState], shards: DeviceShards | None) -> list[Bucket]:
    """The buckets of one block or module. There is one, except where it is reduced in pieces: then there are several of
    at most `_PIECES_NBYTES`, or of one larger parameter. Each of them is reduced as soon as it is full, and two have
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
            room = _PIECES_NBYTES
        groups[-1].append(state)
        room -= nbytes
    return [PiecesBucket(group, block, segments) for group in groups]
