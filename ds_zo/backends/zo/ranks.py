"""How the ranks of a ZO run divide a step's work.

Data parallel: each rank has a batch of its own and tries every direction on it. Direction parallel:
`direction_parallel` ranks share a batch, and each tries its own directions on it. Either way, and combined, what ranks
tell one another is one number a direction, whatever the model's size; each then applies every direction by itself, so
weights stay the same bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ds_zo.config import ConfigError
from ds_zo.streaming.node import explain_lost_rank, use_world_timeout, world_timeout


class Ranks:
    """The ranks of a data-parallel group; one where nothing is distributed. Making one is collective."""

    def __init__(
        self, process_group: Any, *, num_directions: int, direction_parallel: int, device: torch.device, at: str
    ) -> None:
        """`at`: where the optimizer's params stand in the JSON."""
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
        self.num_own = num_directions // direction_parallel
        self.first_direction = self.index % direction_parallel * self.num_own
        self._group: Any = None
        self._talk: Any = None
        """The ranks that share this one's batch: on the device, and for what is not a tensor there."""
        self._source = 0
        self.bytes_wire = 0
        """Handed to collectives since the start."""
        if direction_parallel > 1:
            self._make_groups()

    def _make_groups(self) -> None:
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        timeout = world_timeout(self.device)
        for begin in range(0, self.size, self._group_size):  # every rank makes every group
            members = ranks[begin : begin + self._group_size]
            group = dist.new_group(members, timeout=timeout)
            talk = dist.new_group(members, timeout=timeout, backend="gloo") if self.device.type == "cuda" else group
            if dist.get_rank() in members:
                self._group, self._talk, self._source = group, talk, members[0]

    @property
    def num_batches(self) -> int:
        """Different ones in a step."""
        return self.size // self._group_size

    @property
    def own(self) -> slice:
        """Of all directions, those that this rank tries."""
        return slice(self.first_direction, self.first_direction + self.num_own)

    def shared_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the first rank of those that share a batch was given. Tensors stay on the kind of device they are on."""
        if self._group_size == 1:
            return args, kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        first = dist.get_rank() == self._source
        with explain_lost_rank(self.device):
            message: list[Any] = [None]
            if first:
                message = [([_told(leaf, self.device) for leaf in leaves], spec)]
            dist.broadcast_object_list(message, src=self._source, group=self._talk)
            told, spec = message[0]
            found = []
            for i, what in enumerate(told):
                if isinstance(what, _OnDevice):
                    tensor = leaves[i].detach().contiguous() if first else what.empty(self.device)
                    dist.broadcast(tensor, src=self._source, group=self._group)
                    self.bytes_wire += tensor.numel() * tensor.element_size()
                    found.append(leaves[i] if first else tensor)
                else:
                    found.append(leaves[i] if first else what)
        batch: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(found, spec)
        return batch

    def average(self, g: torch.Tensor) -> torch.Tensor:
        """Projected gradients of all directions, the mean over batches. `g` holds this rank's own, zeros elsewhere."""
        if self.size > 1:
            with explain_lost_rank(self.device):
                dist.all_reduce(g, group=self.process_group)
            self.bytes_wire += g.numel() * g.element_size()
            g /= self.num_batches
        return g

    def first_decides(self, number: int) -> int:
        """Ranks fold alike, or their weights would round apart."""
        if self.size == 1:
            return number
        shared = torch.tensor([number], device=self.device)
        with explain_lost_rank(self.device):
            dist.broadcast(shared, group=self.process_group, group_src=0)
        return int(shared.item())

    def describe(self) -> str:
        if self.size == 1:
            return ""
        shared = f", each shared by {self._group_size} ranks with {self.num_own} directions each"
        skipped = (
            "; batches given to the others of them are not used: give them the same, or deal data among "
            f"{self.num_batches} by rank // {self._group_size}"
        )
        return (
            f"\nds_zo: {self.size} ranks, {self.num_batches} batches a step"
            + (shared + skipped if self._group_size > 1 else "")
            + f"; {4 * self._num_directions} bytes of g a step are reduced over them; a rank waits "
            f"{world_timeout(self.device).total_seconds():.0f} s at most for another"
        )


class _OnDevice:
    """A tensor that follows by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=device)


def _told(leaf: Any, device: torch.device) -> Any:
    return _OnDevice(leaf) if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type else leaf
