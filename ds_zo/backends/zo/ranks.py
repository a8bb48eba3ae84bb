"""Divides a step's work among the ranks of a ZO run.

Data parallel: each rank has its own batch and evaluates every direction on it. Direction parallel: `direction_parallel`
ranks share a batch, and each evaluates its own directions on it. The two combine. Members of rank-1 noise are divided
among all ranks, and each rank evaluates its own members on its own batch. In all cases the ranks exchange one
number per direction, whatever the model's size. Each rank then applies every direction itself, so weights stay
identical bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ds_zo.config import ConfigError
from ds_zo.streaming.node import explain_lost_rank, use_world_timeout, world_timeout


class Ranks:
    """The ranks of a data-parallel group, or a single one where `torch.distributed` is not initialised. Making it is
    collective."""

    def __init__(
        self,
        process_group: Any,
        *,
        num_directions: int,
        direction_parallel: int,
        device: torch.device,
        at: str,
        divides_members: bool = False,
    ) -> None:
        """`at`: the path of the optimizer's params in the JSON, for error messages. With `divides_members`, directions
        are members: each rank evaluates its own of them on its own batch."""
        self.process_group = process_group
        self.device = device
        distributed = dist.is_initialized()
        self.size = dist.get_world_size(process_group) if distributed else 1
        self.index = dist.get_rank(process_group) if distributed else 0
        if self.size > 1:
            use_world_timeout(process_group, device)
        if self.size % direction_parallel:
            raise ConfigError(
                f"direction_parallel must divide the number of ranks ({self.size}), got {direction_parallel}; start "
                "more ranks or lower it",
                at=f"{at}.direction_parallel",
            )
        self._num_directions = num_directions
        self._group_size = direction_parallel
        if divides_members and num_directions % self.size:
            raise ConfigError(
                f"the number of ranks ({self.size}) must divide num_members, got {num_directions}; change one of the "
                "two",
                at=f"{at}.num_members",
            )
        self._num_shares = self.size if divides_members else direction_parallel
        """Number of ranks among which a step's directions are divided."""
        self.num_own_directions = num_directions // self._num_shares
        self.first_direction = self.index % self._num_shares * self.num_own_directions
        self._group: Any = None
        """Process group of the ranks that share this rank's batch, for tensors on the device; None if none share it."""
        self._object_group: Any = None
        """The same ranks, for everything that is not a tensor on the device."""
        self._source = 0
        """Global rank whose batch the group uses."""
        self.bytes_wire = 0
        """Bytes that this rank has passed to collectives since the start."""
        if direction_parallel > 1:
            self._make_groups()

    def _make_groups(self) -> None:
        """Makes a process group for each set of ranks that share a batch. Every rank takes part in making every
        group."""
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        timeout = world_timeout(self.device)
        for begin in range(0, self.size, self._group_size):  # every rank makes every group
            members = ranks[begin : begin + self._group_size]
            group = dist.new_group(members, timeout=timeout)
            object_group = (
                dist.new_group(members, timeout=timeout, backend="gloo") if self.device.type == "cuda" else group
            )
            if dist.get_rank() in members:
                self._group, self._object_group, self._source = group, object_group, members[0]

    @property
    def num_batches(self) -> int:
        """Number of different batches in a step."""
        return self.size // self._group_size

    @property
    def own_directions(self) -> slice:
        """The directions that this rank evaluates, as a slice of all directions."""
        return slice(self.first_direction, self.first_direction + self.num_own_directions)

    def shared_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the first of the ranks that share a batch was given. Tensors on this kind of device stay
        on it."""
        if self._group_size == 1:
            return args, kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first = dist.get_rank() == self._source
        with explain_lost_rank(self.device):
            # A meta tensor stands in the message for a tensor on the device, which a collective there sends.
            message: list[Any] = [None]
            if first:
                message = [([leaf.detach().to("meta") if self._is_here(leaf) else leaf for leaf in leaves], spec)]
            dist.broadcast_object_list(message, src=self._source, group=self._object_group)
            sent, spec = message[0]
            found = leaves if first else list(sent)
            for i, value in enumerate(sent):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    if not first:
                        found[i] = torch.empty(value.shape, dtype=value.dtype, device=self.device)
                    tensor = found[i].detach().contiguous()
                    dist.broadcast(tensor, src=self._source, group=self._group)
                    self.bytes_wire += tensor.numel() * tensor.element_size()
        batch: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(found, spec)
        return batch

    def _is_here(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == self.device.type

    def average(self, g: torch.Tensor) -> torch.Tensor:
        """Projected gradients of all directions, averaged over the ranks that evaluate the same ones. `g` holds this
        rank's own directions, and zeros elsewhere."""
        if self.size > 1:
            with explain_lost_rank(self.device):
                dist.all_reduce(g, group=self.process_group)
            self.bytes_wire += g.numel() * g.element_size()
            g /= self.size // self._num_shares
        return g

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """The sums of these numbers over all ranks."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, device=self.device)
        with explain_lost_rank(self.device):
            dist.all_reduce(total, group=self.process_group)
        self.bytes_wire += total.numel() * total.element_size()
        return [int(number) for number in total.tolist()]

    def broadcast_from_first(self, number: int) -> int:
        """The first rank's number. All ranks must fold alike, or rounding would make their weights differ."""
        if self.size == 1:
            return number
        shared = torch.tensor([number], device=self.device)
        with explain_lost_rank(self.device):
            dist.broadcast(shared, group=self.process_group, group_src=0)
        return int(shared.item())

    def startup_text(self) -> str | None:
        """How ranks share batches and directions, for the start-up table; None for one rank."""
        if self.size == 1:
            return None
        batches = f"{self.size}, {self.num_batches} {'batch' if self.num_batches == 1 else 'batches'} a step"
        if self._group_size == 1:
            return batches
        return f"{batches}, each shared by {self._group_size} ranks: give all ranks of a group the same batch"

    def describe(self) -> str:
        """Text for the log: how ranks share batches and directions; empty for one rank."""
        if self.size == 1:
            return ""
        shared = f", each shared by {self._group_size} ranks with {self.num_own_directions} directions each"
        skipped = (
            "; only the batch of the first rank of each group is used: give all ranks of a group the same batch, or "
            f"split the data into {self.num_batches} by rank // {self._group_size}"
        )
        return (
            f"\nds_zo: {self.size} ranks, {self.num_batches} batches a step"
            + (shared + skipped if self._group_size > 1 else "")
            + f"; {4 * self._num_directions} bytes of g a step are reduced over them; a rank waits "
            f"{world_timeout(self.device).total_seconds():.0f} s at most for another"
        )
