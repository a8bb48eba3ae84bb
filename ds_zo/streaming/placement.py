"""From a module to units with homes: which parameters form which unit, where its bytes live, how large the shared
buffers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_zo.streaming.blocks import find_blocks, reached_elsewhere
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.shared_store import SharedStore
from ds_zo.streaming.units import Part, PlacedParameter, Unit

ReadParameter = Callable[[PlacedParameter], torch.Tensor]


@dataclass
class Placement:
    """The model as units."""

    blocks: list[Unit]
    """In the order the model lists them."""
    leaf_units: list[Unit]
    """Entered through the modules that own them; always resident."""
    ambient: list[Unit]
    """Resident parameters of modules that contain other modules: alive through the whole forward, so each twin needs
    its own copy."""
    entered_by: dict[nn.Module, list[Unit]]
    """Edge modules, and the units whose parameters they own (a tied weight is one unit, entered by two modules)."""
    scratch_nbytes: int
    """One working copy: of the largest block with the largest edge module inside it, or of the largest edge module."""
    pair_scratch_nbytes: int
    """The same with copies of both signs of a block at once. Outside blocks the second copy's room is free."""
    nested_at: dict[int, int] = field(default_factory=dict)
    """Where in the scratch an edge module inside a block puts its copy, by `id(module)`."""

    @property
    def units(self) -> list[Unit]:
        return [*self.blocks, *self.leaf_units, *self.ambient]

    @property
    def narrow(self) -> bool:
        """Whether stored blocks are well below the size of working copies of them (bf12 under bf16 is not)."""
        return any(3 * u.nbytes < 2 * u.scratch_nbytes for u in self.blocks)

    @property
    def block_scratch_nbytes(self) -> int:
        """A working copy of the largest block."""
        return max((u.scratch_nbytes for u in self.blocks), default=0)

    @property
    def numel(self) -> int:
        return sum(placed.numel for unit in self.units for placed in unit.placed)


def plan_units(
    module: nn.Module,
    param_groups: Sequence[Mapping[str, object]],
    *,
    block_paths: str | Sequence[str] | None = None,
    wire: torch.dtype | None = None,
    split: bool = True,
) -> Placement:
    """`wire` None stores each parameter in its own dtype. Edges always are: they never cross the link."""
    blocks = find_blocks(module, block_paths)
    hosts_of: dict[int, dict[int, str]] = {}
    for name, entry in blocks.items():
        for m in entry.modules():
            hosts_of.setdefault(id(m), {})[id(entry)] = name
    # A module that several blocks contain is brought up by each of them, so it is none's own; nor is one that stands
    # outside of its block too.
    elsewhere = reached_elsewhere(module, blocks.values())
    block_of = {
        key: next(iter(hosts.values())) for key, hosts in hosts_of.items() if len(hosts) == 1 and key not in elsewhere
    }
    owners: dict[int, list[nn.Module]] = {}
    for m in module.modules():
        for p in m._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(m)
    group_of = {
        id(p): index
        for index, group in enumerate(param_groups)
        for p in group["params"]  # type: ignore[attr-defined]
    }
    in_block: dict[str, list[PlacedParameter]] = {name: [] for name in blocks}
    at_edge: dict[nn.Module, list[PlacedParameter]] = {}
    offset = 0
    for name, p in module.named_parameters():
        trainable = p.requires_grad and id(p) in group_of
        placed = PlacedParameter(name, p, offset, group_of.get(id(p), 0), trainable, _still(p, owners[id(p)]))
        offset += p.numel()
        homes = {block_of.get(id(m)) for m in owners[id(p)]}
        block = homes.pop() if len(homes) == 1 else None
        if block is None:
            at_edge.setdefault(owners[id(p)][0], []).append(placed)
        else:
            in_block[block].append(placed)
    for name, placed_list in in_block.items():
        frozen = [p for p in placed_list if not p.trainable]
        if (
            sum(p.numel for p in frozen) > sum(p.numel for p in placed_list) // 2
        ):  # adapters in a frozen block stay resident
            for placed in placed_list:
                if placed.trainable:
                    at_edge.setdefault(owners[id(placed.parameter)][0], []).append(placed)
            in_block[name] = frozen

    def make(
        name: str, m: nn.Module, placed: list[PlacedParameter], wire: torch.dtype | None, index: int, is_block: bool
    ) -> Unit:
        return Unit(name, m, _parts(placed, wire=wire, split=split), index=index, is_block=is_block)

    block_units = [
        make(n, blocks[n], placed, wire, i, True) for i, (n, placed) in enumerate(in_block.items()) if placed
    ]
    leaf_units: list[Unit] = []
    ambient: list[Unit] = []
    unit_of: dict[int, Unit] = {}
    for m, placed_list in at_edge.items():
        leaf = all(next(child.parameters(), None) is None for child in m.children())
        unit = make(placed_list[0].name.rpartition(".")[0] or "(root)", m, placed_list, None, 0, False)
        (leaf_units if leaf else ambient).append(unit)
        for placed in placed_list:
            unit_of[id(placed.parameter)] = unit
    edge_set = {id(u) for u in leaf_units}
    entered_by: dict[nn.Module, list[Unit]] = {}
    for m in module.modules():
        mine = {
            id(unit_of[id(p)]): unit_of[id(p)] for p in m._parameters.values() if p is not None and id(p) in unit_of
        }
        entering = [u for u in mine.values() if id(u) in edge_set]
        if entering:
            entered_by[m] = entering
    largest_edge = 0
    nested_at: dict[int, int] = {}
    block_scratch = {u.name: u.scratch_nbytes for u in block_units}
    pair = in_blocks = max(block_scratch.values(), default=0)
    for m, entering in entered_by.items():
        nbytes = sum(u.scratch_nbytes for u in entering)
        largest_edge = max(largest_edge, nbytes)
        if id(m) in hosts_of:
            nested_at[id(m)] = max(block_scratch.get(host, 0) for host in hosts_of[id(m)].values())
            in_blocks = max(in_blocks, nested_at[id(m)] + nbytes)
    return Placement(
        block_units,
        leaf_units,
        ambient,
        entered_by,
        scratch_nbytes=max(largest_edge, in_blocks),
        pair_scratch_nbytes=max(largest_edge, in_blocks + pair),
        nested_at=nested_at,
    )


def _still(p: nn.Parameter, owners: Sequence[nn.Module]) -> tuple[int, int]:
    """The row that has no gradient in any of the modules that own the parameter. A head that is tied to an embedding
    has one for every row."""
    rows = {m.padding_idx if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) else None for m in owners}
    row = rows.pop() if len(rows) == 1 else None
    return (0, 0) if row is None else (row * p.shape[-1], (row + 1) * p.shape[-1])


def _parts(placed: Sequence[PlacedParameter], *, wire: torch.dtype | None, split: bool) -> list[Part]:
    """Trainable floating parameters by dtype, then frozen ones by dtype, which are stored as they are."""
    by_kind: dict[tuple[bool, torch.dtype], list[PlacedParameter]] = {}
    for p in placed:
        by_kind.setdefault((p.trainable, p.parameter.dtype), []).append(p)
    parts = []
    for (trainable, dtype), members in sorted(by_kind.items(), key=lambda item: (not item[0][0], str(item[0][1]))):
        storage = wire if wire is not None and trainable else dtype
        parts.append(
            Part(members, dtype, storage, split=split and trainable and storage.itemsize < 4, direct=not trainable)
        )
    return parts


def place_units(
    placement: Placement,
    store: HostStore,
    device: torch.device,
    *,
    resident: Callable[[Unit], bool],
    read: ReadParameter,
) -> None:
    """Gives every unit its home and fills it, one unit at a time, so that originals are freed as copies are made.

    A resident block's low plane stays on the host when others stream: it is needed only at folds. (Not in memory that
    ranks share: bringing it would take a gather of its own.)
    """
    shared = store if isinstance(store, SharedStore) else None
    low_travels = shared is None and any(not resident(unit) for unit in placement.blocks)
    for number, unit in enumerate(placement.units):
        stays = not unit.is_block or resident(unit)
        low_stays = stays and not (unit.is_block and low_travels)
        home = torch.empty(unit.nbytes, dtype=torch.uint8, device=device) if stays else store.take(unit.nbytes)
        low = None
        if unit.low_nbytes:
            low = (
                torch.empty(unit.low_nbytes, dtype=torch.uint8, device=device)
                if low_stays
                else store.take(unit.low_nbytes)
            )
        unit.assign_buffers(home, low, streamed=not stays, low_streamed=not low_stays)
        if stays or shared is None or shared.writes(number):
            unit.store(read, via=device)
        unit.leave_meta()
        if not stays:
            store.filled(unit)
        unit.bind_stored()
    if shared is not None:
        shared.node.barrier()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers never stream."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)


def evenly_spaced(num_blocks: int, num_resident: int) -> set[int]:
    """Which blocks stay on the device: spaced evenly, so that the link never idles while a run of residents
    computes."""
    return {(2 * i + 1) * num_blocks // (2 * num_resident) for i in range(num_resident)}
