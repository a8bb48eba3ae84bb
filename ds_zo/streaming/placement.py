"""Divides a module's parameters into units, sizes the buffers that units share, and fills the units' stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ds_zo.config.section import FROZEN_DTYPES
from ds_zo.ops import PACKED, FrozenFormat
from ds_zo.ops.nf4 import Quantised
from ds_zo.streaming.blocks import find_blocks, reached_elsewhere
from ds_zo.streaming.host_store import HostStore
from ds_zo.streaming.units import ALIGN, Part, PlacedParameter, Unit, divides_by_expert

ReadParameter = Callable[[PlacedParameter], torch.Tensor | Quantised]
"""Returns a parameter's initial value."""
FrozenWire = torch.dtype | Callable[[nn.Parameter], torch.dtype | None] | None

WIRE: dict[str, torch.dtype | None] = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "bf12": torch.uint8,
    **{found.form.name: dtype for dtype, found in PACKED.items()},
}
"""The torch dtype of stored blocks for each `wire_dtype` and `frozen_dtype`; None: the dtype of the model."""


def register_format(added: FrozenFormat) -> None:
    """Makes a format available as `ds_zo.stream.frozen_dtype`. Call it before `deepspeed.initialize`, in every
    process."""
    name, dtype = added.form.name, added.form.dtype
    if name in WIRE or dtype in WIRE.values():
        raise ValueError(
            f"a storage format needs a name and a dtype of its own, got {name} and {dtype}; choose others "
            "(register_format)"
        )
    if not added.form.scaled or ALIGN % added.form.group_numel or ALIGN % added.form.packed_numel:
        raise ValueError(
            f"a storage format needs scales, and groups and items whose numbers of values divide {ALIGN}, got "
            f"{added.form}; change them (register_format)"
        )
    PACKED[dtype], WIRE[name] = added, dtype
    FROZEN_DTYPES.append(name)


@dataclass
class Placement:
    """A model divided into units."""

    blocks: list[Unit]
    """The blocks, in the order in which the model lists them."""
    leaf_units: list[Unit]
    """Units of leaf modules (without parameters in submodules) that belong to no block. Always resident; materialised
    while one of the modules that own them runs."""
    pass_long: list[Unit]
    """Resident units that are used through a whole forward, such as parameters of modules that contain other modules.
    Each perturbed pass of a step needs its own working copy of them."""
    entered_by: dict[nn.Module, list[Unit]]
    """Modules that own parameters of `leaf_units`, and these units. A tied weight is one unit of two modules."""
    scratch_nbytes: int
    """Bytes of one working copy: of a block together with the largest leaf module inside it, or of the largest leaf
    module, whichever is larger."""
    pair_scratch_nbytes: int
    """The same with two working copies of a block, perturbed by +z and by -z. A leaf module outside the blocks may use
    the second copy's bytes."""
    nested_at: dict[int, int] = field(default_factory=dict)
    """Byte offset in the scratch of the working copy of a leaf module inside a block, by `id(module)`."""

    @property
    def units(self) -> list[Unit]:
        return [*self.blocks, *self.leaf_units, *self.pass_long]

    @property
    def narrow(self) -> bool:
        """Whether a block's stored bytes are less than two thirds of its working copy's (bf12 for bf16 is not)."""
        return any(3 * u.nbytes < 2 * u.scratch_nbytes for u in self.blocks)

    @property
    def second_copy_nbytes(self) -> int:
        """Bytes of a second working copy of the block that needs most."""
        return max((u.second_copy_nbytes for u in self.blocks), default=0)

    @property
    def decodes_frozen(self) -> bool:
        """Whether blocks have frozen parameters that are stored in another format than their dtype."""
        return any(unit.decodes_frozen for unit in self.blocks)

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


def plan_units(
    module: nn.Module,
    param_groups: Sequence[Mapping[str, object]],
    *,
    block_paths: str | Sequence[str] | None = None,
    wire: torch.dtype | None = None,
    frozen_wire: FrozenWire = None,
    split: bool = True,
    outside_blocks: Collection[int] = (),
    in_groups: Collection[int] = (),
) -> Placement:
    """Divides the module's parameters into units. `wire` is the storage dtype of trainable parameters in blocks, and
    `frozen_wire` that of frozen base matrices there (`base_matrix_ids`), or a function that returns it for each
    parameter (None: its own dtype). Parameters outside the blocks keep their dtype: they are never streamed.
    `outside_blocks`: ids of parameters that are not stored with their block. The trainable parameters of a mostly
    frozen block never are. `in_groups`: ids of stacks of experts that are decoded in groups, if their format allows
    it."""
    blocks = find_blocks(module, block_paths)
    hosts_of: dict[int, dict[int, str]] = {}
    for name, block in blocks.items():
        for m in block.modules():
            hosts_of.setdefault(id(m), {})[id(block)] = name
    owners: dict[int, list[nn.Module]] = {}
    for m in module.modules():
        for p in _own_parameters(m):
            owners.setdefault(id(p), []).append(m)
    # A module that several blocks contain, or that is also reachable outside its block, belongs to no block.
    elsewhere = reached_elsewhere(module, blocks.values())
    block_of = {
        key: next(iter(hosts.values())) for key, hosts in hosts_of.items() if len(hosts) == 1 and key not in elsewhere
    }
    in_block: dict[str, list[PlacedParameter]] = {name: [] for name in blocks}
    outside: dict[nn.Module, list[PlacedParameter]] = {}
    for placed in _place_parameters(module, param_groups, owners):
        owning = owners[id(placed.parameter)]
        names = {block_of.get(id(m)) for m in owning}
        block_name = names.pop() if len(names) == 1 else None
        (outside.setdefault(owning[0], []) if block_name is None else in_block[block_name]).append(placed)
    for name, placed_list in in_block.items():
        moved = _outside_their_block(placed_list, outside_blocks)
        in_block[name] = [placed for placed in placed_list if id(placed.parameter) not in moved]
        for placed in placed_list:
            if id(placed.parameter) in moved:
                outside.setdefault(owners[id(placed.parameter)][0], []).append(placed)

    narrow = {} if callable(frozen_wire) else dict.fromkeys(base_matrix_ids(module), frozen_wire)
    frozen_wire_of = frozen_wire if callable(frozen_wire) else lambda p: narrow.get(id(p))
    block_units = [
        Unit(
            name,
            blocks[name],
            _parts(placed_list, wire=wire, frozen_wire_of=frozen_wire_of, split=split, in_groups=in_groups),
            index=index,
            is_block=True,
        )
        for index, (name, placed_list) in enumerate(in_block.items())
        if placed_list
    ]
    leaf_units, pass_long = _units_outside_blocks(outside, split=split)
    placement = Placement(block_units, leaf_units, pass_long, _entered_by(module, leaf_units), 0, 0)
    _size_scratch(placement, hosts_of)
    return placement


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _place_parameters(
    module: nn.Module, param_groups: Sequence[Mapping[str, object]], owners: Mapping[int, Sequence[nn.Module]]
) -> Iterator[PlacedParameter]:
    """All parameters of the module, at their offsets in the model."""
    group_of = {
        id(p): index
        for index, group in enumerate(param_groups)
        for p in group["params"]  # type: ignore[attr-defined]
    }
    offset = 0
    for name, p in module.named_parameters():
        trainable = p.requires_grad and id(p) in group_of
        yield PlacedParameter(name, p, offset, group_of.get(id(p), 0), trainable, _still(p, owners[id(p)]))
        offset += p.numel()


def _outside_their_block(placed_list: Sequence[PlacedParameter], chosen: Collection[int]) -> set[int]:
    """Ids of the parameters of a block that are stored outside it: the `chosen` ones, and in a mostly frozen block the
    trainable ones (adapters), which become resident units of their own."""
    frozen = sum(p.numel for p in placed_list if not p.trainable)
    mostly_frozen = frozen > sum(p.numel for p in placed_list) // 2
    adapters = {id(p.parameter) for p in placed_list if mostly_frozen and p.trainable}
    return adapters | {*chosen}


def _units_outside_blocks(
    outside: Mapping[nn.Module, list[PlacedParameter]], *, split: bool
) -> tuple[list[Unit], list[Unit]]:
    """A unit for each module that owns parameters outside the blocks: those of leaf modules, and the others."""
    leaf_units: list[Unit] = []
    pass_long: list[Unit] = []
    for m, placed_list in outside.items():
        is_leaf = all(next(child.parameters(), None) is None for child in m.children())
        name = placed_list[0].name.rpartition(".")[0] or "(root)"
        parts = _parts(placed_list, wire=None, frozen_wire_of=lambda p: None, split=split)
        (leaf_units if is_leaf else pass_long).append(Unit(name, m, parts, index=0, is_block=False))
    return leaf_units, pass_long


def _entered_by(module: nn.Module, leaf_units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Modules that own parameters of leaf units, and these units."""
    unit_of = {id(placed.parameter): unit for unit in leaf_units for placed in unit.placed}
    found: dict[nn.Module, list[Unit]] = {}
    for m in module.modules():
        entering = {id(unit_of[id(p)]): unit_of[id(p)] for p in _own_parameters(m) if id(p) in unit_of}
        if entering:
            found[m] = list(entering.values())
    return found


def _size_scratch(placement: Placement, hosts_of: Mapping[int, Mapping[int, str]]) -> None:
    """Sets the bytes of working copies, and where leaf modules inside blocks have theirs."""
    block_scratch = {u.name: u.scratch_nbytes for u in placement.blocks}
    in_blocks, largest_leaf = max(block_scratch.values(), default=0), 0
    for m, entering in placement.entered_by.items():
        nbytes = sum(u.scratch_nbytes for u in entering)
        largest_leaf = max(largest_leaf, nbytes)
        if id(m) in hosts_of:
            offset = max(block_scratch.get(host, 0) for host in hosts_of[id(m)].values())
            placement.nested_at[id(m)] = offset
            in_blocks = max(in_blocks, offset + nbytes)
    placement.scratch_nbytes = max(largest_leaf, in_blocks)
    placement.pair_scratch_nbytes = max(largest_leaf, in_blocks + placement.second_copy_nbytes)


def _still(p: nn.Parameter, owners: Sequence[nn.Module]) -> tuple[int, int]:
    """Elements [first, end) of the row that never has a gradient; (0, 0) if there is none. It is an embedding's row
    `padding_idx`, unless another owner uses that row: a head tied to the embedding has a gradient for every row."""
    rows = {m.padding_idx if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) else None for m in owners}
    row = rows.pop() if len(rows) == 1 else None
    return (0, 0) if row is None else (row * p.shape[-1], (row + 1) * p.shape[-1])


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, or GPT-2's `Conv1D` of transformers, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def base_matrix_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters that quantised checkpoints hold in fewer bits: weights of linear layers, and stacks of such
    weights, one for each expert. Adapters of PEFT, embeddings, convolutions and single parameters, such as Mamba's
    `A_log`, are not among them, and keep their precision."""
    found = set()
    for m in module.modules():
        is_convolution = isinstance(m, nn.modules.conv._ConvNd)
        for p in (p for p in m._parameters.values() if p is not None):
            is_stack = p.dim() == 3 and min(p.shape) > 1 and not is_convolution
            if (is_linear(m) and p.dim() == 2) or is_stack:
                found.add(id(p))
    return found - adapter_ids(module)


def adapter_ids(module: nn.Module) -> set[int]:
    """Ids of the parameters of PEFT's layers, without those of the layers that they adapt or replace."""
    found: set[int] = set()
    for m in module.modules():
        base = getattr(m, "base_layer", None) or getattr(m, "original_module", None)
        if hasattr(m, "adapter_layer_names") and isinstance(base, nn.Module):
            found |= {id(p) for p in m.parameters()} - {id(p) for p in base.parameters()}
    return found


def _parts(
    placed: Sequence[PlacedParameter],
    *,
    wire: torch.dtype | None,
    frozen_wire_of: Callable[[nn.Parameter], torch.dtype | None],
    split: bool,
    in_groups: Collection[int] = (),
) -> list[Part]:
    """One part for each dtype and storage dtype of trainable parameters, then of frozen ones. Frozen vectors, such as
    biases and the weights of normalisations, are stored unchanged. Stacks of experts that are decoded `in_groups` are
    in parts of their own."""
    by_kind: dict[tuple[bool, torch.dtype, torch.dtype, bool], list[PlacedParameter]] = {}
    for p in placed:
        dtype = p.parameter.dtype
        if p.trainable:
            storage = wire or dtype
        else:
            is_matrix = p.parameter.dim() >= 2 and dtype in (torch.float32, torch.bfloat16, torch.float16)
            stored = frozen_wire_of(p.parameter)
            storage = stored if stored is not None and is_matrix else dtype
        divides = id(p.parameter) in in_groups and divides_by_expert(p, storage)
        by_kind.setdefault((not p.trainable, dtype, storage, divides), []).append(p)
    return [
        Part(
            members,
            dtype,
            storage,
            split=split and not frozen and storage.itemsize < 4,
            frozen=frozen,
            in_groups=divides,
        )
        for (frozen, dtype, storage, divides), members in sorted(
            by_kind.items(), key=lambda kind: tuple(map(str, kind[0]))
        )
    ]


def place_units(
    placement: Placement,
    store: HostStore,
    device: torch.device,
    *,
    resident: Callable[[Unit], bool],
    read: ReadParameter,
) -> None:
    """Allocates and fills the buffers of every unit, one unit at a time, so that the original parameters are freed as
    they are copied. `read` returns a parameter's initial value.

    A resident block's low plane is on the host when other blocks are streamed: only folds need it. In a store that
    ranks share it is on the device, because uploading it would need a gather of its own.
    """
    low_on_host = store.num_sharers == 1 and any(not resident(unit) for unit in placement.blocks)
    for number, unit in enumerate(placement.units):
        stays = not unit.is_block or resident(unit)
        low_stays = stays and not (unit.is_block and low_on_host)
        buffer = torch.empty(unit.nbytes, dtype=torch.uint8, device=device) if stays else store.take(unit.nbytes)
        low = None
        if unit.low_nbytes:
            low = (
                torch.empty(unit.low_nbytes, dtype=torch.uint8, device=device)
                if low_stays
                else store.take(unit.low_nbytes)
            )
        unit.assign_buffers(buffer, low, streamed=not stays, low_streamed=not low_stays)
        if stays or store.writes(number):
            unit.store(read, via=device)
        unit.leave_meta()
        if not stays:
            store.filled(unit)
        unit.bind_stored()
    store.barrier()


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves the module's buffers to the device: buffers are never streamed."""
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and buffer.device != device:
                m._buffers[name] = buffer.to(device)


def evenly_spaced(num_blocks: int, num_resident: int) -> set[int]:
    """Indices of the blocks that are resident. They are evenly spaced, so that uploads never pause while a run of
    resident blocks computes."""
    return {(2 * i + 1) * num_blocks // (2 * num_resident) for i in range(num_resident)}
