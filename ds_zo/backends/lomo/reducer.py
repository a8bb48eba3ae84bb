"""LOMO on several ranks: the gradients of one layer are averaged while the backward of the next layer runs.

[Note: one order of buckets] The gradients of a layer are reduced together, in the buffers of a bucket. All ranks must
reduce the same buckets in the same order, also if their batches reach different parameters. A bucket is reduced when
this rank has nothing more to add to it and all buckets before it have been reduced. At the end of a pass the remaining
buckets are reduced, with zeros for gradients that this rank does not have. The first pass reduces buckets in the
reverse order of the model. Later passes use the order in which the first pass completed the buckets on rank 0. While
every rank completes buckets in this order, two buckets have buffers: one is filled and one is being reduced. A rank
without a gradient for some bucket holds all later buckets until the end of the pass.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ds_zo.backends.lomo.buckets import Bucket, BucketStage, GradientConsumer
from ds_zo.backends.lomo.parameters import ParameterState
from ds_zo.backends.recompute.blocks import RecomputedBlock
from ds_zo.streaming.node import explain_lost_rank, world_timeout

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reducer(ABC):
    """Averages gradients over ranks and passes them to its consumer. A pass is one call of `begin`, one of `add` for
    each gradient, and one of `finish`. The methods that are not abstract do nothing on one rank."""

    @property
    def active(self) -> bool:
        """A pass has begun and has not ended."""
        return True

    @abstractmethod
    def begin(
        self, trains: Callable[[ParameterState], bool], *, measures: bool, loss_guard: torch.Tensor | None
    ) -> None:
        """Begins a pass. `trains`: whether a parameter is trained now. `measures`: the pass only computes the norm, and
        nothing is consumed. `loss_guard`: a scalar that is finite if this rank's loss is. None in a second pass, after
        the first has found losses and gradients finite."""

    @abstractmethod
    def add(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Adds this rank's gradient of a parameter."""

    @abstractmethod
    def drop(self) -> None:
        """Drops all gradients of a pass that raised."""

    @abstractmethod
    def norm(self) -> float:
        """Norm of all averaged gradients, after a pass that measured. It is not finite if a loss is not. This is the
        only value per step that the host waits for."""

    def close_blocks(self, is_done: Callable[[RecomputedBlock], bool]) -> None:  # noqa: B027
        """Declares that this rank adds no more gradients of the blocks for which `is_done` is true."""

    def send(self) -> None:  # noqa: B027
        """Starts the reductions that can be started now."""

    def finish(self) -> None:  # noqa: B027
        """Ends a pass: reduces and consumes all remaining gradients."""

    def describe(self) -> list[str]:
        """Lines for the debug log."""
        return []

    def startup_text(self) -> str | None:
        """How ranks share the work, for the start-up table."""
        return None


class LocalReducer(Reducer):
    """The reducer of one rank: each gradient is measured or consumed when it comes."""

    def __init__(self, consumer: GradientConsumer) -> None:
        self._consumer = weakref.ref(consumer)
        self._measures = False
        self._loss_guard: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []

    def begin(
        self, trains: Callable[[ParameterState], bool], *, measures: bool, loss_guard: torch.Tensor | None
    ) -> None:
        self._measures, self._loss_guard, self._norms = measures, loss_guard, []

    def add(self, state: ParameterState, grad: torch.Tensor) -> None:
        if self._measures:
            self._norms.append(torch.linalg.vector_norm(grad, dtype=torch.float32))
        elif (consumer := self._consumer()) is not None:
            consumer.consume(state, grad)

    def drop(self) -> None:
        self._norms = []

    def norm(self) -> float:
        norms, self._norms = self._norms, []
        assert self._loss_guard is not None
        return torch.stack([*norms, self._loss_guard]).norm().item()


class GradientReducer(Reducer):
    """The reducer of several ranks, which reduces one bucket at a time. See [Note: one order of buckets]."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        process_group: Any,
        device: torch.device,
        consumer: GradientConsumer,
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
        self._order = self._buckets
        """The buckets in the order in which they are reduced."""
        self._has_learned_order = False
        self._completed: list[Bucket] = []
        """The buckets closed in this pass, in the order in which they were closed."""
        self._measures = False
        self._norms: list[torch.Tensor] = []
        """In a pass that measures: norms of this rank's shards of the summed gradients."""
        self._loss_guard: torch.Tensor | None = None
        self._has_warned = False
        on_gpu_by_gloo = device.type == "cuda" and "gloo" in str(dist.get_backend(process_group))
        self._scatters = not on_gpu_by_gloo
        """Reduce-scatter is available. Gloo has all-reduce for CUDA tensors, but not reduce-scatter."""

    # A pass

    def begin(
        self, trains: Callable[[ParameterState], bool], *, measures: bool, loss_guard: torch.Tensor | None
    ) -> None:
        self.drop()
        self._measures, self._loss_guard = measures, loss_guard
        has_changed = False
        for bucket in self._buckets:
            trained = [state for state in bucket.states if trains(state)]
            if list(map(id, trained)) != list(map(id, bucket.trained)):  # also in the first pass
                bucket.lay_out(trained, num_ranks=self._num_ranks)
                has_changed = True
            bucket.begin()
        if has_changed:
            self._set_order(self._buckets[::-1])
            self._has_learned_order = False

    @property
    def active(self) -> bool:
        return any(bucket.stage is not BucketStage.DONE for bucket in self._buckets)

    def add(self, state: ParameterState, grad: torch.Tensor) -> None:
        """Copies the gradient to its bucket, which may start reductions."""
        bucket = self._bucket_of[id(state)]
        assert bucket.stage is BucketStage.OPEN, f"the bucket of {state.name} is closed"
        bucket.fill(self._device)
        bucket.put(state, grad, guarded=self._loss_guard is not None and not self._measures)
        if len(bucket.arrived) == len(bucket.trained) and (bucket.block is None or bucket.in_shards):
            self._close(bucket)

    def _close(self, bucket: Bucket) -> None:
        """Declares that this rank adds no more gradients to a bucket."""
        if bucket.stage is BucketStage.OPEN:
            self._completed.append(bucket)
            bucket.stage = BucketStage.CLOSED
            self.send()

    def finish(self) -> None:
        open_buckets = [bucket for bucket in self._order if bucket.stage is BucketStage.OPEN]
        if any(bucket.stage is BucketStage.CLOSED for bucket in self._order) and self._has_learned_order:
            self._warn(open_buckets)
        for bucket in open_buckets:
            self._close(bucket)
        self.send()
        self._retire(leaving=0)
        if not self._has_learned_order:
            self._learn_order()

    def drop(self) -> None:
        for bucket in self._buckets:
            bucket.drop()
        self._completed, self._norms = [], []

    def close_blocks(self, is_done: Callable[[RecomputedBlock], bool]) -> None:
        for bucket in reversed(self._buckets):  # the order of a backward pass
            if bucket.block is not None and bucket.stage is BucketStage.OPEN and is_done(bucket.block):
                self._close(bucket)

    def norm(self) -> float:
        """See `Reducer`. The sum of squares is reduced over ranks, so that all ranks get the same number."""
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
        return f"{self._num_ranks}, gradients averaged in {len(self._buckets)} buckets"

    def describe(self) -> list[str]:
        nbytes = sum(s.parameter.numel() * s.parameter.element_size() for b in self._buckets for s in b.states)
        return [
            f"ds_zo: {self._num_ranks} ranks average gradients in {len(self._buckets)} buckets, {nbytes / 2**30:.2f} "
            "GiB per backward pass; a rank waits at most "
            f"{world_timeout(self._device).total_seconds():.0f} s for another"
        ]

    # Reductions

    def send(self) -> None:
        """Starts the reductions of closed buckets, in order, up to the first open bucket. It stops at a bucket whose
        weights cannot be materialised now, and must be called again later."""
        consumer = self._consumer()
        assert consumer is not None
        for bucket in self._order:
            if bucket.stage is BucketStage.OPEN:
                return
            if bucket.stage is BucketStage.CLOSED:
                weights = consumer.materialised_weights(bucket)
                if weights is None:
                    return
                with weights:
                    self._launch(bucket)
                    # A streamed block must be updated while it is materialised; other updates overlap the next bucket.
                    now = bucket.block is not None and not bucket.in_shards and not self._measures
                    self._retire(leaving=0 if now else 1)

    def _launch(self, bucket: Bucket) -> None:
        bucket.fill(self._device)
        if not self._measures:
            bucket.write_marks(self._loss_guard)
        bucket.stage = BucketStage.REDUCING
        with explain_lost_rank(self._device):
            for dtype, buffer in bucket.buffers.items():
                if (self._measures or bucket.in_shards) and self._scatters:
                    shard = buffer.new_empty(buffer.numel() // self._num_ranks)
                    bucket.shards[dtype] = shard
                    work = _reduce_scatter(shard, buffer, group=self._group, async_op=True)
                else:
                    work = dist.all_reduce(buffer, group=self._group, async_op=True)
                bucket.works.append(work)

    def _retire(self, *, leaving: int) -> None:
        """Waits for running reductions and consumes their buckets, oldest first, until `leaving` of them remain."""
        in_flight = [bucket for bucket in self._order if bucket.stage is BucketStage.REDUCING]
        for bucket in in_flight[: len(in_flight) - leaving]:
            with explain_lost_rank(self._device):
                for work in bucket.works:
                    work.wait()
            rank = dist.get_rank(self._group)
            if not bucket.shards:
                bucket.shards = {d: buffer.chunk(self._num_ranks)[rank] for d, buffer in bucket.buffers.items()}
            if self._measures:
                self._norms += [
                    torch.linalg.vector_norm(shard, dtype=torch.float32) for shard in bucket.shards.values()
                ]
            else:
                consumer = self._consumer()
                assert consumer is not None
                bucket.consume(consumer, rank=rank)
            bucket.drop()

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
