"""A unit is a set of parameters that are copied to the device together, stored in one flat buffer.

Each block is a unit. So is each module outside the blocks that owns parameters. A unit's stored bytes are in one
buffer, `store_buffer`: on the host if the unit is streamed, on the device if it is resident. The buffer has one flat
plane for each pair of dtype and storage format. Every parameter starts at a multiple of `ALIGN` elements of its plane.

`UnitState` tells what the parameters show. Only the unit itself changes its state and the version of its stored bytes,
in the methods `bind`, `bind_stored`, `use_in_place`, `leave`, `folded` and `rewritten`.

With split masters ([Note: split masters] in `ops.formats`) a second buffer, `low_buffer`, holds the low plane: the bits
of the float32 weights that the storage format drops. Only a fold, which applies pending updates to stored weights, and
exact reads need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from ds_zo import ops
from ds_zo.ops import Planes, nf4
from ds_zo.streaming.intercepted import intercept, stop_intercepting
from ds_zo.streaming.streams import DONE, Event, Stream

ALIGN = ops.SEGMENT_ALIGNMENT
"""In elements. A parameter starts 256-byte aligned for every dtype, and no scale group spans two parameters."""
PARTLY_FOLDED = -2
"""`Unit.version` after a change in place was broken off. No slot has this version."""


@dataclass
class PlacedParameter:
    """One parameter and its position in its unit's storage."""

    name: str
    parameter: nn.Parameter
    offset: int
    """Index of the parameter's first element among all elements of the model. Its noise is a function of it."""
    group: int
    """Index of its optimizer param group (0 for a parameter in no group, which is never updated)."""
    trainable: bool
    still: tuple[int, int] = (0, 0)
    """Elements [first, end) of the parameter that get no noise: an embedding's row `padding_idx`, which never has a
    gradient. (0, 0) if there are none."""
    start: int = 0
    """Index of the parameter's first element in its plane."""
    first_scale: int = 0
    """Index of the parameter's first scale in the plane of scales."""
    value_sum: str = ""
    """Form and bits' sum of the value that was stored last, before it was encoded. Training does not change it."""

    def __post_init__(self) -> None:
        self.numel, self.shape = self.parameter.numel(), self.parameter.shape

    @property
    def matrix(self) -> ops.Matrix | None:
        """The parameter as a matrix; None if it has fewer than two dimensions."""
        if len(self.shape) < 2 or self.numel == 0:
            return None
        return ops.Matrix(self.offset, self.numel // self.shape[-1], self.shape[-1])

    def view(self, plane: torch.Tensor) -> torch.Tensor:
        return plane[self.start : self.start + self.numel].view(self.shape)


def num_matrices(name: str, shape: Sequence[int]) -> int:
    """Number of matrices in a stack of experts: one of each expert, or two if gate and up are in one tensor."""
    if len(shape) != 3:
        return 1
    return shape[0] * (2 if "gate_up" in name.rpartition(".")[2] else 1)


def _has_whole_groups(placed: PlacedParameter, form: ops.FrozenFormat) -> bool:
    """Whether no group of values spans two matrices of the parameter."""
    return placed.numel % (num_matrices(placed.name, placed.shape) * form.form.group_numel) == 0


def divides_by_expert(placed: PlacedParameter, wire: torch.dtype) -> bool:
    """Whether some experts of a stack can be decoded without the others."""
    found = ops.PACKED.get(wire)
    return found is not None and found.takes != "parameters" and _has_whole_groups(placed, found)


@dataclass
class Part:
    """The parameters of a unit that share a dtype and a storage format. `wire` is the dtype of the stored bytes;
    `split` tells whether there is a low plane."""

    placed: list[PlacedParameter]
    dtype: torch.dtype
    wire: torch.dtype
    split: bool
    frozen: bool
    """The parameters are never trained: their stored bytes do not change."""
    in_groups: bool = False
    """The parameters are stacks of experts that are decoded group by group: no working copy has them."""
    numel: int = 0
    num_scales: int = 0
    _tables: dict[torch.device, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for placed in self.placed:
            placed.start, placed.first_scale = self.numel, self.num_scales
            self.numel += _padded(placed.numel)
            self.num_scales += self._scales_for(placed, padded=True)

    @property
    def direct(self) -> bool:
        """Whether the forward reads the stored bytes themselves: frozen parameters in their own dtype."""
        return self.frozen and self.viewable

    @property
    def is_copied(self) -> bool:
        """Whether a working copy of the unit has values of the part."""
        return not (self.direct or self.in_groups)

    @property
    def _format(self) -> ops.Format | None:
        """The storage format; None for direct parameters, which may have any dtype and which no kernel decodes."""
        return None if self.direct else ops.format_of(self.wire)

    def stored(self, placed: PlacedParameter, storage: torch.Tensor) -> torch.Tensor:
        """The parameter's stored elements, a view of the part's storage plane. It has the parameter's shape, except in
        the formats of `ops.PACKED`, where it is flat."""
        if self._format is None or self.wire not in ops.PACKED:
            return placed.view(storage)
        packed = self._format.packed_numel
        return storage[placed.start // packed : -(-(placed.start + placed.numel) // packed)]

    def decode_(self, out: torch.Tensor, planes: Planes) -> None:
        """Writes the values of frozen parameters to `out`, in its dtype."""
        assert self.frozen
        packed = ops.PACKED.get(self.wire)
        if packed is None:
            nothing_random = ops.Noise(seed=0, step=0)
            ops.replay_perturb(planes, table=self.table(out.device), noise=nothing_random, copies=ops.Copies(out))
            return
        assert planes.scales is not None
        if packed.takes == "spans":
            packed.dequantise_(out, planes.storage, planes.scales)
            return
        for p in self.placed:
            self._decode_parameter_(p.view(out), planes, p)

    def decode_one_(
        self, memory: torch.Tensor, planes: Planes, placed: PlacedParameter, *, experts: range | None = None
    ) -> torch.Tensor:
        """Writes the values of one parameter to the first bytes of `memory`, and returns them. The part
        `decodes_parameters`. `experts`: those of a stack that are decoded, if the part is decoded `in_groups`."""
        shape = placed.shape if experts is None else (len(experts), *placed.shape[1:])
        out = memory[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
        self._decode_parameter_(out, planes, placed, experts=experts)
        return out

    def _decode_parameter_(
        self, out: torch.Tensor, planes: Planes, placed: PlacedParameter, *, experts: range | None = None
    ) -> None:
        assert planes.scales is not None
        packed, scales = self.stored(placed, planes.storage), planes.scales[self.scales_of(placed)]
        shape = self.shape_for_format(placed)
        if experts is not None:
            num_experts = placed.shape[0]
            packed, scales = (
                plane.view(num_experts, -1)[experts.start : experts.stop].view(-1) for plane in (packed, scales)
            )
            shape = (shape[0] // num_experts * len(experts), *shape[1:])
        ops.PACKED[self.wire].dequantise_(out.view(shape), packed, scales)

    def shape_for_format(self, placed: PlacedParameter) -> tuple[int, ...]:
        """The shape in which a format of `ops.PACKED` decodes a parameter. Matrices that are not of whole groups count
        as one."""
        found = ops.PACKED[self.wire]
        if found.takes == "spans":
            return (placed.numel,)
        if found.takes in ("parameters", "stacks"):
            return placed.shape
        return (num_matrices(placed.name, placed.shape) if _has_whole_groups(placed, found) else 1, -1)

    @property
    def decodes_parameters(self) -> bool:
        """Whether `decode_one_` can decode a parameter by itself."""
        return self.wire in ops.PACKED

    def decoded_nbytes(self, placed: PlacedParameter) -> int:
        """Bytes of the parameter in its own dtype, with its padding."""
        return _padded(placed.numel) * self.dtype.itemsize

    def scales_of(self, placed: PlacedParameter) -> slice:
        """The parameter's slice of the plane of scales."""
        return slice(placed.first_scale, placed.first_scale + self._scales_for(placed))

    def _scales_for(self, placed: PlacedParameter, *, padded: bool = False) -> int:
        """Elements of the plane of scales for the parameter, or for it and its padding."""
        if self._format is None:
            return 0
        if self.wire in ops.PACKED and ops.PACKED[self.wire].takes == "matrices":
            num_matrices = self.shape_for_format(placed)[0]
            return num_matrices * self._format.num_scales(placed.numel // num_matrices)
        return self._format.num_scales(_padded(placed.numel) if padded else placed.numel)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Dtype of the plane of scales; None if the format has none."""
        return None if self._format is None else self._format.scale_dtype

    @property
    def stored_as(self) -> str:
        return str(self.wire).removeprefix("torch.") if self._format is None else self._format.name

    @property
    def viewable(self) -> bool:
        """Whether the stored bytes can be viewed as the parameter's values."""
        return self.wire is self.dtype

    @property
    def loses_bits(self) -> bool:
        """Whether a fold rounds the weights and nothing keeps the bits that it drops."""
        return not self.frozen and not self.split and self.wire.itemsize < 4

    @property
    def nbytes(self) -> int:
        scale_nbytes = 0 if self.scale_dtype is None else self.num_scales * self.scale_dtype.itemsize
        return self.storage_nbytes + scale_nbytes

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the stored elements, without scales."""
        packed = 1 if self._format is None else self._format.packed_numel
        return self.numel * self.wire.itemsize // packed

    @property
    def low_nbytes(self) -> int:
        return 2 * self.numel if self.split else 0

    def table(self, device: torch.device) -> Any:
        if device not in self._tables:
            segments = [
                ops.Segment(
                    p.start,
                    p.numel,
                    p.offset,
                    p.group,
                    p.trainable,
                    still=(p.offset + p.still[0], p.offset + p.still[1]) if any(p.still) else (0, 0),
                    matrix=p.matrix,
                )
                for p in self.placed
            ]
            self._tables[device] = ops.build_table(segments, device, factor_dtype=self.dtype)
        return self._tables[device]

    def forget_tables(self) -> None:
        """Drops the cached segment tables, after param groups, trainability or rows without noise have changed."""
        self._tables.clear()


class UnitState(Enum):
    """What a unit's parameters show, and whether the unit is in use."""

    STORED = "stored"
    """The parameters are views of `store_buffer`. They are copies after a direct read, and placeholders without memory
    where the stored bytes cannot be viewed in their dtype. Nothing uses the unit."""
    IN_PLACE = "in place"
    """As `STORED`, and a forward or backward uses the stored bytes, which are on the device."""
    MATERIALISED = "materialised"
    """The parameters are bound to working copies on the device, in a slot or in scratch memory."""


class Unit:
    """A set of parameters stored together; see the module's docstring. `assign_buffers` sets its buffers."""

    def __init__(self, name: str, module: nn.Module, parts: Sequence[Part], *, index: int, is_block: bool) -> None:
        self.name = name
        self.module = module
        self.parts = list(parts)
        self._parameters = [placed.parameter for placed in self.placed]
        self.index = index
        """Index of the block among the blocks; it determines the steps in which the block folds. 0 outside the
        blocks."""
        self.is_block = is_block
        self.nbytes = sum(_padded(part.nbytes) for part in self.parts)
        self.low_nbytes = sum(_padded(part.low_nbytes) for part in self.parts)
        self.scratch_nbytes = sum(_padded(p.numel * p.dtype.itemsize) for p in self.parts if p.is_copied)
        """Bytes of a working copy."""
        self.second_copy_nbytes = sum(_padded(p.numel * p.dtype.itemsize) for p in self.parts if not p.frozen)
        """Bytes of a second working copy. It has no frozen parameters, which both copies share."""
        self.store_buffer: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self.low_buffer: torch.Tensor | None = None
        self.streamed = False
        """Whether `store_buffer` is not whole on the device: each use uploads, or gathers, the unit into a slot."""
        self.low_streamed = False
        """Whether `low_buffer` is on the host and is uploaded to a low slot for each use."""
        self._version = 0
        self._written_back: Event = DONE
        self.is_sharded = False
        """Whether `store_buffer` holds only this rank's shard ([Note: device shards])."""
        self._stored_views: list[torch.Tensor] | None = None
        self._state = UnitState.STORED
        self._gathered_copies: dict[int, torch.Tensor] = {}
        """Values of `GatheredParameters` that parameters show while the unit is not materialised, by the parameter's
        id."""
        self.may_be_changed = False
        """Whether the stored bytes may be other ones than those that the unit has encoded: they were written to, or
        shown where a user may write to them."""
        self.is_intercepted = False
        """Whether access to the parameters is intercepted while the unit is not materialised
        ([Note: direct access to parameters])."""
        self.copies_step: int | None = None
        """Step of the weights in the copies that parameters show after a direct read. None: they show no copies."""

    @property
    def placed(self) -> Iterator[PlacedParameter]:
        return (placed for part in self.parts for placed in part.placed)

    @property
    def trainable(self) -> bool:
        return any(placed.trainable for placed in self.placed)

    @property
    def numel(self) -> int:
        return sum(placed.numel for placed in self.placed)

    @property
    def viewable(self) -> bool:
        """Whether the stored bytes of all parameters can be viewed as their values."""
        return all(part.viewable for part in self.parts)

    @property
    def decodes_frozen(self) -> bool:
        """Whether frozen parameters are stored in another format than their dtype."""
        return any(part.frozen and not part.direct for part in self.parts)

    @property
    def largest_matrix_nbytes(self) -> int:
        """Bytes of its largest encoded parameter in the parameter's own dtype."""
        encoded = (part for part in self.parts if part.is_copied)
        return max((part.decoded_nbytes(placed) for part in encoded for placed in part.placed), default=0)

    # The stored bytes

    @property
    def version(self) -> int:
        """Number of updates that the stored bytes include."""
        return self._version

    @property
    def written_back(self) -> Event:
        """Recorded after the last change of `store_buffer` and `low_buffer` on a stream."""
        return self._written_back

    def folded(self, version: int, *, stream: Stream | None = None) -> None:
        """The stored bytes include `version` updates, or will once the work of `stream` is done. `stream`: the stream
        that makes the change, if uploads are on another one. `PARTLY_FOLDED`: they include a part of an update."""
        is_later = version >= self._version or version == PARTLY_FOLDED
        assert is_later, f"{self.name} includes {self._version} updates already"
        self._set_version(version, stream)

    def _set_version(self, version: int, stream: Stream | None) -> None:
        self._version = version
        if stream is not None:
            self._written_back = stream.recorded()

    def rewritten(self, version: int, *, stream: Stream | None = None) -> None:
        """The stored bytes were replaced by other values, to which the updates from `version` on apply."""
        self._set_version(version, stream)

    def assign_buffers(
        self,
        store_buffer: torch.Tensor,
        low_buffer: torch.Tensor | None,
        *,
        streamed: bool,
        low_streamed: bool,
        is_sharded: bool = False,
    ) -> None:
        """Sets the unit's buffers. The caller fills them."""
        self.store_buffer, self.low_buffer = store_buffer, low_buffer
        self.is_sharded = is_sharded
        self.streamed, self.low_streamed = streamed, low_streamed and low_buffer is not None
        self._stored_views = None

    def spans(self) -> Iterator[tuple[PlacedParameter, int, int]]:
        """Yields each parameter with the first and the end byte of its values in a buffer laid out like
        `store_buffer`."""
        at = 0
        for part in self.parts:
            for placed in part.placed:
                begin = at + placed.start * part.wire.itemsize
                yield placed, begin, begin + placed.numel * part.wire.itemsize
            at += _padded(part.nbytes)

    def planes(self, buffer: torch.Tensor, low: torch.Tensor | None = None) -> list[Planes]:
        """Each part's tensors as views of a buffer laid out like `store_buffer` and of one like `low_buffer`."""
        found, at, low_at = [], 0, 0
        for part in self.parts:
            nbytes = part.storage_nbytes
            storage = buffer[at : at + nbytes].view(part.wire)
            dtype = part.scale_dtype
            scales = None if dtype is None else buffer[at + nbytes : at + part.nbytes].view(dtype)
            at += _padded(part.nbytes)
            part_low = None
            if part.split and low is not None:
                part_low = low[low_at : low_at + part.low_nbytes].view(torch.int16)
            low_at += _padded(part.low_nbytes)
            found.append(Planes(storage, scales, part_low))
        return found

    def outs(self, scratch: torch.Tensor, *, second: torch.Tensor | None = None) -> list[torch.Tensor | None]:
        """Each part's plane in `scratch` for values in the parameters' dtype; None for a part that is not copied. With
        `second`, the planes of parts that are not frozen are there instead."""
        found: list[torch.Tensor | None] = []
        at = 0
        for part in self.parts:
            if not part.is_copied:
                found.append(None)
                continue
            nbytes = part.numel * part.dtype.itemsize
            memory = scratch if second is None or part.frozen else second
            found.append(memory[at : at + nbytes].view(part.dtype))
            at += _padded(nbytes)
        return found

    def views(self, planes: Sequence[Planes], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """One tensor for each parameter, in `placed` order: of `outs`, or else of the stored bytes. Where these cannot
        be viewed as values, it is a placeholder with shape and dtype but no memory."""
        found = []
        for i, (part, out) in enumerate(zip(self.parts, outs, strict=True)):
            plane = planes[i].storage if out is None else out
            if out is None and not part.viewable:
                plane = torch.zeros((), dtype=part.dtype, device=plane.device).expand(part.numel)
            found += [placed.view(plane) for placed in part.placed]
        return found

    def leave_meta(self) -> None:
        """Replaces the tensors behind parameters on the meta device, whose `.data` cannot be set to real memory, by
        placeholders that allow it. The parameters stay the same Python objects."""
        for placed in self.placed:
            p = placed.parameter
            if p.is_meta:
                p.__class__ = nn.Parameter  # `loading.UnreadParameter` before
                hollow = nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad)
                # torch.utils.swap_tensors without its check for weak references: they stay valid, as the object stays.
                torch._C._swap_tensor_impl(p, hollow)

    # What the parameters show

    @property
    def state(self) -> UnitState:
        return self._state

    @property
    def in_use(self) -> bool:
        """Whether the unit is materialised, or used in place."""
        return self._state is not UnitState.STORED

    def use_in_place(self) -> None:
        """Marks a resident unit as in use, until `leave`. Its parameters stay as they are."""
        assert self._state is UnitState.STORED, f"{self.name} is in use"
        self._state = UnitState.IN_PLACE

    def leave(self) -> None:
        """Ends a use, in place or not."""
        if self._state is UnitState.IN_PLACE:
            self._state = UnitState.STORED
        else:
            self.bind_stored()

    def bind(self, views: Iterable[torch.Tensor]) -> None:
        """Sets the parameters' `.data` to `views` (in `placed` order) and marks the unit as materialised."""
        self._adopt_replaced_copies()
        self._state = UnitState.MATERIALISED
        self.copies_step = None
        if self.is_intercepted:
            stop_intercepting(self._parameters)
        for placed, view in zip(self.placed, views, strict=True):
            placed.parameter.data = view

    def bind_stored(self) -> None:
        """Ends materialisation. The parameters show views of the stored bytes, or placeholders with shape and dtype but
        no memory. A parameter with a gathered copy shows that copy."""
        state = UnitState.IN_PLACE if self._state is UnitState.IN_PLACE else UnitState.STORED
        if self._stored_views is None:
            self._stored_views = []
            whole = [None] * len(self.parts) if self.is_sharded else self.planes(self.store_buffer)
            for part, planes in zip(self.parts, whole, strict=True):
                for placed in part.placed:
                    if part.viewable and planes is not None:
                        self._stored_views.append(placed.view(planes.storage))
                    else:
                        hollow = torch.zeros((), dtype=part.dtype, device=self.store_buffer.device)
                        self._stored_views.append(hollow.expand(placed.parameter.shape))
        self.bind(self._stored_views)
        self._state = state
        for placed in self.placed if self._gathered_copies else ():
            if id(placed.parameter) in self._gathered_copies:
                placed.parameter.data = self._gathered_copies[id(placed.parameter)]
        if self.is_intercepted:
            self._intercept()

    def intercept(self) -> None:
        """Intercepts access to the parameters whenever the unit is not materialised, until `stop_intercepting`."""
        self.is_intercepted = True
        if self._state is not UnitState.MATERIALISED:
            self._intercept()

    def stop_intercepting(self) -> None:
        self.is_intercepted = False
        stop_intercepting(self._parameters)

    def _intercept(self) -> None:
        intercept(
            [p for p in self._parameters if id(p) not in self._gathered_copies]
            if self._gathered_copies
            else self._parameters
        )

    def show_copies(self, values: Iterable[torch.Tensor], *, step: int) -> None:
        """Makes the parameters show copies of the weights of `step` (in `placed` order) until the unit is materialised
        again."""
        for placed, value in zip(self.placed, values, strict=True):
            if id(placed.parameter) not in self._gathered_copies:
                placed.parameter.data = value
        self.copies_step = step

    def show_gathered_copy(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Makes `parameter` show `value` while the unit is not materialised, until `drop_gathered_copy`. A tensor that
        the user assigns to `parameter.data` meanwhile takes the place of `value`."""
        stop_intercepting([parameter])
        self._gathered_copies[id(parameter)] = parameter.data = value

    def gathered_copy(self, parameter: nn.Parameter) -> torch.Tensor:
        self._adopt_replaced_copies()
        return self._gathered_copies[id(parameter)]

    def drop_gathered_copy(self, parameter: nn.Parameter) -> None:
        del self._gathered_copies[id(parameter)]

    def _adopt_replaced_copies(self) -> None:
        """Adopts tensors that the user has assigned to `.data` of parameters with gathered copies."""
        if self._state is UnitState.MATERIALISED:
            return
        for placed in self.placed if self._gathered_copies else ():
            copy = self._gathered_copies.get(id(placed.parameter))
            if copy is not None and copy.data_ptr() != placed.parameter.data_ptr():
                self._gathered_copies[id(placed.parameter)] = placed.parameter.data

    def store(
        self, read: Callable[[PlacedParameter], torch.Tensor | nf4.Quantised], *, via: torch.device | None = None
    ) -> None:
        """Fills the buffers from `read(placed)`, one parameter at a time, rounded to nearest. Encodes on the device
        `via` (None: where `store_buffer` is)."""
        via = via or self.store_buffer.device
        for part, planes in zip(self.parts, self.planes(self.store_buffer, self.low_buffer), strict=True):
            for placed in part.placed:
                self._store(part, planes, placed, read(placed), via=via)

    def store_one(self, placed: PlacedParameter, value: torch.Tensor | nf4.Quantised, *, writes: bool = True) -> None:
        """Replaces a parameter's value. `writes` False: another rank writes it to the storage that both share."""
        via = value.device if isinstance(value, torch.Tensor) else self.store_buffer.device
        for part, planes in zip(self.parts, self.planes(self.store_buffer, self.low_buffer), strict=True):
            if any(p is placed for p in part.placed):
                if writes:
                    self._store(part, planes, placed, value, via=via)
                else:
                    self._note_value(part, placed, value)

    @staticmethod
    def _note_value(
        part: Part, placed: PlacedParameter, value: torch.Tensor | nf4.Quantised
    ) -> torch.Tensor | nf4.Quantised:
        """Sums the bits of a value that will be stored, and returns the value."""
        if part.frozen and isinstance(value, torch.Tensor):
            value = value.detach().to(part.dtype)  # as `from_pretrained` does; nothing keeps the bits that this drops
        placed.value_sum = ops.value_sum(value)
        return value

    def _store(
        self,
        part: Part,
        planes: Planes,
        placed: PlacedParameter,
        value: torch.Tensor | nf4.Quantised,
        *,
        via: torch.device,
    ) -> None:
        if tuple(value.shape) != tuple(placed.parameter.shape):
            raise ValueError(
                f"{placed.name} has shape {tuple(placed.parameter.shape)}, got {tuple(value.shape)}: load weights that "
                "were saved from a model with the same config"
            )
        value = self._note_value(part, placed, value)
        if part.wire in ops.PACKED:
            self._store_packed(part, planes, placed, value, via=via)
            return
        value = value.values() if isinstance(value, nf4.Quantised) else value.detach()
        if part.frozen:
            value = value.to(part.dtype)
        if part.direct or (part.viewable and value.dtype is part.dtype):  # nothing to round
            ops.copy_staged_(placed.view(planes.storage), value)
            if planes.low is not None:
                placed.view(planes.low).zero_()
            return
        end = placed.start + -(-placed.numel // ALIGN) * ALIGN
        span = slice(placed.start, end)
        padded = torch.zeros(end - placed.start, dtype=torch.float32, device=via)
        padded[: placed.numel].copy_(value.reshape(-1))
        ops.encode_(
            planes.storage[span],
            padded,
            low=None if planes.low is None else planes.low[span],
            scales=None if planes.scales is None else planes.scales[part.scales_of(placed)],
        )

    @staticmethod
    def _store_packed(
        part: Part,
        planes: Planes,
        placed: PlacedParameter,
        value: torch.Tensor | nf4.Quantised,
        *,
        via: torch.device,
    ) -> None:
        """Stores a frozen parameter in a format of `ops.PACKED`, from its values in its own dtype: chunk by chunk, or
        matrix by matrix, if the format allows it. Values that are in the same format already keep their bytes."""
        assert planes.scales is not None
        found = ops.PACKED[part.wire]
        packed = part.stored(placed, planes.storage).view(torch.uint8)
        scales = planes.scales[part.scales_of(placed)]
        if isinstance(value, nf4.Quantised) and part.wire is ops.NF4.dtype:
            value = value.plain()
        if isinstance(value, nf4.Quantised) and (value.wire is not part.wire or value.absmax.numel() != scales.numel()):
            value = value.values()
        if isinstance(value, nf4.Quantised):
            ops.copy_staged_(packed, value.packed)
            ops.copy_staged_(scales, value.absmax.view(-1))
            return
        value = value.detach().reshape(part.shape_for_format(placed))
        chunks = {
            "spans": value.split(ops.CHUNK_NUMEL),
            "matrices": value,
            "parameters": [value],
            "stacks": [value],
        }  # of whole groups
        begin = at = 0
        for chunk in chunks[found.takes]:
            codes, its_scales = found.quantise(chunk.to(via, part.dtype))
            ops.copy_staged_(packed[begin : begin + codes.numel()], codes)
            ops.copy_staged_(scales[at : at + its_scales.numel()], its_scales)
            begin, at = begin + codes.numel(), at + its_scales.numel()


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
